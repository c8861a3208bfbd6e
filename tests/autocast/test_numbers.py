"""Test that operations which do not round keep the digits of numbers next to 1.

In half, 1 - 1e-6 is 1. Each function here then divides by zero, or takes a logarithm
of zero, or compares with another number. The oracle is NumPy in float64, on the
rounded results of the matmul.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax

import jamp
from jamp._autocast.scope import array_exceeds_half
from tests.support.extent import slow_except
from tests.support.programs import evaluate
from tests.support.states import make

E = 1e-6
HALVES = {"O1": "float16", "O2": "float16", "O4": "bfloat16", "O5": "bfloat16"}
# Multiples of 1/4 between -2 and 2, which a matmul with the identity returns.
H = np.random.default_rng(0).integers(-8, 9, (32, 8)) / 4
X, EYE = jnp.asarray(H, jnp.float32), jnp.eye(8)
STEP = jnp.int32(5000) + 5  # 5005: odd, and 1 beyond a multiple of 9
BOUNDS = jnp.full(8, 1 - E, jnp.float32)
TOP, LOW = np.minimum(H, 1 - np.float32(E)), np.clip(H, -1 + E, 1 - E)


# Bounds next to 1, of the result of a matmul.
BOUNDED = {
    "clip": lambda h: jnp.clip(h, max=1 - E),
    "minimum": lambda h: jnp.minimum(h, 1 - E),
    "clamp": lambda h: jax.lax.clamp(-9.0, h, 1 - E),
    "where": lambda h: jnp.where(h > 1 - E, 1 - E, h),
    "float32": lambda h: jnp.minimum(h, jnp.float32(1 - E)),
    "computed": lambda h: jnp.minimum(h, jnp.float32(1) - jnp.float32(E)),
    "filled": lambda h: jnp.minimum(h, jnp.full_like(h, 1 - E)),
    "closed over": lambda h: jnp.minimum(h, BOUNDS),
    "before a jit with a matmul": lambda h: jax.jit(
        lambda h: jnp.minimum(h @ EYE, 1 - E)
    )(h),
    "from a scan": lambda h: jax.lax.scan(
        lambda c, h: (c, jnp.minimum(h, 1 - E)), 0.0, h
    )[1],
    "chosen by where": lambda h: jnp.minimum(h, jnp.where(STEP < 9, 0.5, 1 - E)),
    "chosen by cond": lambda h: jnp.minimum(
        h, jax.lax.cond(STEP < 9, lambda: 0.5, lambda: 1 - E)
    ),
    "chosen by switch": lambda h: jnp.minimum(
        h, jax.lax.switch(STEP % 2, [lambda: 0.5, lambda: 1 - E])
    ),
    "chosen by an index": lambda h: jnp.minimum(h, jnp.array([0.5, 1 - E])[STEP % 9]),
    "of a schedule": lambda h: jnp.minimum(h, 1 - jnp.where(STEP < 9, 1e-2, E)),
    "for each element": lambda h: jnp.minimum(h, jnp.abs(X) * 0 + (1 - E)),
    "chosen for each element": lambda h: jnp.where(
        h > (t := jnp.abs(X) * 0 + (1 - E)), t, h
    ),
}
AROUND = {
    "in a jit": jax.jit,
    "in a scan": lambda f: lambda h: jax.lax.scan(lambda c, h: (c, f(h)), 0.0, h)[1],
    "under vmap": jax.vmap,
    "in a cond": lambda f: lambda h: jax.lax.cond(h.sum() < 1e9, f, lambda h: h, h),
}


def log_below(h):
    return jnp.log1p(-jnp.minimum(h, 1 - E))


# Functions of the result of a matmul, and their values.
FUNCTIONS = {
    **{
        k: (lambda h, f=f: jnp.log1p(-f(h)), np.log1p(-TOP)) for k, f in BOUNDED.items()
    },
    **{name: (around(log_below), np.log1p(-TOP)) for name, around in AROUND.items()},
    "eps": (
        lambda h: jnp.log1p(-jnp.minimum(h, 1 - jnp.finfo(h.dtype).eps)),
        np.log1p(-np.minimum(H, 1 - np.finfo(np.float32).eps)),
    ),
    "interp": (
        lambda h: jnp.interp(h, jnp.array([0, 1 - E, 1.0]), jnp.array([0.0, 1.0, 5.0])),
        np.interp(H, [0, np.float32(1 - E), 1], [0, 1, 5]),
    ),
    "arctanh": (lambda h: jnp.arctanh(jnp.clip(h, -1 + E, 1 - E)), np.arctanh(LOW)),
    "erf_inv": (
        lambda h: jax.scipy.special.erfinv(jnp.clip(h, -1 + E, 1 - E)),
        scipy.special.erfinv(LOW),
    ),
    "arccos": (lambda h: jnp.arccos(jnp.clip(h, -1 + E, 1 - E)), np.arccos(LOW)),
    "reciprocal": (lambda h: 1 / (1 - jnp.clip(h, -1 + E, 1 - E)), 1 / (1 - LOW)),
    "count": (lambda h: (h > 1 - E).sum(), (H > 1 - E).sum()),
    "guarded": (
        lambda h: jnp.where(jnp.abs(h) <= 1 - E, jnp.arctanh(h / 2), 6.0),
        np.where(np.abs(H) <= 1 - E, np.arctanh(LOW / 2), 6.0),
    ),
    "slerp": (
        lambda h: jnp.where(h > 0.9995, 1.0, 2.0).sum(),
        np.where(H > 0.9995, 1.0, 2.0).sum(),
    ),
    "equal": (lambda h: (h == 1 - E).sum() + (h != 1 + E).sum(), H.size),
    "concatenate": (
        lambda h: jnp.log1p(-jnp.concatenate([h * 0, jnp.full_like(h, 1 - E)])),
        np.log(np.concatenate([H * 0 + 1, H * 0 + E])),
    ),
    "pad": (
        lambda h: jnp.log1p(-jnp.pad(h * 0, 1, constant_values=1 - E)),
        np.log1p(-np.pad(H * 0, 1, constant_values=1 - E)),
    ),
    "set": (
        lambda h: jnp.log1p(-(h * 0).at[0].set(1 - E)),
        np.log1p(-np.where(np.arange(32)[:, None] == 0, 1 - E, H * 0)),
    ),
}


@pytest.mark.parametrize("level", slow_except(["O2", "O4"], HALVES))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_next_to_1_keep_their_digits(name, level):
    function, want = FUNCTIONS[name]
    state = make(level, {"w": EYE}, loss_scale=1.0)

    def loss_fn(params, x):
        out = function(x @ params["w"])
        return 0.0 * params["w"].sum(), out

    grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    _, got = evaluate(grad, state, X)[0]
    # float32 holds 1 - 1e-6 with an error of 3 % of 1e-6.
    np.testing.assert_allclose(got, want, rtol=0.04, atol=0.002)


FAR = np.float32([1] * 7 + [1e10])
MASK = np.where(np.arange(32)[:, None] < 5, np.float32(-1e9), 0) * np.ones(8)
MASK = MASK.astype(np.float32)
SCORES = jnp.asarray(MASK)  # the first rows are masked as a whole
WEIGHTS = np.where(MASK < 0, 1 / 8, scipy.special.softmax(H, -1))
RELU = np.maximum(H, 0)
ZEROS, LEFT = (RELU == 0).astype(float), np.maximum(-H, 0) * (H[:, :1] > 0)


def near_zero(h):
    """The mask of Moindrot's triplet loss, where a root has no derivative."""
    zeros = (jax.nn.relu(h) == 0).astype(jnp.float32)
    return jnp.log(jax.nn.relu(h) + zeros * 1e-16) * (1 - zeros)


