"""Test `scaled_grad` and `scaled_value_and_grad`: results, losses, aux, groups."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax import lax

import jamp
from tests.support.bits import assert_same_bits
from tests.support.states import RUNNING, all_nan, make, params, wide, with_scales


def loss_fn(p, x):
    """Has the gradients `x * scale` for w and `(w * x).sum()` for scale."""
    return (wide(p["w"]) * x).sum() * p["norm"]["scale"]


X = np.float32([0.5, 0.25, -2.0])
LOSS = -3.0  # (1 * 0.5 - 2 * 0.25 - 0.5 * 2) * 3
GRADS = {"w": np.float32([1.5, 0.75, -6.0]), "b": np.float32([0.0, 0.0])}
GRADS["norm"] = {"scale": np.float32(-1.0)}


def assert_grads(tree, scale=1.0):
    same = lambda g, want: np.testing.assert_array_equal(wide(g), want * scale)  # noqa: E731
    jax.tree.map(same, tree, GRADS)


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize("level", RUNNING)
def test_loss_and_gradients_of_every_level(level):
    state = make(level, loss_scale=8.0)
    f = jamp.scaled_value_and_grad(loss_fn)
    loss, grads = f(state, X)
    assert (loss.dtype, loss.shape, loss) == (jnp.float32, (), LOSS)
    assert jax.tree.structure(grads) == jax.tree.structure(state.params)
    assert_grads(grads)
    assert dtypes(grads) == {"float32"}
    assert_same_bits(jax.jit(f)(state, x=X), (loss, grads))
    assert_same_bits(jamp.scaled_grad(loss_fn)(state, X), grads)
    # scale_loss and unscale around jax.grad.
    by_hand = jax.grad(lambda p: jamp.scale_loss(loss_fn(p, X), state))(state.params)
    assert dtypes(by_hand) == dtypes(state.params)
    assert_grads(by_hand, 8.0)
    assert_same_bits(jamp.unscale(by_hand, state), grads)


def test_aux_and_static_arguments_work_as_in_jax():
    def with_aux(p, x, mode, *, times=1):
        return times * loss_fn(p, x), (x, mode, None, 3, print)

    state, f = make(), jamp.scaled_value_and_grad(with_aux, has_aux=True)
    (loss, aux), grads = f(state, X, "text", times=2)
    same, also = jamp.scaled_grad(with_aux, has_aux=True)(state, X, "text", times=2)
    assert loss == 2 * LOSS
    assert_same_bits(same, grads)
    for x, *rest in (aux, also):
        assert_same_bits(x, jnp.asarray(X))
        assert rest == ["text", None, 3, print]
    named = lambda p, *, self, state, params: loss_fn(p, state)  # noqa: E731
    grads = jamp.scaled_grad(named)(make(), self=1, state=X, params=2)
    assert_same_bits(grads, same)


def test_the_loss_is_the_fp32_loss_bit_for_bit():
    # For some of these values, x * 3 / 3 and x * (1 / 3) * 3 differ from x.
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    assert (values * np.float32(3) / np.float32(3) != values).any()
    state = make(loss_scale=3.0)

    def constant(p, x):
        return x + 0.0 * loss_fn(p, jnp.asarray(X))

    f = jax.vmap(jamp.scaled_value_and_grad(constant), (None, 0))
    np.testing.assert_array_equal(f(state, values)[0], values)


def test_a_loss_in_half_is_scaled_in_float32():
    # In Flax's DynamicScale, a float16 loss times 65536 is inf, and the result NaN.
    square = lambda p: jnp.square(p["w"].astype(jnp.float16)).sum()  # noqa: E731
    with pytest.warns(jamp.PrecisionWarning, match="float16"):
        loss, _ = jamp.scaled_value_and_grad(square)(make())
    assert (loss.dtype, loss) == (jnp.float32, 5.25)
    for options in ({"enabled": False}, {"loss_scale": 1.0}):
        with pytest.warns(jamp.PrecisionWarning, match="float16"):
            loss = jamp.scale_loss(jnp.float16(3.0), make("O1", **options))
        assert (loss.dtype, loss) == (jnp.float32, 3.0)


def test_they_are_unscaled_with_the_scale_that_scaled_them():
    # mpx 0.1.8 halves loss and gradients on every growth step.
    state = make(loss_scale=jamp.DynamicLossScale(4.0, window=1))
    for scale in (4.0, 8.0):
        assert state.loss_scale == scale
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, X)
        assert loss == loss_fn(jamp.master_params(state), X)
        assert grads["norm"]["scale"] == (wide(state.params["w"]) * X).sum()
        state = state.apply_gradients(grads=grads)


BAD_LOSSES = {
    "vector": (lambda p: wide(p["w"]) * X, r"float scalar, got float32\[3\]"),
    "integer": (lambda p: jnp.int32(3), r"float scalar, got int32"),
    "complex": (lambda p: lax.complex(loss_fn(p, X), 1.0), r"got complex64"),
    "tuple": (lambda p: (loss_fn(p, X), 1.0), r"returned a tuple: pass has_aux=True"),
}
# All functions that take a loss, a state or a loss_id.
value_and_grad = jamp.scaled_value_and_grad
DOORS = {
    "scaled_grad": lambda f, s, i: jamp.scaled_grad(f, loss_id=i)(s),
    "scaled_value_and_grad": lambda f, s, i: value_and_grad(f, loss_id=i)(s),
    "closure": lambda f, s, i: jamp.closure(f, loss_id=i)(s)(params()),
    "scale_loss": lambda f, s, i: jamp.scale_loss(f(params()), s, i),
    "unscale": lambda f, s, i: jamp.unscale(params(), s, i),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_must_be_a_float_scalar(name):
    bad, words = BAD_LOSSES[name]
    state = make("O0")
    for door in list(DOORS)[:4]:
        with pytest.raises(TypeError, match=rf"loss.*{words}"):
            DOORS[door](bad, state, 0)
    with pytest.raises(TypeError, match=r"has_aux=True .* return \(loss, aux\)"):
        jamp.scaled_grad(lambda p: (1.0, 2.0, 3.0), has_aux=True)(state)


@pytest.mark.parametrize("door", DOORS)
def test_other_states_and_loss_ids_are_refused(door):
    def loss(p):
        return loss_fn(p, X)

    flax = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    for bad in (flax, params(), None):
        words = rf"jamp\.{door}\(.*\) takes .*initialize.* got {type(bad).__name__}"
        with pytest.raises(TypeError, match=words):
            DOORS[door](loss, bad, 0)
    for loss_id in (2, 7, -1, True):
        words = rf"loss_id={loss_id} .* has 2 loss .*num_losses"
        with pytest.raises(IndexError, match=words):
            DOORS[door](loss, make("O0", num_losses=2), loss_id)


def test_each_loss_has_its_own_scale():
    state = with_scales(make(num_losses=2), 2.0**16, 4.0)
    assert_grads(jamp.scaled_grad(loss_fn, loss_id=1)(state, X))
    assert all_nan(jamp.scaled_grad(loss_fn)(state, X))  # -6 * 2**16
    assert jamp.scale_loss(jnp.float32(2.0), state, loss_id=1) == 8.0
    # float16 has no number between 0 and 2^-24.
    assert jamp.unscale({"w": jnp.float16(2.0**-24)}, state, 1)["w"] == 2.0**-26


def test_integers_none_and_keys_have_no_gradient():
    w, n = jnp.asarray([1.0, 2.0], jnp.float32), jnp.asarray([3, 4], jnp.int32)
    tree = {"w": w, "n": n, "flag": jnp.asarray(True), "key": jax.random.key(0)}
    state = make("O2", tree | {"none": None}, loss_scale=2.0)

    def uses_all(p):
        assert p["none"] is None
        noise = jax.random.normal(p["key"], (), jnp.float32)
        gain = jnp.where(p["flag"], wide(p["n"]), 0.0)
        return (wide(p["w"]) * gain).sum() + 0.0 * noise

    loss, grads = jamp.scaled_value_and_grad(uses_all)(state)
    assert loss == 11.0
    held_out = dict.fromkeys(["n", "flag", "key", "none"])
    assert_same_bits(grads, {"w": wide(n)} | held_out)


def test_unscale_returns_nan_after_an_overflow_if_the_rule_checks():
    half = jnp.asarray([1.0, np.inf], jnp.float16)
    rest = {"n": jnp.arange(2), "key": jax.random.key(0), "none": None}
    tree = {"w": half, "b": jnp.ones(2, jnp.float32)} | rest
    dynamic, static = jamp.DynamicLossScale(4.0), jamp.StaticLossScale(4.0)
    for rule in (dynamic, jamp.StaticLossScale(4.0, check=True), static):
        got = jamp.unscale(tree, make(loss_scale=rule))
        assert_same_bits({k: got[k] for k in rest}, rest)
        wanted = [np.nan] * 4 if rule.check else [0.25, np.inf, 0.25, 0.25]
        np.testing.assert_array_equal([*got["w"], *got["b"]], wanted)
    # The gradient is finite only before the division.
    low = make(loss_scale=jamp.DynamicLossScale(2.0**-10))
    assert all_nan(jamp.unscale({"w": jnp.float32([1e37, 1.0])}, low))


def groups(pack, **kwargs):
    trees = [{"w": jnp.full(2, v, jnp.float32)} for v in (1.0, 2.0, 3.0)]
    kwargs = {"loss_scale": 2.0} | kwargs
    return make("O2", pack(trees), pack([optax.sgd(0.1)] * 3), **kwargs)


def named(values):
    return dict(zip("abc", values, strict=True))


def of_groups(p):
    """Has the slopes 1, 2 and 3."""
    trees = p.values() if isinstance(p, Mapping) else p
    assert len(trees) == 3  # for any `wrt`: a generator's loss also runs the critic
    return sum(i * wide(tree["w"]).sum() for i, tree in enumerate(trees, 1))


WRT = [
    # The container, `wrt`, and the slopes.
    (named, None, {"a": 1.0, "b": 2.0, "c": 3.0}),
    (named, "b", 2.0),
    (tuple, 1, 2.0),
    (named, ["c", "a"], {"a": 1.0, "c": 3.0}),
    (lambda x: FrozenDict(named(x)), ("b",), FrozenDict(b=2.0)),
    (list, [1], [None, 2.0, None]),
    (tuple, (2, 0), (1.0, None, 3.0)),
]


@pytest.mark.parametrize("pack, wrt, slopes", WRT)
def test_wrt_selects_groups(pack, wrt, slopes):
    state = groups(pack)
    loss, grads = jamp.scaled_value_and_grad(of_groups, wrt=wrt)(state)
    assert loss == 2 * (1 + 4 + 9)
    expected = jax.tree.map(lambda s: {"w": jnp.full(2, s, jnp.float32)}, slopes)
    assert_same_bits(grads, expected)


def test_a_wrt_that_names_no_groups_is_refused():
    for pack, wrt, words in (
        (named, "z", r"'z' is not one of the groups \['a', 'b', 'c'\]"),
        (list, 3, r"3 is not one of the groups \[0, 1, 2\]"),
        (named, ("a", "a"), "must name groups, each once"),
        (named, (), "must name groups, each once"),
    ):
        with pytest.raises(ValueError, match=f"wrt=.*{words}"):
            jamp.scaled_grad(of_groups, wrt=wrt)(groups(pack))
    with pytest.raises(ValueError, match="wrt='w', but the state has one group"):
        jamp.scaled_grad(loss_fn, wrt="w")(make(), X)


CONSTANT = {
    "read from outside": lambda state: lambda p: wide(state.params["w"]).sum(),
    "stopped": lambda state: lambda p: wide(lax.stop_gradient(p["w"])).sum(),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_does_not_depend_on_its_params_warns(level):
    tree = {"w": jnp.ones((2, 2)), "unused": jnp.ones(2)}
    state = make(level, tree, loss_scale=1.0)
    for loss_of in CONSTANT.values():
        for run in (lambda f: f, jax.jit):
            grads_of = run(lambda s, f=loss_of: jamp.scaled_grad(f(s))(s))
            with pytest.warns(UserWarning, match="does not depend on the params that"):
                grads = grads_of(state)
            assert (grads["w"] == 0).all()

    @jax.checkpoint
    def forward(w):
        return lax.scan(lambda x, _: (x @ w, None), jnp.ones(2), None, 2)[0]

    def depends_on_some(params):
        outside = wide(state.params["w"]).sum()
        w = wide(params["w"])
        return outside + lax.cond(outside > 0, forward, lambda w: w[0], w).sum()

    assert (jax.jit(jamp.scaled_grad(depends_on_some))(state)["w"] != 0).any()
