"""Test that `promote="widest"` is as accurate as torch's rules on small programs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.torch_table import HALVES, measure
from tests.oracles.torch_autocast import torch_autocast
from tests.support.extent import more
from tests.support.small_programs import PROGRAMS

# Less accurate by a factor of up to 3.5, because a norm of half values returns half.
EXCEPT = ("group_norm_after_conv",)

X = jnp.linspace(0.1, 1.9, 12).reshape(3, 4)
W = jnp.linspace(-1.1, 1.3, 20).reshape(4, 5)
B = jnp.linspace(3.3, 4.1, 5)
S = jnp.float32(0.3)


def half(x):
    """Rounds to bfloat16, and returns float64."""
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


def kept(first, second):
    """Adds in a Ref, which keeps the dtype of its first value."""
    ref = jax.new_ref(first)
    ref[...] += second
    return jax.freeze(ref)


def product():
    return half(half(X) @ half(W))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda: X @ W, product),
        (lambda: X @ W + B, lambda: half(product() + half(B))),
        (lambda: X @ W * B, lambda: product() * np.float64(B)),
        (lambda: X @ W + X[:, :1], lambda: product() + np.float64(X[:, :1])),
        (lambda: X @ W - S, lambda: half(product() - half(S))),
        (lambda: X @ W * 0.3, lambda: half(product() * np.float32(0.3))),
        (lambda: jnp.exp(X @ W), lambda: np.exp(product())),
        (lambda: 1.0 / (X @ W), lambda: 1 / product()),
        (lambda: jnp.tanh(X @ W), lambda: half(np.tanh(product()))),
        (lambda: (X @ W).sum(0), lambda: product().sum(0)),
        (
            lambda: jax.nn.silu(X @ W),
            lambda: half(product() / (1 + np.exp(-product()))),
        ),
        (lambda: jnp.tanh(X), lambda: np.tanh(np.float64(X))),
        (
            lambda: jax.lax.scan(lambda c, _: (c @ W[:, :4], c[0]), X, length=2)[1],
            lambda: [np.float64(X[0]), half(half(X) @ half(W[:, :4]))[0]],
        ),
        (lambda: kept(X @ W, X[:, :1]), lambda: half(product() + np.float64(X[:, :1]))),
        (
            lambda: jax.lax.cond(S > 0, lambda: X @ W, lambda: jnp.exp(X @ W)),
            product,
        ),
        (
            lambda: jax.grad(lambda w: jnp.exp(X @ w).sum())(W),
            lambda: half(half(X).T @ half(np.exp(product()))),
        ),
    ],
    ids="product bias scale column 0-d python exp reciprocal tanh sum silu alone "
    "scan ref cond grad".split(),
)
def test_the_oracle_follows_torch(fn, expected):
    got = torch_autocast(fn, "bfloat16")()
    np.testing.assert_allclose(got, expected(), rtol=2e-6)


# The programs are written as users write them.
pytestmark = pytest.mark.standard_promotion


# One half dtype for each program, and the other one in a sweep.
CASES = list(zip(PROGRAMS, itertools.cycle(HALVES), strict=False))
OTHERS = (case for case in itertools.product(PROGRAMS, HALVES) if case not in CASES)
# It compiles for long.
MARKED = [
    pytest.param(*case, marks=pytest.mark.slow) if case[0] == "loss_ctc" else case
    for case in CASES
]


@pytest.mark.parametrize(("name", "half"), MARKED + more("SWEEP", OTHERS))
def test_no_less_accurate_than_torch(name, half):
    for row in measure(name, PROGRAMS[name], half):
        assert row.is_fine(3.5 if name in EXCEPT else 1.1), row
