"""Derivatives of derivatives: WGAN-GP's penalty on the slope of a critic.

The inner gradient is taken by jax.grad in the loss, so it is scaled and unscaled by
hand, as docs/gradient_penalty.md has it. Oracle: the gradient in float64, by hand.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import products

LEVELS = ("O0", "O1", "O2", "O4", "O5")
SCALED = ("O1", "O2")  # those in float16
# Relative to the largest element: half's rounding is 2^-12 and 2^-9, several in a row.
ACCURACY = {"O0": 2.0**-19, "O1": 2.0**-8, "O2": 2.0**-8, "O4": 2**-5, "O5": 2**-5}
BATCH, INPUTS, HIDDEN, WEIGHT = 8, 6, 16, 10.0
# Compiling takes the time, running none.
FAST = {"xla_backend_optimization_level": 0}
SGD = optax.sgd(0.5)  # the same object each time, or jit would trace again


class Critic(nn.Module):
    """One number per sample; smooth, so that no second derivative is zero."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(HIDDEN)(x))
        return nn.Dense(1)(x)[:, 0]


def draw():
    rng = np.random.default_rng(0)
    params = {
        "Dense_0": {
            "kernel": rng.normal(size=(INPUTS, HIDDEN)) / 2,
            "bias": rng.normal(size=HIDDEN) / 8,
        },
        "Dense_1": {"kernel": rng.normal(size=(HIDDEN, 1)) / 4, "bias": np.zeros(1)},
    }
    real, fake = rng.normal(size=(2, BATCH, INPUTS)) + [[[0.0]], [[1.0]]]
    share = rng.random((BATCH, 1))
    data = {"real": real, "fake": fake, "mixed": share * real + (1 - share) * fake}
    return jax.tree.map(np.float32, (params, data))


PARAMS, DATA = draw()
# Its slopes, divided by the batch, are less than half of float16's smallest number.
FLAT = jax.tree.map(lambda x: x * np.float32(2.0**-11), PARAMS)


def penalty(critic, x, state, loss_id=0):
    """The recipe of the page: (mean of (|slope| - 1)^2, slopes in float32)."""

    def scaled_mean(x):
        return jamp.scale_loss(critic(x).mean(), state, loss_id)

    slopes = jamp.unscale(jax.grad(scaled_mean)(x), state, loss_id) * len(x)
    return ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean(), slopes


def careless_penalty(critic, x, state, loss_id=0):
    """The same without a scale on the inner loss."""
    del state, loss_id
    slopes = jax.grad(lambda x: critic(x).mean())(x) * len(x)
    return ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean(), slopes


def no_penalty(critic, x, state, loss_id=0):
    del critic, state, loss_id
    return jnp.float32(0.0), x


def critic_loss(params, state, data, recipe, loss_id=0):
    def critic(x):
        return Critic().apply({"params": params}, x)

    value, slopes = recipe(critic, data["mixed"], state, loss_id)
    apart = critic(data["fake"]).mean() - critic(data["real"]).mean()
    return apart + WEIGHT * value, slopes


def loss_and_grads(state, data, recipe=penalty, inner_id=0):
    def loss_fn(params):
        return critic_loss(params, state, data, recipe, inner_id)

    return jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)


@functools.cache
def jitted(recipe, inner_id):
    return jax.jit(
        functools.partial(loss_and_grads, recipe=recipe, inner_id=inner_id),
        compiler_options=FAST,
    )


def value_and_grad(state, recipe=penalty, inner_id=0):
    """((loss, slopes), grads), compiled once per level, recipe and id."""
    return jitted(recipe, inner_id)(state, DATA)


@functools.partial(jax.jit, compiler_options=FAST)
def apply(state, grads):
    return state.apply_gradients(grads=grads)


def make(level, params=PARAMS, scale=2.0**8, **kwargs):
    state = jamp.initialize(params, SGD, level, verbosity=0, **kwargs)
    return with_scales(state, *[scale] * len(state.loss_scales))


def with_scales(state, *scales):
    if not state.loss_scale_rules[0].moves:
        return state
    pairs = zip(state.loss_scales, scales, strict=True)
    moved = tuple(old._replace(scale=jnp.float32(new)) for old, new in pairs)
    return state.replace(loss_scales=moved)


# The oracle


