"""`jamp.master_weights` as a transformation of optax, without the rest of the library.

Under nothing but `optax.apply_updates`: `params == cast(masters)` after every step, and
the masters, however they are kept, are what the transformation makes of float32 params.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp import optimizers as jo
from pallas_kernels import join, split_float32
from tests.optimizers.fused import assert_close, fresh
from tests.support.bits import assert_same_bits

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RATES = [1e-4, 1e-2, 1.0]
STEPS = 12
SPOILT = 5


def tree(a: Any = F16, b: Any = BF16) -> Any:
    """Both halves at once, which saves compiling twice, and leaves that stay fp32."""
    rng = np.random.default_rng(0)

    def leaf(shape, dtype):
        return jnp.asarray(rng.normal(size=shape), F32).astype(dtype)

    return {
        "dense": {"kernel": leaf((5, 3), a), "bias": leaf((3,), b)},
        "list": [leaf((), a), leaf((7,), b)],
        "norm": {"scale": leaf((3,), F32), "bias": leaf((), F32)},
    }


def gradients(params: Any, dtype: Any = None, spoil: float | None = None) -> Any:
    """STEPS gradients along axis 0, in the dtypes of `params` or in `dtype`."""
    rng = np.random.default_rng(1)

    def leaf(p):
        g = rng.normal(size=(STEPS, *p.shape))
        if spoil is not None and p.size > 7:
            g[SPOILT, 0, 0] = spoil
        return jnp.asarray(g, F32).astype(p.dtype if dtype is None else dtype)

    return jax.tree.map(leaf, params)


def is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def stored(state: Any) -> dict[str, Any]:
    """By path, what is kept beside a param; fp32 params have nothing."""
    # A wrapper around a part of the params has one hole for all of the rest.
    trees = [by_path(x) for _, x in optax.tree.get_all_with_path(state, "masters")]
    found = functools.reduce(operator.or_, trees)
    assert found and len(found) == sum(map(len, trees))
    return found


def assert_invariant(params: Any, state: Any) -> dict[str, Any]:
    """Each half leaf is its master, rounded and finite. Returns all masters by path."""
    masters = stored(state)
    for path, p in by_path(params).items():
        assert (path in masters) == (p.dtype != F32), path
        master = masters.setdefault(path, p)
        assert master.dtype == F32, path
        largest = float(jnp.finfo(p.dtype).max)
        rounded = np.clip(np.asarray(master), -largest, largest).astype(p.dtype)
        rounded = p if p.dtype == F32 else rounded
        assert np.asarray(p).tobytes() == np.asarray(rounded).tobytes(), path
    return masters


def assert_split(params: Any, state: Any) -> dict[str, Any]:
    """Beside bfloat16 params are 16 bits of their masters, which this returns."""
    lows, masters = stored(state), by_path(params)
    for path, p in by_path(params).items():
        assert (path in lows) == (p.dtype == BF16), path
        if path in lows:
            assert lows[path].dtype == jnp.uint16, path
            masters[path] = join(p, lows[path])
            assert_same_bits(p, split_float32(masters[path])[0])
    return masters


def alone(keep, tx):
    """No wrapper around the one that keeps masters."""
    return keep(tx)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(inside, outside, rate, trees, grads):
    """All steps in one scan: per tree, params and state before and after each."""
    keep = jamp.master_weights
    txs = [outside(keep, inside(rate))]
    txs += [outside(functools.partial(keep, store_remainder=True), inside(rate))]
    txs += [inside(rate)] if outside is alone else []
    ways = list(zip(txs, trees, grads, strict=False))

    def step(carry, grads):
        new = []
        for tx, (params, state), g in zip(txs, carry, grads, strict=True):
            updates, state = tx.update(g, state, params)
            new.append((optax.apply_updates(params, updates), state))
        return new, new

    start = [(p, tx.init(p)) for tx, p, _ in ways]
    _, after = lax.scan(step, start, [g for *_, g in ways])
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, after)


def assert_it_holds(inside, outside=alone, dtype=None, spoil=None, halves=(F16, BF16)):
    """For `inside`, from a learning rate to what steps the masters.

    `outside` makes of what keeps masters, and a transformation, another one; `dtype` is
    that of gradients, None for each param's; `spoil` is put into one gradient. Beside
    bfloat16 `halves` remainders are kept, in the same tree with float32 for float16,
    which may round in another way.
    """
    params = tree(*halves)
    trees = [params, as_float32(params, F16), as_float32(params, F16, BF16)]
    grads = gradients(params, dtype, spoil)
    grads = [grads, as_float32(grads, F16), as_float32(grads, F16, BF16)]
    for rate in RATES:
        first, halved, *plain = run(inside, outside, F32(rate), trees, grads)
        masters = assert_invariant(*first)
        others = [by_path(params) for params, _ in plain] + [assert_split(*halved)]
        for other in others:
            assert_close(other, masters, 1e-5, 1e-5 * rate)
        for x in map(np.float32, jax.tree.leaves(first[0])):
            assert np.isfinite(x).all()
            # At 1e-4 most steps round to nothing; at 1 none does.
            assert rate < 1.0 or (x != x[0]).any(0).all()


def as_float32(tree: Any, *dtypes: Any) -> Any:
    """The leaves of these dtypes widened."""
    return jax.tree.map(lambda x: x.astype(F32) if x.dtype in dtypes else x, tree)


HALVES = [F16, BF16]
# optax.apply_updates adds fp32 to half.
standard = pytest.mark.standard_promotion


def only(*keys):
    """A mask that is True on these top-level keys."""
    return lambda params: {k: k in keys for k in params}


INSIDE = {
    "chain": lambda rate: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(rate, weight_decay=0.1)
    ),
    # Where the mask leaves it out, the gradient itself steps the masters.
    "masked": lambda rate: optax.masked(optax.adam(rate), only("dense", "norm")),
    "inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.adam)(rate),
}
# Each takes what keeps masters, and what is to be wrapped.
OUTSIDE = {
    "masked": lambda keep, tx: optax.chain(
        optax.masked(keep(tx), only("dense", "list")), optax.masked(tx, only("norm"))
    ),
    "multi_steps_skip": lambda keep, tx: optax.MultiSteps(
        keep(tx), 3, should_skip_update_fn=optax.transforms.skip_not_finite
    ).gradient_transformation(),
}
# These look at the gradients before the wrapper widens them, so they get fp32 ones.
OUTSIDE_FP32 = {
    "clip_by_global_norm": lambda keep, tx: optax.chain(
        optax.clip_by_global_norm(0.5), keep(tx)
    ),
    "apply_if_finite": lambda keep, tx: optax.apply_if_finite(keep(tx), 5),
    "inject_hyperparams": lambda keep, tx: optax.inject_hyperparams(
        lambda by: keep(optax.chain(tx, optax.scale(by)))
    )(by=1.0),
}


@standard
@pytest.mark.parametrize("name", INSIDE)
def test_the_invariant_holds_around_every_transformation(name):
    assert_it_holds(INSIDE[name], halves=(BF16, BF16))


@standard
@pytest.mark.parametrize("name", [*OUTSIDE, *OUTSIDE_FP32])
def test_the_invariant_holds_inside_every_wrapper(name):
    spoil = {"multi_steps_skip": np.inf, "apply_if_finite": np.nan}.get(name)
    # Half gradients are added up in half; one dtype for hyperparameters is looked for,
    # to which all params promote; and each part needs params for remainders.
    alike = name.startswith(("multi", "inject"))
    halves = (BF16, BF16) if alike else (F16, BF16)
    dtype = F32 if name in OUTSIDE_FP32 else None
    assert_it_holds(optax.adam, (OUTSIDE | OUTSIDE_FP32)[name], dtype, spoil, halves)


@standard
@pytest.mark.parametrize("name", ["adam", "lamb", "larc_sgd"])
def test_params_are_their_rounded_masters_after_every_step(name):
    halves = (F16 if name == "adam" else BF16, BF16)
    assert_it_holds(lambda rate: fresh(name, learning_rate=rate), halves=halves)


@pytest.mark.parametrize("dtype", HALVES)
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
def test_what_is_beyond_half_is_clamped_and_comes_back(dtype, store):
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
    # An infinite master, too; it stays so, or is the largest that rounds to a finite.
    np.testing.assert_array_equal(step([-np.inf, np.inf]), [largest, -largest])
    if not store:
        np.testing.assert_array_equal(state.masters["w"], [np.inf, -np.inf])


@pytest.mark.parametrize("store", [False, True])
def test_init_widens_half_leaves_and_leaves_holes_for_the_others(store):
    params = tree(BF16, BF16) | {"none": None}
    tx = jamp.master_weights(optax.adam(0.1), store_remainder=store)
    state = tx.init(params)
    kept = [x.astype(F32) for x in jax.tree.leaves(params["dense"])]
    if store:  # two bytes, which half params lack nothing of
        kept = [jnp.zeros(x.shape, jnp.uint16) for x in kept]
    assert_same_bits(jax.tree.leaves(state.masters["dense"]), kept)
    assert is_hole(state.masters["norm"]["scale"])
    assert is_hole(state.masters["norm"]["bias"])
    assert state.masters["none"] is None
    moments = optax.tree.get(state, "mu")
    assert {str(x.dtype) for x in jax.tree.leaves(moments)} == {"float32"}
    assert jax.tree.structure(moments) == jax.tree.structure(params)
    assert_same_bits(jax.jit(tx.init)(params), state)


def test_init_from_fp32_params_copies_what_casting_them_loses():
    # 1 + 2^-12 is 1 in fp16. The params are cast after init, and the norm is kept.
    originals = {"w": jnp.asarray([1 + 2.0**-12], F32), "norm": jnp.asarray([2.0], F32)}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(originals)
    assert_same_bits(state.masters["w"], originals["w"])
    params = {"w": originals["w"].astype(F16), "norm": originals["norm"]}
    grads = {"w": jnp.asarray([1.0], F16), "norm": jnp.ones(1, F32)}
    updates, state = tx.update(grads, state, params)
    assert state.masters["w"] == 2.0**-12
    assert (updates["w"], updates["norm"]) == (2.0**-12 - 1, -1.0)


@pytest.mark.parametrize("make", [optax.sgd, optax.contrib.schedule_free_sgd])
def test_init_shares_no_array_with_the_params_or_within_the_state(make):
    params = tree()
    for given in (params, jax.tree.map(lambda x: x.astype(F32), params)):
        state = jamp.master_weights(make(0.1)).init(given)
        leaves = jax.tree.leaves((given["dense"], given["list"], state))
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_schedule_free_params_for_evaluation():
    tx = optax.contrib.schedule_free_sgd(0.1)
    state = jamp.initialize({"w": jnp.ones(3)}, tx, "O2", verbosity=0)
    state = state.apply_gradients(grads={"w": jnp.full(3, 0.5)})
    evaluate = optax.contrib.schedule_free_eval_params
    with pytest.raises(
        AttributeError, match=r"opt_state.inner_state, jamp.master_para"
    ):
        evaluate(state.opt_state, state.params)
    found = evaluate(state.opt_state.inner_state, jamp.master_params(state))
    np.testing.assert_allclose(found["w"], 0.95, 1e-6)  # after one step x is z


# The interface of optax


PARAMS = tree()
DENSE = PARAMS["dense"]
CAST = PARAMS | {"norm": jax.tree.map(lambda x: x.astype(F16), PARAMS["norm"])}
ERRORS = {
    "missing": (PARAMS | {"dense": {"kernel": 0}}, PARAMS, r"dense\W+bias"),
    "another shape": (  # would broadcast
        PARAMS | {"dense": DENSE | {"bias": jnp.ones(1, BF16)}},
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


def test_what_is_no_transformation_or_wrapped_already_is_refused():
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
