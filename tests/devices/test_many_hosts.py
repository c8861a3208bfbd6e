"""Two processes as two hosts: agreed to the bit, through skips, saves and deaths.

`python -m tests.devices.test_many_hosts ADDRESS PROCESS FOLDER MOMENT` is one of them,
with two devices, and prints a line of JSON. At the moment "first" it trains all cases,
and ends as a host that fails while all save; "second" goes on from the last checkpoint.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jamp
from tests.devices.eight_devices import misplaced
from tests.support.subprocesses import ROOT, cpu_devices

SGD, ADAM = optax.sgd(0.5, momentum=0.5), jamp.optimizers.fused_adam(0.125)
CASES = ["O1 jit", "O2 shard_map"]
SAVED, LAST = 3, 5  # steps, of which the third overflows

# Eighths and quarters: linear losses and their gradients are exact in half, in any
# order of summation. So what the processes compute must be the oracle's to the bit.
RNG = np.random.default_rng(0)
PARAMS = {
    "w": np.float32(RNG.integers(-8, 9, (8, 4)) / 8),
    "b": np.float32(RNG.integers(-8, 9, 4) / 8),
}
BATCHES = np.float32(RNG.integers(-8, 9, (LAST, 16, 8)) / 4)
OVERFLOW = SAVED - 1
BATCHES[OVERFLOW, -1, 0] = np.inf  # in a row of the last process


# One of the processes


def linear(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.dot(x, params["w"]) + x[:, :1] * params["b"]
    return out.astype(jnp.float32).mean()


def squares(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.dot(x, params["w"]) + params["b"]
    return jnp.square(out.astype(jnp.float32)).mean()


@functools.cache
def lying(spec):
    return NamedSharding(Mesh(jax.devices(), ("data",)), spec)


def step_of(loss_fn, how="jit"):
    """A step of several states, as one program."""
    axis_name = None if how == "jit" else "data"

    def step(states, x):
        out, new = {}, {}
        for name, state in states.items():
            both = jamp.scaled_value_and_grad(loss_fn, axis_name=axis_name)
            out[name], grads = both(state, x)
            new[name] = state.apply_gradients(grads=grads)
        return new, out

    if how == "shard_map":
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        step = jax.shard_map(step, mesh=lying(P()).mesh, **specs)
    return jax.jit(step)


def make(level, params, tx=SGD, verbosity=0):
    rule = jamp.DynamicLossScale(init_scale=2.0**8, window=2)
    options = {"loss_scale": rule, "verbosity": verbosity, "key": jax.random.key(7)}
    return jamp.initialize(params, tx, level, **options)


def digests(tree):
    """Per device of this process all bits that lie there."""
    leaves = [x.addressable_shards for x in jax.tree.leaves(tree)]
    of_device = [
        b"".join(np.asarray(shards[i].data).tobytes() for shards in leaves)
        for i in range(jax.local_device_count())
    ]
    return [hashlib.sha256(data).hexdigest() for data in of_device]


def described(state):
    scale = state.loss_scales[0]
    skips = int(state.skipped_steps), bool(state.last_step_skipped)
    return {
        "bits": digests((state.params, state.opt_state)),
        "counters": digests((state.loss_scales, state.step, state.skipped_steps)),
        "scale": [float(scale.scale), int(scale.unskipped), *skips],
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
    }


def whole(tree):
    return jax.jit(lambda x: x, out_shardings=lying(P()))(tree)


def train(step, states, batches, spec=None):
    """The states at the end, and of each what was after each step."""
    look = whole if spec else lambda x: x
    trails, losses = ({name: [] for name in states} for _ in range(2))
    for x in batches:
        own = np.split(x, jax.process_count())[jax.process_index()]
        x = jax.make_array_from_process_local_data(lying(P("data")), own)
        states, out = step(states, x)
        for name, state in states.items():
            trails[name].append(described(look(state)))
            losses[name].append(float(out[name]))
    wanted = lambda x: lying(spec if spec and x.ndim else P())  # noqa: E731
    reports = {
        name: {
            "trail": trails[name],
            "losses": losses[name],
            "misplaced": misplaced(state, jax.tree.map(wanted, state)),
            "compiled": step._cache_size(),
        }
        for name, state in states.items()
    }
    return states, reports


def train_cases():
    reports, params = {}, jax.device_put(PARAMS, lying(P()))
    for case in CASES:
        level, how = case.split()
        states = {case: make(level, params)}
        assert misplaced(states, jax.tree.map(lambda _: lying(P()), states)) == []
        reports |= train(step_of(linear, how), states, BATCHES)[1]
    return reports


def from_numpy():
    """A state made from each process's own arrays, which it says are the same."""
    state = make("O1", PARAMS, verbosity=1)  # its level is printed once
    assert all(x.is_fully_addressable for x in jax.tree.leaves(state))
    states, report = train(step_of(linear), {"numpy": state}, BATCHES[: OVERFLOW + 1])
    trained = states["numpy"]
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 1 steps"):
        jamp.check(trained, 1)  # one skip in a row is one too many
    restored = jamp.from_checkpoint(state, jamp.to_checkpoint(trained))
    assert described(restored) == report["numpy"]["trail"][-1]
    return report


