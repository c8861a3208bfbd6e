"""Test gradients of the loss head at large logits, against float64.

The loss and its derivative read the same rounded logits. A derivative that computes
them again in float32 would be off by 86 % at logits of 640 in bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.autocast.test_heads import LOSSES
from tests.support.states import make

pytestmark = pytest.mark.slow

ROWS, WIDTH, CLASSES = 32, 8, 64
SIZES = (5, 20, 80, 320, 640)
LABELS, TOKENS = np.random.default_rng(0).integers(CLASSES, size=(2, ROWS))


# A CPU may otherwise keep the logits' float32 digits in one pass only.
STRICTLY = {"xla_allow_excess_precision": False}


def chunked(loss, logits_of, x, labels):
    """Returns the mean over chunks of rows, whose logits are recomputed."""

    @jax.checkpoint
    def total(sum_, chunk):
        return sum_ + loss(logits_of(chunk[0]), chunk[1]).sum(), None

    chunks = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (x, labels))
    return lax.scan(total, jnp.float32(0), chunks)[0] / ROWS


def whole(loss, logits_of, x, labels):
    return loss(logits_of(x), labels).mean()


def inputs(size, tied):
    """Draws inputs and a table with exact products. The logits are near +-size, and
    differ by a few half ulps."""
    rng = np.random.default_rng(size)
    x = rng.integers(-4, 5, (ROWS, WIDTH)) / 8
    table = rng.integers(-4, 5, (CLASSES, WIDTH)) / 2
    x[:, 0], table[:, 0] = size * rng.choice([-1, 1], ROWS), 1
    if tied:
        table[:, 0] = 2.0 ** np.round(np.log2(size) / 2)
    return x, table


def exact(x, table, half, tied):
    """Returns the table's gradient in float64, for logits that are rounded once."""
    x = table[TOKENS] if tied else x
    logits = (x @ table.T).astype(jnp.dtype(half)).astype(np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    d_logits = weights / weights.sum(-1, keepdims=True)
    d_logits[np.arange(ROWS), LABELS] -= 1
    grad = d_logits.T @ x / ROWS
    if tied:
        np.add.at(grad, TOKENS, d_logits @ table / ROWS)
    return grad


def check(level, loss=LOSSES["optax"], tied=False, reduced=whole, place=jnp.asarray):
    """Checks a head's gradient on rows of inputs, or on tokens of a tied embedding."""

    def apply(params, rows, labels):
        logits_of = lambda rows: (params[rows] if tied else rows) @ params.T  # noqa: E731
        return reduced(loss, logits_of, rows, labels)

    def gradient(state, rows):
        loss_fn = lambda p: state.apply_fn(p, rows, jnp.asarray(LABELS))  # noqa: E731
        return jamp.scaled_grad(loss_fn)(state)

    compiled = None
    for size in SIZES:
        x, table = inputs(size, tied)
        rows = jnp.asarray(TOKENS) if tied else jnp.asarray(x, jnp.float32)
        params = place(jnp.asarray(table, jnp.float32))
        state = make(level, params, apply_fn=apply, loss_scale=16.0)
        if compiled is None:
            lowered = jax.jit(gradient).lower(state, rows)
            compiled = lowered.compile(compiler_options=STRICTLY)
        half = jnp.float16 if level in ("O1", "O2") else jnp.bfloat16
        wanted = exact(x, table, half, tied)
        error = np.linalg.norm(np.asarray(compiled(state, rows), np.float64) - wanted)
        eps = float(jnp.finfo(half).eps)
        assert error < eps / 2 * np.linalg.norm(wanted), size


levels = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
HEADS = {
    name: {"loss": LOSSES[name]}
    for name in ("optax", "log_softmax", "take_along_axis", "one_hot")
}
HEADS |= {"in chunks of rows": {"reduced": chunked}, "tied": {"tied": True}}


@levels
@pytest.mark.parametrize("head", HEADS)
def test_a_gradient_has_the_digits_of_half(head, level):
    check(level, **HEADS[head])


@levels
@pytest.mark.eight_devices
def test_with_classes_on_eight_devices(level):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("classes",))
    sharding = jax.NamedSharding(mesh, jax.P("classes", None))
    check(level, place=lambda w: jax.device_put(w, sharding))