def oracle(params, data):
    """(loss, gradients, slopes) of `critic_loss`, in float64, by the chain rule."""
    wide = functools.partial(np.asarray, dtype=np.float64)
    params, data = jax.tree.map(wide, (params, data))
    first, second = params["Dense_0"], params["Dense_1"]
    v = second["kernel"][:, 0]

    hidden = np.tanh(data["mixed"] @ first["kernel"] + first["bias"])
    bend = 1 - hidden**2
    slopes = (bend * v) @ first["kernel"].T
    norms = np.sqrt((slopes**2).sum(-1, keepdims=True))
    loss = WEIGHT * ((norms - 1) ** 2).mean()

    back = WEIGHT * 2 * (norms - 1) / BATCH * slopes / norms  # d loss / d slopes
    across = back @ first["kernel"]
    d_z = across * v * (-2 * hidden * bend)
    d_kernel = back.T @ (bend * v) + data["mixed"].T @ d_z
    d_bias, d_v = d_z.sum(0), (across * bend).sum(0)
    for x, sign in ((data["fake"], 1), (data["real"], -1)):
        hidden = np.tanh(x @ first["kernel"] + first["bias"])
        loss += sign * (hidden @ v + second["bias"]).mean()
        d_z = sign * v * (1 - hidden**2) / BATCH
        d_kernel += x.T @ d_z
        d_bias += d_z.sum(0)
        d_v += sign * hidden.mean(0)
    grads = {
        "Dense_0": {"kernel": d_kernel, "bias": d_bias},
        "Dense_1": {"kernel": d_v[:, None], "bias": np.zeros(1)},
    }
    return loss, grads, slopes


def test_oracle_is_the_derivative_of_its_loss():
    _, grads, slopes = oracle(PARAMS, DATA)
    rng = np.random.default_rng(1)
    for _ in range(5):
        along = jax.tree.map(lambda x: rng.normal(size=x.shape), PARAMS)
        ahead, behind = (
            oracle(jax.tree.map(lambda p, d, h=h: p + h * d, PARAMS, along), DATA)[0]
            for h in (1e-6, -1e-6)
        )
        products = jax.tree.map(lambda g, d: (g * d).sum(), grads, along)
        expected = sum(jax.tree.leaves(products))
        np.testing.assert_allclose((ahead - behind) / 2e-6, expected, rtol=1e-7)
    norms = np.linalg.norm(slopes, axis=-1)
    assert norms.max() < 0.8  # so that the penalty pulls


def assert_near(got, expected, accuracy):
    """In units of the largest element, as half's errors come."""
    for (path, g), e in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        largest = max(np.abs(e).max(), 1e-30)
        error = np.abs(np.asarray(g, np.float64) - e).max() / largest
        assert error <= accuracy, (jax.tree_util.keystr(path), error)


# Value and gradients


