"""jamp.closure: the loss as optimizers that evaluate it more than once want it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import products

# Compiling takes the time, running none.
FAST = {"xla_backend_optimization_level": 0}
quick = functools.partial(jax.jit, compiler_options=FAST)
backtracking = functools.partial(
    optax.scale_by_backtracking_linesearch, max_backtracking_steps=15
)
# The same objects each time: jit compares them. Zoom takes twice as long to compile.
ZOOM = optax.lbfgs()
BACKTRACKING = optax.lbfgs(linesearch=backtracking())
WITH_GRADIENT = optax.lbfgs(linesearch=backtracking(store_grad=True))
HALF = {"O1": "float16", "O2": "float16", "O5": "bfloat16"}


def draw():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)) * [1.0, 2.0, 0.5, 1.0]
    y = x @ [0.3, -0.7, 1.2, 0.1] + 0.3 * rng.normal(size=16)
    return np.float32(x), np.float32(y)


X, Y = draw()
START = {"w": jnp.asarray([1.0, 0.5, -0.5, -1.0], jnp.float32)}


def loss_fn(p, x, y):
    """Least squares; the product is in half wherever the params are, and at O1."""
    product = x.astype(p["w"].dtype) @ p["w"]
    return 0.5 * ((product.astype(jnp.float32) - y) ** 2).mean()


def make(level="O2", params=START, tx=ZOOM, **kwargs):
    return jamp.initialize(params, tx, level, verbosity=0, **kwargs)


def rescaled(state, scale):
    (only,) = state.loss_scales
    return state.replace(loss_scales=(only._replace(scale=jnp.float32(scale)),))


def search_step(state, *args, loss_fn=loss_fn, **options):
    loss, grads = jamp.scaled_value_and_grad(loss_fn, **options)(state, *args)
    value_fn = jamp.closure(loss_fn, **options)(state, *args)
    update_args = {"value": loss, "grad": grads.unscale()[0], "value_fn": value_fn}
    return state.apply_gradients(grads=grads, update_args=update_args), loss


step = quick(search_step)


# Oracles in float64: the minimum in closed form, and the loss


def exact_loss(w):
    residual = np.float64(X) @ np.asarray(w, np.float64) - Y
    return 0.5 * (residual**2).mean()


BEST = np.linalg.lstsq(np.float64(X), np.float64(Y), rcond=None)[0]


def test_oracle_knows_the_minimum():
    rng = np.random.default_rng(1)
    lowest = exact_loss(BEST)
    assert all(exact_loss(BEST + 1e-4 * rng.normal(size=4)) > lowest for _ in range(9))
    assert exact_loss(START["w"]) > 50 * lowest


# Line searches


LEVELS = ("O0", "O1", "O2", "O5")


@pytest.mark.parametrize(
    "tx, level",
    [
        *(pytest.param(ZOOM, level, id=f"zoom-{level}") for level in LEVELS),
        *(pytest.param(BACKTRACKING, level, id=f"back-{level}") for level in LEVELS),
        pytest.param(WITH_GRADIENT, "O2", id="back_with_gradient-O2"),
    ],
)
def test_lbfgs_reaches_the_minimum(tx, level):
    state = make(level, tx=tx)
    for _ in range(16):
        state, loss = step(state, X, Y)
    assert state.step + state.skipped_steps == 16
    assert state.skipped_steps <= (6 if level in ("O1", "O2") else 0)
    # A step of half's rounding away from the minimum costs its square.
    above = exact_loss(jamp.master_params(state)["w"]) - exact_loss(BEST)
    assert above < {"O0": 1e-7, "O5": 1e-3}.get(level, 1e-4)
    np.testing.assert_allclose(loss, exact_loss(BEST), rtol=0.05)


@pytest.mark.parametrize("tx", [ZOOM, BACKTRACKING], ids=["zoom", "back"])
def test_at_o0_every_iterate_is_that_of_plain_optax(tx):
    @quick
    def plain(params, opt_state):
        value_fn = functools.partial(loss_fn, x=X, y=Y)
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, opt_state = tx.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = START, tx.init(START)
    state = make("O0", tx=tx)
    for _ in range(6):
        params, opt_state = plain(params, opt_state)
        state, _ = step(state, X, Y)
        np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5, atol=1e-5)


def test_params_are_the_rounded_masters_after_each_step():
    state = rescaled(make(), 2.0**8)
    for _ in range(3):
        state, _ = step(state, X, Y)
        masters = jamp.master_params(state)["w"]
        assert_same_bits(state.params["w"], masters.astype(jnp.float16))
    assert (state.step, state.skipped_steps) == (3, 0)


def test_a_step_that_overflows_is_skipped_search_and_all():
    state = rescaled(make(), 2.0**24)
    after, _ = step(state, X, Y)
    assert (after.step, after.skipped_steps, after.loss_scale) == (0, 1, 2.0**23)
    for name in ("params", "opt_state"):
        assert_same_bits(getattr(after, name), getattr(state, name))


def test_trial_points_may_overflow():
    # At the start 2^16 fits; a step of 1 along the gradient goes where it does not.
    curvature = jnp.asarray([10.0, 3.0, 40.0], jnp.float32)
    target = jnp.asarray([0.25, -0.5, 0.75], jnp.float32)

    def bowl(p):
        return 0.5 * (curvature * (p["w"].astype(jnp.float32) - target) ** 2).sum()

    start = target + jnp.asarray([0.0625, 0.0, 0.0], jnp.float32)
    state = make(params={"w": start})
    trial = {"w": start - 0.625 * jnp.asarray([1.0, 0.0, 0.0], jnp.float32)}
    (loss, grad), _ = evaluated(bowl, state, at=trial)
    assert np.isfinite(loss) and not np.isfinite(grad["w"]).all()
    bowl_step = quick(functools.partial(search_step, loss_fn=bowl))
    for _ in range(8):
        state, loss = bowl_step(state)
    assert (state.skipped_steps, state.loss_scale) == (0, 2.0**16)
    np.testing.assert_allclose(jamp.master_params(state)["w"], target, atol=2.0**-9)


# value_fn


def evaluated(loss_fn, state, *args, at=None, **options):
    """Jitted: the closure's loss and derivative, and those of the scaled gradients."""

    @quick
    def both(state, at):
        value_fn = jamp.closure(loss_fn, **options)(state, *args)
        loss, grads = jamp.scaled_value_and_grad(loss_fn, **options)(state, *args)
        return jax.value_and_grad(value_fn)(at), (loss, grads.unscale()[0])

    return both(state, jamp.master_params(state) if at is None else at)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_at_the_masters_it_is_the_scaled_gradient_unscaled(level):
    state = make(level, tx=optax.sgd(0.1), loss_scale=2.0**8)
    (loss, tree), expected = evaluated(loss_fn, state, X, Y)
    assert (loss.dtype, loss.shape, tree["w"].dtype) == (jnp.float32, (), jnp.float32)
    assert_same_bits((loss, tree), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_would_underflow_in_half_are_there(level):
    def small(p, x):
        product = x.astype(p["w"].dtype) @ p["w"]
        return product.astype(jnp.float32).sum() * 2.0**-30

    state = make(level)
    (loss, tree), _ = evaluated(small, state, X)
    expected = np.float64(X).sum(0) * 2.0**-30
    assert np.abs(expected).max() < 2.0**-26  # zero in float16
    np.testing.assert_allclose(tree["w"], expected, rtol=2.0**-8)
    np.testing.assert_allclose(
        loss, np.float64(X).sum(0) @ START["w"] * 2.0**-30, rtol=2.0**-8
    )
    # The same without a scale: autocast at O1, half params at O2.
    plain = jamp.autocast(small) if level == "O1" else small
    unscaled = quick(jax.grad(plain))(state.params, X)
    assert not unscaled["w"].any()


@pytest.mark.parametrize("level", HALF)
def test_the_loss_runs_under_the_policy_of_the_state(level):
    value_fn = jamp.closure(loss_fn)(make(level), X, Y)
    for fn in (value_fn, jax.grad(value_fn)):
        found = products(fn, START)
        assert found and set(found) == {f"{HALF[level]},{HALF[level]}"}


@pytest.mark.parametrize("level, half", [("O2", jnp.float16), ("O5", jnp.bfloat16)])
def test_params_are_rounded_as_the_state_has_them(level, half):
    seen = []

    def look(p):
        seen.append(jax.tree.map(lambda x: x.dtype, p))
        return (p["w"].astype(jnp.float32) * 3).sum() + p["norm"]["scale"]

    tree = {"w": jnp.zeros(2, jnp.float32), "norm": {"scale": jnp.float32(0.0)}}
    state = make(level, tree, keep_fp32="norm")
    at = {
        "w": jnp.asarray([1.0 + 2.0**-13, 0.5], jnp.float32),
        "norm": {"scale": jnp.float32(1.0 + 2.0**-13)},
    }
    loss = quick(jamp.closure(look)(state))(at)
    assert seen[-1] == {"w": half, "norm": {"scale": jnp.dtype(jnp.float32)}}
    assert loss == 3 * 1.5 + 1 + 2.0**-13  # w is rounded, scale is not


def test_a_master_beyond_half_is_clamped_as_in_a_step():
    state = make("O2", {"w": jnp.ones(1, jnp.float32)})
    value_fn = jamp.closure(lambda p: p["w"].astype(jnp.float32).sum())(state)
    assert value_fn({"w": jnp.asarray([1e6], jnp.float32)}) == 65504.0


def test_its_derivative_is_multiplied_as_any_other():
    state = make(loss_scale=2.0**8)

    @quick
    def gradients(at):
        value_fn = jamp.closure(loss_fn)(state, X, Y)
        pulled = jax.vjp(value_fn, at)[1](jnp.float32(-2.0))
        return jax.grad(value_fn)(at), pulled, jax.grad(lambda p: 3 * value_fn(p))(at)

    once, (pulled,), thrice = gradients(START)
    np.testing.assert_array_equal(pulled["w"], -2 * once["w"])
    np.testing.assert_array_equal(thrice["w"], 3 * once["w"])


def test_it_maps_over_trial_points():
    state = make("O0")
    value_fn = jamp.closure(loss_fn)(state, X, Y)
    points = jnp.stack([START["w"], 2 * START["w"], 0 * START["w"]])
    mapped = jax.vmap(jax.value_and_grad(value_fn))
    losses, grads = quick(mapped)({"w": points})
    np.testing.assert_allclose(losses, [exact_loss(w) for w in points], rtol=1e-5)
    wanted = (np.float64(points) @ X.T - Y) @ X / len(X)
    np.testing.assert_allclose(grads["w"], wanted, rtol=1e-4, atol=1e-5)


def test_leaves_that_are_no_floats_come_from_the_state():
    tree = {
        "w": jnp.asarray([1.0, 2.0], jnp.float32),
        "n": jnp.asarray([3, 4], jnp.int32),
        "key": jax.random.key(0),
        "none": None,
    }
    state = make("O2", tree, optax.sgd(0.1), loss_scale=4.0)

    def uses_all(p):
        assert p["none"] is None
        noise = jax.random.normal(p["key"], (), jnp.float32)
        return (p["w"].astype(jnp.float32) * p["n"]).sum() + 0.0 * noise

    value_fn = jamp.closure(lambda p: uses_all({**p, "n": p["n"].astype(jnp.float32)}))(
        state
    )
    at = {"w": jnp.asarray([2.0, 1.0], jnp.float32), "n": None, "key": None}
    loss, grads = quick(jax.value_and_grad(value_fn))(at | {"none": None})
    assert loss == 10.0
    (leaf,) = jax.tree.leaves(grads)
    np.testing.assert_array_equal(leaf, [3.0, 4.0])


def test_aux_is_dropped_and_keywords_are_passed_on():
    def with_aux(p, x, *, y):
        return loss_fn(p, x, y), {"what": "ever"}

    state = make("O0")
    value_fn = jamp.closure(with_aux, has_aux=True)(state, X, y=Y)
    loss = quick(value_fn)(START)
    np.testing.assert_allclose(loss, exact_loss(START["w"]), rtol=1e-6)
    expected = quick(jax.grad(jamp.closure(loss_fn)(state, X, Y)))(START)
    assert_same_bits(quick(jax.grad(value_fn))(START), expected)


def test_each_loss_is_scaled_with_its_own_scale():
    state = make(num_losses=2)
    low = state.loss_scales[1]._replace(scale=jnp.float32(2.0**-14))
    state = state.replace(loss_scales=(state.loss_scales[0], low))

    def small(p):
        return p["w"].astype(jnp.float32).sum() * 2.0**-16

    first, second = (
        quick(jax.grad(jamp.closure(small, loss_id=i)(state)))(START) for i in (0, 1)
    )
    np.testing.assert_array_equal(first["w"], np.full(4, 2.0**-16))
    assert not second["w"].any()  # 2^-30 in float16


# Under jit


def test_one_trace_serves_all_steps_and_scan_takes_it():
    traces = []

    def counted(p, x, y):
        traces.append(None)
        return loss_fn(p, x, y)

    once = quick(functools.partial(search_step, loss_fn=counted))
    state = start = rescaled(make(tx=BACKTRACKING), 2.0**8)
    before = jax.tree.map(jax.typeof, state)
    state, _ = once(state, X, Y)
    count = len(traces)
    for _ in range(3):
        state, _ = once(state, X, Y)
    assert len(traces) == count
    assert jax.tree.map(jax.typeof, state) == before

    @quick
    def scanned(state):
        return lax.scan(lambda s, _: search_step(s, X, Y), state, length=4)

    again, losses = scanned(start)
    assert losses[0] > losses[-1]
    np.testing.assert_allclose(again.params["w"], state.params["w"], atol=2.0**-8)


# Several groups


def pair(level="O2", **kwargs):
    trees = {"a": START, "b": {"w": jnp.asarray([0.5, 0.25], jnp.float32)}}
    txs = {"a": BACKTRACKING, "b": optax.sgd(0.1)}
    return jamp.initialize(trees, txs, level, verbosity=0, **kwargs)


def joint(p, x, y):
    return loss_fn(p["a"], x, y) + (p["b"]["w"].astype(jnp.float32) ** 2).sum()


def test_one_group_of_several_is_searched():
    state = pair()
    before = state.params["b"]
    once = quick(functools.partial(search_step, loss_fn=joint, wrt="a"))
    for _ in range(16):
        state, loss = once(state, X, Y)
    masters = jamp.master_params(state)["a"]["w"]
    assert exact_loss(masters) - exact_loss(BEST) < 1e-4
    np.testing.assert_allclose(loss, exact_loss(BEST) + 0.3125, rtol=0.02)
    assert_same_bits(state.params["b"], before)
    assert state.skipped_steps["b"] == 0


def test_the_other_groups_are_those_of_the_state():
    value_fn = jamp.closure(joint, wrt="b")(pair("O0"), X, Y)
    at = {"w": jnp.asarray([2.0, 1.0], jnp.float32)}
    loss, grad = quick(jax.value_and_grad(value_fn))(at)
    np.testing.assert_allclose(loss, exact_loss(START["w"]) + 5.0, rtol=1e-6)
    np.testing.assert_array_equal(grad["w"], [4.0, 2.0])


def test_groups_in_a_list_go_by_number():
    state = jamp.initialize([START, START], [optax.sgd(0.1)] * 2, "O0", verbosity=0)

    def both(p, x, y):
        return loss_fn(p[0], x, y) + 2 * p[1]["w"].sum()

    grad = quick(jax.grad(jamp.closure(both, wrt=1)(state, X, Y)))(START)
    np.testing.assert_array_equal(grad["w"], np.full(4, 2.0))


# Errors


@pytest.mark.parametrize("wrt", [None, ("a",), ["a", "b"]], ids=str)
def test_of_several_groups_exactly_one_is_named(wrt):
    with pytest.raises(ValueError, match=r"(?s)wrt.*'a', 'b'"):
        jamp.closure(joint, wrt=wrt)(pair(), X, Y)


@pytest.mark.parametrize("make_state", [make, pair], ids=["one", "several"])
def test_a_group_that_is_not_there_is_an_error(make_state):
    with pytest.raises((ValueError, LookupError), match="(?s)wrt.*z"):
        jamp.closure(joint, wrt="z")(make_state(), X, Y)


@pytest.mark.parametrize("bad", [START, None, optax.EmptyState()], ids=str)
def test_what_is_no_state_is_refused(bad):
    with pytest.raises(TypeError, match=r"(?s)jamp\.initialize|AmpState"):
        jamp.closure(loss_fn)(bad, X, Y)(START)


def test_a_loss_id_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="(?s)loss_id.*num_losses"):
        jamp.closure(loss_fn, loss_id=1)(make(), X, Y)(START)


@pytest.mark.parametrize(
    "bad, words",
    [
        (lambda p: p["w"].astype(jnp.float32), "scalar"),
        (lambda p: (jnp.float32(1.0), 2.0), "has_aux"),
        (lambda p: None, "scalar, got NoneType"),
    ],
    ids=["vector", "tuple", "none"],
)
def test_a_loss_that_is_no_scalar_is_refused(bad, words):
    with pytest.raises(TypeError, match=rf"(?s){words}"):
        jamp.closure(bad)(make())(START)


def test_params_of_another_structure_are_refused():
    value_fn = jamp.closure(loss_fn)(make(), X, Y)
    with pytest.raises((ValueError, TypeError, KeyError)):
        value_fn({"other": START["w"]})
