"""Test that a run survives interrupts and JAX's debugging flags, or raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx
from benchmarks import h200
from tests.support.bits import assert_same_bits, copy
from tests.support.states import step_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
]  # as in a user's program

PARAMS = {"w": jnp.asarray([0.5, -0.25, 2.0]), "b": jnp.zeros(())}
SGD = optax.sgd(0.125, momentum=0.5)
X = np.float32([1.0, -2.0, 0.5])


def loss_fn(params, x):
    return (jnp.tanh(params["w"] * x) + params["b"]).astype(jnp.float32).mean() / 4


def make(level="O2", **options):
    return jamp.initialize(PARAMS, SGD, level, verbosity=0, **options)


step = step_on(loss_fn)
AFTER = step(make(), X)


def interrupted_nnx():
    def interrupted(model):
        model(X[None])
        model.count.set_value(model.count.get_value() + 1)
        raise KeyboardInterrupt

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model.count = nnx.BatchStat(jnp.zeros(()))
    model, optimizer = jamp.nnx.initialize(model, SGD, "O2", verbosity=0)
    before = copy(nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(KeyboardInterrupt):
        jamp.nnx.scaled_grad(interrupted)(model, optimizer)
    assert_same_bits(copy(nnx.to_pure_dict(nnx.state(model))), before)
    grads = jamp.nnx.scaled_grad(lambda m: m(X).mean() / 4)(model, optimizer)
    optimizer.update(model, grads)
    assert optimizer.step.get_value() == 1


def under(context):
    with context:
        after = step(make(), X)
        assert_same_bits(*(jax.tree.map(np.asarray, s) for s in (after, AFTER)))


def debug_nans():
    with jax.debug_nans(True):
        assert_same_bits(step(make(), X), AFTER)
        after = jax.jit(step)(AFTER, X * np.inf)  # outputs no NaN
        assert after.last_step_skipped
        infinite = jax.tree.map(lambda p: jnp.full_like(p, np.inf), PARAMS)
        # The check turns infinity into NaN, but does not return it.
        assert AFTER.apply_gradients(grads=infinite).last_step_skipped
        overflows = jamp.scaled_grad(lambda p: p["w"].sum() * np.inf)
        for grads in (overflows, jax.jit(overflows)):
            with pytest.raises(FloatingPointError):
                grads(AFTER)
        with pytest.raises(FloatingPointError):
            jax.jit(jamp.scaled_value_and_grad(loss_fn))(AFTER, X * np.nan)


FAULTS = {
    "Ctrl-C inside of an NNX loss": interrupted_nnx,
    "`jax.enable_x64`": lambda: under(jax.enable_x64(True)),
    "`jax.disable_jit`": lambda: under(jax.disable_jit()),
    "`jax.debug_nans`": debug_nans,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault):
    FAULTS[fault]()


@pytest.mark.h200
@pytest.mark.parametrize(
    "tx, traffic",  # bytes of masters, moments and half params
    [(SGD, 8 + 8 + 4), (jamp.optimizers.fused_adam(1e-3), 8 + 16 + 4)],
)
def test_a_leaf_may_have_more_elements_than_int32_counts(tx, traffic):
    step = step_on(lambda w: w.astype("f4").sum())
    shape = jax.ShapeDtypeStruct((2**31 + 1,), jnp.float32)
    begin = lambda w: jamp.initialize(w, tx, "O2", verbosity=0)  # noqa: E731
    program = h200.compile_step(step, jax.eval_shape(begin, shape), donate=(0,))

    per_param = program.traffic / (2**31 + 1)
    assert per_param == pytest.approx(traffic, abs=1e-3) and program.temp < 2**20
