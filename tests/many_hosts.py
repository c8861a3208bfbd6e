"""Training by two processes with two devices each; run by test_many_hosts.py.

`python -m tests.many_hosts ADDRESS PROCESS FOLDER MOMENT` prints one line of JSON. At
the moment "first" it trains all `CASES`, and ends as a host that fails while all save;
"second" goes on from the last checkpoint.
"""

import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jamp

LEVELS = ("O1", "O2")
LR, MOMENTUM, ADAM_LR = 0.5, 0.5, 0.125
CASES = [f"{level} {how}" for level in LEVELS for how in ("jit", "shard_map")]
RULE = {"init_scale": 2.0**8, "window": 2}
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


def linear(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.dot(x, params["w"]) + x[:, :1] * params["b"]
    return out.astype(jnp.float32).mean()


def squares(params, x):
    x = x.astype(params["w"].dtype)
    out = jnp.dot(x, params["w"]) + params["b"]
    return jnp.square(out.astype(jnp.float32)).mean()


def stepping(loss_fn, **options):
    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn, **options)(state, x)
        return state.apply_gradients(grads=grads), (loss, grads.scale)

    return step


@functools.cache
def mesh():
    return Mesh(jax.devices(), ("data",))


def lying(spec):
    return NamedSharding(mesh(), spec)


def global_batch(x):
    """The whole batch, of which this process gives its rows."""
    own = np.split(x, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(lying(P("data")), own)


def mapped(loss_fn, **options):
    step = stepping(loss_fn, axis_name="data", **options)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh(), **specs))


def make(level, params, tx=None, verbosity=0, **rule):
    return jamp.initialize(
        params,
        tx or optax.sgd(LR, momentum=MOMENTUM),
        level,
        loss_scale=jamp.DynamicLossScale(**(RULE | rule)),
        verbosity=verbosity,
        key=jax.random.key(7),
    )


def digests(tree):
    """Per device of this process all bits that lie there."""
    leaves = [x.addressable_shards for x in jax.tree.leaves(tree)]
    return [
        hashlib.sha256(
            b"".join(np.asarray(shards[i].data).tobytes() for shards in leaves)
        ).hexdigest()
        for i in range(jax.local_device_count())
    ]


def described(state, metrics=None):
    scale = state.loss_scales[0]
    return {
        "bits": digests((state.params, state.opt_state)),
        "counters": digests((state.loss_scales, state.step, state.skipped_steps)),
        "scale": float(scale.scale),
        "unskipped": int(scale.unskipped),
        "skipped": int(state.skipped_steps),
        "last": bool(state.last_step_skipped),
        "key": np.asarray(jax.random.key_data(state.key)).tolist(),
        "loss": float(metrics[0]) if metrics else None,
    }


def run(step, state, batches=BATCHES):
    """The state at the end, and what was after each step."""
    trail = []
    for x in batches:
        state, metrics = step(state, global_batch(x))
        trail.append(described(state, metrics))
    return state, trail


def values(tree):
    """As lists: what lies on all devices."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train_case(case):
    level, how = case.split()
    step = jax.jit(stepping(linear)) if how == "jit" else mapped(linear)
    state = make(level, jax.device_put(PARAMS, lying(P())))
    everywhere = all(x.sharding == lying(P()) for x in jax.tree.leaves(state))
    state, trail = run(step, state)
    return {
        "trail": trail,
        "masters": values(jamp.master_params(state)),
        "everywhere": everywhere,
        "compiled": step._cache_size(),
    }


def redo():
    """Gradients too large for half at scales above 2**14, on the last process alone."""
    state = make("O2", jax.device_put(PARAMS, lying(P())), init_scale=2.0**16)
    x = np.full((16, 8), 0.25, np.float32)
    x[8:] = 8.0
    step = mapped(linear, redo_on_overflow=3)
    state, trail = run(step, state, [x])
    return {"trail": trail, "masters": values(jamp.master_params(state))}


def from_numpy():
    """A state made from each process's own arrays, which it says are the same."""
    state = make("O1", PARAMS, verbosity=1)  # its level is printed once
    step = jax.jit(stepping(linear))
    own = all(x.is_fully_addressable for x in jax.tree.leaves(state))
    trained, trail = run(step, state, BATCHES[: OVERFLOW + 1])
    jamp.check(trained)
    restored = jamp.from_checkpoint(state, jamp.to_checkpoint(trained))
    return {
        "own": own,
        "trail": trail,
        "restored": described(restored),
        "check": error_of(jamp.check, trained, 1),  # one skip in a row is one too many
        "state_dict": jamp.state_dict(trained),
    }


# Params, masters and moments in parts: one on each of the four devices


def make_sharded(level="O2"):
    params = jax.device_put(PARAMS, lying(P("data")))
    return make(level, params, jamp.optimizers.fused_adam(ADAM_LR))


def whole(tree):
    return jax.jit(lambda x: x, out_shardings=lying(P()))(tree)


def run_sharded(state, steps, step=None):
    step = step or jax.jit(stepping(squares))
    trail = []
    for i in steps:
        state, metrics = step(state, global_batch(BATCHES[i]))
        trail.append(described(whole(state), metrics))
    misplaced = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree.leaves_with_path(state)
        if x.ndim and not x.sharding.is_equivalent_to(lying(P("data")), x.ndim)
    ]
    return state, trail, {"misplaced": misplaced, "compiled": step._cache_size()}


def save(manager, at, state):
    saved = ocp.args.StandardSave(jamp.to_checkpoint(state))
    manager.save(at, args=saved)
    manager.wait_until_finished()


def first(folder):
    report = {case: train_case(case) for case in CASES}
    report |= {"redo": redo(), "from_numpy": from_numpy()}
    manager = ocp.CheckpointManager(folder)
    state, step = make_sharded(), jax.jit(stepping(squares))
    save(manager, 0, state)  # before a step made anything anew
    state, before, _ = run_sharded(state, range(SAVED), step)
    save(manager, SAVED, state)
    report["saved"] = values(whole(jamp.master_params(state)))
    state, after, lies = run_sharded(state, range(SAVED, LAST), step)
    report["sharded"] = {"trail": before + after, **lies}
    report["sharded"]["masters"] = values(whole(jamp.master_params(state)))
    print(json.dumps(report), flush=True)
    multihost_utils.sync_global_devices("both have printed")
    if jax.process_index():
        os.kill(os.getpid(), signal.SIGKILL)
    save(manager, LAST, state)  # waits for the part of the other process


def second(folder):
    manager = ocp.CheckpointManager(folder)
    report = {"steps": list(manager.all_steps())}
    state = make_sharded()
    target = ocp.args.StandardRestore(jamp.to_checkpoint(state))
    found = manager.restore(SAVED, args=target)
    state = jamp.from_checkpoint(state, found)
    report["restored"] = described(whole(state))
    other = jamp.from_checkpoint(make_sharded("O5"), found)
    report["other level"] = values(whole(jamp.master_params(other)))
    state, report["trail"], report["lies"] = run_sharded(state, range(SAVED, LAST))
    save(manager, LAST, state)
    report["steps at the end"] = list(manager.all_steps())
    manager.close()
    print(json.dumps(report), flush=True)


def main(address, process, folder, moment):
    end = lambda: (os.read(0, 1), os._exit(1))  # noqa: E731 - when pytest ends
    threading.Thread(target=end, daemon=True).start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(process))
    {"first": first, "second": second}[moment](pathlib.Path(folder).absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
