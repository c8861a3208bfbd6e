"""What jamp's steps cost on an H200, against the same steps without jamp."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import Array

import jamp
from tests import by_hand, h200, models, programs

# optax and a model with `dtype=` promote, as those do that users write.
pytestmark = [pytest.mark.h200, pytest.mark.standard_promotion]

TX = optax.adam(1e-3)
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}


class Case(NamedTuple):
    """A model, and what it is trained on."""

    model: Any
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct


# A million parameters and more; small enough to compile in seconds.
CASES = {
    "cnn": Case(
        models.CNN(features=(128, 256), classes=100),
        jax.ShapeDtypeStruct((64, 32, 32, 16), jnp.float32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    ),
    "transformer": Case(
        models.Transformer(1024, width=1024, heads=16, depth=1, length=128),
        jax.ShapeDtypeStruct((8, 128), jnp.int32),
        jax.ShapeDtypeStruct((8, 128), jnp.int32),
    ),
}
both = pytest.mark.parametrize("case", CASES)


def variables(case: str) -> Any:
    model, inputs, _ = CASES[case]
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x), inputs)


def jamp_state(case: str, level: str, loss_scale: Any = None) -> Any:
    def init(variables):
        return jamp.initialize(
            variables["params"],
            TX,
            level,
            loss_scale=loss_scale,
            apply_fn=CASES[case].model.apply,
            batch_stats=variables.get("batch_stats", {}),
            verbosity=0,
        )

    return jax.eval_shape(init, variables(case))


def jamp_step(state: Any, inputs: Array, labels: Array) -> Any:
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, inputs, mutable=["batch_stats"])
        return by_hand.loss_of(logits, labels), new.get("batch_stats", {})

    value_and_grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = value_and_grad(state)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@functools.cache
def compiled_jamp(case: str, level: str, loss_scale: Any = None) -> h200.Program:
    _, inputs, labels = CASES[case]
    state = jamp_state(case, level, loss_scale)
    return h200.compile_step(jamp_step, state, inputs, labels, donate=(0,))


@functools.cache
def compiled_plain(case: str) -> h200.Program:
    model, inputs, labels = CASES[case]
    init = lambda v: by_hand.plain_init(model, v, TX)  # noqa: E731
    state = jax.eval_shape(init, variables(case))
    return h200.compile_step(by_hand.plain_step, state, inputs, labels, donate=(0,))


@functools.cache
def compiled_by_hand(case: str, static_scale: float | None = None) -> h200.Program:
    model, inputs, labels = CASES[case]
    init = lambda v: by_hand.mixed_init(v, TX, jnp.float16)  # noqa: E731
    state = jax.eval_shape(init, variables(case))
    model = model.clone(dtype=jnp.float16)
    step = by_hand.mixed_step(model, TX, jnp.float16, static_scale=static_scale)
    return h200.compile_step(step, state, inputs, labels, donate=(0,))