def ratio(h):
    gate = (h[:, :1] > 0).astype(h.dtype)
    right, left = jax.nn.relu(h), jax.nn.relu(-h) * gate
    return right / (right + left + np.full(8, 1e-9, np.float32))


# Functions with arrays that float16 cannot hold, and their values.
RANGES = {
    "the last distance of a NeRF": (
        lambda h: jnp.exp(
            -jax.nn.relu(h) * (FAR * jnp.linalg.norm(X, axis=-1, keepdims=True))
        ),
        np.exp(-RELU * FAR * np.linalg.norm(H, axis=-1, keepdims=True)),
    ),
    "a mask": (lambda h: jax.nn.softmax(h + MASK), WEIGHTS),
    "a mask in a scan": (
        lambda h: jax.lax.scan(
            lambda c, h: (c, jax.nn.softmax(h @ EYE + SCORES)), 0.0, h[None]
        )[1][0],
        WEIGHTS,
    ),
    "a mask in a jit": (
        lambda h: jax.jit(lambda h, m: jax.nn.softmax(h @ EYE + m))(h, SCORES),
        WEIGHTS,
    ),
    "a mask in a checkpoint": (
        lambda h: jax.checkpoint(lambda h: jax.nn.softmax(h + SCORES))(h),
        WEIGHTS,
    ),
    "a tiny array": (ratio, RELU / (RELU + LEFT + 1e-9)),
    "a tiny mask": (near_zero, np.log(RELU + ZEROS) * (1 - ZEROS)),
}


