"""Test that each mechanism of autocast changes the program of its example."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

import jamp
from benchmarks.mechanisms import MECHANISMS, without

pytestmark = pytest.mark.slow


class Example(NamedTuple):
    """A function whose gradients differ without a mechanism."""

    fn: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    level: str = "O4"
    options: dict[str, Any] = {}


def label_loss(w, x, bias=0.0):
    logits, labels = x @ w + bias, jnp.arange(4)[:, None]
    return nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels, -1)[:, 0]


def standardised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def activations(w, x):
    """Two matmuls by weights read an activation, and a third reads their sum."""
    y = x * w
    return jnp.tanh(y @ w + y @ w.T) @ w


def rnn(w, v, xs):
    """Multiplies the carry by two weights that all steps share."""

    def step(h, x):
        h = jnp.tanh(h @ w + h @ v + x)
        return h, h

    return lax.scan(step, xs[0] @ w, xs)[1]


def lstm(w, v, xs):
    """Concatenates the weights of two gates in each step."""

    def step(h, x):
        a, b = jnp.split(h @ jnp.concatenate([w, v], 1) + x.repeat(2, -1), 2, -1)
        return jnp.tanh(a) * b, a

    return lax.scan(step, xs[0], xs)[1]


def summed(ws, x):
    """Sums matmuls over the steps."""
    step = lambda total, w: (total + x @ w, None)  # noqa: E731
    return lax.scan(step, jnp.zeros((4, 4)), ws)[0]


def residual(w, x):
    y = x @ w
    return y + standardised(y)


MATRIX, MATRICES = (4, 4), (3, 4, 4)
SQUARE, FAR = jnp.eye(4), np.full((4, 4), 1e-39, np.float32)
SQUARES = MATRIX, MATRIX
OF_BIAS = (4,), *SQUARES
NARROWEST = {"promote": "narrowest"}
# The keys name the mechanisms without which the program of the example changes.
EXAMPLES = {
    "bias sums, biases, sum barrier": Example(lambda b, x, w: x @ w + b, OF_BIAS),
    "repeated": Example(
        lambda w, x: standardised(x @ w + (x[:, 0] @ w)[:, None]), (MATRIX, MATRICES)
    ),
    "softmax, sums recomputed, islands, small inputs": Example(
        lambda w, x, b: nn.softmax(x @ w + b) @ w, (*SQUARES, (4, 1))
    ),
    "island barrier": Example(lambda w, x: jnp.tanh(x @ w) @ w, SQUARES),
    "sums kept": Example(lambda w, x: standardised(jnp.tanh(x @ w)) @ w, SQUARES),
    "heads, labels, head barrier, inlined calls": Example(label_loss, SQUARES),
    "logit biases": Example(lambda b, w, x: label_loss(w, x, b), OF_BIAS),
    "chains, one cast": Example(lambda w, x: (x @ w * 2.0 + 1.0) @ w, SQUARES),
    "ratios": Example(lambda w, x: (x @ w) / (w @ x) @ w, SQUARES, "O1"),
    "norms": Example(residual, SQUARES),
    "smaller, cast apart": Example(
        lambda w, x: standardised(x @ w) @ w, SQUARES, "O4", NARROWEST
    ),
    "lookups": Example(lambda w: w[jnp.zeros(4, int)], (MATRIX,), "O5"),
    "numbers": Example(lambda w, x: jnp.minimum(x @ w, 1 - 1e-6), SQUARES),
    "arrays": Example(
        lambda w, x: standardised(x @ w + FAR) @ w, SQUARES, "O4", NARROWEST
    ),
    "weights, cotangent copies, islands of loops": Example(rnn, (*SQUARES, MATRICES)),
    "loops": Example(lstm, (*SQUARES, MATRICES)),
    "half params": Example(lambda a, x, w: x @ w + a * 3.0, (MATRIX, *SQUARES), "O5"),
    # Matmuls read the carry, which is an activation.
    "half carries": Example(
        lambda ws, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ ws[0], ws)[0],
        *((MATRICES, MATRIX), "O4", NARROWEST),
    ),
    "float32 carries": Example(summed, (MATRICES, MATRIX), "O4", NARROWEST),
    "quantized once, weights in fp8, quantizing barrier, quantized before loops": (
        Example(activations, SQUARES, "O6", {"fp8": jamp.Fp8(smallest=1)})
    ),
}


def program(example: Example) -> str:
    """Returns the program of the example's gradients, without addresses."""
    properties = jamp.Properties.from_opt_level(example.level, **example.options)
    written = jamp.cast_forward(example.fn, properties)
    first, *rest = (jax.ShapeDtypeStruct(s, jnp.float32) for s in example.shapes)
    if properties.cast_model_type is not None:
        first = jax.ShapeDtypeStruct(first.shape, properties.cast_model_type)
    places = tuple(range(len(example.shapes)))
    grad = jax.grad(lambda *args: jnp.square(written(*args)).sum(), places)

    def step(*args):
        if not properties.fp8:
            return grad(*args)
        return lax.map(lambda _: grad(*args), jnp.arange(2))  # two micro-batches

    traced = jax.jit(step).trace(first, *rest)
    text = str(traced.jaxpr)
    if properties.fp8:  # the primitive decides how to quantize when JAX lowers it
        text += traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r"0x[0-9a-f]+", "", text)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("names", EXAMPLES)
