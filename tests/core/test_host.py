"""Test transfer guards, the lines of warnings, print and pickle."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.standard_promotion  # optax and Flax promote

ADAM = optax.adam(1e-2)
PARAMS = {"w": jnp.full(3, 0.1), "norm": {"scale": jnp.ones(())}}
QUIET = {"verbosity": 0, "loss_scale": jamp.DynamicLossScale(init_scale=8.0)}
X = jnp.asarray([1.0, 2.0, 3.0])


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum() * params["norm"]["scale"]


def run(level, tx):
    """Calls every function that a program calls outside a jitted step."""
    state = jamp.initialize(PARAMS, tx, level, **QUIET)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, X)
    state = state.apply_gradients(grads=grads)
    checkpoint = jamp.to_checkpoint(state)
    state = jamp.from_checkpoint(state, checkpoint)
    state = jamp.load_state_dict(state, jamp.state_dict(state))
    jamp.check(state)
    state = state.replace(params=jamp.master_params(state))
    own = jamp.unscale(state.params, state)
    return state.load_params(PARAMS, reset_optimizer=True), loss, checkpoint, own


DISALLOWED = "Disallowed host-to-device transfer"


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_transfer_guard_stops_none_of_our_constants(level):
    tx = jamp.optimizers.fused_adam(1e-2)
    expected = run(level, tx)
    assert expected[0].step == 1
    with jax.transfer_guard("disallow"):
        assert_same_bits(run(level, tx), expected)
        with pytest.raises(Exception, match=DISALLOWED):
            jnp.zeros(3)  # the guard is on again


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_guards_the_loss_and_the_optimizer_of_the_user(level):
    """Plain `jax.value_and_grad` raises as well."""
    numpy = np.asarray(X)
    ids = np.asarray([0, 1])  # a batch of tokens, which autocast does not trace
    state = make(level)
    table = lambda params, ids: params["w"].astype(jnp.float32)[ids].sum()  # noqa: E731
    moves = lambda params, x: loss_fn(params, x + jax.device_put(numpy))  # noqa: E731
    own = lambda params, x: loss_fn(params, jnp.asarray(numpy) + x)  # noqa: E731
    grads = jamp.scaled_grad(loss_fn)(state, X)
    calls = [
        lambda: jamp.scaled_grad(loss_fn)(state, numpy),
        lambda: jamp.scaled_value_and_grad(loss_fn)(state, x=numpy),
        lambda: jamp.scaled_grad(table)(state, ids),
        lambda: state.apply_gradients(grads=grads),  # optax.adam makes constants
    ]
    if level == "O0":  # autocast traces the loss, and a program keeps its constants
        calls.append(lambda: jamp.scaled_grad(own)(state, X))
    for call in calls:
        call()
        with jax.transfer_guard("disallow"), pytest.raises(Exception, match=DISALLOWED):
            call()
    with jax.transfer_guard("disallow"):
        jamp.scaled_grad(moves)(state, X)  # an explicit transfer


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
