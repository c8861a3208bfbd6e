"""Scaled gradients: the shapes of jax.value_and_grad, and what ScaledGrads can do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import jamp
from tests.bits import assert_same_bits
from tests.states import HALF, RUNNING, make, params, wide, with_scales


def loss_fn(p, x):
    """Its gradient is `x * scale` for w and `(w * x).sum()` for scale."""
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


# The shapes of jax.value_and_grad


@pytest.mark.parametrize("level", RUNNING)
def test_loss_and_gradients_of_every_level(level):
    state = make(level, loss_scale=8.0)
    f = jamp.scaled_value_and_grad(loss_fn)
    loss, grads = f(state, X)
    assert (loss.dtype, loss.shape, loss) == (jnp.float32, (), LOSS)
    assert isinstance(grads, jamp.ScaledGrads)
    assert jax.tree.structure(grads.tree) == jax.tree.structure(state.params)
    assert grads.tree["w"].dtype == HALF.get(level, jnp.float32)
    assert grads.tree["norm"]["scale"].dtype == jnp.float32
    assert_grads(grads.tree, 8.0)
    assert (grads.scale, grads.finite, grads.loss_id) == (8.0, True, 0)
    assert grads.finite.dtype == jnp.bool_
    tree, finite = grads.unscale()
    assert_grads(tree)
    assert (dtypes(tree), finite) == ({"float32"}, True)
    assert_same_bits(jax.jit(f)(state, x=X), (loss, grads))
    assert_same_bits(jamp.scaled_grad(loss_fn)(state, X), grads)
    # By hand, around one's own jax.grad.
    by_hand = jax.grad(lambda p: jamp.scale_loss(loss_fn(p, X), state))(state.params)
    assert_same_bits(by_hand, grads.tree)
    assert_same_bits(jamp.unscale(by_hand, state), tree)


def test_aux_and_static_arguments_are_those_of_jax():
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


# The loss


def test_the_loss_is_the_fp32_loss_bit_for_bit():
    # x * 3 / 3 and x * (1 / 3) * 3 are not x for all of these.
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    assert (values * np.float32(3) / np.float32(3) != values).any()
    state = make(loss_scale=3.0)

    def constant(p, x):
        return x + 0.0 * loss_fn(p, jnp.asarray(X))

    f = jax.vmap(jamp.scaled_value_and_grad(constant), (None, 0))
    np.testing.assert_array_equal(f(state, values)[0], values)


def test_only_gradients_decide_and_not_the_loss():
    # apex_semantics 4.5: "Inf in the loss itself is not examined".
    def shifted(p, x):
        return loss_fn(p, x) + jnp.inf

    loss, grads = jamp.scaled_value_and_grad(shifted)(make(), X * 2.0**-10)
    assert (loss, grads.finite) == (jnp.inf, True)


BAD_LOSSES = {
    "vector": (lambda p: wide(p["w"]) * X, r"float scalar, got float32\[3\]"),
    "integer": (lambda p: jnp.int32(3), r"float scalar, got int32"),
    "complex": (lambda p: lax.complex(loss_fn(p, X), 1.0), r"got complex64"),
    "tuple": (lambda p: (loss_fn(p, X), 1.0), r"returned a tuple: pass has_aux=True"),
}
# All that take a loss, or a state, or a loss_id.
value_and_grad = jamp.scaled_value_and_grad
DOORS = {
    "scaled_grad": lambda f, s, i: jamp.scaled_grad(f, loss_id=i)(s),
    "scaled_value_and_grad": lambda f, s, i: value_and_grad(f, loss_id=i)(s),
    "closure": lambda f, s, i: jamp.closure(f, loss_id=i)(s)(params()),
    "scale_loss": lambda f, s, i: jamp.scale_loss(f(params()), s, i),
    "unscale": lambda f, s, i: jamp.unscale(params(), s, i),
    "zero_grads": lambda f, s, i: jamp.zero_grads(s, i),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_what_is_no_scalar_float_is_refused(name):
    bad, words = BAD_LOSSES[name]
    state = make("O0")
    for door in list(DOORS)[:4]:
        with pytest.raises(TypeError, match=rf"loss.*{words}"):
            DOORS[door](bad, state, 0)
    with pytest.raises(TypeError, match=r"has_aux=True .* return \(loss, aux\)"):
        jamp.scaled_grad(lambda p: (1.0, 2.0, 3.0), has_aux=True)(state)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_state_and_no_loss_id_is_refused(door):
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
    grads = jamp.scaled_grad(loss_fn, loss_id=1)(state, X)
    assert (grads.scale, grads.loss_id) == (4.0, 1)
    assert_grads(grads.tree, 4.0)
    assert jamp.scale_loss(jnp.float32(2.0), state, loss_id=1) == 8.0
    assert jamp.unscale({"w": jnp.float16(8.0)}, state, 1)["w"] == 2.0
    zeros = jamp.zero_grads(state, loss_id=1)
    expected = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
    assert_same_bits(zeros.tree, expected)
    assert (zeros.scale, zeros.finite, zeros.loss_id) == (4.0, True, 1)
    with pytest.raises(ValueError, match="different losses .* loss_id 1 and 0"):
        zeros + jamp.zero_grads(state)


def test_integers_none_and_keys_are_held_out():
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
    total = grads + jamp.zero_grads(state)
    for tree, scale in ((grads.tree, 2), (grads.unscale()[0], 1), (total.tree, 2)):
        (leaf,) = jax.tree.leaves(tree)
        np.testing.assert_array_equal(wide(leaf), wide(n) * scale)


# Flags


def test_one_bad_element_is_found():
    for at, bad in ((0, np.inf), (0, np.nan), (2, -np.inf), (2, np.nan)):
        x = X * np.float32(2.0**-10)
        x[at] = bad
        assert not jamp.scaled_grad(loss_fn)(make(), x).finite


@pytest.mark.parametrize("shape", [(8,), (5000,), (70, 80), (9, 40, 20)])
def test_one_bad_element_is_found_among_the_largest(shape):
    # apex's Python fallback sums the gradient, and calls a sum beyond float32 overflow.
    params = {"b": jnp.zeros(3, jnp.float32), "w": jnp.zeros(shape, jnp.float32)}
    state = make("O0", params, loss_scale="dynamic", max_loss_scale=1)
    product = lambda p, g: sum((wide(p[k]) * g[k]).sum() for k in p)  # noqa: E731
    measure = jax.jit(jamp.scaled_grad(product))
    largest = jax.tree.map(lambda x: np.full(x.shape, 3e38, np.float32), params)
    grads = measure(state, largest)
    assert (grads.scale, grads.finite) == (1.0, True)
    for leaf in largest.values():
        for place in (0, leaf.size // 2, -1):
            for bad in (np.inf, -np.inf, np.nan):
                leaf.flat[place] = bad
                assert not measure(state, largest).finite, (leaf.shape, place, bad)
            leaf.flat[place] = -3e38


# ScaledGrads


def scaled(level="O2", scale=8.0, x=X):
    return jamp.scaled_grad(loss_fn)(make(level, loss_scale=scale), x)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_sum_is_fp32_and_beyond_half(level):
    grads = scaled(level, x=X * np.float32(1000.0))  # -6 * 8 * 1000 fits fp16
    total = grads + grads
    assert dtypes(total.tree) == {"float32"}
    np.testing.assert_array_equal(total.tree["norm"]["scale"], -16000.0)
    np.testing.assert_array_equal(total.tree["w"], 2 * wide(grads.tree["w"]))
    assert np.abs(total.tree["w"]).max() > 65504
    assert (total.finite, total.scale) == (True, 8.0)


def test_one_overflow_spoils_a_sum():
    state = make()
    good, bad = (jamp.scaled_grad(loss_fn)(state, X * k) for k in (2.0**-10, np.inf))
    sums = [good + good, good + bad, bad + good]
    assert [bool(total.finite) for total in sums] == [True, False, False]


def test_what_scaled_grads_do_not_do():
    grads = scaled("O0")
    flax = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    for bad in (grads, "2", jnp.ones(3, jnp.float32)):
        for operate in (lambda x: grads * x, lambda x: grads / x):
            with pytest.raises(TypeError, match="take a scalar factor, got"):
                operate(bad)
    with pytest.raises(TypeError, match="add to ScaledGrads, got .*zero_grads"):
        grads + grads.tree
    for use_as_a_tree in (
        lambda: grads["w"],
        lambda: "w" in grads,
        lambda: list(grads),
        lambda: len(grads),
        lambda: jamp.unscale(grads, make()),
        lambda: flax.apply_gradients(grads=grads),
    ):
        with pytest.raises(TypeError, match=r"apply_gradients\(grads=grads\).*unscale"):
            use_as_a_tree()


# unscale


def test_unscale_keeps_what_half_would_lose():
    # 2^-24 / 2^16 is far below fp16's smallest number.
    got = jamp.unscale({"w": jnp.asarray(2.0**-24, jnp.float16)}, make())
    assert got["w"] == 2.0**-40


# Several groups


def groups(pack, **kwargs):
    trees = [{"w": jnp.full(2, v, jnp.float32)} for v in (1.0, 2.0, 3.0)]
    kwargs = {"loss_scale": 2.0} | kwargs
    return make("O2", pack(trees), pack([optax.sgd(0.1)] * 3), **kwargs)


def named(values):
    return dict(zip("abc", values, strict=True))


def of_groups(p):
    """Its slopes are 1, 2 and 3."""
    trees = p.values() if isinstance(p, dict) else p
    assert len(trees) == 3  # whatever `wrt`: a generator's loss runs the critic too
    return sum(i * wide(tree["w"]).sum() for i, tree in enumerate(trees, 1))


WRT = [
    # The container, `wrt`, and the scaled slopes of what it gives.
    (named, None, {"a": 2.0, "b": 4.0, "c": 6.0}),
    (named, "b", 4.0),
    (tuple, 1, 4.0),
    (named, ["c", "a"], (6.0, 2.0)),
    (list, [1], (4.0,)),
]


@pytest.mark.parametrize("pack, wrt, slopes", WRT)
def test_wrt_gives_a_tree_or_a_tuple_in_its_order_or_the_container(pack, wrt, slopes):
    state = groups(pack)
    loss, grads = jamp.scaled_value_and_grad(of_groups, wrt=wrt)(state)
    assert loss == 2 * (1 + 4 + 9)
    expected = jax.tree.map(lambda s: {"w": jnp.full(2, s, jnp.float16)}, slopes)
    assert_same_bits(grads.tree, expected)
    halved = jax.tree.map(lambda x: wide(x) / 2, expected)
    assert_same_bits(grads.unscale()[0], halved)
    total = jamp.zero_grads(state, wrt=wrt) + grads
    assert_same_bits(total.tree, jax.tree.map(wide, expected))


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
    a, b = (jamp.zero_grads(groups(named), wrt=key) for key in "ab")
    with pytest.raises(ValueError, match=r"groups a and b. Pass both"):
        a + b
