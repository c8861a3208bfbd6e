"""Test which float32 values count as the bias of a matmul in half.

The other values are added in float32, as with torch's rules.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.programs import evaluate
from tests.support.states import make

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[1], (64, 16))
Z = jnp.arange(64) % 4
LEVELS = ["O1", "O4"]
P = {
    "w": jax.random.normal(KEYS[0], (16, 1)) / 4,
    "wide": jax.random.normal(KEYS[2], (16, 8)) / 4,
    "shift": jnp.array([-13.6, -1029.5, -1485.3, -2042.0]),
    "series": jnp.linspace(3.0, 7.0, 8),
}
LAST = 1000 + jnp.arange(64.0) / 7
W = np.float64(P["w"])
H, HIDDEN = (np.float64(X) @ W)[:, 0], np.float64(X) @ np.float64(P["wide"])
SHIFT, SERIES = np.float64(P["shift"]), np.float64(P["series"])


def column(p, x):
    return (x @ p["w"])[:, 0]


# Each adds a float32 value to a half matmul.
NO_BIAS = {
    "gathered rows": lambda p, x, last: column(p, x) + p["shift"][Z],
    "taken rows": lambda p, x, last: jnp.take(p["shift"], Z) + column(p, x),
    "one hot": lambda p, x, last: (
        column(p, x) + jnp.dot(jax.nn.one_hot(Z, 4), p["shift"], precision="highest")
    ),
    "data": lambda p, x, last: last + column(p, x),
    "data, a slice": lambda p, x, last: column(p, x) + jnp.stack([last, last])[1],
    "data beside a vector": lambda p, x, last: x @ p["w"][:, 0] + last,
    "data in a jit": jax.jit(lambda p, x, last: column(p, x) + last),
    "data of a scan": lambda p, x, last: jax.lax.scan(
        lambda c, xs: (c, column(p, xs[0]) + xs[1]), 0.0, (x[None], last[None])
    )[1][0],
    "computed": lambda p, x, last: x @ p["wide"] + jnp.exp(p["series"])[None],
    "computed before a jit": lambda p, x, last: jax.jit(add)(
        p["wide"], x, jnp.exp(p["series"])
    ),
    "computed before a custom_vjp": lambda p, x, last: add_vjp(
        p["wide"], x, jnp.exp(p["series"])
    ),
    "computed before a checkpoint": lambda p, x, last: jax.checkpoint(add)(
        p["wide"], x, jnp.exp(p["series"])
    ),
    "a sum of inputs": lambda p, x, last: (
        x @ p["wide"] + (p["series"] + 250 * p["series"])
    ),
    "a cumulative sum": lambda p, x, last: (
        x @ p["wide"] + 100 * jnp.cumsum(p["series"])
    ),
}
# Their values in float64, by the first words of their names.
VALUES = {
    ("gathered", "taken", "one hot"): H + SHIFT[Z],
    ("data",): H + np.float64(LAST),
    ("computed",): HIDDEN + np.exp(SERIES),
    ("a sum",): HIDDEN + 251 * SERIES,
    ("a cumulative",): HIDDEN + 100 * np.cumsum(SERIES),
}


def add(w, x, y):
    return x @ w + y


add_vjp = jax.custom_vjp(add)


add_vjp.defvjp(
    lambda w, x, y: (x @ w + y, (w, x)),
    lambda saved, g: (saved[1].T @ g, g @ saved[0].T, g.sum(0)),
)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NO_BIAS)
def test_these_are_added_in_float32(name, level):
    (want,) = (value for words, value in VALUES.items() if name.startswith(words))
    half = "float16" if level == "O1" else "bfloat16"
    got = evaluate(jamp.autocast(NO_BIAS[name], half), P, X, LAST)
    # The matmul rounds to half; the sum does not. Matmuls here are below 4.
    error = 4 * float(jnp.finfo(half).eps)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=error)


BIASES = {
    "param": lambda p, x: x @ p["wide"] + p["series"],
    "first": lambda p, x: p["series"] + x @ p["wide"],
    "row": lambda p, x: x @ p["wide"] + p["series"][None],
    "broadcast": lambda p, x: (
        x @ p["wide"] + jnp.broadcast_to(p["series"], (len(x), 8))
    ),
    "of a column": lambda p, x: jax.vmap(lambda x: p["wide"].T @ x + p["series"])(x),
    "joined": lambda p, x: (
        x @ p["wide"] + jnp.concatenate([p["series"][:4], p["series"][4:]])
    ),
    "part": lambda p, x: x @ p["wide"] + jnp.tile(p["series"], 2)[4:12],
    "reshaped": lambda p, x: (
        (x @ p["wide"]).reshape(-1, 2, 4) + p["series"].reshape(2, 4)
    ).reshape(-1, 8),
    "in a jit": lambda p, x: jax.jit(lambda w, b: x @ w + b)(p["wide"], p["series"]),
    "under vmap": lambda p, x: jax.vmap(lambda x: x @ p["wide"] + p["series"])(x),
    "of a layer": lambda p, x: jax.lax.scan(
        lambda h, p: (h, x @ p["wide"] + p["series"]),
        0.0,
        jax.tree.map(lambda leaf: leaf[None], p),
    )[1][0],
    "a constant": lambda p, x: x @ p["wide"] + P["series"],
}


@pytest.mark.parametrize("name", BIASES)
def test_inputs_and_their_parts_are_biases(name):
    found = jamp.explain(BIASES[name])(P, X)
    assert "bias" in {op.why for op in found.operations}, found


@pytest.mark.parametrize("name", [name for name in BIASES if name != "a constant"])
def test_a_level_and_autocast_write_the_same_program(name):
    fn, level = BIASES[name], jamp.Properties.from_opt_level("O4")
    forms = jamp.cast_forward(fn, level), jamp.autocast(fn, "bfloat16")
    first, second = (str(jax.make_jaxpr(form)(P, X)) for form in forms)
    assert re.sub("0x[0-9a-f]+", "", first) == re.sub("0x[0-9a-f]+", "", second)


def loss_fn(params, x):
    """The energies of atoms: a correction and a reference for each element."""
    return (column(params, x) + params["shift"][Z]).mean()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_kept_param_of_the_size_of_a_half_value_is_added_in_float32(level):
    options = {} if level in LEVELS else {"keep_fp32": "shift"}
    state = make(level, P, loss_scale=1.0, **options)
    loss, grads = jax.jit(jamp.scaled_value_and_grad(loss_fn))(state, X)
    np.testing.assert_allclose(loss, (H + SHIFT[Z]).mean(), atol=0.005)
    np.testing.assert_allclose(grads["shift"], np.full(4, 1 / 4), rtol=0.01)


MEAN = np.float32([100.3, 77.7, -90.1, 128.9, 55.5, -31.3, 99.9, 250.1])
# Each adds a vector of the batch, or a constant, that has the size of a bias.
VECTORS = {
    "an argument": lambda p, x, mean: x @ p["wide"] + mean,
    "a row": lambda p, x, mean: x @ p["wide"] + jnp.stack([mean, mean])[1],
    "a constant": lambda p, x, mean: MEAN + x @ p["wide"],
    "a constant array": lambda p, x, mean: x @ p["wide"] + jnp.asarray(MEAN),
    "in a jit": lambda p, x, mean: jax.jit(add)(p["wide"], x, mean),
    "in a custom_vjp": lambda p, x, mean: add_vjp(p["wide"], x, mean),
    "under vmap": lambda p, x, mean: jax.vmap(lambda x: x @ p["wide"] + mean)(x),
    "in a scan": lambda p, x, mean: jax.lax.scan(
        lambda c, _: (c, x @ p["wide"] + mean), 0.0, None, 1
    )[1][0],
    "beside a param": lambda p, x, mean: x @ p["wide"] + (mean + 0 * p["series"]),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", VECTORS)
def test_where_the_params_are_known_other_vectors_are_no_biases(name, level):
    forward = jamp.cast_forward(VECTORS[name], jamp.Properties.from_opt_level(level))
    got = jax.jit(forward)(P, X, jnp.asarray(MEAN))
    error = 4 * float(jnp.finfo("float16" if level == "O1" else "bfloat16").eps)
    np.testing.assert_allclose(got, HIDDEN + np.float64(MEAN), rtol=1e-6, atol=error)


@pytest.mark.parametrize("level", LEVELS)
def test_params_are_biases_in_losses_and_of_teachers(level):
    def layer(params, x):
        return x @ params["wide"] + params["series"]

    state = make(level, P, apply_fn=layer, loss_scale=1.0)

    def loss_fn(params, x, others):
        return (layer(params, x) - state.apply_fn(others, x)).sum()

    found = jamp.explain(loss_fn)(state, X, P).operations
    assert [op.why for op in found if op.primitive == "add"] == ["bias", "bias"]
