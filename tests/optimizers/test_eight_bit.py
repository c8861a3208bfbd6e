"""Test moments in 8 bits: their formats, decay, outliers, and optax's optimizers."""

import functools
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jamp import optimizers as jo
from jamp.optimizers import _codes
from tests.oracles import eight_bit as oracle, rounding
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.standard_promotion  # optax promotes

F32, BF16 = jnp.float32, jnp.bfloat16
ADAM = functools.partial(jo.fused_adam, 1e-3, moment_dtype="8bit")
SGD = functools.partial(jo.fused_sgd, 1e-3, momentum=0.9, moment_dtype="8bit")


def noise(*shape, seed=0, spread=1.0):
    """Returns numbers of many magnitudes, with a zero in each row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(0, spread, shape))
    x[..., 0] = 0
    return np.float32(x)


def steps(tx, params, gradients, state=None):
    """Returns the updates of the last step, and the state after it."""
    state, update = tx.init(params) if state is None else state, jax.jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
    return updates, state


def moments(state, name="w"):
    """Returns the first and second moments of a leaf of Adam."""
    wide = _codes.widened({"mu": state.mu[name], "nu": state.nu[name]})
    return wide["mu"], wide["nu"]


# Formats


def test_every_code_is_a_number_of_a_small_float():
    codes = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    root = jo.EightBit(jnp.asarray(codes), jnp.full((16, 1), 3.0)).root
    np.testing.assert_allclose(root[5], 3 * oracle.ROOT, rtol=3e-7)
    bits = np.tile(codes[:1, :127], (16, 4))[:, :256].view(_codes.FIRST)
    value = jo.EightBit(jnp.asarray(bits), jnp.full((16, 1), 3.0)).value
    np.testing.assert_allclose(value[5, :127], 3 * oracle.FIRST, rtol=3e-7)
    signed = jnp.asarray(codes.view(np.int8))
    value = jo.EightBit(signed, jnp.full((16, 1), -3.0)).value
    np.testing.assert_allclose(value[5, :128], -3 * oracle.SQUARES, rtol=3e-7)
    np.testing.assert_allclose(value[5, :128:-1], 3 * oracle.SQUARES[1:], rtol=3e-7)


@pytest.mark.parametrize("shape", [(16, 512), (64, 128), (3, 5, 5, 64), (4096,)])
@pytest.mark.parametrize("kind", ["first", "second", "momentum"])
def test_numbers_are_rounded_by_a_hash_in_blocks_of_the_last_axis(shape, kind):
    block = next(b for b in (256, 128, 64) if shape[-1] % b == 0)
    x, random = noise(*shape, spread=3.0), rounding.random_16(3, 7, np.arange(10**4), 0)
    random = random[: x.size].reshape(shape)
    x, root = (x * x, np.abs(x)) if kind == "second" else (x, x)
    dtype, book = {
        "first": (_codes.FIRST, oracle.FIRST),
        "second": (_codes.SECOND, oracle.ROOT),
        "momentum": (_codes.MOMENTUM, oracle.SQUARES),
    }[kind]
    encode = jax.jit(lambda x, bits: _codes.encoded(x, dtype, bits))
    found = encode(x, jnp.asarray(random, jnp.uint32))
    scales = oracle.maxima(root, block)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-6)
    each = oracle.spread(scales, shape[-1])
    code, unsure = oracle.rounded(np.abs(root), each, book, random)
    if kind == "second":
        code = np.where((root != 0) & (code == 0), 1, code)
    bits = np.asarray(found.codes)
    given = bits.view(np.uint8) & 0x7F if kind == "first" else np.abs(np.int32(bits))
    assert unsure.mean() < 1e-3
    np.testing.assert_array_equal(given[~unsure], code[~unsure])
    value = np.float32(found.value)
    assert ((np.sign(value) == np.sign(x)) | (value == 0)).all()


def test_a_second_moment_above_zero_never_reads_back_as_zero():
    v = np.geomspace(1e-24, 1e6, 4096, dtype=np.float32)
    v = np.random.default_rng(0).permutation(v).reshape(16, 256)
    v[:, :9] = 0
    for bits in (0, 0x8000, 0xFFFF):
        x = _codes.encoded(jnp.asarray(v), _codes.SECOND, np.uint32(bits))
        assert ((np.asarray(x.codes) == 0) == (v == 0)).all()
        assert ((np.asarray(x.value) > 0) == (v > 0)).all()


def test_adam_stores_a_ratio_and_bounds_the_scales():
    params, grads = {"w": jnp.ones((16, 512))}, noise(16, 512, spread=3.0)
    _, state = steps(ADAM(b1=0.5, b2=0.75), params, [{"w": grads}] * 2)
    nu = state.nu["w"]
    # The first step has m = g / 2 and v = g**2 / 4, and the scale 1/2 max |g|.
    scale = np.sqrt(0.75 * 0.25 + 0.25) * oracle.maxima(grads, 256)
    np.testing.assert_allclose(nu.scales, scale, rtol=1e-6)
    assert state.mu["w"].dtype == _codes.FIRST and nu.codes.dtype == _codes.SECOND
    m, v = moments(state)
    large = np.abs(grads) > 1e-3 * oracle.spread(oracle.maxima(grads, 256), 512)
    exact = np.abs(grads[large])
    np.testing.assert_allclose(np.sqrt(v)[large], np.sqrt(0.4375) * exact, rtol=0.3)
    np.testing.assert_allclose(np.abs(m)[large], 0.75 * exact, rtol=0.5)
    ratio = np.float32(state.mu["w"])
    np.testing.assert_allclose(ratio, np.where(v > 0, 8 * m / np.sqrt(v), 0), rtol=1e-5)


def test_the_bits_are_the_hash_of_step_leaf_and_element():
    grads, params = noise(16, 512), {"w": jnp.ones((16, 512))}
    _, state = steps(SGD(momentum=0.5), params, [{"w": grads}] * 3)
    before = steps(SGD(momentum=0.5), params, [{"w": grads}] * 2)[1].trace["w"]
    trace = 0.5 * np.asarray(before.value) + grads
    random = rounding.random_16(2, crc32(b"w"), np.arange(grads.size), 0)
    scale = oracle.spread(oracle.maxima(trace, 256), 512)
    args = np.abs(trace), scale, oracle.SQUARES, random.reshape(grads.shape)
    code, unsure = oracle.rounded(*args)
    found = np.abs(np.int32(state.trace["w"].codes))
    np.testing.assert_array_equal(found[~unsure], code[~unsure])


def test_small_leaves_and_odd_axes_are_bfloat16():
    shapes = {"small": (63, 64), "odd": (64, 100), "w": (64, 64), "gain": ()}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    for tx in (ADAM(), jo.eight_bit(optax.adam(1e-3))):
        for name in ("mu", "nu"):
            found = optax.tree.get(tx.init(params), name)
            kinds = {k: isinstance(x, jo.EightBit) for k, x in found.items()}
            assert all(found[k].dtype == BF16 for k in ("small", "odd", "gain"))
            assert kinds["w"] or found["w"].dtype == _codes.FIRST


# Decay, outliers and skips


BLOCKS = [{"w": jnp.zeros((16, 256))}]


@pytest.mark.parametrize("make", [ADAM, lambda: jo.eight_bit(optax.adam(1e-3))])
def test_zero_gradients_move_nothing_and_second_moments_decay_at_the_right_rate(make):
    tx, params = make(), {"w": jnp.ones((16, 256))}
    updates, state = steps(tx, params, [{"w": noise(16, 256)}])
    start = optax.tree.get(state, "nu")["w"].value
    mu = jax.tree.map(jnp.zeros_like, optax.tree.get(state, "mu"))
    state = optax.tree.set(state, mu=mu)
    step = jax.jit(functools.partial(tx.update, BLOCKS[0]))
    for _ in range(500):
        updates, state = step(state, params)
        assert not updates["w"].any()
    end = optax.tree.get(state, "nu")["w"].value
    assert float(end.sum() / start.sum()) == pytest.approx(0.999**500, rel=0.02)
    rest = (start > 1e-4 * start.max()) & (start > 0)
    assert float((end / start)[rest].mean()) == pytest.approx(0.999**500, rel=0.03)
    assert ((end > 0) == (start > 0)).all()


def test_roots_decay_at_the_right_rate_in_the_mean():
    """A constant keeps the scale, so the codes of the other elements fall."""
    params, tx = {"w": jnp.ones((64, 256))}, ADAM(b2=0.99)
    constant = jnp.zeros((64, 256)).at[:, 0].set(4.0)
    _, state = steps(tx, params, [{"w": constant.at[:, 1:].set(1.0)}])
    _, state = steps(tx, params, [{"w": constant}] * 200, state)
    root = np.asarray(state.nu["w"].root)
    assert root[:, 1:].mean() == pytest.approx(0.1 * 0.99**100, rel=0.02)
    assert root[:, 0].mean() == pytest.approx(4 * (1 - 0.99**201) ** 0.5, rel=0.02)


def test_a_momentum_of_0_99_decays():
    """Rounding to nearest never lets it decay: 1 % is less than half a unit."""
    params, tx = {"w": jnp.ones((64, 256))}, SGD(momentum=0.99)
    first = jnp.full((64, 256), 0.1).at[:, 0].set(2.0)
    _, state = steps(tx, params, [{"w": first}])
    hold = {"w": jnp.zeros((64, 256)).at[:, 0].set(0.02)}
    _, state = steps(tx, params, [hold] * 100, state)
    found = np.asarray(state.trace["w"].value)[:, 1:].mean()
    assert found == pytest.approx(0.1 * 0.99**100, rel=0.03)
    one = _codes.encoded(first, _codes.MOMENTUM)
    decayed = (0.99 * one.value).at[:, 0].set(2.0)
    again = _codes.encoded(decayed, _codes.MOMENTUM)
    assert (again.codes[:, 1:] == one.codes[:, 1:]).all()


@pytest.mark.slow
def test_updates_are_right_in_the_mean():
    """Gradients have heavy tails and many sizes, and fall to 0.3 halfway."""
    rng, params = np.random.default_rng(0), {"w": jnp.ones((16, 256))}
    sizes = np.exp(rng.normal(size=(16, 256)))
    both = [jo.fused_adam(1e-3), ADAM()]
    states, update = [tx.init(params) for tx in both], jax.jit(_both, static_argnums=0)
    errors, shares = [], []
    for t in range(1500):
        g = np.float32(sizes * rng.standard_t(4, sizes.shape) * (0.3 if t > 750 else 1))
        (wanted, found), states = update(tuple(both), {"w": g}, states, params)
        if t >= 1200:
            wanted, found = (np.float64(x["w"]) for x in (wanted, found))
            errors.append(((found - wanted) ** 2).mean() / (wanted**2).mean())
            shares.append((found * wanted).mean() / (wanted**2).mean())
    assert np.sqrt(np.mean(errors)) == pytest.approx(0.14, abs=0.02)
    assert np.mean(shares) == pytest.approx(1, abs=0.02)


def _both(transformations, grads, states, params):
    pairs = zip(transformations, states, strict=True)
    results = [tx.update(grads, state, params) for tx, state in pairs]
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("make", [jo.fused_adam, optax.adam])
def test_an_outlier_leaves_the_other_updates_within_15_percent(make):
    plain = make(1e-3)
    rng = np.random.default_rng(0)
    params = {"w": jnp.ones((16, 512))}
    draws = [np.float32(rng.normal(size=(16, 512))) for _ in range(60)]
    draws[-3][:, ::256] = 1e4
    gradients = [{"w": x} for x in draws]
    found, _ = steps(jo.eight_bit(plain), params, gradients)
    wanted, _ = steps(plain, params, gradients)
    others = np.arange(512) % 256 != 0
    found, wanted = found["w"][:, others], wanted["w"][:, others]
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    assert error < 0.15
    # No update is larger than the largest exact one, within the error of a code.
    assert abs(found).max() < 1.3 * abs(wanted).max()


@pytest.mark.parametrize("make", [ADAM, SGD], ids=["adam", "sgd"])
def test_a_skip_keeps_codes_and_scales(make):
    tx, params = make(), {"w": jnp.ones((16, 256)), "b": jnp.ones(9)}
    grads = {"w": noise(16, 256), "b": np.ones(9, np.float32)}
    _, state = steps(tx, params, [grads] * 2)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), grads)
    update = jax.jit(tx.update)
    updates, after = update(bad, state, params, found_inf=jnp.bool_(True))
    assert_same_bits(after, state)
    assert not any(jnp.any(x) for x in jax.tree.leaves(updates))
    # Without a skip, NaN stays: no moment becomes 0, as it would in bitsandbytes.
    _, spoiled = update(bad, state, params)
    kept = spoiled.nu["w"] if "adam" in tx.rule.name else spoiled.trace["w"]
    assert jnp.isnan(kept.value).all()
