"""Test that each primitive of jamp has all rules that JAX asks a primitive for.

One of them runs before a loop whose trips share its operand.
"""

import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.sharding import AxisType, PartitionSpec as P

import jamp
import pallas_kernels
from jamp._autocast import barriers, products, reduction, sums
from jamp._fp8 import quantized
from jamp._fp8.quantized import Of, quantize
from pallas_kernels import layouts
from tests.support.programs import walk

NUMBERS = ((1,), (0,)), ((), ())  # of a matmul of two matrices
# fp8 holds these numbers, and their products with 2 and 3, exactly.
X = jnp.asarray(np.random.default_rng(0).choice([-2, -1, 0.5, 1], (8, 8)), jnp.bfloat16)
fp8_derivative = functools.partial(
    quantized._linear.bind, numbers=NUMBERS, half=jnp.bfloat16, first=True
)
# Linear functions of a half array that return the array. `fp8_once` is only for the
# gradient of a matmul, and `quantize` returns another dtype: see the tests below.
LINEAR = {
    "residual": functools.partial(barriers._barrier.bind, backward=False),
    "residual (backward)": functools.partial(barriers._barrier.bind, backward=True),
    "kept": barriers.kept,
    "sum": barriers.kept_on_tpu,
    "apart": sums.apart,
    "repeated": functools.partial(sums._repeated.bind, half=jnp.bfloat16),
    "product": lambda x: products.product_with(x, jnp.eye(8), NUMBERS, False),
    "product (first)": lambda x: products.product_with(x, jnp.eye(8), NUMBERS, True),
    "row_major": layouts._row_major.bind,
    "made": reduction._made.bind,
    "fp8_derivative": lambda x: fp8_derivative(x, jnp.eye(8, dtype=x.dtype)),
}
OTHERS = {
    "fp8_once": quantized._once.bind,
    "quantize": lambda x: quantized._quantize.bind(x, of=quantized.Of.INPUT),
}


def test_these_are_all_primitives_of_jamp():
    found = set()
    for package in (jamp, pallas_kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                values = vars(importlib.import_module(module.name)).values()
                found |= {x.name for x in values if _is_own(x)}
    assert found == {f"jamp_{name.partition(' ')[0]}" for name in LINEAR | OTHERS}


def _is_own(x):
    return isinstance(x, Primitive) and not hasattr(primitives, f"{x}_p")


def close(got, want):
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0)


@pytest.mark.parametrize("name", LINEAR)
def test_forward_and_reverse_mode(name):
    fn = LINEAR[name]
    out, tangent = jax.jvp(fn, (X,), (2 * X,))
    close(out, X)
    close(tangent, 2 * X)
    (gradient,) = jax.vjp(fn, X)[1](3 * X)
    close(gradient, 3 * X)


@pytest.mark.parametrize("name", LINEAR)
def test_the_transpose_of_a_linear_function(name):
    # JAX transposes a primitive itself if it reads a tangent, as in a `custom_jvp`.
    close(jax.linear_transpose(LINEAR[name], X)(3 * X)[0], 3 * X)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.jacfwd])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
@pytest.mark.parametrize("name", LINEAR)
def test_inside_a_checkpoint(name, policy, transform):
    fn = jax.checkpoint(lambda x: LINEAR[name](x * x).sum(), policy=policy)
    got = transform(fn)(X)
    close(got[1] if isinstance(got, tuple) else got, 2 * X)


@pytest.mark.parametrize("name", LINEAR)
def test_batches(name):
    batch = jnp.stack([X, 2 * X])
    close(jax.vmap(LINEAR[name])(batch), batch)
    close(jax.vmap(lambda x: jax.vjp(LINEAR[name], x)[1](x)[0])(batch), batch)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("name", LINEAR | OTHERS)
def test_lowers_for_each_platform(name, platform):
    traced = jax.jit((LINEAR | OTHERS)[name]).trace(X)
    assert "func.func" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_second_derivative_of_an_fp8_matmul_raises():
    of_cotangent = functools.partial(quantized._quantize.bind, of=Of.COTANGENT)
    for bind in (OTHERS["fp8_once"], of_cotangent):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            jax.jvp(bind, (X,), (X,))


@pytest.mark.parametrize("name", OTHERS)
def test_batches_of_those_with_another_result(name):
    batch = jnp.stack([X, X])
    assert jax.tree.leaves(jax.vmap(OTHERS[name])(batch))[0].shape == batch.shape


QUARTERS = jnp.arange(4.0).reshape(2, 2) / 4


def total(x):
    return quantize(x, Of.INPUT)[0].astype(jnp.float32).sum()


def trips(fn):
    return lax.scan(lambda sum, _: (sum + fn(), None), jnp.float32(0), length=2)[0]


def alone(x):
    """Closes a `shard_map` over the array."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    fn = lambda: total(x)  # noqa: E731
    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()


jitted = jax.jit(total)
BOUND_BEFORE = {
    "scan": lambda x: trips(lambda: total(x)),
    "scan of scan": lambda x: trips(lambda: trips(lambda: total(x))),
    "cast": lambda x: trips(lambda: total(x.astype("bfloat16").T)),
    "jit": lambda x: trips(jax.jit(lambda: total(x))),
    "branch": lambda x: lax.cond(
        x[0, 0] == 0, lambda: total(x), lambda: jnp.float32(0)
    ),
    "gradient": lambda x: trips(
        lambda: jax.grad(lambda x: total(x) + x.sum())(x).sum()
    ),
}
BOUND_WITHIN = {
    "computed": lambda x: trips(lambda: total(x + 1)),
    "an argument": lambda x: trips(lambda: jitted(x)),
    "vmap": lambda x: jax.vmap(BOUND_BEFORE["scan"])(x).sum(),
    "shard_map": alone,
}


@pytest.mark.parametrize("name", BOUND_BEFORE | BOUND_WITHIN)
def test_a_loop_invariant_is_quantized_before_the_loop(name):
    fn = (BOUND_BEFORE | BOUND_WITHIN)[name]
    program = jax.make_jaxpr(fn)(QUARTERS).jaxpr
    names = [eqn.primitive.name for eqn in program.eqns]
    everywhere = [eqn.primitive.name for eqn in walk(program)]
    assert everywhere.count("jamp_quantize") == 1
    assert ("jamp_quantize" in names) == (name in BOUND_BEFORE)
    with jax.disable_jit():  # moves no operation
        expected = fn(QUARTERS)
    np.testing.assert_array_equal(jax.jit(fn)(QUARTERS), expected)
