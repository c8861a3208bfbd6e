"""Scaled gradients: the shapes of jax.value_and_grad, and what ScaledGrads can do."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import products
from tests.subprocesses import on_devices

RUNNING = ("O0", "O2", "O3", "O5")
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
REFUSED = (TypeError, ValueError)


def params():
    return {
        "w": jnp.asarray([1.0, -2.0, 0.5], jnp.float32),
        "norm": {"scale": jnp.asarray(3.0, jnp.float32)},
    }


def make(level="O2", tree=None, tx=None, **kwargs):
    tree = params() if tree is None else tree
    tx = optax.sgd(1.0) if tx is None else tx
    kwargs.setdefault("keep_fp32", "norm" if level in HALF and "norm" in tree else None)
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def wide(x):
    return x.astype(jnp.float32)


def loss_fn(p, x):
    """Its gradient is `x * scale` for w and `(w * x).sum()` for scale."""
    return (wide(p["w"]) * x).sum() * p["norm"]["scale"]


X = np.float32([0.5, 0.25, -2.0])
LOSS = -3.0  # (1 * 0.5 - 2 * 0.25 - 0.5 * 2) * 3
GRADS = {"w": [1.5, 0.75, -6.0], "norm": {"scale": -1.0}}


def assert_grads(tree, scale=1.0):
    np.testing.assert_array_equal(wide(tree["w"]), np.float32(GRADS["w"]) * scale)
    np.testing.assert_array_equal(tree["norm"]["scale"], -1.0 * scale)


# The shapes of jax.value_and_grad


@pytest.mark.parametrize("level", RUNNING)
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_loss_and_gradients_of_every_level(level, transform):
    state = make(level, loss_scale=8.0)
    f = transform(jamp.scaled_value_and_grad(loss_fn))
    loss, grads = f(state, X)
    assert (loss.dtype, loss.shape) == (jnp.float32, ())
    assert loss == LOSS
    assert isinstance(grads, jamp.ScaledGrads)
    assert jax.tree.structure(grads.tree) == jax.tree.structure(state.params)
    assert grads.tree["w"].dtype == HALF.get(level, jnp.float32)
    assert grads.tree["norm"]["scale"].dtype == jnp.float32
    assert_grads(grads.tree, 8.0)
    assert (grads.scale, grads.finite, grads.loss_id) == (8.0, True, 0)


def test_scaled_grad_leaves_out_the_value():
    state = make(loss_scale=8.0)
    grads = jamp.scaled_grad(loss_fn)(state, X)
    assert isinstance(grads, jamp.ScaledGrads)
    assert_grads(grads.tree, 8.0)


def test_aux_comes_where_jax_puts_it():
    def with_aux(p, x):
        return loss_fn(p, x), {"x": x}

    state = make()
    (loss, aux), grads = jamp.scaled_value_and_grad(with_aux, has_aux=True)(state, X)
    assert loss == LOSS
    np.testing.assert_array_equal(aux["x"], X)
    grads2, aux2 = jamp.scaled_grad(with_aux, has_aux=True)(state, X)
    np.testing.assert_array_equal(aux2["x"], X)
    assert_same_bits(grads2, grads)


def test_aux_may_hold_what_is_no_array():
    class Opaque:
        pass

    opaque = Opaque()

    def with_aux(p, x):
        return loss_fn(p, x), ("text", None, 3, opaque, print)

    _, aux = jamp.scaled_grad(with_aux, has_aux=True)(make(), X)
    assert aux == ("text", None, 3, opaque, print)
    assert isinstance(aux[2], int)


def test_aux_keeps_its_dtypes():
    def with_aux(p, x):
        return loss_fn(p, x), {"half": jnp.float16(1.5), "int": jnp.int32(7)}

    _, aux = jamp.scaled_grad(with_aux, has_aux=True)(make(), X)
    assert (aux["half"].dtype, aux["int"].dtype) == (jnp.float16, jnp.int32)


def test_static_arguments_and_python_branches():
    def branching(p, x, mode, *, times=1):
        assert isinstance(mode, str)
        total = loss_fn(p, x)
        for _ in range(times - 1):
            total = total + loss_fn(p, x)
        return -total if mode == "minus" else total

    state = make(loss_scale=1.0)
    f = jamp.scaled_value_and_grad(branching)
    assert f(state, X, "plus")[0] == LOSS
    assert f(state, X, "minus", times=2)[0] == -2 * LOSS
    jitted = jax.jit(f, static_argnums=2, static_argnames="times")
    loss, grads = jitted(state, X, "minus", times=2)
    assert loss == -2 * LOSS
    assert_grads(grads.tree, -2.0)


def test_the_state_is_the_first_argument_and_x_may_come_by_name():
    loss, _ = jamp.scaled_value_and_grad(loss_fn)(make(), x=X)
    assert loss == LOSS


def test_the_loss_function_sees_the_params_of_the_state():
    seen = []

    def look(p, x):
        seen.append((p["w"].dtype, p["norm"]["scale"].dtype))
        return loss_fn(p, x)

    jamp.scaled_grad(look)(make("O5"), X)
    assert set(seen) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))}


@pytest.mark.parametrize("level, half", [("O1", "float16"), ("O4", "bfloat16")])
def test_o1_and_o4_run_the_loss_under_autocast(level, half):
    state = jamp.initialize(jnp.ones((3, 3)), optax.sgd(0.1), level, verbosity=0)

    def loss_fn(w, x):
        return jnp.square(x @ w).mean()

    step = jamp.scaled_value_and_grad(loss_fn)
    found = products(step, state, jnp.eye(3))
    assert found and set(found) == {f"{half},{half}"}
    loss, grads = step(state, jnp.eye(3))
    assert (loss, loss.dtype, grads.tree.dtype) == (1.0, jnp.float32, jnp.float32)


def test_without_patching_o1_is_scaled_fp32():
    state = make("O1", patch_functions=False)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, X)
    assert loss == LOSS
    assert_grads(grads.tree, 2.0**16)


# The loss


def test_the_loss_is_the_fp32_loss_bit_for_bit():
    # x * 3 / 3 and x * (1 / 3) * 3 are not x for all of these.
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    assert (values * np.float32(3) / np.float32(3) != values).any()
    state = make(loss_scale=3.0)

    def constant(p, x):
        return x + 0.0 * loss_fn(p, jnp.asarray(X))

    f = jax.jit(jax.vmap(jamp.scaled_value_and_grad(constant), (None, 0)))
    np.testing.assert_array_equal(f(state, values)[0], values)


@pytest.mark.parametrize("level", RUNNING)
def test_a_scaled_loss_beyond_fp16_is_no_nan_on_step_1(level):
    # 3 * 2^16 is inf in fp16; so is 1 * 2^16.
    state = make(level, loss_scale="dynamic")
    assert state.loss_scale == 2.0**16
    tiny = X * np.float32(2.0**-10)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, tiny)
    assert loss == LOSS * 2.0**-10
    assert grads.finite
    assert_grads(grads.tree, 2.0**6)
    loss, _ = jamp.scaled_value_and_grad(loss_fn)(state, X * 1e30)
    assert np.isfinite(loss)


def test_a_loss_whose_product_overflows_fp32_is_returned_as_it_is():
    def huge(p, x):
        return loss_fn(p, x) * 1e35

    loss, grads = jamp.scaled_value_and_grad(huge)(make("O0", loss_scale="dynamic"), X)
    np.testing.assert_allclose(loss, LOSS * 1e35, rtol=1e-6)
    assert not grads.finite


def test_only_gradients_decide_and_not_the_loss():
    # apex_semantics 4.5: "Inf in the loss itself is not examined".
    def shifted(p, x):
        return loss_fn(p, x) + jnp.inf

    loss, grads = jamp.scaled_value_and_grad(shifted)(make(), X * 2.0**-10)
    assert loss == jnp.inf
    assert grads.finite


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_loss_in_half_warns(level, dtype):
    def half(p, x):
        return loss_fn(p, x).astype(dtype)

    with pytest.warns(jamp.PrecisionWarning, match=jnp.dtype(dtype).name):
        loss, _ = jamp.scaled_value_and_grad(half)(make(level, loss_scale=2.0), X)
    assert loss.dtype == jnp.float32
    assert loss == LOSS


def test_a_loss_in_fp32_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jamp.scaled_grad(loss_fn)(make(), X)


BAD_LOSSES = {
    "vector": (lambda p, x: wide(p["w"]) * x, r"scalar"),
    "one_element": (lambda p, x: loss_fn(p, x)[None], r"scalar"),
    "integer": (lambda p, x: jnp.int32(3), r"int32"),
    "bool": (lambda p, x: loss_fn(p, x) > 0, r"bool"),
    "complex": (lambda p, x: lax.complex(loss_fn(p, x), 1.0), r"complex64"),
    "tuple": (lambda p, x: (loss_fn(p, x), 1.0), r"has_aux"),
    "dict": (lambda p, x: {"loss": loss_fn(p, x)}, r"scalar|dict"),
    "none": (lambda p, x: None, r"scalar|None"),
}


@pytest.mark.parametrize("wrapper", [jamp.scaled_grad, jamp.scaled_value_and_grad])
@pytest.mark.parametrize("name", BAD_LOSSES)
def test_what_is_no_scalar_float_is_refused(name, wrapper):
    bad, words = BAD_LOSSES[name]
    with pytest.raises(REFUSED, match=f"(?s)loss.*(?:{words})|(?:{words}).*loss"):
        wrapper(bad)(make(), X)


def test_the_shape_of_a_bad_loss_is_in_the_message():
    with pytest.raises(REFUSED, match=r"\[3\]|\(3,\)"):
        jamp.scaled_grad(lambda p, x: wide(p["w"]) * x)(make(), X)


def test_has_aux_without_a_pair_is_refused():
    with pytest.raises(REFUSED, match="(?s)aux"):
        jamp.scaled_grad(loss_fn, has_aux=True)(make(), X)


@pytest.mark.parametrize("loss_id", [1, 2, 7])
def test_a_loss_id_out_of_range_is_an_index_error(loss_id):
    state = make(num_losses=1)
    for call in (
        lambda: jamp.scaled_grad(loss_fn, loss_id=loss_id)(state, X),
        lambda: jamp.scaled_value_and_grad(loss_fn, loss_id=loss_id)(state, X),
        lambda: jamp.scale_loss(jnp.float32(1.0), state, loss_id),
        lambda: jamp.unscale(state.params, state, loss_id),
        lambda: jamp.zero_grads(state, loss_id),
    ):
        with pytest.raises(IndexError, match=rf"(?s)loss_id.*{loss_id}.*num_losses"):
            call()


def test_each_loss_has_its_own_scale():
    state = make(num_losses=2, loss_scale="dynamic")
    second = state.loss_scales[1]._replace(scale=jnp.float32(4.0))
    state = state.replace(loss_scales=(state.loss_scales[0], second))
    grads = jamp.scaled_grad(loss_fn, loss_id=1)(state, X)
    assert (grads.scale, grads.loss_id) == (4.0, 1)
    assert_grads(grads.tree, 4.0)


@pytest.mark.parametrize("name", ["scaled_grad", "scaled_value_and_grad"])
def test_a_train_state_is_refused(name):
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"jamp\.initialize.*TrainState") as caught:
        getattr(jamp, name)(loss_fn)(state, X)
    assert f"jamp.{name} takes" in str(caught.value)


def test_params_instead_of_a_state_are_refused():
    with pytest.raises(TypeError, match=r"jamp\.initialize.*dict"):
        jamp.scaled_grad(loss_fn)(params(), X)


# Leaves that are held out


def test_integers_none_and_keys_are_held_out():
    tree = {
        "w": jnp.asarray([1.0, 2.0], jnp.float32),
        "n": jnp.asarray([3, 4], jnp.int32),
        "flag": jnp.asarray(True),
        "key": jax.random.key(0),
        "none": None,
    }
    state = make("O2", tree, loss_scale=2.0)

    def uses_all(p):
        assert set(p) == set(tree)
        assert p["none"] is None
        noise = jax.random.normal(p["key"], (), jnp.float32)
        gain = jnp.where(p["flag"], p["n"].astype(jnp.float32), 0.0)
        return (wide(p["w"]) * gain).sum() + 0.0 * noise

    loss, grads = jamp.scaled_value_and_grad(uses_all)(state)
    assert loss == 11.0
    (leaf,) = jax.tree.leaves(grads.tree)
    np.testing.assert_array_equal(wide(leaf), [6.0, 8.0])
    tree, finite = grads.unscale()
    np.testing.assert_array_equal(tree["w"], [3.0, 4.0])
    assert finite
    assert len(jax.tree.leaves(grads + grads)) == len(jax.tree.leaves(grads))


# Flags


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 2])
def test_one_bad_element_is_found(bad, at):
    x = X * np.float32(2.0**-10)
    x[at] = bad
    grads = jax.jit(jamp.scaled_grad(loss_fn))(make(), x)
    assert grads.finite.dtype == jnp.bool_
    assert not grads.finite


def test_finite_gradients_whose_sum_is_not_are_finite():
    # apex's Python fallback sums the gradient and calls this an overflow.
    grads = jamp.scaled_grad(lambda p: (wide(p["w"]) * 1.5e38).sum())(
        make(
            "O0",
            {"w": jnp.zeros(8, jnp.float32)},
            loss_scale="dynamic",
            max_loss_scale=1,
        )
    )
    assert grads.scale == 1.0
    assert grads.finite


def test_the_unscaling_uses_the_scale_that_scaled():
    # A state that has moved on since must not matter.
    state = make(loss_scale="dynamic")
    grads = jamp.scaled_grad(loss_fn)(state, X * 2.0**-10)
    tree, _ = grads.unscale()
    assert_grads(tree, 2.0**-10)
    assert tree["w"].dtype == jnp.float32


# ScaledGrads


def scaled(level="O2", scale=8.0, x=X):
    return jamp.scaled_grad(loss_fn)(make(level, loss_scale=scale), x)


def test_it_is_a_frozen_pytree_of_four_parts():
    grads = scaled()
    names = {f.name for f in dataclasses.fields(grads)}
    assert names >= {"tree", "scale", "finite", "loss_id", "groups"}
    assert len(jax.tree.leaves(grads)) == 2 + 2  # the tree's, scale, finite
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        grads.scale = 1.0
    again = jax.jit(lambda x: x)(grads)
    assert_same_bits(again, grads)


def test_replace():
    grads = scaled()
    other = grads.replace(tree=jax.tree.map(jnp.negative, grads.tree))
    assert_grads(other.tree, -8.0)
    assert (other.scale, other.loss_id) == (grads.scale, grads.loss_id)
    assert_grads(grads.tree, 8.0)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_sum_is_fp32_and_beyond_half(level):
    big = X * np.float32(1000.0)  # -6 * 8 * 1000 fits fp16, twice that does not
    grads = scaled(level, x=big)
    total = grads + grads
    assert {str(x.dtype) for x in jax.tree.leaves(total.tree)} == {"float32"}
    np.testing.assert_array_equal(total.tree["norm"]["scale"], -16000.0)
    rounded = np.float32(wide(grads.tree["w"]))
    np.testing.assert_array_equal(total.tree["w"], 2 * rounded)
    assert np.abs(total.tree["w"]).max() > 65504
    assert (total.finite, total.scale) == (True, 8.0)


def test_one_overflow_spoils_a_sum():
    state = make()
    f = jax.jit(jamp.scaled_grad(loss_fn))
    good, bad = f(state, X * 2.0**-10), f(state, X * np.inf)
    assert (good.finite, bad.finite) == (True, False)
    assert not (good + bad).finite
    assert not (bad + good).finite
    assert (good + good).finite


def test_products_and_quotients_act_on_the_tree_alone():
    grads = scaled()
    for got, factor in [
        (grads * 0.5, 4.0),
        (0.5 * grads, 4.0),
        (grads / 4, 2.0),
        (grads / jnp.float32(4.0), 2.0),
        ((grads + grads) / 2, 8.0),
    ]:
        assert_grads(got.tree, factor)
        assert (got.scale, got.finite) == (8.0, True)


@pytest.mark.parametrize("kind", ["ScaledGrads", "tree", "string", "None", "vector"])
def test_factors_are_scalars(kind):
    grads = scaled()
    bad = {
        "ScaledGrads": grads,
        "tree": grads.tree,
        "string": "2",
        "None": None,
        "vector": jnp.ones(3, jnp.float32),
    }[kind]
    with pytest.raises(REFUSED):
        grads * bad
    with pytest.raises(REFUSED):
        grads / bad


def test_a_mean_over_micro_batches_is_the_gradient_of_the_mean():
    state = make(loss_scale=2.0)
    f = jamp.scaled_grad(loss_fn)
    mean = (f(state, X) + f(state, 3 * X)) / 2
    tree, finite = mean.unscale()
    assert_grads(tree, 2.0)
    assert finite


def test_gradients_of_different_losses_do_not_add():
    state = make(num_losses=2)
    a, b = (jamp.scaled_grad(loss_fn, loss_id=i)(state, X) for i in (0, 1))
    with pytest.raises(REFUSED, match="(?s)loss_id|loss"):
        a + b


@pytest.mark.parametrize("other", [1.0, {"w": 1.0}, None], ids=str)
def test_only_scaled_grads_can_be_added(other):
    with pytest.raises(TypeError):
        scaled() + other


def test_a_scan_accumulates_from_zero_grads():
    state = make(loss_scale=4.0)
    xs = jnp.stack([X, 2 * X, -0.5 * X])

    @jax.jit
    def accumulate(state, xs):
        def body(total, x):
            return total + jamp.scaled_grad(loss_fn)(state, x), None

        return lax.scan(body, jamp.zero_grads(state), xs)[0]

    total = accumulate(state, xs)
    assert_grads(total.tree, 4.0 * 2.5)
    assert (total.scale, total.finite) == (4.0, True)
    state = state.apply_gradients(grads=total)
    assert state.step == 1
    expected = np.asarray(params()["w"]) - 2.5 * np.float32(GRADS["w"])
    np.testing.assert_array_equal(jamp.master_params(state)["w"], expected)


def test_zero_grads_are_fp32_zeros_with_the_scale_of_their_loss():
    state = make(num_losses=2, loss_scale="dynamic")
    second = state.loss_scales[1]._replace(scale=jnp.float32(4.0))
    state = state.replace(loss_scales=(state.loss_scales[0], second))
    zeros = jamp.zero_grads(state, loss_id=1)
    assert jax.tree.structure(zeros.tree) == jax.tree.structure(state.params)
    for x, p in zip(
        jax.tree.leaves(zeros.tree), jax.tree.leaves(state.params), strict=True
    ):
        assert (x.dtype, x.shape) == (jnp.float32, p.shape)
        assert not x.any()
    assert (zeros.scale, zeros.finite, zeros.loss_id) == (4.0, True, 1)


MISUSES = {
    "index": lambda g: g["w"],
    "position": lambda g: g[0],
    "in": lambda g: "w" in g,
    "iteration": lambda g: list(g),
}


@pytest.mark.parametrize("name", MISUSES)
def test_use_as_a_plain_tree_names_the_two_ways_out(name):
    with pytest.raises(TypeError, match=r"(?s)apply_gradients.*unscale"):
        MISUSES[name](scaled())


def test_flax_train_state_names_the_two_ways_out():
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"(?s)apply_gradients.*unscale"):
        state.apply_gradients(grads=scaled("O0"))


# scale_loss and unscale, for one's own jax.grad


@pytest.mark.parametrize("level", RUNNING)
def test_scale_loss_and_unscale_around_ones_own_grad(level):
    state = make(level, loss_scale=8.0)

    def scaled_loss(p):
        return jamp.scale_loss(loss_fn(p, X), state)

    grads = jax.grad(scaled_loss)(state.params)
    assert_grads(grads, 8.0)
    got = jamp.unscale(grads, state)
    assert {str(x.dtype) for x in jax.tree.leaves(got)} == {"float32"}
    assert_grads(got)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_scale_loss_multiplies_in_fp32(dtype):
    loss, state = jnp.asarray(3.0, dtype), make()
    if dtype == jnp.float32:
        scaled = jamp.scale_loss(loss, state)
    else:
        with pytest.warns(jamp.PrecisionWarning, match=jnp.dtype(dtype).name):
            scaled = jamp.scale_loss(loss, state)
    assert scaled.dtype == jnp.float32
    assert scaled == 3.0 * 2.0**16


def test_scale_loss_and_unscale_take_a_loss_id():
    state = make(num_losses=2)
    second = state.loss_scales[1]._replace(scale=jnp.float32(4.0))
    state = state.replace(loss_scales=(state.loss_scales[0], second))
    assert jamp.scale_loss(jnp.float32(2.0), state, loss_id=1) == 8.0
    assert jamp.unscale({"w": jnp.float16(8.0)}, state, 1)["w"] == 2.0


def test_unscale_keeps_what_half_would_lose():
    # 2^-24 / 2^16 is far below fp16's smallest number.
    got = jamp.unscale({"w": jnp.asarray(2.0**-24, jnp.float16)}, make())
    assert got["w"] == 2.0**-40


@pytest.mark.parametrize("rule", [2.0**126, jamp.StaticLossScale(2.0**126)], ids=repr)
def test_unscale_at_the_largest_scale_is_exact(rule):
    state = make("O0", loss_scale=rule)
    assert jamp.unscale({"w": jnp.float32(2.0**127)}, state)["w"] == 2.0


BEYOND = {
    "number": lambda: make("O0", loss_scale=2.0**127),
    "string": lambda: make("O0", loss_scale=str(2.0**127)),
    "rule": lambda: jamp.StaticLossScale(2.0**127),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_static_scale_whose_reciprocal_is_subnormal_is_refused(name):
    # XLA flushes 1 / 2^127 to zero, and all gradients with it.
    with pytest.raises(ValueError, match=r"2\*\*126"):
        BEYOND[name]()


def test_a_dynamic_scale_stops_where_its_reciprocal_is_normal():
    rule = jamp.DynamicLossScale(init_scale=2.0**125, window=1, max_scale=2.0**127)
    state = make("O0", loss_scale=rule)
    for _ in range(3):
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        state = state.apply_gradients(grads=zeros)
    assert state.loss_scale == 2.0**126
    assert jamp.unscale({"w": jnp.float32(2.0**127)}, state)["w"] == 2.0


def test_disabled_amp_leaves_the_loss_alone():
    state = make("O2", enabled=False)
    assert jamp.scale_loss(jnp.float32(3.0), state) == 3.0
    assert_same_bits(jamp.unscale(state.params, state), state.params)


# Several groups


def groups(pack, **kwargs):
    trees = [{"w": jnp.full(2, v, jnp.float32)} for v in (1.0, 2.0, 3.0)]
    txs = [optax.sgd(0.1)] * 3
    kwargs.setdefault("loss_scale", 2.0)
    return jamp.initialize(pack(trees), pack(txs), "O2", verbosity=0, **kwargs)


def named(values):
    return dict(zip("abc", values, strict=True))


def total(p):
    return wide(p["w"]).sum()


def test_wrt_none_gives_the_container():
    def loss_fn(p):
        assert set(p) == set("abc")
        return total(p["a"]) + 2 * total(p["b"]) + 3 * total(p["c"])

    loss, grads = jamp.scaled_value_and_grad(loss_fn)(groups(named))
    assert loss == 2 + 8 + 18
    for key, slope in zip("abc", (1, 2, 3), strict=True):
        np.testing.assert_array_equal(wide(grads.tree[key]["w"]), 2.0 * slope)


@pytest.mark.parametrize(
    "pack, key", [(named, "b"), (list, 1), (tuple, 1)], ids=["dict", "list", "tuple"]
)
def test_wrt_a_key_gives_that_groups_tree(pack, key):
    state = groups(pack)

    def loss_fn(p, times):
        # All groups are there: a generator's loss runs the discriminator too.
        assert jax.tree.structure(p) == jax.tree.structure(state.params)
        return sum(total(p[k]) for k in ("abc" if pack is named else range(3))) * times

    loss, grads = jamp.scaled_value_and_grad(loss_fn, wrt=key)(state, 5.0)
    assert loss == 60.0
    assert set(grads.tree) == {"w"}
    np.testing.assert_array_equal(wide(grads.tree["w"]), 10.0)
    tree, _ = grads.unscale()
    np.testing.assert_array_equal(tree["w"], 5.0)


@pytest.mark.parametrize("wrt", [("c", "a"), ["c", "a"]])
def test_wrt_a_sequence_gives_a_tuple_in_that_order(wrt):
    def loss_fn(p):
        return total(p["c"]) * 3 + total(p["b"]) * 7 + total(p["a"])

    loss, grads = jamp.scaled_value_and_grad(loss_fn, wrt=wrt)(groups(named))
    assert loss == 18 + 28 + 2
    assert isinstance(grads.tree, tuple)
    c, a = grads.tree
    np.testing.assert_array_equal(wide(c["w"]), 6.0)
    np.testing.assert_array_equal(wide(a["w"]), 2.0)


def test_wrt_a_sequence_of_one_is_still_a_tuple():
    grads = jamp.scaled_grad(lambda p: total(p["b"]), wrt=["b"])(groups(named))
    (b,) = grads.tree
    np.testing.assert_array_equal(wide(b["w"]), 2.0)


def test_wrt_leaves_no_gradient_through_the_other_groups():
    # Only what is differentiated can overflow.
    state = groups(named, loss_scale="dynamic")

    def loss_fn(p):
        return total(p["a"]) * 1e30 + total(p["b"]) * 2.0**-10

    assert jamp.scaled_grad(loss_fn, wrt="b")(state).finite
    assert not jamp.scaled_grad(loss_fn, wrt="a")(state).finite
    assert not jamp.scaled_grad(loss_fn)(state).finite


@pytest.mark.parametrize(
    "pack, wrt",
    [(named, "z"), (list, 3), (tuple, "a"), (named, ("a", "z"))],
    ids=["dict", "list", "tuple", "one of two"],
)
def test_an_unknown_group_is_an_error_that_lists_them(pack, wrt):
    state = groups(pack)
    with pytest.raises((*REFUSED, LookupError), match=r"(?s)wrt.*(?:\bb\b|\b1\b)"):
        jamp.scaled_grad(lambda p: jnp.float32(0.0), wrt=wrt)(state)


def test_a_group_named_twice_is_an_error():
    with pytest.raises(ValueError, match="wrt"):
        jamp.scaled_grad(lambda p: total(p["a"]), wrt=("a", "a"))(groups(named))


def test_wrt_with_one_group_is_an_error():
    with pytest.raises((*REFUSED, LookupError), match="wrt"):
        jamp.scaled_grad(loss_fn, wrt="w")(make(), X)


def test_gradients_of_different_groups_do_not_add():
    state = groups(named)

    def loss_fn(p):
        return total(p["a"]) + total(p["b"])

    a, b = (jamp.scaled_grad(loss_fn, wrt=key)(state) for key in "ab")
    with pytest.raises(REFUSED, match="group"):
        a + b


@pytest.mark.parametrize("wrt", ["b", ("b",), ["b", "c"], None], ids=str)
def test_a_scan_over_some_groups_starts_from_their_zeros(wrt):
    state = groups(named)
    grad = jamp.scaled_grad(lambda p, x: total(p["b"]) * x, wrt=wrt)

    def body(grads, x):
        return grads + grad(state, x), None

    xs = jnp.asarray([1.0, 2.0], jnp.float32)
    grads, _ = lax.scan(body, jamp.zero_grads(state, wrt=wrt), xs)
    tree = {"b": grads.tree} if wrt == "b" else grads.tree
    key = "b" if isinstance(tree, dict) else 0
    np.testing.assert_array_equal(tree[key]["w"], 6.0)


# A mapped axis


def test_axis_name_means_over_vmap_and_agrees_on_the_flag():
    state = make("O2", loss_scale="dynamic")
    step = jamp.scaled_value_and_grad(loss_fn, axis_name="i")
    f = jax.jit(jax.vmap(step, (None, 0), axis_name="i"))
    xs = jnp.stack([X, 3 * X]) * 2.0**-10
    _, grads = f(state, xs)
    np.testing.assert_array_equal(grads.finite, [True, True])
    for i in range(2):
        assert_grads(jax.tree.map(lambda x, i=i: x[i], grads.tree), 2 * 2.0**6)
    _, grads = f(state, xs.at[1, 0].set(jnp.inf))
    np.testing.assert_array_equal(grads.finite, [False, False])


@pytest.fixture(scope="module")
def two_devices():
    """What tests/two_devices.py found on two virtual CPU devices."""
    return on_devices(2, "tests.two_devices")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_reduces_in_fp32(two_devices, check_vma):
    # 60,000 from each device: their sum is inf in fp16, their mean is not.
    got = two_devices[f"reduce/{check_vma}"]
    assert got["finite"] == [True, True]
    assert got["grads"] == [[60000.0, 60000.0], [60000.0, 60000.0]]


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_agrees_on_the_finite_flag(two_devices, check_vma):
    got = two_devices[f"overflow/{check_vma}"]
    assert got["finite"] == [False, False]
    assert got["skipped_steps"] == 1
    assert got["step"] == 0
    assert got["params"] == [1.0, 1.0]


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_inside_shard_map_is_the_step_on_the_whole_batch(two_devices, check_vma):
    got = two_devices[f"step/{check_vma}"]
    assert got["step"] == 1
    assert got["params"] == got["whole"]
    assert got["params"] != [1.0, 1.0]
    assert got["masters"] == got["whole_masters"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_params_that_vary_over_the_axis_are_accepted(two_devices, check_vma):
    got = two_devices[f"varying/{check_vma}"]
    assert got["finite"] == [True, True]
    assert got["grads"] == [[2.0], [2.0]]  # the mean of 1 and 3


def test_sharded_arrays_under_jit_need_no_axis_name(two_devices):
    got = two_devices["jit"]
    assert got["params"] == got["whole"]
    assert got["skipped_steps"] == 1


def test_pmap_averages_as_shard_map_does(two_devices):
    got = two_devices["pmap"]
    assert got["finite"] == [True, True]
    assert got["grads"] == [[60000.0, 60000.0], [60000.0, 60000.0]]


def test_gradients_do_not_multiply_each_other():
    state = jamp.initialize(jnp.ones(2), optax.sgd(0.1), "O0", verbosity=0)
    grads = jamp.scaled_grad(lambda w: w.sum())(state)
    with pytest.raises(TypeError, match="scalar factor"):
        grads * grads
    with pytest.raises(TypeError, match="scalar factor"):
        grads / jnp.ones(2)


@pytest.mark.parametrize("wrt", [("a", "a"), ()], ids=["twice", "none"])
def test_wrt_names_groups_once(wrt):
    with pytest.raises(ValueError, match="wrt"):
        jamp.scaled_grad(lambda p: total(p["a"]), wrt=wrt)(groups(named))


def test_a_dict_of_scaled_grads_points_to_a_sequence():
    state = groups(named)
    grads = jamp.scaled_grad(lambda p: total(p["a"]), wrt="a")(state)
    with pytest.raises(TypeError, match="sequence"):
        state.apply_gradients(grads={"a": grads, "b": None, "c": None})
