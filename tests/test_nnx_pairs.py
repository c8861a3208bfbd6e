"""A model and the optimizer that it was initialized with; another is refused."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jamp.nnx

pytestmark = pytest.mark.standard_promotion  # Flax's layers promote

X = np.ones((2, 2), np.float32)


def make(seed=0, level="O2", **options):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    return jamp.nnx.initialize(model, optax.sgd(0.1), level, verbosity=0, **options)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def train_step(model, optimizer, x):
    optimizer.update(model, jamp.nnx.scaled_grad(loss_fn)(model, optimizer, x))


ANOTHER = "The model comes from another call of jamp.nnx.initialize.*one call"


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_equal_models_of_two_calls_are_not_mixed_up(wrap):
    (first, one), (second, two) = make(), make()
    with pytest.raises(ValueError, match=ANOTHER):
        wrap(train_step)(first, two, X)
    with pytest.raises(ValueError, match=ANOTHER):
        one.amp_state(second)
    wrap(train_step)(first, one, X)
    assert one.step.get_value() == 1


def test_update_alone_notices_too():
    (model, optimizer), (second, _) = make(), make()
    grads = jamp.nnx.scaled_grad(loss_fn)(model, optimizer, X)
    before = np.array(second.kernel[...])
    with pytest.raises(ValueError, match=ANOTHER):
        optimizer.update(second, grads)
    np.testing.assert_array_equal(second.kernel[...], before)


def test_a_model_that_never_went_through_is_refused():
    model, optimizer = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), make()[1]
    with pytest.raises(ValueError, match="has not gone through jamp.nnx.initialize"):
        train_step(model, optimizer, X)


def test_the_models_of_one_call_keep_their_keys():
    models = {name: nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for name in "ab"}
    txs = {name: optax.sgd(0.1) for name in "ab"}
    models, optimizer = jamp.nnx.initialize(models, txs, "O2", verbosity=0)
    swapped = {"a": models["b"], "b": models["a"]}
    with pytest.raises(ValueError, match="The model 'a' was 'b' in jamp.nnx.init"):
        optimizer.amp_state(swapped)
    optimizer.amp_state(models)


def test_a_model_that_was_changed_afterwards_is_named_by_its_leaf():
    model, optimizer = make()
    model.kernel.set_value(jnp.float32(model.kernel[...]))
    with pytest.raises(ValueError, match=r"differ at \['kernel'\].*float32.*float16"):
        train_step(model, optimizer, X)


COPIES = {
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "split and merge": lambda model: nnx.merge(*nnx.split(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_its_model_is_its_model(name):
    model, optimizer = make()
    train_step(COPIES[name](model), optimizer, X)
    with pytest.raises(ValueError, match=ANOTHER):
        train_step(COPIES[name](model), make()[1], X)


def test_with_jamp_switched_off_they_are_not_mixed_up_either():
    model, optimizer = make(enabled=False)
    train_step(model, optimizer, X)
    with pytest.raises(ValueError, match=ANOTHER):
        train_step(model, make(enabled=False)[1], X)


def test_a_model_in_half_and_one_initialized_before_are_refused():
    model = nnx.Linear(2, 3, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"\['bias'\] with dtype float16, expected"):
        jamp.nnx.initialize(model, optax.sgd(0.1), verbosity=0)
    for level in ("O1", "O2"):
        model, _ = make(level=level)
        with pytest.raises(ValueError, match=f"already, at {level}.*fresh one"):
            jamp.nnx.initialize(model, optax.sgd(0.1), verbosity=0)


def test_a_linen_model_around_which_nnx_is_wrapped_still_trains():
    model = nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
    model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.1), "O2", verbosity=0)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    train_step(model, optimizer, X)
    assert (np.array(model.kernel[...]) != before["kernel"]).any()
