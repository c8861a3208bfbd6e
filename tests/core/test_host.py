"""Test a transfer guard, the lines of warnings, print and pickle."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits
from tests.support.states import step_on

pytestmark = pytest.mark.standard_promotion  # optax and Flax promote

ADAM = optax.adam(1e-2)
PARAMS = {"w": jnp.full(3, 0.1), "norm": {"scale": jnp.ones(())}}
X = jnp.asarray([1.0, 2.0, 3.0])


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum() * params["norm"]["scale"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_jitted_step_runs_under_a_transfer_guard(level):
    step, state = jax.jit(step_on(loss_fn)), make(level)
    with jax.transfer_guard("disallow"):
        assert_same_bits(step(state, X), step(state, X))


def make(level="O2", tx=ADAM, **options):
    return jamp.initialize(PARAMS, tx, level, verbosity=0, **options)


WARNINGS = {
    "The loss is float16": lambda state: jamp.scaled_grad(
        lambda params: params["w"].sum().astype(jnp.float16)
    )(state),
    "are float16, and the loss scale is dynamic": lambda state: state.apply_gradients(
        grads=jax.tree.map(jnp.ones_like, state.params)
    ),
    "min_loss_scale=1.0 has no effect": lambda _: make("O5", min_loss_scale=1.0),
    "store_remainder has no effect": lambda _: make("O0", store_remainder=True),
}


@pytest.mark.parametrize("message", WARNINGS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_warning_names_the_line_of_the_call(message, wrap):
    state = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(lambda state: WARNINGS[message](state))(state)
    (warning,) = [w for w in caught if message in str(w.message)]
    assert warning.filename == __file__


class Mine(jamp.AmpState):
    ema: jax.Array


PRINTED = """\
Mine at O5
  params: 4 bfloat16
  optimizer state: 8 float32, 4 uint16, 1 int32
  step: 0, skipped: 0
  loss scale: (1.0, 1.0)
  half and scalar: norm/scale (see keep_fp32)
  extra fields: ema"""


def test_print_shows_a_summary_and_no_arrays():
    mine = {"state_class": Mine, "ema": jnp.ones(()), "num_losses": 2}
    assert str(make("O5", store_remainder=True, **mine)) == PRINTED
    traced = []
    jax.eval_shape(lambda state: traced.append(repr(state)), make())
    assert "step: int32[], skipped: int32[]\n  loss scale: float32[]" in traced[0]


@pytest.mark.parametrize("fields", [{}, {"batch_stats": {"mean": jnp.ones(2)}}])
def test_a_state_comes_back_from_pickle(fields):
    # A fused optimizer, because pickle refuses optax's closures.
    tx = jamp.optimizers.larc(jamp.optimizers.fused_adam(0.1))
    state = make("O5", tx, store_remainder=True, **fields)
    again = pickle.loads(pickle.dumps(state))
    assert (type(again), again.tx) == (type(state), state.tx)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_same_bits(again, state)


@pytest.mark.parametrize("name", ["GradScaler", "DynamicScale", "Policy", "amp"])
def test_a_name_of_another_library_names_its_counterpart(name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'\..*jamp\.\w+"):
        getattr(jamp, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'\\.$"):
        jamp.nothing  # noqa: B018
