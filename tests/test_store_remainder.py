"""`master_weights(tx, store_remainder=True)`: 16 bits beside bfloat16 are a master."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp import optimizers as jo
from pallas_kernels import Weight, join, split
from tests.bits import assert_same_bits
from tests.one_pass import F32, dot, each_backend, normal, params, start, step

BF16 = ml_dtypes.bfloat16
LARGEST = 0x7F7F7FFF  # of the float32 numbers that do not round to infinity


def stored(tx):
    return jamp.master_weights(tx, store_remainder=True)


# Splitting and joining, over all lower halves

HIGHS = {
    "zero": 0x0000,
    "denormal": 0x0001,
    "largest denormal": 0x007F,
    "smallest normal": 0x0080,
    "one, even": 0x3F80,
    "above one, odd": 0x3F81,
    "largest of a binade": 0x40FF,
    "below the largest": 0x7F7E,
    "largest": 0x7F7F,
    "infinity": 0x7F80,
    "signaling NaN": 0x7F81,
    "quiet NaN": 0x7FC0,
    "last NaN": 0x7FFF,
}
HIGHS |= {f"random {k}": int(x) for k, x in enumerate(normal(4, 0).view("u4") >> 16)}
LOWS = np.arange(2**16, dtype=np.uint32)


@jax.jit
def there_and_back(x):
    high, low = split(x)
    return high, low, join(high, low)


def upper_bits(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["+", "-"])
@pytest.mark.parametrize("name", HIGHS)
def test_split_and_join_are_exact_for_all_lower_halves(name, sign):
    u = np.uint32((HIGHS[name] | sign) << 16) | LOWS
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


def test_the_lists_above_hold_every_sort_of_number():
    u = np.uint32(np.array([*HIGHS.values()]) << 16)[:, None] | LOWS
    x = u.view(np.float32)
    sorts = [x == 0, np.isinf(x), np.isnan(x), u == LARGEST, u == LARGEST + 1]
    sorts += [(x != 0) & (np.abs(x) < np.finfo(np.float32).tiny)]
    for sort in sorts:
        assert sort.any() and not sort.all()


@each_backend
def test_kernels_split_and_join_as_functions_do(backend):
    """A step of 0, so that nothing but splitting and joining happens."""
    high = np.array([*HIGHS.values()], np.uint32)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    u = ((high[:, None] << 16) | low).ravel()
    u = np.concatenate([u, u | np.uint32(1 << 31)])
    with np.errstate(invalid="ignore"):
        x = jnp.asarray(u.view(np.float32))
    tx = jo.fused_sgd(0.0, backend=backend)
    state = start(tx, "O5", {"w": x}, store_remainder=True, loss_scale=1.0)
    high, low, joined = there_and_back(x)
    assert_same_bits(state.params["w"], high)
    assert_same_bits(state.opt_state.masters["w"], low)
    after = step(state, {"w": np.zeros(x.shape, np.float32)})
    # Adding a zero to -0 gives 0, and on a CPU to a denormal too.
    kept = ~(np.abs(np.asarray(joined)) < np.finfo(np.float32).tiny)
    assert (upper_bits(after.params["w"]) == upper_bits(high))[kept].all()
    assert (after.opt_state.masters["w"] == low)[kept].all()


# The same run as with float32 masters


def fifty(tx, **kwargs):
    """50 steps at O5, as a scan: masters, moments and params after each."""
    state = start(tx, "O5", loss_scale=1.0, **kwargs)
    xs = {k: normal((50, *p.shape), p.size) for k, p in params().items()}

    def one(state, x):
        state = state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x))
        inner = state.opt_state.inner_state
        return state, (jamp.master_params(state), inner, state.params)

    return jax.jit(lambda s: lax.scan(one, s, xs))(state)


OPTIMIZERS = {
    "fused_adam": functools.partial(jo.fused_adam, 1e-2, weight_decay=0.1),
    "fused_lamb": functools.partial(jo.fused_lamb, 1e-2),
    "optax.adam": functools.partial(optax.adam, 1e-2),
}


@pytest.mark.standard_promotion  # for optax
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_those_of_float32_masters_bit_for_bit(name):
    split_state, stored = fifty(OPTIMIZERS[name](), store_remainder=True)
    whole_state, copied = fifty(OPTIMIZERS[name]())
    assert_same_bits(stored[:2], copied[:2])
    masters, _, halves = stored
    for key in ("a", "b", "z"):
        assert split_state.opt_state.masters[key].dtype == jnp.uint16
        assert whole_state.opt_state.masters[key].dtype == F32
        u = np.asarray(masters[key]).view(np.uint32)
        tie = u & 0xFFFF == 0x8000
        same = upper_bits(halves[key]) == upper_bits(copied[2][key])
        assert (same | tie).all()
        # A step loses nothing: the lower halves are all different.
        assert len(np.unique(u & 0xFFFF)) > u.size / 4


@pytest.mark.standard_promotion
def test_a_plain_loop_of_optax_lands_on_the_upper_halves():
    txs = [wrap(optax.adam(1e-2)) for wrap in (stored, jamp.master_weights)]
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    half["n"] = params()["n"]  # is its own master
    grads = {k: normal((50, *p.shape), p.size) for k, p in half.items()}
    grads = {k: jnp.asarray(g).astype(half[k].dtype) for k, g in grads.items()}

    def loop(tx):
        def one(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, state.masters)

        return lax.scan(one, (half, tx.init(half)), grads)[1]

    (highs, lows), (_, masters) = jax.jit(lambda: tuple(map(loop, txs)))()
    for key in ("a", "b", "z"):
        assert lows[key].dtype == jnp.uint16
        assert_same_bits(join(highs[key], lows[key]), masters[key])
        assert_same_bits(highs[key], split(masters[key])[0])
    assert isinstance(lows["n"], optax.MaskedNode)


# Skips


def odd(dtype):
    """inf, NaNs with payloads, denormals and -0 among ordinary numbers."""
    u = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0x7F81, 1, 0x8001, 0x8000], "u2")
    return jnp.asarray(np.resize(u, 130).view(dtype))


@pytest.mark.parametrize("name", ["xla", "interpret", "optax"])
def test_a_skip_keeps_the_bits_of_whatever_is_in_the_params(name):
    tx = optax.sgd(1.0) if name == "optax" else jo.fused_adam(backend=name)
    tree = {"v": jnp.ones(130), "w": jnp.ones(9)}
    state = start(tx, "O5", tree, store_remainder=True)
    values = {"v": odd(BF16), "w": odd(BF16)[:9]}
    lows = {k: jnp.arange(x.size).astype(jnp.uint16) * 501 for k, x in values.items()}
    opt_state = state.opt_state._replace(masters=lows)
    state = state.replace(params=values, opt_state=opt_state)
    after = step(state, {"v": np.full(130, np.nan, "f4"), "w": np.ones(9, "f4")})
    assert after.skipped_steps == 1
    assert_same_bits(after.params, state.params)
    assert_same_bits(after.opt_state, state.opt_state)


@each_backend
@pytest.mark.parametrize("level", ["O3", "O0"])
def test_a_skip_keeps_such_bits_without_masters_too(level, backend):
    dtype = {"O3": np.float16, "O0": np.float32}[level]
    state = start(jo.fused_sgd(1.0, backend=backend), level, {"v": jnp.ones(130)})
    u = np.asarray(odd(BF16)).view(np.uint16).astype(f"u{np.dtype(dtype).itemsize}")
    u = u << 16 | 0x1234 if level == "O0" else u
    state = state.replace(params={"v": jnp.asarray(u.view(dtype))})
    after = step(state, {"v": np.full(130, np.inf, "f4")})
    assert after.skipped_steps == 1
    assert_same_bits(after.params, state.params)


# init, errors, equality


def test_init_of_half_params_has_no_remainder_and_of_originals_all_of_them():
    half = jnp.asarray([1.0, -2.5], jnp.bfloat16)
    state = stored(optax.sgd(1.0)).init({"w": half, "n": jnp.ones(2), "none": None})
    assert_same_bits(state.masters["w"], jnp.zeros(2, jnp.uint16))
    assert isinstance(state.masters["n"], optax.MaskedNode)
    assert state.masters["none"] is None
    state = start(optax.sgd(1.0), "O5", store_remainder=True)
    assert_same_bits(jamp.master_params(state), params())
    # Two bytes per half param, where float32 masters take four.
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state.opt_state.masters)}
    assert dtypes == {"uint16"}


@pytest.mark.parametrize("make", [jo.fused_adam, lambda: optax.sgd(1.0)])
def test_float16_is_refused_with_the_path(make):
    message = r"store_remainder.*bfloat16.*\['w'\].*float16.*O5"
    with pytest.raises(ValueError, match=message):
        stored(make()).init({"v": jnp.ones(1, BF16), "w": jnp.ones(1, jnp.float16)})
    with pytest.raises(ValueError, match=message):
        start(make(), "O2", {"w": jnp.ones(1)}, store_remainder=True)


@pytest.mark.parametrize("make", [jo.fused_adam, lambda: optax.sgd(1.0)])
def test_params_that_are_all_float32_are_refused(make):
    with pytest.raises(ValueError, match="store_remainder.*bfloat16.*float32.*cast"):
        stored(make()).init({"w": jnp.ones(1)})
    with pytest.raises(ValueError, match="store_remainder.*bfloat16.*float32"):
        start(make(), "O5", {"w": jnp.ones(1)}, keep_fp32="w", store_remainder=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_levels_without_masters_warn(level):
    with pytest.warns(jamp.UnusedOptionWarning, match=f"store_remainder.*{level}.*O5"):
        state = start(jo.fused_adam(), level, {"w": jnp.ones(1)}, store_remainder=True)
    assert state.tx == jo.fused_adam()


@pytest.mark.parametrize("make", [jo.fused_adam, optax.identity])
def test_wrappers_are_equal_where_the_option_is(make):
    tx = make()
    a, b, plain = stored(tx), stored(tx), jamp.master_weights(tx)
    assert a == b and hash(a) == hash(b)
    assert a != plain
    assert plain == jamp.master_weights(tx, store_remainder=False)
    assert (a.store_remainder, plain.store_remainder) == (True, False)
    assert a.inner == plain.inner


def test_equal_fused_optimizers_give_equal_wrappers():
    assert stored(jo.fused_adam(1e-3)) == stored(jo.fused_adam(1e-3))
    assert hash(stored(jo.fused_adam(1e-3))) == hash(stored(jo.fused_adam(1e-3)))
    assert stored(jo.fused_adam(1e-3)) != stored(jo.fused_adam(2e-3))


def test_both_halves_are_of_one_value_whatever_the_compiler_does():
    # Unoptimised, XLA:CPU rounds a product and a sum once in one fusion, and twice in
    # another: halves of two values are off by a whole bfloat16 where these straddle.
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(2**22, np.float32)
    grads = jnp.asarray(1000 * rng.standard_normal(2**22, np.float32))
    high, low = split(jnp.asarray(weights))
    tx = jo.fused_sgd(0.05)

    def apply(grads, state, weight, found_inf):
        return tx.apply(grads, state, weight, grad_scale=1000.0, found_inf=found_inf)

    options = {"xla_backend_optimization_level": 0}
    args = (grads, tx.init(high), Weight(high, low), jnp.asarray(False))
    weight, _ = jax.jit(apply, compiler_options=options)(*args)
    expected = weights - 0.05 * (np.asarray(grads, np.float64) / 1000)
    np.testing.assert_allclose(weight.value, expected, 3e-7, 3e-8)
