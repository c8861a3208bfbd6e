"""What a state shows when it is printed, and what pickle makes of one."""

import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.bits import assert_same_bits

PARAMS = {"w": jnp.ones((3, 4)), "bn1": {"scale": jnp.ones(4)}}


class Mine(jamp.AmpState):
    ema: jax.Array


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()


def make(**options):
    options = {"tx": optax.adam(0.1), "opt_level": "O2", "verbosity": 0} | options
    return jamp.initialize(PARAMS, **options)


PRINTED = [
    """\
Mine at O5
  params: 12 bfloat16, 4 float32
  optimizer state: 32 float32, 12 uint16, 1 int32
  step: 0, skipped: 0
  loss scale: (1.0, 1.0)
  extra fields: ema""",
    "ScaledGrads(loss 0, scale 65536.0, finite False: 12 float16, 4 float32)",
    """\
AmpState at O2
  params: 12 float16, 4 float32
  optimizer state: 44 float32, 1 int32
  step: int32[], skipped: int32[]
  loss scale: float32[]""",
]


def test_print_shows_a_summary_and_no_arrays():
    mine = {"state_class": Mine, "ema": jnp.ones(()), "num_losses": 2}
    mine |= {"opt_level": "O5", "store_remainder": True}
    printed = [str(make(**mine)), repr(jamp.scaled_grad(loss_fn)(make(), jnp.inf))]
    jax.eval_shape(lambda state: printed.append(repr(state)), make())
    assert printed == PRINTED


@pytest.mark.parametrize("fields", [{}, {"batch_stats": {"mean": jnp.ones(2)}}])
def test_a_state_comes_back_from_pickle(fields):
    # With a fused optimizer: pickle refuses the closures of optax's.
    tx = jamp.optimizers.larc(jamp.optimizers.fused_adam(0.1))
    state = make(tx=tx, opt_level="O5", store_remainder=True, **fields)
    again = pickle.loads(pickle.dumps(state))
    assert (type(again), again.tx) == (type(state), state.tx)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_same_bits(again, state)


@pytest.mark.parametrize("old", ["_amp_state AmpState", "_state_class AmpState[ema]"])
def test_a_pickle_from_before_the_rooms_says_what_to_do(old):
    module, name = old.split()
    with pytest.raises(pickle.UnpicklingError, match="jamp.from_checkpoint"):
        pickle.loads(f"cjamp.{module}\n{name}\n.".encode())
