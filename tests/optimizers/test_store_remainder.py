"""`master_weights(tx, store_remainder=True)`: 16 bits beside bfloat16 are a master."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from pallas_kernels import join, split
from tests.bits import assert_same_bits
from tests.optimizers.one_pass import normal, one_step, start, step

BF16 = ml_dtypes.bfloat16
LARGEST = 0x7F7F7FFF  # of the float32 numbers that do not round to infinity
stored = functools.partial(jamp.master_weights, store_remainder=True)


# Splitting and joining, over all lower halves

# Zeros, denormals, the least normal; one, and odd above it; the largest of a
# binade, and of all; infinity; NaNs.
HIGHS = [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x40FF, 0x7F7E, 0x7F7F, 0x7F80]
HIGHS += [0x7F81, 0x7FC0, 0x7FFF, *(normal(4, 0).view("u4") >> 16).tolist()]
LOWS = np.arange(2**16, dtype=np.uint32)


@jax.jit
def there_and_back(x):
    high, low = split(x)
    return high, low, join(high, low)


def upper_bits(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["+", "-"])
@pytest.mark.parametrize("upper", HIGHS)
def test_split_and_join_are_exact_for_all_lower_halves(upper, sign):
    u = np.uint32((upper | sign) << 16) | LOWS
    x = u.view(np.float32)
    high, low, joined = map(np.asarray, there_and_back(x))
    assert (high.dtype, low.dtype, joined.dtype) == (BF16, np.uint16, np.float32)
    magnitude = u & 0x7FFFFFFF
    finite = magnitude <= LARGEST
    assert (joined.view(np.uint32)[finite] == u[finite]).all()
    # To nearest, exact ties away from zero.
    rounded = ((u.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    assert (upper_bits(high)[finite] == rounded[finite]).all()
    assert (low[finite] == LOWS[finite]).all()
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(BF16)
    tie = LOWS == 0x8000
    assert (upper_bits(high) == upper_bits(nearest))[finite & ~tie].all()
    # What would round to infinity stays the largest, and comes back as that.
    beyond = ~finite & (magnitude <= 0x7F800000)
    clamped = np.uint32(LARGEST | (sign << 16))
    assert (joined.view(np.uint32)[beyond] == clamped).all()
    assert np.isfinite(high.astype(np.float32)[beyond]).all()
    # NaNs become one NaN.
    nan = np.isnan(x)
    assert np.isnan(joined[nan]).all() and np.isnan(high.astype(np.float32)[nan]).all()
    assert len(np.unique(upper_bits(high)[nan])) == len(np.unique(low[nan])) == any(nan)


def test_both_halves_are_of_one_value_whatever_the_compiler_does():
    # Unoptimised, XLA:CPU rounds a product and a sum once in one fusion, and twice in
    # another: halves of two values are off by a whole bfloat16 where these straddle.
    weights, grads = ({"w": normal(2**21, seed)} for seed in range(2))
    scale = jamp.StaticLossScale(1.0, check=True)
    state = start(
        jo.fused_sgd(0.05), "O5", weights, store_remainder=True, loss_scale=scale
    )
    options = {"xla_backend_optimization_level": 0}
    after = jax.jit(one_step, compiler_options=options)(state, grads)
    expected = weights["w"] - 0.05 * grads["w"].astype(BF16).astype(np.float64)
    np.testing.assert_allclose(jamp.master_params(after)["w"], expected, 3e-7, 3e-8)


def odd(dtype):
    """inf, NaNs with payloads, denormals and -0 among ordinary numbers."""
    u = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0x7F81, 1, 0x8001, 0x8000], "u2")
    if dtype.itemsize == 4:
        u = u.astype("u4") << 16 | 0x1234
    return jnp.asarray(np.resize(u, 130).view(dtype))


@pytest.mark.parametrize(
    "name, level", [(x, "O5") for x in ("xla", "interpret", "optax")] + [("xla", "O3")]
)
def test_a_skip_keeps_the_bits_of_whatever_is_in_the_params(name, level):
    tx = optax.sgd(1.0) if name == "optax" else jo.fused_adam(backend=name)
    has_masters, tree = level == "O5", {"v": jnp.ones(130), "w": jnp.ones(9)}
    state = start(tx, level, tree, store_remainder=has_masters)
    values = jax.tree.map(lambda p: odd(p.dtype)[: p.size], state.params)
    state = state.replace(params=values)
    if has_masters:
        lows = {
            k: jnp.uint16(501) * jnp.arange(x.size, dtype="u2")
            for k, x in values.items()
        }
        state = state.replace(opt_state=state.opt_state._replace(masters=lows))
    after = step(state, {"v": np.full(130, np.nan, "f4"), "w": np.ones(9, "f4")})
    assert after.skipped_steps == 1
    assert_same_bits(after.params, state.params)
    assert_same_bits(after.opt_state, state.opt_state)


@pytest.mark.message
def test_other_params_are_refused():
    half, wide = {"v": jnp.ones(1, BF16), "w": jnp.ones(1, "f2")}, {"w": jnp.ones(1)}
    float16 = r"bfloat16.*\['w'\].*float16.*O5"
    for call, text in [
        (lambda: stored(optax.sgd(1.0)).init(half), float16),
        (lambda: stored(optax.sgd(1.0)).init(wide), "bfloat16.*float32.*cast"),
        (lambda: start(jo.fused_adam(), "O2", wide, store_remainder=True), float16),
    ]:
        with pytest.raises(ValueError, match=f"store_remainder.*{text}"):
            call()
