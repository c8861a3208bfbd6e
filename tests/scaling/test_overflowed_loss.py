"""A loss that is not finite is an overflow, also if its gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jamp
import jamp.nnx
from jamp import fp16_utils, optimizers as jo
from tests.support.states import assert_skipped

START = np.float32([1.0, -2.0, 0.5])
LEVELS = ("O0", "O1", "O2", "O5")
CHECKS = jamp.DynamicLossScale(8.0)


def hidden(params, x):
    """Its gradient is 1, whatever x is: `abs` and `maximum` select in it."""
    w = params["w"].astype(jnp.float32)
    return jnp.maximum(jnp.abs(x + 0 * w.sum()), 0.0) + w.sum()


def make(level, tx, rule=CHECKS, **options):
    options |= {"loss_scale": rule, "verbosity": 0}
    return jamp.initialize({"w": jnp.asarray(START)}, tx, level, **options)


def all_nan(tree):
    return all(np.isnan(x).all() for x in jax.tree.leaves(tree))


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "tx", [optax.sgd(1.0), jo.fused_adam(0.1)], ids=["sgd", "fused"]
)
@pytest.mark.parametrize("level", LEVELS)
def test_all_gradients_are_nan_and_the_step_is_skipped(level, tx):
    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(hidden)(state, x)
        return state.apply_gradients(grads=grads), loss, grads

    state = make(level, tx)
    for run in (step, jax.jit(step)):
        after, loss, grads = run(state, jnp.float32(2.0))
        assert (after.step, after.skipped_steps) == (1, 0) and loss == 1.5
        np.testing.assert_array_equal(grads["w"], 1.0)
        for bad in (np.nan, np.inf):
            after, loss, grads = run(state, jnp.float32(bad))
            assert not np.isfinite(loss) and all_nan(grads)
            assert_skipped(after, state)
            assert after.loss_scale == 4.0
    for _ in range(3):
        after = run(after, jnp.float32(np.nan))[0]
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 4 steps in a row"):
        jamp.check(after, max_consecutive_skips=4)


@pytest.mark.parametrize("rule", [128.0, jamp.StaticLossScale(128.0, check=True)])
def test_a_static_scale_lets_it_through_unless_it_checks(rule):
    state = make("O2", optax.sgd(1.0), rule)
    grads = jax.jit(jamp.scaled_grad(hidden))(state, jnp.float32(np.nan))
    assert all_nan(grads) == (rule != 128.0)


def test_of_several_losses_it_is_the_one_whose_scale_falls():
    state = make("O2", optax.sgd(1.0), num_losses=2)

    @jax.jit
    def step(state, xs):
        aux = lambda p, x: (hidden(p, x), x)  # noqa: E731
        grads, found = zip(
            *(
                jamp.scaled_grad(aux, has_aux=True, loss_id=i)(state, xs[i])
                for i in (0, 1)
            ),
            strict=True,
        )
        return state.apply_gradients(grads=grads, loss_id=(0, 1)), found

    after, aux = step(state, jnp.float32([1.0, np.nan]))
    assert_skipped(after, state)
    assert tuple(after.loss_scale) == (8.0, 4.0) and aux[0] == 1.0


@pytest.mark.parametrize("averaged", [True, False])
def test_on_a_mapped_axis_one_loss_makes_all_skip(averaged):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    # In O2, JAX would sum the gradients of half params, which warns.
    state = make("O2" if averaged else "O0", jo.fused_sgd(1.0))

    def step(state, x):
        options = {"axis_name": "i"} if averaged else {}
        loss, grads = jamp.scaled_value_and_grad(hidden, **options)(state, x[0])
        return state.apply_gradients(grads=grads), loss[None]

    specs = {"mesh": mesh, "in_specs": (P(), P("i"))}
    run = jax.jit(jax.shard_map(step, out_specs=(P(), P("i")), **specs))
    after, _ = run(state, jnp.float32([np.nan]))
    assert_skipped(after, state)
    assert run(state, jnp.float32([1.0]))[0].step == 1

    def on_each(x):
        return jamp.scaled_value_and_grad(hidden, axis_name="i")(state, x)

    loss, grads = jax.vmap(on_each, axis_name="i")(jnp.float32([1.0, np.nan, 2.0]))
    assert np.isnan(loss).all() and all_nan(grads)


@pytest.mark.standard_promotion
def test_nnx_keeps_what_the_model_held():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.seen = (
                nnx.Param(jnp.asarray(START)),
                nnx.BatchStat(jnp.zeros(())),
            )

        def __call__(self, x):
            self.seen[...] += 1
            return hidden({"w": self.w[...]}, x)

    model, optimizer = jamp.nnx.initialize(
        Model(), optax.sgd(1.0), "O2", loss_scale=CHECKS, verbosity=0
    )

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jamp.nnx.scaled_value_and_grad(lambda m, x: m(x))(
            model, optimizer, x
        )
        optimizer.update(model, grads)

    for x, skips in ((np.nan, 1), (1.0, 1)):
        step(model, optimizer, jnp.float32(x))
        assert optimizer.skipped_steps[...] == skips
    assert model.seen[...] == 1 and (model.w[...] == START - 1).all()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_fp16_optimizers_skip(flat, dynamic):
    if flat:
        optimizer = fp16_utils.FlatFP16_Optimizer(
            jo.fused_adam(0.1), dynamic_loss_scale=dynamic, verbose=False
        )
    else:
        optimizer = fp16_utils.FP16_Optimizer(
            optax.sgd(1.0), dynamic_loss_scale=dynamic, verbose=False
        )

    def step(state, x):
        return optimizer.step(optimizer.backward(state, hidden, x)[1])

    state = optimizer.init({"w": jnp.asarray(START, jnp.float16)})
    if dynamic:  # down from 2**32, at which float16 overflows
        for _ in range(20):
            state = optimizer.zero_grad(jax.jit(step)(state, jnp.float32(1.0)))
    before = np.asarray(state.params["w"])
    checks = dynamic or flat  # the flat one always looks at the norm
    for x, skips in ((np.nan, checks), (1.0, False)):
        after = jax.jit(step)(state, jnp.float32(x))
        assert after.overflow == skips
        assert (after.params["w"] == before).all() == skips


def test_a_line_search_gets_nan_from_the_closure():
    state = make("O2", optax.lbfgs())
    value_fn = jamp.closure(hidden)(state, jnp.float32(np.nan))
    loss, grads = jax.value_and_grad(value_fn)({"w": jnp.asarray(START)})
    assert np.isnan(loss) and all_nan(grads)


def test_gradients_of_scale_loss_cannot_show_it():
    state, x = make("O2", optax.sgd(1.0)), jnp.float32(np.nan)
    grads = jax.grad(lambda p: jamp.scale_loss(hidden(p, x), state))(state.params)
    np.testing.assert_array_equal(jamp.unscale(grads, state)["w"], 1.0)
