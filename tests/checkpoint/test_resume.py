"""Test that a new process resumes bit for bit, and that files are never partial.

`python -m tests.checkpoint.test_resume FOLDER` is the new process. It restores the
states, trains on, and prints a line of JSON.
"""

import json
import os
import pathlib
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jamp
from jamp import optimizers as jo
from tests.support import subprocesses
from tests.support.pages import SHOWN
from tests.support.states import State

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
]  # for optax.adam, here and in the process

ADAM = optax.adam(1e-2)
FUSED = jo.fused_adam(1e-2, weight_decay=0.1, max_grad_norm=1.0)
RUNS = {"O2 fused adam": FUSED, "O5 optax adam": ADAM}

GOOD = np.float32(np.random.default_rng(0).normal(size=(4, 3)))
BAD = GOOD * np.float32(np.inf)
# The batches of two losses. At the save, loss 0 needs one more overflow before its
# scale falls, loss 1 needs one more clean step before its scale grows, and a skip is
# pending.
BEFORE = [(GOOD, -GOOD), (GOOD, BAD), (BAD, GOOD)]
AFTER = [(BAD, GOOD), (2 * GOOD, GOOD), (GOOD, -GOOD)]


def forward(variables, x):
    p = variables["params"]
    y = x.astype(p["kernel"].dtype) @ p["kernel"]
    return y.astype(jnp.float32) * p["norm"]["scale"]


def make(run, seed):
    level, _ = run.split(" ", 1)
    kernel = np.random.default_rng(seed).normal(size=(3, 2))
    return jamp.initialize(
        {"kernel": np.float32(kernel), "norm": {"scale": np.float32(1 + seed)}},
        RUNS[run],
        level,
        apply_fn=forward,
        loss_scale=jamp.DynamicLossScale(init_scale=2.0**8, window=2, hysteresis=2),
        keep_fp32="norm" if level in ("O2", "O3", "O5") else None,
        num_losses=2,
        verbosity=0,
        state_class=State,
        ema=jnp.asarray(seed, jnp.float32),
    )


@jax.jit
def step_all(states, batches):
    """Runs all states in one program, which compiles in half the time."""

    def step(state):
        def loss_fn(params, x):
            out = state.apply_fn({"params": params}, x)
            return jnp.square(out.astype(jnp.float32) - 1).mean()

        parts = [
            jamp.scaled_value_and_grad(loss_fn, loss_id=k)(state, x)
            for k, x in enumerate(batches)
        ]
        losses, grads = zip(*parts, strict=True)
        ema = 0.5 * state.ema + losses[0]
        return state.apply_gradients(grads=grads, loss_id=(0, 1), ema=ema)

    return {run: step(state) for run, state in states.items()}


def train(states, batches):
    states = jax.device_put(states, jax.devices()[0])  # as Orbax does: compiles once
    for pair in batches:
        states = step_all(states, pair)
    return states


def described(states):
    """Maps the path of each leaf to its dtype, shape and bits."""
    leaves = ((path, np.asarray(x)) for path, x in jax.tree.leaves_with_path(states))
    return {
        jax.tree_util.keystr(path): [str(x.dtype), list(x.shape), x.tobytes().hex()]
        for path, x in leaves
    }


def main(folder):
    args = ocp.args.StandardRestore({run: make(run, seed=1) for run in RUNS})
    with ocp.CheckpointManager(folder) as checkpoints:
        states = checkpoints.restore(7, args=args)
    print(json.dumps([described(states), described(train(states, AFTER))]))


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    start = {run: make(run, seed=0) for run in RUNS}
    saved = train(start, BEFORE)
    with ocp.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(7, args=ocp.args.StandardSave(saved))
    printed = subprocesses.run("tests.checkpoint.test_resume", str(tmp_path))
    straight = train(start, BEFORE + AFTER)
    resumed = json.loads(printed.splitlines()[-1])
    assert resumed == [described(saved), described(straight)]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_file_written_as_the_page_says_is_never_in_part(moment, tmp_path):
    (recipe,) = re.findall(r"```python\n([^`]*?\bdef write\([^`]*?)```", SHOWN)
    page, path = {}, tmp_path / "state.msgpack"
    exec(recipe, page)
    page["write"](path, b"old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, moment, mock.Mock(side_effect=KeyboardInterrupt))
        page["write"](path, b"new")
    assert path.read_bytes() == b"old"
    page["write"](path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.msgpack"]


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
