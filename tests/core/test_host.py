"""On the host: a transfer guard, whose line a warning is of, print and pickle."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
import jamp.nnx
from tests.bits import assert_same_bits

pytestmark = pytest.mark.standard_promotion  # optax and Flax promote

ADAM = optax.adam(1e-2)
PARAMS = {"w": jnp.full(3, 0.1), "norm": {"scale": jnp.ones(())}}
QUIET = {"verbosity": 0, "loss_scale": jamp.DynamicLossScale(init_scale=8.0)}
X = jnp.asarray([1.0, 2.0, 3.0])


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum() * params["norm"]["scale"]


def run(level, tx):
    """All that one does outside of a jitted step."""
    state = jamp.initialize(PARAMS, tx, level, **QUIET)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, X)
    state = state.apply_gradients(grads=grads)
    checkpoint = jamp.to_checkpoint(state)
    state = jamp.from_checkpoint(state, checkpoint)
    state = jamp.load_state_dict(state, jamp.state_dict(state))
    jamp.check(state)
    state = state.replace(params=jamp.master_params(state))
    own = jamp.unscale(grads, state)
    return state.load_params(PARAMS, reset_optimizer=True), loss, checkpoint, own


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_transfer_guard_stops_none_of_our_constants(level):
    for tx in (ADAM, jamp.optimizers.fused_adam(1e-2)):
        expected = run(level, tx)
        assert expected[0].step == 1
        with jax.transfer_guard("disallow"):
            assert_same_bits(run(level, tx), expected)
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                jnp.zeros(3)  # it is on again


def half_loss(params):
    return params["w"].sum().astype(jnp.float16)


def make(level="O2", tx=ADAM, **options):
    return jamp.initialize(PARAMS, tx, level, verbosity=0, **options)


WARNINGS = {
    "The loss is float16": lambda state: jamp.scaled_grad(half_loss)(state),
    "are float16, and the loss scale is dynamic": lambda state: state.apply_gradients(
        grads=jax.tree.map(jnp.ones_like, state.params)
    ),
    "min_loss_scale=1.0 has no effect": lambda _: make("O5", min_loss_scale=1.0),
    "store_remainder has no effect": lambda _: make("O0", store_remainder=True),
}


@pytest.mark.parametrize("message", WARNINGS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_warning_is_of_the_line_that_called(message, wrap):
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
  half, of one number each: norm/scale (see keep_fp32)
  extra fields: ema"""


def test_print_shows_a_summary_and_no_arrays():
    mine = {"state_class": Mine, "ema": jnp.ones(()), "num_losses": 2}
    assert str(make("O5", store_remainder=True, **mine)) == PRINTED
    traced = []
    jax.eval_shape(lambda state: traced.append(repr(state)), make())
    assert "step: int32[], skipped: int32[]\n  loss scale: float32[]" in traced[0]


@pytest.mark.parametrize("fields", [{}, {"batch_stats": {"mean": jnp.ones(2)}}])
def test_a_state_comes_back_from_pickle(fields):
    # With a fused optimizer: pickle refuses the closures of optax's.
    tx = jamp.optimizers.larc(jamp.optimizers.fused_adam(0.1))
    state = make("O5", tx, store_remainder=True, **fields)
    again = pickle.loads(pickle.dumps(state))
    assert (type(again), again.tx) == (type(state), state.tx)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_same_bits(again, state)
