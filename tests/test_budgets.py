"""What jamp's steps cost on an H200, against the same steps without jamp."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests import by_hand, h200, models, programs
from tests.by_jamp import amp_gradients, amp_init, amp_step
from tests.hlo import Program

# optax, and a model with `dtype=`, promote; as in the programs that users write.
pytestmark = pytest.mark.standard_promotion

TX = optax.adam(1e-3)
HALF = {"O2": "f16", "O3": "f16", "O5": "bf16"}

both = pytest.mark.parametrize("case", ["cnn", "transformer"])
half_levels = pytest.mark.parametrize("level", HALF)


class Case(NamedTuple):
    """A model, and the shapes that it is trained on."""

    model: Any
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct

    def variables(self) -> Any:
        return jax.eval_shape(self.model.init, jax.random.key(0), self.inputs)


# Large enough that parameters and activations, not scalars, are what is counted. Few
# tokens: over many XLA would split the sums of a weight's gradient, which adds kernels.
CASES = {
    "cnn": Case(
        models.CNN(features=(128, 256), classes=100),
        jax.ShapeDtypeStruct((64, 32, 32, 16), jnp.float32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
    ),
    "transformer": Case(
        models.Transformer(1024, width=1024, heads=16, depth=1, length=128),
        jax.ShapeDtypeStruct((8, 128), jnp.int32),
        jax.ShapeDtypeStruct((8, 128), jnp.int32),
    ),
}


def amp_state(case: str, level: str, loss_scale: Any = None) -> Any:
    model = CASES[case].model
    init = functools.partial(amp_init, model, tx=TX, level=level, loss_scale=loss_scale)
    return jax.eval_shape(init, CASES[case].variables())


@functools.cache
def amp_program(case: str, level: str, loss_scale: Any = None) -> Program:
    _, inputs, labels = CASES[case]
    state = amp_state(case, level, loss_scale)
    return h200.compile_step(amp_step, state, inputs, labels, donate=(0,))


@functools.cache
def plain_program(case: str) -> Program:
    model, inputs, labels = CASES[case]
    init = functools.partial(by_hand.plain_init, model, tx=TX)
    state = jax.eval_shape(init, CASES[case].variables())
    return h200.compile_step(by_hand.plain_step, state, inputs, labels, donate=(0,))


@functools.cache
def mixed_program(case: str) -> Program:
    model, inputs, labels = CASES[case]
    init = functools.partial(by_hand.mixed_init, tx=TX, dtype=jnp.float16)
    state = jax.eval_shape(init, CASES[case].variables())
    step = by_hand.mixed_step(model.clone(dtype=jnp.float16), TX, jnp.float16)
    return h200.compile_step(step, state, inputs, labels, donate=(0,))


def tree_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def factors(products: Iterable[Any]) -> set[str]:
    return {dtype for product in products for dtype in (product.lhs, product.rhs)}


@pytest.mark.h200
@both
def test_o0_adds_no_traffic_and_two_scalar_kernels(case):
    amp, plain = amp_program(case, "O0"), plain_program(case)
    assert amp.kernels <= plain.kernels + 2
    # A scalar kernel reads and writes 4 bytes: `unskipped + 1` and a constant flag.
    assert amp.traffic <= plain.traffic + 16
    assert amp.temp <= 1.02 * plain.temp


@pytest.mark.h200
@both
def test_o2_costs_what_it_costs_by_hand(case):
    amp, mixed = amp_program(case, "O2"), mixed_program(case)
    assert amp.traffic <= 1.02 * mixed.traffic
    assert amp.temp <= 1.02 * mixed.temp


@pytest.mark.h200
@both
def test_a_dynamic_scale_adds_one_read_of_the_gradients_to_a_step(case):
    params = amp_state(case, "O2").params
    dynamic, static = amp_program(case, "O2"), amp_program(case, "O2", 128.0)
    # A gradient that is a sum (a bias, the places) is summed inside the optimizer's
    # kernel where nothing checks it, and else written first: 9 % of a read here.
    one_read = tree_bytes(params)
    assert dynamic.traffic <= static.traffic + 1.125 * one_read
    assert dynamic.kernels <= static.kernels + 2 * len(jax.tree.leaves(params)) + 10


@pytest.mark.h200
def test_a_dynamic_scale_adds_exactly_one_read_to_an_update():
    shapes = {"kept": (1024, 1024)}
    for layer in range(10):
        shapes |= {f"kernel_{layer}": (1024, 512), f"bias_{layer}": (512,)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    def init(params, loss_scale):
        return jamp.initialize(
            params, TX, "O2", loss_scale=loss_scale, keep_fp32="kept", verbosity=0
        )

    def update(state, grads):
        def loss_fn(params):
            products = jax.tree.map(
                lambda p, g: (p * g).sum(dtype="float32"), params, grads
            )
            return sum(jax.tree.leaves(products))

        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))

    def compiled(loss_scale):
        state = jax.eval_shape(functools.partial(init, loss_scale=loss_scale), params)
        return h200.compile_step(update, state, state.params, donate=(0,)), state.params

    (dynamic, half), (static, _) = compiled("dynamic"), compiled(128.0)
    one_read = tree_bytes(half)
    assert one_read == 4 * 1024 * 1024 + 2 * 10 * (1024 * 512 + 512)
    # Beside it: partial results of the check, a byte per thousand elements, written and
    # read, and a few scalars per leaf.
    slop = 2 * one_read / 1000 + 64 * len(shapes)
    assert 0.99 * one_read <= dynamic.traffic - static.traffic <= one_read + slop
    assert dynamic.kernels <= static.kernels + 2 * len(shapes) + 10


@pytest.mark.h200
@both
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_donated_state_is_updated_in_place(case, level):
    amp = amp_program(case, level)
    # The step does not read `last_step_skipped`, one byte: JAX leaves that out.
    assert amp.aliased_bytes == tree_bytes(amp_state(case, level)) - 1
    assert max(amp.copies, default=0) < 2**16


@pytest.mark.h200
@both
@half_levels
def test_no_float32_product_is_left_on_an_h200(case, level):
    if level == "O2":
        program = amp_program(case, level)
    else:
        _, inputs, labels = CASES[case]
        program = h200.compile_step(
            amp_gradients, amp_state(case, level), inputs, labels
        )
    assert factors(plain_program(case).products) == {"f32"}
    assert factors(program.products) == {HALF[level]}
    assert len(program.products) == len(plain_program(case).products)


@both
@half_levels
def test_no_float32_product_is_left_in_the_jaxpr(case, level):
    model, inputs, labels = CASES[case]
    init = functools.partial(by_hand.plain_init, model, tx=TX)
    state = jax.eval_shape(init, CASES[case].variables())
    plain = programs.products(by_hand.plain_step, state, inputs, labels)
    amp = programs.products(amp_step, amp_state(case, level), inputs, labels)
    assert factors(plain) == {"float32"}
    assert factors(amp) == {"bfloat16" if level == "O5" else "float16"}
    assert len(amp) == len(plain)