@pytest.mark.parametrize("level", LEVELS)
def test_value_and_gradients_match_float64(level):
    (loss, slopes), grads = value_and_grad(make(level))
    tree, finite = grads.unscale()
    expected_loss, expected_grads, expected_slopes = oracle(PARAMS, DATA)
    assert finite
    assert (loss.dtype, slopes.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(loss, expected_loss, rtol=ACCURACY[level])
    assert_near(slopes, expected_slopes, ACCURACY[level])
    assert_near(tree, expected_grads, ACCURACY[level])


@pytest.mark.parametrize("level", LEVELS)
def test_the_second_backward_pass_multiplies_in_the_levels_dtype(level):
    half = {"O0": "float32", "O1": "float16", "O2": "float16"}.get(level, "bfloat16")
    found = products(loss_and_grads, make(level), DATA)
    plain = products(
        functools.partial(loss_and_grads, recipe=no_penalty), make(level), DATA
    )
    # To the inputs, and back through that: eight more, of two layers.
    assert len(found) == len(plain) + 8
    assert set(found) == {f"{half},{half}"}


# Underflow


@pytest.mark.parametrize("level", SCALED)
def test_small_slopes_survive_with_a_scale(level):
    (loss, slopes), grads = value_and_grad(make(level, FLAT, scale=2.0**14))
    expected_loss, expected_grads, expected_slopes = oracle(FLAT, DATA)
    assert_near(slopes, expected_slopes, ACCURACY[level])
    np.testing.assert_allclose(loss, expected_loss, rtol=ACCURACY[level])
    tree, finite = grads.unscale()
    assert finite
    for name in ("Dense_0", "Dense_1"):  # of the biases, almost all cancels
        expected = expected_grads[name]["kernel"]
        assert_near(tree[name]["kernel"], expected, ACCURACY[level])


@pytest.mark.parametrize("level", SCALED)
def test_small_slopes_are_zero_without_one_and_their_norm_has_no_gradient(level):
    # apex issue 654: every step is skipped, until the loss scale is zero.
    state = make(level, FLAT, scale=2.0**14)
    (loss, slopes), grads = value_and_grad(state, careless_penalty)
    assert np.abs(oracle(FLAT, DATA)[2]).min() > 0
    assert not slopes.any()
    assert loss == WEIGHT
    assert not grads.finite


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_bfloat16_needs_no_scale(level):
    (_, slopes), grads = value_and_grad(make(level, FLAT))
    assert grads.finite
    assert_near(slopes, oracle(FLAT, DATA)[2], ACCURACY[level])


# Overflow


@pytest.mark.parametrize("level", SCALED)
def test_slopes_that_overflow_skip_the_step_and_lower_the_scale(level):
    state = make(level, scale=2.0**24)
    (_, slopes), grads = value_and_grad(state)
    assert not np.isfinite(slopes).all()
    after = apply(state, grads)
    assert (after.last_step_skipped, after.step) == (True, 0)
    assert after.loss_scale == 2.0**23
    assert_same_bits(after.params, state.params)
    assert_same_bits(jamp.master_params(after), jamp.master_params(state))


@pytest.mark.parametrize("level", SCALED)
def test_a_scale_that_fits_is_found(level):
    state, skips = make(level, scale=2.0**24), 0
    before = state.params
    while state.step == 0:
        (_, slopes), grads = value_and_grad(state)
        state = apply(state, grads)
        skips += 1
        assert skips < 20
    assert state.skipped_steps == skips - 1 > 2
    assert jnp.isfinite(slopes).all()
    assert not np.array_equal(
        before["Dense_0"]["kernel"], state.params["Dense_0"]["kernel"]
    )


def test_a_redo_lowers_the_scale_of_the_loss_and_not_that_of_the_slopes():
    # The loss function has its own state, and so the scale that overflowed.
    state = make("O1", scale=2.0**22)

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(state):
        grads, _ = jamp.scaled_grad(
            lambda params: critic_loss(params, state, DATA, penalty),
            has_aux=True,
            redo_on_overflow=3,
        )(state)
        return state.apply_gradients(grads=grads)

    after = step(state)
    assert (after.skipped_steps, after.loss_scale) == (1, 2.0**18)
    assert_same_bits(after.params, state.params)


def with_inner_scale(state, grads, slopes):
    """What tells the scale of the inner loss, 1, whether the slopes overflowed."""
    news = jamp.zero_grads(state, loss_id=1).replace(finite=jnp.isfinite(slopes).all())
    return apply(state, (grads, news))


def test_an_inner_scale_of_its_own_falls_when_the_slopes_overflow():
    state = with_scales(make("O1", num_losses=2), 2.0**8, 2.0**24)
    (_, slopes), grads = value_and_grad(state, inner_id=1)
    assert not grads.finite  # a skip for both: the penalty is not finite
    alone = apply(state, grads)
    assert (alone.skipped_steps, alone.loss_scale) == (1, (2.0**7, 2.0**24))
    both = with_inner_scale(state, grads, slopes)
    assert (both.skipped_steps, both.loss_scale) == (1, (2.0**7, 2.0**23))
    assert_same_bits(both.params, state.params)


def test_an_inner_scale_of_its_own_stays_when_another_gradient_overflows():
    state = with_scales(make("O1", num_losses=2), 2.0**24, 2.0**8)
    (_, slopes), grads = value_and_grad(state, inner_id=1)
    assert np.isfinite(slopes).all()
    after = with_inner_scale(state, grads, slopes)
    assert (after.skipped_steps, after.loss_scale) == (1, (2.0**23, 2.0**8))


def test_an_inner_scale_of_its_own_changes_no_step():
    state = with_scales(make("O1", num_losses=2), 2.0**8, 2.0**6)
    (_, slopes), grads = value_and_grad(state, inner_id=1)
    alone, both = (
        apply(state, grads),
        with_inner_scale(state, grads, slopes),
    )
    assert (both.step, both.skipped_steps) == (1, 0)
    np.testing.assert_array_equal(both.loss_scales[1].unskipped, 1)
    for a, b in zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(both.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert_near(slopes, oracle(PARAMS, DATA)[2], ACCURACY["O1"])


# Training


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level", SCALED)
def test_the_slope_of_a_critic_approaches_one(level):
    steps = 150
    rng = np.random.default_rng(2)
    real, fake = rng.normal(size=(2, steps, 32, INPUTS)) / 2 + [[[[0.0]]], [[[1.0]]]]
    share = rng.random((steps, 32, 1))
    data = {"real": real, "fake": fake, "mixed": share * real + (1 - share) * fake}
    data = jax.tree.map(np.float32, data)

    def step(state, data):
        (_, slopes), grads = loss_and_grads(state, data)
        norm = jnp.linalg.norm(slopes, axis=-1).mean()
        return state.apply_gradients(grads=grads), norm

    @functools.partial(jax.jit, compiler_options=FAST)
    def train(state):
        return jax.lax.scan(step, state, data)

    small = jax.tree.map(lambda x: x / 4, PARAMS)
    state = jamp.initialize(small, optax.adam(3e-2), level, verbosity=0)
    state, norms = train(state)
    assert norms[0] < 0.1
    # The best slope along the distance d of the means gains d, and costs the penalty:
    # s d - WEIGHT (s - 1)^2 is largest at 1 + d / (2 WEIGHT).
    best = 1 + np.sqrt(INPUTS) / (2 * WEIGHT)
    np.testing.assert_allclose(norms[-30:].mean(), best, atol=0.03)
    assert state.step + state.skipped_steps == steps
    assert state.skipped_steps < 10
    jamp.check(state)
