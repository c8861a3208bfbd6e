"""Multiplies half values. On CUDA, a float32 operand has a float32 gradient.

    y:f16 = product[a b, b c -> a c] x w:f32
    g:f32 = product[a c, a b -> b c] ct x          its transpose

JAX would transpose a `dot_general` of a half and a float32 operand to one with the same
dtypes, which XLA runs in float32. `jax.lax.platform_dependent` would lower both forms
for all platforms of an export, and a CPU rejects the algorithm of the CUDA form.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

# The axes of the two operands and of the result. Each number occurs in two of them.
type Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def product_with(x: Array, weight: Array, numbers: Any, first: bool) -> Array:
    """Returns a `dot_general` of a half array and a float32 weight, in half.

    `first` states whether the weight is the first operand.
    """
    operands = (weight, x) if first else (x, weight)
    axes = _axes_of(numbers, [operand.ndim for operand in operands])
    return _product.bind(
        *operands, axes=axes, half=x.dtype, dtype=x.dtype, sharding=None
    )


def _axes_of(numbers: Any, ranks: Sequence[int]) -> Axes:
    """Returns the axes of a `dot_general`: batch, then each operand's free axes."""
    (contracted, batch), (rank, other_rank) = numbers, ranks
    first, count = list(range(rank)), rank
    second = [-1] * other_rank
    for mine, its in (contracted, batch):
        for i, j in zip(mine, its, strict=True):
            second[j] = first[i]
    for j, axis in enumerate(second):
        if axis < 0:
            second[j], count = count, count + 1
    batch_axes = [first[i] for i in batch[0]]
    gone = {first[i] for i in contracted[0]}
    free = [a for a in dict.fromkeys(first + second) if a not in {*gone, *batch_axes}]
    return tuple(first), tuple(second), (*batch_axes, *free)


def _multiply(
    x: Array,
    y: Array,
    axes: Axes,
    half: DTypeLike,
    dtype: DTypeLike,
    sharding: Any,
    on_cuda: bool,
) -> Array:
    first, second, result = axes
    out = jnp.einsum(
        *(x.astype(half), first, y.astype(half), second, result),
        preferred_element_type=dtype if on_cuda else half,
        out_sharding=sharding,
    )
    return out.astype(dtype)


_on_cuda = functools.partial(_multiply, on_cuda=True)
_elsewhere = functools.partial(_multiply, on_cuda=False)
_product = Primitive("jamp_product")
_OPTIONS = ("axes", "half", "dtype", "sharding")
_product.def_impl(
    jax.jit(
        lambda *args, **options: _product.bind(*args, **options),
        static_argnames=_OPTIONS,
    )
)


@_product.def_abstract_eval
def _type_of(x: Any, y: Any, **options: Any) -> Any:
    jaxpr = jax.make_jaxpr(functools.partial(_elsewhere, **options))(x, y)
    return jaxpr.jaxpr.outvars[0].aval


def _transpose_first(
    cotangent: Array, x: Any, y: Array, axes: Axes, half: DTypeLike, **_: Any
) -> Array:
    first, second, result = axes
    options = _like(x.aval, half)
    return _product.bind(cotangent, y, axes=(result, second, first), **options)


def _transpose_second(
    cotangent: Array, x: Array, y: Any, axes: Axes, half: DTypeLike, **_: Any
) -> Array:
    first, second, result = axes
    options = _like(y.aval, half)
    return _product.bind(x, cotangent, axes=(first, result, second), **options)


def _like(aval: Any, half: DTypeLike) -> dict[str, Any]:
    """Returns the options of a product that is a gradient of an operand."""
    # On an explicit mesh, a sum over a sharded axis must name its sharding.
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return {"half": half, "dtype": aval.dtype, "sharding": sharding}


def _batched(
    args: Sequence[Array],
    places: Sequence[int | None],
    axes: Axes,
    sharding: Any,
    **options: Any,
) -> tuple[Array, int]:
    *operands, result = axes
    new = 1 + max(map(max, operands))
    for i, place in enumerate(places):
        if place is not None:
            operands[i] = (*operands[i][:place], new, *operands[i][place:])
    if sharding is not None:
        sharding = sharding.update(spec=jax.P(None, *sharding.spec))
    options |= {"axes": (*operands, (new, *result)), "sharding": sharding}
    return _product.bind(*args, **options), 0


ad.defbilinear(_product, _transpose_first, _transpose_second)
batching.primitive_batchers[_product] = _batched
mlir.register_lowering(_product, mlir.lower_fun(_elsewhere, multiple_results=False))
_lower_on_cuda = mlir.lower_fun(_on_cuda, multiple_results=False)
mlir.register_lowering(_product, _lower_on_cuda, platform="cuda")