@pytest.mark.parametrize("level", slow_except(["O2"], HALVES))
@pytest.mark.parametrize("name", RANGES)
def test_arrays_beyond_the_range_of_half_are_float32(name, level):
    """A softmax of -1e9 alone has equal weights, and of -inf it is NaN."""
    function, want = RANGES[name]
    state = make(level, {"w": EYE}, loss_scale=1.0)

    def loss_fn(params, x):
        out = function(x @ params["w"])
        return out.sum(), out

    grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (_, got), grads = evaluate(grad, state, X)
    np.testing.assert_allclose(got, want, rtol=0.01, atol=0.005)
    assert np.isfinite(grads["w"]).all()


@pytest.mark.parametrize("largest", [6e4, 7e4, 1e-3, 1e-9])
def test_an_array_counts_by_its_largest_number(largest):
    """Trained weights may have tiny numbers among larger ones."""
    array = np.float32([0, -np.inf, 1e-12, -largest])
    exceeds = largest in (7e4, 1e-9)
    assert array_exceeds_half(array, np.float16) == exceeds
    assert array_exceeds_half(jnp.asarray(array), np.float16) == exceeds
    assert not array_exceeds_half(np.float32([]), np.float16)
    assert not array_exceeds_half(jax.new_ref(jnp.asarray(array)), np.float16)


@pytest.mark.parametrize("promote", ["widest", "narrowest"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name, function",
    {
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "hard_tanh": jax.nn.hard_tanh,
        "leaky_relu": jax.nn.leaky_relu,
        "elu": lambda h: jnp.where(h > 0, h, 0.5),
        "dropout": lambda h: jnp.where(jnp.arange(8) % 2 == 0, h / 0.9, 0),
        "joined": lambda h: jnp.concatenate([h, jnp.ones_like(h)]),
        "padded": lambda h: jnp.pad(h, 1, constant_values=-0.5),
    }.items(),
)
def test_numbers_that_half_holds_leave_an_operation_in_half(
    name, function, half, promote
):
    found = jamp.explain(lambda w, x: function(x @ w), half, promote=promote)(EYE, X)
    assert "literal" not in {op.why for op in found.operations}


IDS = np.arange(8) % 3
# A sum with a mask. Half holds the mask and the other operand, and not the sum.
MASKED = {
    "eye": (lambda h: h + jnp.eye(8), lambda h: h + np.eye(8)),
    "tri": (lambda h: h - jnp.tri(8), lambda h: h - np.tri(8)),
    "one_hot": (lambda h: jax.nn.one_hot(IDS, 8) - h, lambda h: np.eye(8)[IDS] - h),
    "moved": (lambda h: h + jnp.eye(8)[::-1].T, lambda h: h + np.eye(8)[::-1].T),
    "comparison": (
        lambda h: h + (h > h.mean()).astype(h.dtype),
        lambda h: h + (h > h.mean()),
    ),
    "jit": (lambda h: jax.jit(lambda h: h + jnp.eye(8))(h), lambda h: h + np.eye(8)),
    "scan": (
        lambda h: lax.scan(lambda c, row: (c, row + jnp.eye(8)[0]), 0, h)[1],
        lambda h: h + np.eye(8)[0],
    ),
}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MASKED)
def test_a_sum_with_a_mask_is_float32(name, half):
    """As by torch's rules: `logdet(a + I)` needs the digits that half would drop."""
    function, in_numpy = MASKED[name]
    h = 2 / jnp.finfo(half).eps + 2 * np.arange(64.0).reshape(8, 8)
    got = jamp.autocast(lambda w, x: function(x @ w), half)(EYE, jnp.float32(h))
    np.testing.assert_array_equal(got, in_numpy(np.float64(h)))