def check_gradients_out_of_jit():
    """Each process sees in its own copy that another one overflowed."""
    state = make("O2", jax.device_put(PARAMS, lying(P())))
    for batch in (BATCHES[0], BATCHES[OVERFLOW]):
        own = np.split(batch, jax.process_count())[jax.process_index()]
        x = jax.make_array_from_process_local_data(lying(P("data")), own)
        grads = jax.jit(jamp.scaled_grad(linear))(state, x)
        assert not grads["w"].is_fully_addressable
        here = np.asarray(grads["w"].addressable_data(0))
        mean = np.repeat(batch.mean(0)[:, None], 4, axis=1) / 4
        if np.isinf(batch).any():
            mean[:] = np.nan
        np.testing.assert_array_equal(here, mean)


# Params, masters and moments in parts: one on each of the four devices


def make_sharded():
    return {"sharded": make("O2", jax.device_put(PARAMS, lying(P("data"))), ADAM)}


def save(manager, at, states):
    tree = jamp.to_checkpoint(states["sharded"])
    manager.save(at, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()


def first(manager):
    reports = train_cases() | from_numpy()
    check_gradients_out_of_jit()
    states, step = make_sharded(), step_of(squares)
    save(manager, 0, states)  # before a step made anything anew
    states, before = train(step, states, BATCHES[:SAVED], P("data"))
    save(manager, SAVED, states)
    states, after = train(step, states, BATCHES[SAVED:], P("data"))
    parts = before["sharded"], after["sharded"]
    both = {key: parts[0][key] + parts[1][key] for key in ("trail", "losses")}
    reports["sharded"] = parts[1] | both
    print(json.dumps(reports), flush=True)
    multihost_utils.sync_global_devices("both have printed")
    if jax.process_index():
        os.kill(os.getpid(), signal.SIGKILL)
    save(manager, LAST, states)  # waits for the part of the other process


def second(manager):
    report = {"steps": list(manager.all_steps())}
    (like,) = make_sharded().values()
    target = ocp.args.StandardRestore(jamp.to_checkpoint(like))
    state = jamp.from_checkpoint(like, manager.restore(SAVED, args=target))
    report["restored"] = described(whole(state))
    rest = BATCHES[SAVED:]
    states, reports = train(step_of(squares), {"sharded": state}, rest, P("data"))
    save(manager, LAST, states)
    report["steps at the end"] = list(manager.all_steps())
    manager.close()
    print(json.dumps(report | reports), flush=True)


def main(address, process, folder, moment):
    end = lambda: (os.read(0, 1), os._exit(1))  # noqa: E731 - when pytest ends
    threading.Thread(target=end, daemon=True).start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(process))
    manager = ocp.CheckpointManager(pathlib.Path(folder).absolute())
    {"first": first, "second": second}[moment](manager)


