"""Test that two processes, as two hosts, agree bit for bit through a skip.

docs/test_distributed.py saves and resumes. `python -m tests.devices.test_many_hosts
ADDRESS PROCESS` is one process with two devices, which prints a line of JSON.
"""

import functools
import hashlib
import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jamp
from tests.devices.eight_devices import misplaced
from tests.support.states import SGD, State
from tests.support.subprocesses import ROOT, SECONDS, cpu_devices

pytestmark = pytest.mark.slow

LEVELS = ["O1", "O2"]
STEPS, OVERFLOW = 5, 2

# With eighths and quarters, linear losses and their gradients are exact in half, in any
# order of summation. The processes must therefore agree bit for bit.
RNG = np.random.default_rng(0)
PARAMS = {
    "w": np.float32(RNG.integers(-8, 9, (8, 4)) / 8),
    "b": np.float32(RNG.integers(-8, 9, 4) / 8),
}
BATCHES = np.float32(RNG.integers(-8, 9, (STEPS, 16, 8)) / 4)
BATCHES[OVERFLOW, -1, 0] = np.inf  # in a row of the last process


def linear(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.dot(x, params["w"]) + x[:, :1] * params["b"]
    return out.astype(jnp.float32).mean()


@functools.cache
def sharding(spec):
    return NamedSharding(Mesh(jax.devices(), ("data",)), spec)


def step(state, x):
    loss, grads = jamp.scaled_value_and_grad(linear)(state, x)
    return state.apply_gradients(grads=grads), loss


def make(level, params, verbosity=0):
    rule = jamp.DynamicLossScale(init_scale=2.0**8, window=2)
    options = {"loss_scale": rule, "verbosity": verbosity, "key": jax.random.key(7)}
    return jamp.initialize(params, SGD, level, state_class=State, **options)


def digests(tree):
    """Hashes all bits on each device of this process."""
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


def on_devices(batch):
    own = np.split(batch, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(sharding(P("data")), own)


def train(state, batches):
    """Returns the final state, and a report about each step."""
    trail, losses, jitted = [], [], jax.jit(lambda *args: step(*args))
    for batch in batches:
        state, loss = jitted(state, on_devices(batch))
        trail.append(described(state))
        losses.append(float(loss))
    wanted = jax.tree.map(lambda _: sharding(P()), state)
    report = {"trail": trail, "losses": losses, "misplaced": misplaced(state, wanted)}
    return state, report | {"compiled": jitted._cache_size()}


def from_mesh(level):
    state = make(level, jax.device_put(PARAMS, sharding(P())))
    assert misplaced(state, jax.tree.map(lambda _: sharding(P()), state)) == []
    return train(state, BATCHES)[1]


def from_numpy():
    """Trains from NumPy params, which are equal in all processes."""
    state = make("O1", PARAMS, verbosity=1)  # its level is printed once
    assert all(x.is_fully_addressable for x in jax.tree.leaves(state))
    trained, report = train(state, BATCHES[: OVERFLOW + 1])
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 1 steps"):
        jamp.check(trained, 1)  # one skip in a row is one too many
    restored = jamp.from_checkpoint(state, jamp.to_checkpoint(trained))
    assert described(restored) == report["trail"][-1]
    return report


def main(address, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(process))
    reports = {level: from_mesh(level) for level in LEVELS}
    print(json.dumps(reports | {"numpy": from_numpy()}))


@pytest.fixture(scope="module")
def printed():
    """Returns the output of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.devices.test_many_hosts", address]
    children = [
        subprocess.Popen(
            [*command, str(process)],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": cpu_devices(2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        out = [child.communicate(timeout=SECONDS)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    return out


@pytest.fixture(scope="module")
def reports(printed):
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.parametrize("case", [*LEVELS, "numpy"])
def test_all_devices_of_both_processes_hold_the_same_bits(reports, case):
    one, other = (report[case] for report in reports)
    assert one["trail"] == other["trail"]
    for step in one["trail"]:
        assert len(step["bits"]) == 2
        assert len(set(step["bits"])) == len(set(step["counters"])) == 1
    np.testing.assert_array_equal(one["losses"], other["losses"])
    assert one["misplaced"] == []
    assert one["compiled"] == 1 or case == "numpy"


@pytest.mark.parametrize("case", LEVELS)
def test_an_overflow_on_one_process_skips_the_step_on_both(reports, case):
    steps, losses = (reports[0][case][key] for key in ("trail", "losses"))
    bits = [step["bits"][0] for step in steps]
    assert bits[OVERFLOW] == bits[OVERFLOW - 1]
    assert len(set(bits)) == STEPS - 1  # all other steps change the state
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(STEPS) != OVERFLOW)
    # Two clean steps in a row double the scale, and a skip halves it.
    begun, rest = [[256, 1, 0, 0], [512, 0, 0, 0]], [[256, 1, 1, 0], [512, 0, 1, 0]]
    assert [step["scale"] for step in steps] == [*begun, [256, 0, 1, 1], *rest]


def test_params_that_each_process_has_as_numpy_will_do(printed, reports):
    for report in reports:
        pairs = zip(report["numpy"]["trail"], report["O1"]["trail"], strict=False)
        assert all(a["bits"] == b["bits"] for a, b in pairs)
    assert [x.count("jamp O1") for x in printed] == [1, 0]


if __name__ == "__main__":
    main(*sys.argv[1:])
