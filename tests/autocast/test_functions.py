"""Test library functions that run in float32 because they need its digits."""

import functools
import operator

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.optimize
import jax.scipy.signal
import jax.scipy.sparse.linalg
import jax.scipy.spatial.transform
import jax.scipy.stats
import numpy as np
import pytest
import scipy
from jax.experimental.ode import odeint
from scipy.spatial.transform import Rotation

import jamp

pytestmark = pytest.mark.standard_promotion

LISTS = jamp.AutocastLists()
RANDOM = np.random.default_rng(0)
A = RANDOM.normal(size=(4, 4)).astype(np.float32)
S = A @ A.T + 4 * np.eye(4, dtype=np.float32)  # positive definite
DATA = (RANDOM.normal(size=(3, 64)) + 3000).astype(np.float32)
T = np.linspace(0.0, 4.0, 32, dtype=np.float32)
UNIT = np.eye(24, dtype=np.float32).reshape(4, 6, 8, 3) + np.float32(0.01)
linalg, signal = jnp.linalg, jax.scipy.signal


# Functions with the same name in JAX and the oracle, and their arguments.
SAME = {
    "cov": [DATA],
    "corrcoef": [DATA],
    "poly": [A[0]],
    "polymul": [A[0], A[1]],
    "linalg.inv": [S],
    "linalg.solve": [S, A[0]],
    "linalg.norm": [100 * A],
    "linalg.pinv": [A[:, :2]],
    "linalg.tensorinv": [UNIT],
    "scipy.linalg.expm": [4 * A],
    "scipy.linalg.solve": [S, A],
    "scipy.stats.multivariate_normal.logpdf": [A[0], A[1], S],
    "scipy.signal.detrend": [DATA],
}


def by_name(name):
    """Returns JAX's function and the oracle's."""
    both = (jax, scipy) if name.startswith("scipy") else (jnp, np)
    names = name, name.removeprefix("scipy.")
    return [
        operator.attrgetter(n)(module) for n, module in zip(names, both, strict=True)
    ]


CASES = {
    **{name: (*by_name(name), *args) for name, args in SAME.items()},
    "matrix_power": (
        lambda a: linalg.matrix_power(a, 5),
        lambda a: np.linalg.matrix_power(a, 5),
        A,
    ),
    "rotation": (
        lambda q, x: jax.scipy.spatial.transform.Rotation.from_quat(q).apply(x),
        lambda q, x: Rotation.from_quat(q).apply(x),
        *(A, DATA[:, :4].T),
    ),
    "odeint": (
        lambda y: odeint(lambda y, t: -y * t, y, T),
        lambda y: y * np.exp(-(T.astype(np.float64)[:, None] ** 2) / 2),
        A[0],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_is_as_exact_as_without_autocast(case):
    half = ("float16", "bfloat16")[list(CASES).index(case) % 2]
    fn, oracle, *args = CASES[case]
    expected = oracle(*(np.asarray(x, np.float64) for x in args))
    plain, got = fn(*args), jamp.autocast(fn, half)(*map(jnp.asarray, args))
    for wanted, exact, found in zip(
        *map(jax.tree.leaves, (expected, plain, got)), strict=True
    ):
        error = np.abs(exact - wanted).max()
        assert np.abs(found - wanted).max() <= 2 * error + 1e-5 * np.abs(wanted).max()
        assert found.dtype == exact.dtype


def products(fn, *args, lists=LISTS):
    """Returns the set of the matmuls' dtypes."""
    operations = jamp.explain(fn, lists=lists)(*map(jnp.asarray, args)).operations
    return {op.dtype for op in operations if op.flops}


HALF, FLOAT, BOTH = {"float16"}, {"float32"}, {"float16", "float32"}


def inv(x):
    return x @ x


def softmax(x):
    return x @ x


def cube(x):
    return linalg.matrix_power(x, 3)


minimize = functools.partial(jax.scipy.optimize.minimize, method="BFGS")
# A solver runs in float32, but the user's function inside it runs in half.
OF_THE_USERS = {
    "matmul": (lambda a: linalg.matmul(a, a), HALF),
    "multi_dot": (lambda a: linalg.multi_dot([a, a, a]), HALF),
    "tensordot": (lambda a: linalg.tensordot(a, a, axes=1), HALF),
    "jnp.convolve": (lambda a: jnp.convolve(a[0], a[1]), HALF),
    "convolve": (lambda a: signal.convolve(a, a), HALF),
    "correlate2d": (lambda a: signal.correlate2d(a, a), HALF),
    "einsum": (lambda a: jnp.einsum("ij,kj", a, a), HALF),
    "user's inv": (jax.jit(inv), HALF),
    "user's softmax": (jax.jit(softmax), HALF),
    "odeint": (lambda a: odeint(lambda y, t: a @ y, a[0], jnp.asarray(T)), BOTH),
    "minimize": (lambda a: minimize(lambda y: ((a @ y) ** 2).sum(), a[0]).x, BOTH),
    "beside": (jax.jit(jax.checkpoint(lambda x: cube(x) @ signal.detrend(x))), BOTH),
}


@pytest.mark.parametrize("name", OF_THE_USERS)
def test_functions_that_are_products_stay_half(name):
    fn, expected = OF_THE_USERS[name]
    # JAX must not reuse the trace of a float32 function for a half one.
    assert products(jnp.polymul, A[0], A[1]) == FLOAT
    assert products(fn, S) == expected
    if name == "beside":
        assert products(jax.grad(lambda x: fn(x).sum()), S) == expected


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (jnp.cov, "cov"),
        (jnp.corrcoef, "corrcoef"),  # calls `cov`: the outermost decides
        (cube, "matrix_power"),
        (cube, "jax.numpy.linalg.*"),
    ],
)
def test_lists_take_a_function_out(fn, name):
    assert products(fn, S) == FLOAT
    for rule in ("default", "half"):
        assert products(fn, S, lists=LISTS.with_function(name, rule)) == HALF


def test_a_function_is_taken_out_with_its_callees():
    """`expm` jits functions that jit functions."""
    for lists in (LISTS, LISTS.with_function("expm", "default")):
        explained = jamp.explain(jax.scipy.linalg.expm, lists=lists)(jnp.asarray(A))
        found = any(op.why == "region" for op in explained.operations)
        assert found == (lists == LISTS)
