"""A run survives faults, or raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jamp
import jamp.nnx
from benchmarks import h200
from tests.oracles import loss_scale as oracle
from tests.support.bits import assert_same_bits, copy
from tests.support.extent import more

pytestmark = pytest.mark.standard_promotion  # as in a user's program

PARAMS = {"w": jnp.asarray([0.5, -0.25, 2.0]), "b": jnp.zeros(())}
SGD = optax.sgd(0.125, momentum=0.5)
X = np.float32([1.0, -2.0, 0.5])


def loss_fn(params, x):
    return (jnp.tanh(params["w"] * x) + params["b"]).astype(jnp.float32).mean() / 4


def make(level="O2", **options):
    return jamp.initialize(PARAMS, SGD, level, verbosity=0, **options)


def step(state, x=X):
    return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))


AFTER = step(make())


@jax.jit
def run(state, xs):
    """Returns the last state, and the loss scale and step count of each step."""

    def body(state, x):
        state = step(state, x)
        return state, (state.loss_scale, state.step)

    return lax.scan(body, state, xs)


def storm():
    rule = oracle.Rule(min_scale=2.0**7)
    good = np.random.default_rng(0).random(400) < 0.1
    xs = np.where(good[:, None], X, np.inf)
    state, (scales, steps) = run(make(min_loss_scale=2.0**7), xs)
    counters, expected = oracle.init(rule), []
    for finite in good:
        counters = oracle.update(rule, counters, bool(finite))
        expected.append(counters.scale)
    assert scales.tolist() == expected
    assert steps.tolist() == np.cumsum(good).tolist()
    calm, _ = run(make(), xs[good])
    assert_same_bits(state.params, calm.params)
    assert_same_bits(state.opt_state, calm.opt_state)


def nothing_but_nan():
    state, (scales, _) = run(AFTER, np.full((1000, 3), np.nan, np.float32))
    kept = ("loss_scales", "skipped_steps", "last_step_skipped")
    assert_same_bits(
        state.replace(**{name: getattr(AFTER, name) for name in kept}), AFTER
    )
    assert scales[-1] == 2.0**-126 and state.skipped_steps == 1000
    with pytest.raises(FloatingPointError, match="1000"):
        jamp.check(state)


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
        assert_same_bits(*(jax.tree.map(np.asarray, s) for s in (step(make()), AFTER)))


def debug_nans():
    with jax.debug_nans(True):
        assert_same_bits(step(make()), AFTER)
        after = jax.jit(step)(AFTER, X * np.inf)  # the outputs have no NaN
        assert after.last_step_skipped
        infinite = jax.tree.map(lambda p: jnp.full_like(p, np.inf), PARAMS)
        # The check makes NaN of infinity, but shows none.
        assert AFTER.apply_gradients(grads=infinite).last_step_skipped
        overflows = jamp.scaled_grad(lambda p: p["w"].sum() * np.inf)
        for grads in (overflows, jax.jit(overflows)):  # they return NaN
            with pytest.raises(FloatingPointError):
                grads(AFTER)
        with pytest.raises(FloatingPointError):
            jax.jit(jamp.scaled_value_and_grad(loss_fn))(AFTER, X * np.nan)


FAULTS = {
    "90 % of the steps overflow": storm,
    "1,000 batches of NaN": nothing_but_nan,
    "Ctrl-C inside of an NNX loss": interrupted_nnx,
    "`jax.enable_x64`": lambda: under(jax.enable_x64(True)),
    "`jax.disable_jit`": lambda: under(jax.disable_jit()),
    "`jax.debug_nans`": debug_nans,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault):
    FAULTS[fault]()


def shape_of(params, tx):
    shapes = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in params.items()}
    return jax.eval_shape(lambda p: jamp.initialize(p, tx, "O2", verbosity=0), shapes)


def ones_step(state):
    grads = jamp.scaled_grad(lambda p: sum(x.astype("f4").sum() for x in p.values()))
    return state.apply_gradients(grads=grads(state))


@pytest.mark.h200
@pytest.mark.parametrize(
    "tx, traffic",  # masters, moments and half params are read and written
    [(SGD, 8 + 8 + 4), (jamp.optimizers.fused_adam(1e-3), 8 + 16 + 4)],
)
def test_more_elements_than_int32_counts(tx, traffic):
    state = shape_of({"w": (2**31 + 1,)}, tx)
    program = h200.compile_step(ones_step, state, donate=(0,))
    per_param = program.traffic / (2**31 + 1)
    assert per_param == pytest.approx(traffic, abs=1e-3) and program.temp < 2**20


@pytest.mark.parametrize("count", more("BUDGETS", [10_000]))
def test_ten_thousand_leaves(count):
    params = {f"layer{i}": (3,) for i in range(count)}
    state = shape_of(params, jamp.optimizers.fused_sgd(0.5))
    lowered = jax.jit(ones_step).lower(state)
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure(state)
