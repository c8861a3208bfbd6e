"""Test that `jamp.nnx` leaves the class of a model alone, and runs any method."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits
from tests.support.programs import products

pytestmark = pytest.mark.standard_promotion  # Flax's layers promote

X = np.float32(np.random.default_rng(0).normal(size=(4, 6)))
LOW = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**8)}
RATE, SGD = 0.1, optax.sgd(0.1)


class Coder(nnx.Module):
    """Has methods besides its call, and a layer that a user may call alone."""

    def __init__(self, rngs):
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.down = nnx.Linear(8, 6, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def encode(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.up(x))

    def generate(self, x, steps=2):
        for _ in range(steps):
            x = self.down(self.encode(x))
        return x

    def __call__(self, x):
        return self.down(self.encode(x))


def begin(level, model=None, tx=SGD, **options):
    model = Coder(nnx.Rngs(0)) if model is None else model
    return jamp.nnx.initialize(model, tx, level, verbosity=0, **options)


FORWARDS = {
    "encode": (Coder.encode, 1),
    "generate": (Coder.generate, 4),
    "a layer": (lambda model, x: model.up(x), 1),
    "the call": (lambda model, x: model(x), 2),
}
HALF = {"O1": "float16", "O2": "float16", "O4": "bfloat16", "O5": "bfloat16"}


def by_hand(model, name, x, dtype):
    """Computes a forward pass in float64, with operands of matmuls in half."""
    half = lambda a: np.float64(jnp.asarray(a, jnp.float32).astype(dtype))  # noqa: E731
    apply = lambda layer, x: (  # noqa: E731
        half(x) @ half(layer.kernel[...]) + half(layer.bias[...])
    )
    encode = lambda x: np.tanh(apply(model.up, x))  # noqa: E731
    coded = lambda x: apply(model.down, encode(x))  # noqa: E731
    return {
        "encode": encode,
        "generate": lambda x: coded(coded(x)),
        "a layer": lambda x: apply(model.up, x),
        "the call": coded,
    }[name](x)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("level", HALF)
def test_any_method_runs_under_the_level(level, name, wrap):
    fn, matmuls = FORWARDS[name]
    model, optimizer = begin(level)
    forward = wrap(jamp.nnx.cast_forward(fn, optimizer))
    y = forward(model, X)
    assert y.dtype == jnp.float32
    assert model.calls[...] == (name != "a layer") * (2 if name == "generate" else 1)
    found = products(jamp.nnx.cast_forward(fn, optimizer), model, X)
    assert [p.lhs for p in found] == [HALF[level]] * matmuls
    tolerance = 0.05 if HALF[level] == "bfloat16" else 5e-3
    expected = by_hand(model, name, X, HALF[level])
    np.testing.assert_allclose(y, expected, atol=tolerance)


def test_it_casts_outputs_and_hashes_by_value():
    model, optimizer = begin("O5", cast_model_outputs=jnp.bfloat16)
    forward = jamp.nnx.cast_forward(Coder.encode, optimizer)
    assert forward(model, X).dtype == jnp.bfloat16
    assert forward == jamp.nnx.cast_forward(Coder.encode, optimizer.properties)
    assert hash(forward) == hash(jamp.nnx.cast_forward(Coder.encode, optimizer))
    for wrong in (None, model, optax.sgd(0.1)):
        with pytest.raises(TypeError, match="Optimizer or jamp.Properties, got"):
            jamp.nnx.cast_forward(Coder.encode, wrong)
    with pytest.raises(TypeError, match="Expected an nnx.Module"):
        forward(X, model)


def test_a_model_without_an_optimizer_takes_the_properties():
    model, level = begin("O5", tx=None), jamp.Properties.from_opt_level("O5")
    found = products(jamp.nnx.cast_forward(Coder.encode, level), model, X)
    assert [p.lhs for p in found] == ["bfloat16"]


def test_in_a_loss_it_ends_the_half_part():
    """Float16 numbers above 2,048 are even: without it, the loss is 4 * 4096."""
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.full((2, 1), 2048.0))
    model, optimizer = begin("O2", model, **LOW)
    forward = jamp.nnx.cast_forward(lambda model, x: model(x), optimizer)
    loss_fn = lambda model, x, y: (forward(model, x) - y).sum()  # noqa: E731
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    loss, _ = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x, y)
    assert loss == 4 * 4095


REGISTRY: list[str] = []


class Registered(nnx.Module):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.append(cls.__name__)


class Entry(Registered):
    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Named(nnx.Module):
    def __init_subclass__(cls, *, name, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.title = name


class Titled(Named, name="titled"):
    __init__, __call__ = Entry.__init__, Entry.__call__


class NoPytree(nnx.Module, pytree=False):
    __init__, __call__ = Entry.__init__, Entry.__call__


class Layers(nnx.Module, pytree=False):
    """Contains other modules in a list, which is not a pytree."""

    def __init__(self, rngs):
        self.layers = [NoPytree(rngs)]

    def __call__(self, x):
        return self.layers[0](x)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("cls", [Entry, Titled, NoPytree, Layers])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_class_stays_and_learns(level, cls):
    before = list(REGISTRY)
    model, optimizer = begin(level, cls(nnx.Rngs(0)), **LOW)
    assert type(model) is cls and before == REGISTRY
    plain, values = cls(nnx.Rngs(0)), []
    for _ in range(3):
        loss, grads = nnx.value_and_grad(loss_fn)(plain, X)
        step = lambda p, g: p - RATE * g  # noqa: E731
        nnx.update(plain, jax.tree.map(step, nnx.state(plain, nnx.Param), grads))
        values.append(float(loss))
    losses = [float(train_step(model, optimizer, X)) for _ in range(3)]
    np.testing.assert_allclose(losses, values, rtol=1e-2)
    assert losses[-1] < losses[0] and optimizer.step.get_value() == 3


def failing(params):
    del params
    raise ValueError("no state")


LATE = {
    "an optimizer that raises": {"tx": optax.GradientTransformation(failing, None)},
    "a rule without a match": {"keep_fp32": "nothing"},
    "a frozen param in half": {"wrt": nnx.LoRAParam},
}


@pytest.mark.parametrize("name", LATE)
def test_an_error_leaves_the_model_unchanged(name):
    model = Coder(nnx.Rngs(0))
    model.up.dtype = jnp.float16
    before = copy.deepcopy(nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ValueError):
        begin("O2", model, **LATE[name])
    assert_same_bits(nnx.to_pure_dict(nnx.state(model)), before)
    assert (type(model), model.up.dtype) == (Coder, jnp.float16)
