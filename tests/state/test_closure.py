"""Test `jamp.closure`, a loss for optimizers that evaluate it several times."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.policy.forward_models import products
from tests.support.bits import assert_rounded_alike, assert_same_bits
from tests.support.states import assert_skipped, make, wide, with_scales

# One object each, because jit compares them. Zoom takes twice as long to compile.
ZOOM = optax.lbfgs()
BACKTRACKING, WITH_GRADIENT = (
    optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(15, store_grad=store))
    for store in (False, True)
)


def draw():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)) * [1.0, 2.0, 0.5, 1.0]
    y = x @ [0.3, -0.7, 1.2, 0.1] + 0.3 * rng.normal(size=16)
    return np.float32(x), np.float32(y)


X, Y = draw()
START = {"w": jnp.asarray([1.0, 0.5, -0.5, -1.0], jnp.float32)}
PAIR = jnp.asarray([2.0, 1.0], jnp.float32)


def loss_fn(p, x=X, y=Y):
    """Returns the mean squared error. The matmul has the dtype of the params."""
    product = x.astype(p["w"].dtype) @ p["w"]
    return 0.5 * ((wide(product) - y) ** 2).mean()


def search_step(state, *args, loss_fn=loss_fn, **options):
    loss, grads = jamp.scaled_value_and_grad(loss_fn, **options)(state, *args)
    value_fn = jamp.closure(loss_fn, **options)(state, *args)
    update_args = {"value": loss, "grad": grads, "value_fn": value_fn}
    wrt = options.get("wrt")
    grads = grads if wrt is None else {wrt: grads}
    return state.apply_gradients(grads=grads, update_args=update_args), loss


step = jax.jit(search_step, static_argnames="loss_fn")


# Oracles in float64: the loss and its minimum in closed form
def exact_loss(w):
    residual = np.float64(X) @ np.asarray(w, np.float64) - Y
    return 0.5 * (residual**2).mean()


BEST = np.linalg.lstsq(np.float64(X), np.float64(Y), rcond=None)[0]


SEARCHES = {
    "zoom-O2": (ZOOM, "O2", 1e-4),
    "back-O0": (BACKTRACKING, "O0", 1e-7),
    "back_with_gradient-O5": (WITH_GRADIENT, "O5", 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_lbfgs_reaches_the_minimum(name):
    tx, level, above = SEARCHES[name]
    state = make(level, START, tx)
    for _ in range(16):
        state, loss = step(state)
    assert state.step + state.skipped_steps == 16
    assert state.skipped_steps <= (6 if level == "O2" else 0)
    # Rounding to half moves the minimum, so the loss grows by the square of the move.
    masters = jamp.master_params(state)["w"]
    assert exact_loss(masters) - exact_loss(BEST) < above
    np.testing.assert_allclose(loss, exact_loss(BEST), rtol=0.05)
    assert_same_bits(state.params["w"], masters.astype(state.params["w"].dtype))
    if level == "O2":  # an overflow skips the step with its search
        before = with_scales(state, 2.0**24)
        after, _ = step(before)
        assert_skipped(after, before)
        assert after.loss_scale == 2.0**23


def test_trial_points_may_overflow():
    # The start fits a scale of 2^16, but a step of 1 along the gradient does not.
    curvature = jnp.asarray([10.0, 3.0, 40.0], jnp.float32)
    target = jnp.asarray([0.25, -0.5, 0.75], jnp.float32)

    def bowl(p):
        return 0.5 * (curvature * (wide(p["w"]) - target) ** 2).sum()

    start = target + jnp.asarray([0.0625, 0.0, 0.0], jnp.float32)
    state = make("O2", {"w": start}, ZOOM)
    trial = {"w": start - 0.625 * jnp.asarray([1.0, 0.0, 0.0], jnp.float32)}
    loss, grad = jax.value_and_grad(jamp.closure(bowl)(state))(trial)
    assert np.isfinite(loss) and not np.isfinite(grad["w"]).all()
    for _ in range(8):
        state, loss = step(state, loss_fn=bowl)
    assert (state.skipped_steps, state.loss_scale) == (0, 2.0**16)
    np.testing.assert_allclose(jamp.master_params(state)["w"], target, atol=2.0**-9)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_closure_equals_the_unscaled_gradient(level):
    state = make(level, START, loss_scale=2.0**8)

    @jax.jit
    def both(state, at):
        value_fn = jamp.closure(loss_fn)(state, X, Y)
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, X, Y)
        pulled = jax.vjp(value_fn, at)[1](jnp.float32(-2.0))
        mine = jax.value_and_grad(value_fn)(at)
        return mine, (loss, grads), pulled[0]

    at = jamp.master_params(state)
    (loss, tree), expected, pulled = both(state, at)
    assert (loss.dtype, loss.shape, tree["w"].dtype) == (jnp.float32, (), jnp.float32)
    assert_rounded_alike((loss, tree), expected)
    # vjp multiplies the derivative by the cotangent.
    np.testing.assert_array_equal(pulled["w"], -2 * tree["w"])
    half = "float32" if level == "O0" else "float16"
    value_fn = jamp.closure(loss_fn)(state)
    for fn in (value_fn, jax.grad(value_fn)):
        assert set(products(fn, at)) == {f"{half},{half}"}


def pair():
    trees = {"a": START, "b": {"w": jnp.asarray([0.5, 0.25], jnp.float32)}}
    return make("O2", trees, {"a": BACKTRACKING, "b": optax.sgd(0.1)})


def joint(p):
    return loss_fn(p["a"]) + (wide(p["b"]["w"]) ** 2).sum()


def test_a_search_moves_one_group_of_several():
    begun, searches = pair(), functools.partial(search_step, loss_fn=joint, wrt="a")
    state, losses = lax.scan(lambda s, _: searches(s), begun, length=16)
    masters = jamp.master_params(state)["a"]["w"]
    assert exact_loss(masters) - exact_loss(BEST) < 1e-4
    np.testing.assert_allclose(losses[-1], exact_loss(BEST) + 0.3125, rtol=0.02)
    assert_same_bits(state.params["b"], begun.params["b"])
    assert state.skipped_steps["b"] == 0


def test_leaves_other_than_floats_come_from_the_state():
    tree = {"w": jnp.zeros(2, jnp.float32), "n": jnp.asarray([3, 4]), "none": None}

    def look(p, *, times):
        assert p["none"] is None
        return (wide(p["w"]) * wide(p["n"])).sum() * times, {"what": "ever"}

    state = make("O2", tree, loss_scale=4.0)
    value_fn = jamp.closure(look, has_aux=True)(state, times=2.0)
    loss, grads = jax.value_and_grad(value_fn)({"w": PAIR, "n": None, "none": None})
    assert (loss, grads["w"].tolist()) == (20, [6, 8])
    # Params beyond half are clamped, as in a step.
    assert value_fn({"w": 1e6 * PAIR, "n": None, "none": None}) == 2 * 7 * 65504.0


def test_a_closure_needs_one_existing_group():
    for state, wrt, words in (
        (pair(), None, r"one group: pass wrt=key, one of \['a', 'b'\]; got wrt=None"),
        (pair(), "z", r"wrt='z': 'z' is not one of the groups"),
        (make(), "z", r"wrt='z', but the state has one group"),
    ):
        with pytest.raises(ValueError, match=words):
            jamp.closure(joint, wrt=wrt)(state)