def test_a_program_differs_without_its_mechanism(names):
    example = EXAMPLES[names]
    as_is = program(example)
    for name in names.split(", "):
        with without(name):
            assert program(example) != as_is, name
    assert program(example) == as_is


def bias_gradient():
    """Sums 4,096 numbers that bfloat16 holds exactly."""
    numbers = np.random.default_rng(0).integers(0, 2, (4096, 4)) + 1 / 64
    fn = lambda b, x: ((x @ SQUARE + b) * numbers).sum()  # noqa: E731
    grad = jax.jit(jax.grad(jamp.autocast(fn, "bfloat16")))
    got = grad(jnp.zeros(4), jnp.ones((4096, 4)))
    return np.abs(np.asarray(got, float) / numbers.sum(0) - 1).max()


def quotient():
    """Differentiates a ratio by x: float16 holds x, but 1 / x ** 2 overflows."""
    fn = lambda w, x: ((SQUARE @ x) / (SQUARE @ w)).sum()  # noqa: E731
    small = jnp.full((4, 4), 0.003)
    grad = jax.grad(jamp.autocast(fn, "float16"))(small, small)
    error = np.abs(np.asarray(grad, float) * 0.003 + 1).max()
    return error if np.isfinite(error) else np.inf


def norm():
    """Normalizes numbers that bfloat16 holds, around a mean of 3."""
    numbers = np.random.default_rng(0).integers(-64, 64, (64, 32)) / 64 + 3
    mean, var = (f(numbers, -1, keepdims=True) for f in (np.mean, np.var))
    fn = jamp.autocast(lambda x: standardised(x @ jnp.eye(32)), "bfloat16")
    with jax.disable_jit():
        got = fn(jnp.float32(numbers))
    return np.abs(np.asarray(got, float) - (numbers - mean) / np.sqrt(var + 1e-5)).max()


def scaled_exponential():
    """Scales a float32 value by a half param."""
    numbers = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    fn = lambda scale, x: scale * jnp.exp(x) + scale  # noqa: E731
    written = jamp.cast_forward(fn, jamp.Properties.from_opt_level("O5"))
    got = np.asarray(written(jnp.ones((8, 4), jnp.bfloat16), numbers), float)
    return np.abs(got / (np.exp(numbers.astype(float)) + 1) - 1).max()


def total():
    """Adds 1/64 to 256 in 63 trips of a loop."""
    ws = jnp.full((64, 4, 4), 1 / 64).at[0].set(256.0)
    got = jamp.autocast(summed, "bfloat16", promote="narrowest")(ws, SQUARE)
    return np.abs(np.asarray(got, float) / (256 + 63 / 64) - 1).max()


def table_gradient():
    """Looks up one row 4,096 times."""
    fn = lambda w: w[jnp.zeros(4096, int)].sum()  # noqa: E731
    written = jamp.cast_forward(fn, jamp.Properties.from_opt_level("O5"))
    grad = jax.grad(written)(jnp.ones((4, 4), jnp.bfloat16))
    return np.abs(np.asarray(grad[0], float) / 4096 - 1).max()


def bounded():
    """Subtracts a number next to 1 from 1."""
    fn = lambda x: 1 - jnp.minimum(x @ SQUARE, 1 - 1e-4)  # noqa: E731
    got = jamp.autocast(fn, "bfloat16")(2 * jnp.ones((4, 4)))
    return np.abs(np.asarray(got, float) / 1e-4 - 1).max() / 10


def distant():
    """Masks all scores of a row by -1e9, which float16 cannot hold."""
    mask = np.full((4, 4), -1e9, np.float32)
    fn = lambda w, x: nn.softmax(x @ w + mask)  # noqa: E731
    written = jamp.cast_forward(fn, jamp.Properties.from_opt_level("O3"))
    got = written(jnp.zeros((4, 4), jnp.float16), jnp.zeros((4, 4)))
    return np.nan_to_num(np.abs(np.asarray(got, float) - 0.25).max(), nan=1.0)


# Each returns an error relative to float64, which a mechanism for accuracy keeps small.
ERRORS = {
    "bias sums": bias_gradient,
    "ratios": quotient,
    "lookups": table_gradient,
    "numbers": bounded,
    "arrays": distant,
    "smaller": norm,
    "half params": scaled_exponential,
    "float32 carries": total,
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ERRORS)
def test_digits_are_lost_without_a_mechanism(name):
    error = ERRORS[name]
    assert error() < 1e-3
    with without(name):
        assert error() > 2e-3


def test_each_mechanism_has_an_example():
    assert set(MECHANISMS) == set(", ".join(EXAMPLES).split(", "))
