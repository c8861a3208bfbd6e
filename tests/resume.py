"""Training to be interrupted; test_resume.py runs the second half in a process.

`python -m tests.resume FOLDER` restores what `save` wrote, trains on, and prints one
line of JSON. Then it begins to save another step, and kills itself before its end.
"""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization

import jamp
from jamp import optimizers as jo
from tests.mixed_leaves import FAST

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "optax adam": optax.adam(1e-2),
    "fused adam": jo.fused_adam(1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "lamb": jo.fused_lamb(1e-2),
}
RUNS = [f"{level} {name}" for level in LEVELS for name in OPTIMIZERS]
FORMS = ("raw msgpack", "raw orbax", "any level msgpack", "any level orbax")

GOOD = np.float32(np.random.default_rng(0).normal(size=(4, 3)))
BAD = GOOD * np.float32(np.inf)
# The batches of two losses. At the save loss 0 has one more overflow before its scale
# falls, loss 1 one more clean step before its scale grows, and a skip is pending.
BEFORE = [(GOOD, -GOOD), (GOOD, BAD), (BAD, GOOD)]
AFTER = [(BAD, GOOD), (2 * GOOD, GOOD), (GOOD, -GOOD)]


def forward(variables, x):
    p = variables["params"]
    y = x.astype(p["kernel"].dtype) @ p["kernel"]
    return y.astype(jnp.float32) * p["norm"]["scale"]


def make(run, seed):
    level, name = run.split(" ", 1)
    rng = np.random.default_rng(seed)
    params = {
        "kernel": np.float32(rng.normal(size=(3, 2))),
        "norm": {"scale": np.float32(1 + seed)},
    }
    return jamp.initialize(
        params,
        OPTIMIZERS[name],
        level,
        apply_fn=forward,
        loss_scale=jamp.DynamicLossScale(init_scale=2.0**8, window=2, hysteresis=2),
        keep_fp32="norm" if level in ("O2", "O3", "O5") else None,
        num_losses=2,
        verbosity=0,
        ema=jnp.asarray(seed, jnp.float32),
    )


def step(state, batches):
    def loss_fn(params, x):
        out = state.apply_fn({"params": params}, x)
        return jnp.square(out.astype(jnp.float32) - 1).mean()

    parts = [
        jamp.scaled_value_and_grad(loss_fn, loss_id=k)(state, x)
        for k, x in enumerate(batches)
    ]
    ema = 0.5 * state.ema + parts[0][0]
    return state.apply_gradients(grads=[grads for _, grads in parts], ema=ema)


@functools.partial(jax.jit, compiler_options=FAST)
def step_all(states, batches):
    """All runs in one program: 18 take twice as long to compile."""
    return {run: step(state, batches) for run, state in states.items()}


def train(states, batches):
    states = jax.device_put(states, jax.devices()[0])  # as Orbax does: one compilation
    for pair in batches:
        states = step_all(states, pair)
    return states


def described(state):
    """Every leaf by its path: dtype, shape and bits."""
    leaves = ((path, np.asarray(x)) for path, x in jax.tree.leaves_with_path(state))
    return {
        jax.tree_util.keystr(path): [str(x.dtype), list(x.shape), x.tobytes().hex()]
        for path, x in leaves
    }


def manager(folder, **options):
    return ocp.CheckpointManager(pathlib.Path(folder).absolute(), **options)


def save(folder, states):
    """All runs in each of the forms."""
    trees = {
        "raw": states,
        "any level": {run: jamp.to_checkpoint(s) for run, s in states.items()},
    }
    for form, tree in trees.items():
        data = serialization.to_bytes(tree)
        (folder / f"{form}.msgpack").write_bytes(data)
        with manager(folder / form) as checkpoints:
            checkpoints.save(7, args=ocp.args.StandardSave(tree))


def restore(folder, form):
    targets = {run: make(run, seed=1) for run in RUNS}
    kind, writer = form.rsplit(" ", 1)
    shapes = targets
    if kind == "any level":
        to_checkpoint = lambda targets: {  # noqa: E731
            run: jamp.to_checkpoint(state) for run, state in targets.items()
        }
        shapes = jax.eval_shape(to_checkpoint, targets)
    if writer == "orbax":
        with manager(folder / kind) as checkpoints:
            found = checkpoints.restore(
                checkpoints.latest_step(), args=ocp.args.StandardRestore(shapes)
            )
    else:
        data = (folder / f"{kind}.msgpack").read_bytes()
        if kind == "raw":
            return serialization.from_bytes(targets, data)
        found = serialization.msgpack_restore(data)
    if kind == "raw":
        return found
    return {run: jamp.from_checkpoint(targets[run], found[run]) for run in RUNS}


class Killed(ocp.StandardCheckpointHandler):
    """Ends the process when arrays are written and the checkpoint is not complete."""

    def finalize(self, directory):
        os.kill(os.getpid(), signal.SIGKILL)


@ocp.args.register_with_handler(Killed, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveAndDie(ocp.args.StandardSave):
    """`StandardSave`, by the handler above."""


def die_while_saving(folder, state):
    checkpoints = manager(folder)
    assert checkpoints.latest_step() == 7
    checkpoints.save(8, args=SaveAndDie(state))
    checkpoints.wait_until_finished()


def main(folder):
    out = {}
    for form in FORMS:
        states = restore(folder, form)
        trained = train(states, AFTER)
        out[form] = {
            run: [described(states[run]), described(trained[run])] for run in RUNS
        }
    print(json.dumps(out), flush=True)
    die_while_saving(folder / "raw", states)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
