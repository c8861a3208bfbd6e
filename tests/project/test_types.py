"""Test what pyright reports about a user's program."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.pages import ROOT

# "# ->" gives the type that pyright must reveal, and "# !!" the rule that the line must
# break. Pyright must find nothing on other lines.
PROGRAM = """
from typing import Any

import jamp
import jamp.nnx
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Mine(jamp.AmpState):
    ema: Any


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return (params["w"] * batch).sum()


def with_aux(params: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return loss_fn(params, batch), {"seen": 1}


params, batch, tx = {"w": jnp.ones(2)}, jnp.ones(2), optax.sgd(0.1)
state = jamp.initialize(params, tx, "O2", loss_scale="dynamic", verbosity=0)
reveal_type(state)  # -> AmpState
mine = jamp.initialize(params, tx, state_class=Mine, ema={"a": jnp.ones(1)})
reveal_type(mine)  # -> Mine
reveal_type(mine.apply_gradients(grads=params))  # -> Mine
reveal_type(mine.replace(step=0))  # -> Mine
loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, batch)
reveal_type(loss)  # -> Array
reveal_type(grads)  # -> Any
(loss, aux), grads = jamp.scaled_value_and_grad(with_aux, has_aux=True)(state, batch)
reveal_type(aux)  # -> dict[str, int]
reveal_type(jamp.scaled_grad(loss_fn)(state, batch))  # -> Any
grads, aux = jamp.scaled_grad(with_aux, has_aux=True)(state, batch)
reveal_type(aux)  # -> dict[str, int]
mean = jax.tree.map(lambda a, b: (a + b) / 2, grads, grads)
state = state.apply_gradients(grads=(grads, mean), loss_id=(0, 0))
reveal_type(state)  # -> AmpState
reveal_type(jamp.autocast(loss_fn)(params, batch))  # -> Array

linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
model, optimizer = jamp.nnx.initialize(linear, tx, "O5", verbosity=0)
reveal_type(model)  # -> Linear
reveal_type(optimizer)  # -> Optimizer
loss, grads = jamp.nnx.scaled_value_and_grad(lambda m: m(batch).sum())(model, optimizer)
reveal_type(loss)  # -> Array
reveal_type(grads)  # -> Any

jamp.initialize(params, tx, "02")  # !! reportArgumentType
jamp.initialize(params, tx, "O7")  # !! reportArgumentType
jamp.initialize(params, tx, "O2", loss_sale=128.0)  # !! reportArgumentType
jamp.initialize(params, tx, "O2", master_weight=True)  # !! reportArgumentType
jamp.initialize(params, tx, "O1", promote="wide")  # !! reportArgumentType
jamp.scaled_value_and_grad(loss_fn, hasaux=True)  # !! reportCallIssue
jamp.scaled_grad(loss_fn, los_id=1)  # !! reportCallIssue
jamp.scaled_value_and_grad(loss_fn)(state, batch, batch)  # !! reportCallIssue
state.apply_gradients(grads=grads, loss_id=(0.0, 1.0))  # !! reportArgumentType
state.apply_gradients(grads=grads, los_id=1)  # !! reportArgumentType
state.add_params(params, allow_incoming_model=True)  # !! reportArgumentType
jamp.nnx.initialize(linear, tx, "O2", verbose=0)  # !! reportCallIssue
"""


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None,
    reason="needs pyright, which the extra `test` installs",
)


def pyright(folder, *args):
    command = [sys.executable, "-m", "pyright", "--outputjson", *args]
    command += ["--pythonpath", sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=env
    )
    return json.loads(done.stdout)


def test_types_of_a_users_program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    found = pyright(tmp_path, "-p", str(tmp_path))["generalDiagnostics"]
    said = {}
    for item in found:
        line = item["range"]["start"]["line"]
        revealed = re.fullmatch(r'Type of .* is "(.*)"', item["message"], re.DOTALL)
        said[line] = f"-> {revealed[1]}" if revealed else f"!! {item.get('rule')}"
    lines = PROGRAM.splitlines()
    wanted = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(lines)
        if "  # -> " in line or "  # !! " in line
    }
    assert {n: (lines[n], words) for n, words in said.items()} == {
        n: (lines[n], words) for n, words in wanted.items()
    }


def test_public_names_are_annotated(tmp_path):
    # Pyright does not know jaxtyping's PyTree and optax's classes.
    report = pyright(tmp_path, "--verifytypes", "jamp", "--ignoreexternal")
    symbols = report["typeCompleteness"]["symbols"]
    assert len(symbols) > 300
    missing = [
        (symbol["name"], item["message"])
        for symbol in symbols
        for item in symbol.get("diagnostics", ())
        if symbol["name"].startswith("jamp.") and "missing" in item["message"]
    ]
    assert missing == []
