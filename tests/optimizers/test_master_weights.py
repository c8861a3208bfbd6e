"""Test `jamp.master_weights` as an optax transformation, without the rest of jamp.

After every step with `optax.apply_updates`, `params == cast(masters)`, and the masters
equal float32 params that the same transformation steps.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp import optimizers as jo
from pallas_kernels import join, split_float32
from tests.support.bits import assert_rounded_alike, assert_same_bits
from tests.support.extent import slow_except

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RATES = [1e-4, 1e-2, 1.0]
STEPS = 12
SPOILT = 5


def tree(half: Any = F16) -> Any:
    """Returns half leaves, and leaves that stay float32."""
    rng = np.random.default_rng(0)

    def leaf(shape, dtype=half):
        return jnp.asarray(rng.normal(size=shape), F32).astype(dtype)

    return {
        "dense": {"kernel": leaf((5, 3)), "bias": leaf((3,))},
        "list": [leaf(()), leaf((7,))],
        "norm": {"scale": leaf((3,), F32), "bias": leaf((), F32)},
    }


def gradients(params: Any, spoil: float | None = None) -> Any:
    """Draws STEPS gradients along axis 0, in the dtypes of `params`."""
    rng = np.random.default_rng(1)

    def leaf(p):
        g = rng.normal(size=(STEPS, *p.shape))
        if spoil is not None and p.size > 7:
            g[SPOILT, 0, 0] = spoil
        return jnp.asarray(g, F32).astype(p.dtype)

    return jax.tree.map(leaf, params)


def widened(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(F32), tree)


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def masters_of(params: Any, state: Any) -> dict[str, Any]:
    """Returns all masters by path, and checks that half params equal theirs."""
    # A wrapper around some params has one hole for all others.
    trees = [by_path(x) for _, x in optax.tree.get_all_with_path(state, "masters")]
    kept, masters = functools.reduce(operator.or_, trees), by_path(params)
    assert kept.keys() == {path for path, p in masters.items() if p.dtype != F32}
    for path, master in kept.items():
        p = masters[path]
        if master.dtype == jnp.uint16:  # the lower bits of float32
            master = join(p, master)
        else:
            assert_same_bits(p, master.astype(p.dtype))
        masters[path] = master
    return masters


def only(*keys):
    """Returns a mask that is True on these top-level keys."""
    return lambda params: {k: k in keys for k in params}


class Case(NamedTuple):
    """A transformation that steps the masters, and the wrappers around it.

    Attributes:
        inside: makes the transformation from a learning rate.
        outside: wraps it, given `master_weights` and the transformation.
        half: the dtype of most params. bfloat16 params have remainders.
        wide: whether gradients are float32, because a wrapper reads or adds them.
        spoil: a value that one element of the gradients has.
    """

    inside: Callable[[Any], Any] = optax.adam
    outside: Callable[[Any, Any], Any] = lambda keep, tx: keep(tx)
    half: Any = F16
    wide: bool = False
    spoil: float | None = None


CASES = {
    "adam": Case(jo.fused_adam),
    "lamb, remainders": Case(jo.fused_lamb, half=BF16),
    "around a chain": Case(
        lambda rate: optax.chain(
            optax.clip_by_global_norm(0.5), optax.adamw(rate, weight_decay=0.1)
        ),
        half=BF16,
    ),
    # The gradient of a masked leaf itself steps the master.
    "around a mask": Case(lambda r: optax.masked(optax.adam(r), only("dense", "norm"))),
    "around injected": Case(lambda rate: optax.inject_hyperparams(optax.adam)(rate)),
    "in a mask": Case(
        outside=lambda keep, tx: optax.chain(
            optax.masked(keep(tx), only("dense", "list")),
            optax.masked(tx, only("norm")),
        ),
        half=BF16,
    ),
    "in multi_steps": Case(
        outside=lambda keep, tx: optax.MultiSteps(
            keep(tx), 3, should_skip_update_fn=optax.transforms.skip_not_finite
        ).gradient_transformation(),
        wide=True,
        spoil=np.inf,
    ),
    "in a chain": Case(
        outside=lambda keep, tx: optax.chain(optax.clip_by_global_norm(0.5), keep(tx)),
        wide=True,
    ),
    "in apply_if_finite": Case(
        outside=lambda keep, tx: optax.apply_if_finite(keep(tx), 5),
        half=BF16,
        wide=True,
        spoil=np.nan,
    ),
    "in injected": Case(
        outside=lambda keep, tx: optax.inject_hyperparams(
            lambda by: keep(optax.chain(tx, optax.scale(by)))
        )(by=1.0),
        wide=True,
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def run(case, rate, params, grads):
    """Returns params and states around each step, and params of a float32 run."""

    def trained(keep, params, grads):
        tx = case.outside(keep, case.inside(rate))

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            after = optax.apply_updates(params, updates), state
            return after, after

        start = params, tx.init(params)
        after = lax.scan(step, start, grads)[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, after)

    keep = functools.partial(jamp.master_weights, store_remainder=case.half == BF16)
    plain = trained(lambda tx: tx, widened(params), widened(grads))
    return *trained(keep, params, grads), plain[0]


# optax.apply_updates adds float32 to half.
standard = pytest.mark.standard_promotion


@standard
@pytest.mark.parametrize(
    "name", slow_except(["adam", "lamb, remainders", "in a mask"], CASES)
)
def test_params_are_their_rounded_masters_after_every_step(name):
    case = CASES[name]
    params = tree(case.half)
    grads = gradients(params, case.spoil)
    for rate in RATES:
        given = widened(grads) if case.wide else grads
        found, state, plain = run(case, F32(rate), params, given)
        masters = masters_of(found, state)
        assert_rounded_alike(masters, by_path(plain), 1e-5, 1e-5 * rate)
        # At a rate of 1e-4, most steps of half params round to zero. At 1, none does.
        for x in map(np.float32, jax.tree.leaves(found) if rate == 1.0 else ()):
            assert (x != x[0]).any(0).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_updates_are_the_difference_of_two_halves_in_fp32(dtype):
    params = {"w": jnp.asarray([1.0, 2.0], dtype)}
    tx = jamp.master_weights(optax.sgd(1.0))
    grads = {"w": jnp.asarray([0.25 + 2.0**-9, 2.0**-12], F32)}
    updates, state = tx.update(grads, tx.init(params), params, unknown=1)
    assert updates["w"].dtype == F32
    masters = np.float32([0.75 - 2.0**-9, 2.0 - 2.0**-12])
    np.testing.assert_array_equal(state.masters["w"], masters)
    rounded = masters.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(updates["w"], rounded - np.float32([1, 2]))


@standard
@pytest.mark.parametrize("dtype, store", [(F16, False), (BF16, True)])
def test_params_beyond_half_are_clamped_and_recover(dtype, store):
    largest = float(jnp.finfo(dtype).max)
    tx = jamp.master_weights(optax.sgd(1.0), store_remainder=store)
    params = {"w": jnp.asarray([10.0, -10.0], dtype)}
    state = tx.init(params)

    def step(grad):
        nonlocal params, state
        updates, state = tx.update({"w": jnp.asarray(grad, F32)}, state, params)
        params = optax.apply_updates(params, updates)
        return np.float64(params["w"])

    jump = np.asarray([-largest, largest])
    for grads in [jump, jump * 1e-3, jump * 0.0]:
        np.testing.assert_array_equal(step(grads), [largest, -largest])
    if not store:
        assert (np.abs(state.masters["w"]) > largest).all()
    assert (np.abs(step(-jump * 0.9)) < largest).all()
    # An infinite master is clamped too. It stays infinite, unless it is a remainder.
    np.testing.assert_array_equal(step([-np.inf, np.inf]), [largest, -largest])
    if not store:
        np.testing.assert_array_equal(state.masters["w"], [np.inf, -np.inf])


@pytest.mark.parametrize("store", [False, True])
def test_init_widens_half_leaves_and_leaves_holes_for_the_others(store):
    params = tree(BF16) | {"none": None}
    tx = jamp.master_weights(optax.adam(0.1), store_remainder=store)
    state = tx.init(params)
    kept = [x.astype(F32) for x in jax.tree.leaves(params["dense"])]
    if store:  # the remainder of a half param is zero
        kept = [jnp.zeros(x.shape, jnp.uint16) for x in kept]
    assert_same_bits(jax.tree.leaves(state.masters["dense"]), kept)
    holes = state.masters["norm"].values()
    assert all(isinstance(x, optax.MaskedNode) for x in holes)
    assert state.masters["none"] is None
    moments = optax.tree.get(state, "mu")
    assert {str(x.dtype) for x in jax.tree.leaves(moments)} == {"float32"}
    assert jax.tree.structure(moments) == jax.tree.structure(params)
    assert_same_bits(jax.jit(tx.init)(params), state)
    for given in [params] if store else [params, widened(params)]:  # shares no array
        leaves = jax.tree.leaves((given["dense"], given["list"], tx.init(given)))
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_init_from_fp32_params_keeps_what_casting_loses():
    # 1 + 2^-12 is 1 in float16. The params are cast after init, except for the norm.
    originals = {"w": jnp.asarray([1 + 2.0**-12], F32), "norm": jnp.asarray([2.0], F32)}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(originals)
    assert_same_bits(state.masters["w"], originals["w"])
    params = {"w": originals["w"].astype(F16), "norm": originals["norm"]}
    grads = {"w": jnp.asarray([1.0], F16), "norm": jnp.ones(1, F32)}
    updates, state = tx.update(grads, state, params)
    assert state.masters["w"] == 2.0**-12
    assert (updates["w"], updates["norm"]) == (2.0**-12 - 1, -1.0)


def test_schedule_free_params_for_evaluation():
    tx = optax.contrib.schedule_free_sgd(0.1)
    state = jamp.initialize({"w": jnp.ones(3)}, tx, "O2", verbosity=0)
    state = state.apply_gradients(grads={"w": jnp.full(3, 0.5)})
    evaluate = optax.contrib.schedule_free_eval_params
    found = evaluate(state.opt_state.inner_state, jamp.master_params(state))
    np.testing.assert_allclose(found["w"], 0.95, 1e-6)  # x is z after one step


PARAMS = tree()
DENSE = PARAMS["dense"]
CAST = PARAMS | {"norm": jax.tree.map(lambda x: x.astype(F16), PARAMS["norm"])}
ERRORS = {
    "missing": (PARAMS | {"dense": {"kernel": 0}}, PARAMS, r"dense\W+bias"),
    "another shape": (  # would broadcast
        PARAMS | {"dense": DENSE | {"bias": jnp.ones(1, F16)}},
        PARAMS,
        r"dense\W+bias",
    ),
    "no params": (PARAMS, None, "master_weights needs the params"),
    "cast since": (CAST, CAST, "norm.*is float16 but was float32.*no master"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_trees_that_do_not_match_are_an_error_with_the_path(row):
    grads, params, text = ERRORS[row]
    tx = jamp.master_weights(optax.sgd(0.1))
    state = tx.init(PARAMS)
    with pytest.raises((TypeError, ValueError), match=text):
        tx.update(grads, state, params)
    with pytest.raises(TypeError, match="EmptyState.*expected the MasterWeightsState"):
        tx.update(PARAMS, optax.EmptyState(), PARAMS)


def test_wrapping_twice_or_another_object_is_refused():
    for bad in (optax.sgd, 0.1, None, (optax.sgd(0.1),)):
        with pytest.raises(TypeError, match="(?i)transformation"):
            jamp.master_weights(bad)
    with pytest.raises(ValueError, match="keeps master weights already"):
        jamp.master_weights(jamp.master_weights(optax.sgd(0.1)))


def test_equal_arguments_make_equal_wrappers():
    stored = functools.partial(jamp.master_weights, store_remainder=True)
    a, b = stored(jo.fused_adam(1e-3)), stored(jo.fused_adam(1e-3))
    assert a == b and hash(a) == hash(b)
    assert a.inner == jo.fused_adam(1e-3)
    assert a not in (jamp.master_weights(a.inner), stored(jo.fused_adam(2e-3)))


LARGEST = 0x7F7F7FFF  # of the float32 numbers that do not round to infinity
SGD = optax.sgd(1.0)
stored = functools.partial(jamp.master_weights, store_remainder=True)


# Zero, denormals, the smallest normal, 1 and the next number, the largest of a binade
# and of all, infinity, NaNs and an ordinary number.
HIGHS = [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x40FF, 0x7F7E, 0x7F7F, 0x7F80]
HIGHS += [0x7F81, 0x7FC0, 0x7FFF, 0x3DE1]
LOWS = np.arange(2**16, dtype=np.uint32)


def upper_bits(x):
    return np.asarray(x).view(np.uint16)


def test_split_and_join_are_exact_for_all_lower_halves():
    uppers = np.uint32([upper | sign for upper in HIGHS for sign in (0, 0x8000)])
    u = (uppers[:, None] << 16) | LOWS
    x = u.view(np.float32)
    high, low, joined = map(np.asarray, jax.jit(there_and_back)(x))
    assert (high.dtype, low.dtype, joined.dtype) == (BF16, np.uint16, np.float32)
    magnitude = u & 0x7FFFFFFF
    finite = magnitude <= LARGEST
    np.testing.assert_array_equal(joined.view(np.uint32)[finite], u[finite])
    # Rounds to nearest, ties away from zero.
    rounded = ((u.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(upper_bits(high)[finite], rounded[finite])
    np.testing.assert_array_equal(low[finite], (u & 0xFFFF)[finite])
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(BF16)
    decided = finite & (u & 0xFFFF != 0x8000)
    assert (upper_bits(high) == upper_bits(nearest))[decided].all()
    # Numbers that would round to infinity become the largest.
    beyond = ~finite & (magnitude <= 0x7F800000)
    clamped = np.copysign(np.uint32(LARGEST).view(np.float32), x)
    np.testing.assert_array_equal(joined[beyond], clamped[beyond])
    assert np.isfinite(high.astype(np.float32)[beyond]).all()
    # NaNs become one NaN.
    nan = np.isnan(x)
    assert np.isnan(joined[nan]).all() and np.isnan(high.astype(np.float32)[nan]).all()
    assert set(upper_bits(high)[nan] & 0x7FFF) == {0x7FC0} and not low[nan].any()


def there_and_back(x):
    high, low = split_float32(x)
    return high, low, join(high, low)


def test_other_params_are_refused():
    half, wide = {"v": jnp.ones(1, BF16), "w": jnp.ones(1, "f2")}, {"w": jnp.ones(1)}
    float16 = r"bfloat16.*\['w'\].*float16.*O5"
    for call, text in [
        (lambda: stored(SGD).init(half), float16),
        (lambda: stored(SGD).init(wide), "bfloat16.*float32.*cast"),
        (lambda: jamp.initialize(wide, SGD, "O2", store_remainder=True), float16),
    ]:
        with pytest.raises(ValueError, match=f"store_remainder.*{text}"):
            call()