def ended(children, seconds):
    """Waits until all have ended or one has failed, and ends them all."""
    try:
        until = time.monotonic() + seconds
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)
            codes = [child.poll() for child in children]
        return codes
    finally:
        for child in children:
            child.kill()
            child.communicate()  # closes the pipe, too


def processes(folder, moment):
    """Runs two: exit codes, what each printed and reports, and standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.devices.test_many_hosts", address]
    children, paths = [], [folder / f"{moment}{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for i, path in enumerate(paths):
            streams = [stack.enter_context(open(f"{path}.{k}", "wb")) for k in "oe"]
            child = subprocess.Popen(
                [*command, str(i), str(folder / "saved"), moment],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": cpu_devices(2)},
                stdin=subprocess.PIPE,  # its end tells the child of ours
                stdout=streams[0],
                stderr=streams[1],
            )
            children.append(child)
        codes = ended(children, seconds=240)
    out, errors = ([p.with_suffix(f".{k}").read_text() for p in paths] for k in "oe")
    reports = re.findall("^{.*", "\n".join(out), re.MULTILINE)
    errors = "\n".join(text[-2000:] for text in errors)
    assert len(reports) == 2, errors
    return codes, out, list(map(json.loads, reports)), errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def first_run(folder):
    """What each process reports, of which the second dies at the end."""
    return processes(folder, "first")


@pytest.fixture(scope="module")
def reports(first_run):
    return first_run[2]


@pytest.fixture(scope="module")
def later(folder, first_run):
    """What each reports of a start anew, from what the first ones saved."""
    codes, _, reports, errors = processes(folder, "second")
    assert codes == [0, 0], errors
    return reports


@pytest.mark.parametrize("case", [*CASES, "numpy", "sharded"])
def test_all_devices_of_both_processes_hold_the_same_bits(reports, case):
    one, other = (report[case] for report in reports)
    assert one["trail"] == other["trail"]
    for step in one["trail"]:
        assert len(step["bits"]) == 2
        assert len(set(step["bits"])) == len(set(step["counters"])) == 1
    np.testing.assert_array_equal(one["losses"], other["losses"])
    assert one["misplaced"] == []
    assert one["compiled"] == 1 or case == "numpy"


@pytest.mark.parametrize("case", [*CASES, "sharded"])
def test_an_overflow_on_one_process_skips_the_step_on_both(reports, case):
    steps, losses = (reports[0][case][key] for key in ("trail", "losses"))
    bits = [step["bits"][0] for step in steps]
    assert bits[OVERFLOW] == bits[OVERFLOW - 1]
    assert len(set(bits)) == LAST - 1  # all other steps made something new
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(LAST) != OVERFLOW)
    # By hand: two clean steps in a row double the scale, a skip halves it.
    begun, rest = [[256, 1, 0, 0], [512, 0, 0, 0]], [[256, 1, 1, 0], [512, 0, 1, 0]]
    assert [step["scale"] for step in steps] == [*begun, [256, 0, 1, 1], *rest]


def test_params_that_each_process_has_as_numpy_will_do(first_run):
    _, out, reports, _ = first_run
    for report in reports:
        pairs = zip(report["numpy"]["trail"], report["O1 jit"]["trail"], strict=False)
        assert all(a["bits"] == b["bits"] for a, b in pairs)
    assert [text.count("jamp O1") for text in out] == [1, 0]


# A process dies while all save


def test_a_dead_process_ends_the_others(first_run):
    codes, *_ = first_run
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0


def test_a_save_without_the_part_of_one_process_is_none(later):
    for report in later:
        assert report["steps"] == [0, SAVED]
        assert report["steps at the end"] == [0, SAVED, LAST]


def test_both_go_on_from_the_last_checkpoint_bit_for_bit(reports, later):
    for before, after in zip(reports, later, strict=True):
        saved, *rest = before["sharded"]["trail"][SAVED - 1 :]
        assert after["restored"] == saved
        assert after["sharded"]["trail"] == rest
        assert (after["sharded"]["misplaced"], after["sharded"]["compiled"]) == ([], 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
