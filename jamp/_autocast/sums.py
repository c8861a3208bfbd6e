"""Sums of gradients, in float32: of a bias, of a table, of a weight that loops share.

    y = add(dot_general(a, w), b)          y = with_bias(dot_general(a, w), b)
    scan { w c. y = dot_general(c, w) }    scan { w c. y = product(c, w, half of w) }
    y = convert(gather(w, i))              y = rows(i, w, half of w)
    y:f32 = add(convert x, convert t)      y:f32 = add(convert x, repeated(convert t))
    scan { v w c. u = concatenate v w }    u = concatenate v w; scan { u c. }

The gradient of a bias is a sum over all examples. XLA adds up float16 in float16; cast
to float32 first, as JAX would be told by a cast of the bias, XLA keeps the cotangent in
float32 as well, twice as large, for this sum alone. So the rounded cotangent is made
first, which the product's own gradients read, and the sum reads that. XLA for a TPU
adds up where it makes the cotangent, at no cost.

What is broadcast in half and added to half, such as a time to the pixels, is such a sum
too where a norm has the addition in float32: of what the other's cotangent is rounded
to, not of one in float32 that would be there for this sum alone.

The gradient of a weight that all trips of a loop share is a sum of products, one of
each trip. Rounded to half, each would be written, read and added by kernels of their
own. XLA for CUDA adds a float32 product of half operands where it computes it: two
thirds of the bytes, and one rounding less. It would merge the products of several
weights with one cotangent, and add slices of the result; with copies of the cotangent
it does not.

The gradients of a table's rows are added to that of the head that is the same table, in
float32. The rows are read from the half copy that the head's product reads, or from a
half param: in float32 the first norm's backward pass would keep them.

Flax joins the weights of an LSTM's gates in each step. XLA does so once, before the
loop. But of what a loop is given JAX sums the gradient: on each trip that of the joined
weight would be cut into parts, and each part be added by a kernel. So what only
rearranges a scan's constants is taken out of it first.
"""

import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.frames import (
    frames_of,
    scan_counts,
    with_fewer_consts,
    with_programs,
)
from jamp._autocast.primitives import Shape, traits_of
from jamp._core.dtypes import FLOAT32
from pallas_kernels._compat import compute_capability


@jax.custom_jvp
def with_bias(product: Array, bias: Array) -> Array:
    """The sum of a half product and a float32 bias of as many axes, in half."""
    return product + bias.astype(product.dtype)


def _derivative(primals, tangents):
    (product, bias), (of_product, of_bias) = primals, tangents
    if isinstance(of_bias, SymbolicZero):
        return with_bias(product, bias), of_product
    repeated = jnp.ones_like(product, of_bias.dtype) * of_bias
    tangent = apart(repeated.astype(product.dtype))
    if not isinstance(of_product, SymbolicZero):
        tangent = of_product + tangent
    return with_bias(product, bias), tangent


with_bias.defjvp(_derivative, symbolic_zeros=True)


def apart(tangent: Array) -> Array:
    """A tangent whose cotangent is there before it is read, on a GPU."""
    return _apart.bind(tangent)


# A primitive, since `jax.lax.platform_dependent` would trace two programs for each.
_apart = Primitive("apart")
_apart.def_impl(lambda x: x)
_apart.def_abstract_eval(lambda x: x)
ad.deflinear2(_apart, lambda cotangent, _: [apart(cotangent)])
batching.defvectorized(_apart)
mlir.register_lowering(_apart, lambda _, x: [x])
_barrier = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
for _gpu in ("cuda", "rocm"):
    mlir.register_lowering(_apart, _barrier, platform=_gpu)


@functools.lru_cache(maxsize=256)
def broadcast(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """What broadcasts to a shape: one for each, for it is traced once."""
    return lambda x: jnp.broadcast_to(x, shape)


@functools.cache
def repeated(half: DTypeLike) -> Callable[[Array], Array]:
    """What hands a float32 array on, and rounds its cotangent to half."""
    return functools.partial(_repeated.bind, half=np.dtype(half))


def _derivative_of_repeated(primals, tangents, half):
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = apart(tangent.astype(half)).astype(x.dtype)
    return repeated(half)(x), tangent


# A primitive, since islands hold it.
_repeated = Primitive("repeated")
_repeated.def_impl(lambda x, half: x)
_repeated.def_abstract_eval(lambda x, half: x)
ad.primitive_jvps[_repeated] = _derivative_of_repeated
batching.defvectorized(_repeated)
mlir.register_lowering(_repeated, lambda _, x, half: [x])


@functools.lru_cache(maxsize=256)
def with_weight(numbers: Any, first: bool, copies: int) -> Callable[..., Array]:
    """What multiplies a half array by a float32 weight, given a half copy of that too.

    `jax.lax.dot_general` takes the `numbers`, and the weight as `first` or second. So
    many `copies` of the cotangent are read by other products.
    """

    def dot(x: Array, weight: Array, dtype: DTypeLike, precision: Any = None) -> Array:
        operands = (weight, x) if first else (x, weight)
        return jax.lax.dot_general(
            *operands, numbers, precision=precision, preferred_element_type=dtype
        )

    @jax.custom_jvp
    def product(x: Array, weight: Array, in_half: Array) -> Array:
        return dot(x, in_half, x.dtype)

    def in_float32(x: Array, weight: Array) -> Array:
        # The algorithm says what the operands are cast to, the cotangent too.
        half_operands = jax.lax.DotAlgorithm(x.dtype, x.dtype, FLOAT32)
        return dot(x, weight, FLOAT32, half_operands).astype(x.dtype)

    def derivative(primals, tangents):
        (x, weight, in_half), (of_x, of_weight, _) = primals, tangents
        half = x.dtype
        known = [] if isinstance(of_x, SymbolicZero) else [dot(of_x, in_half, half)]
        if not isinstance(of_weight, SymbolicZero):
            rounded = lambda x, w: dot(x, w.astype(half), half)  # noqa: E731
            on_cuda = in_float32 if has_algorithm(half) else rounded
            tangent = jax.lax.platform_dependent(
                x, of_weight, cuda=on_cuda, default=rounded
            )
            for _ in range(copies):
                tangent = apart(tangent)
            known.append(tangent)
        return product(x, weight, in_half), sum(known[1:], known[0])

    product.defjvp(derivative, symbolic_zeros=True)
    return product


@functools.lru_cache(maxsize=256)
def rows_of(params: tuple[tuple[str, Any], ...]) -> Callable[..., Array]:
    """What looks rows of a float32 table up in a half copy of it, as a gather does."""
    gather = functools.partial(jax.lax.gather_p.bind, **dict(params))

    @jax.custom_jvp
    def rows(indices: Array, table: Array, in_half: Array) -> Array:
        return gather(in_half, indices)

    def derivative(primals, tangents):
        (indices, _, in_half), (_, of_table, _) = primals, tangents
        found = rows(*primals)
        if isinstance(of_table, SymbolicZero):
            return found, jnp.zeros_like(found)
        return found, gather(of_table, indices).astype(in_half.dtype)

    rows.defjvp(derivative, symbolic_zeros=True)
    return rows


def has_algorithm(half: DTypeLike) -> bool:
    """Whether XLA takes an algorithm for a half dtype on the GPUs here.

    It refuses one for bfloat16 before Ampere.
    """
    found = map(compute_capability, jax.local_devices())
    return half == jnp.float16 or not any(c and c < (8, 0) for c in found)


# ---- what only rearranges the constants of a loop

# Each number of theirs is one of an operand's, and each of those is there once.
_REARRANGE = (Shape.RESHAPE, Shape.REARRANGE)


def moves_taken_out(jaxpr: jc.Jaxpr, done: dict[int, jc.Jaxpr]) -> jc.Jaxpr:
    """The same program, and itself where there is nothing to take out.

    What became of programs is `done`, by their `id`, for one may be called twice.
    """
    if id(jaxpr) not in done:
        eqns: list[jc.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            eqns += _taken_out_of(eqn, done)
        same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
        done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=eqns)
    return done[id(jaxpr)]


def _taken_out_of(eqn: jc.JaxprEqn, done: dict[int, jc.Jaxpr]) -> list[jc.JaxprEqn]:
    frames = frames_of(eqn)
    new = [moves_taken_out(frame.program, done) for frame in frames]
    if any(a is not frame.program for a, frame in zip(new, frames, strict=True)):
        eqn = eqn.replace(params=with_programs(eqn, new))
    # An effect names operands by their places.
    split = eqn.primitive.name == "scan" and not new[0].effects
    return _split(eqn, new[0]) if split else [eqn]


def _split(scan: jc.JaxprEqn, body: jc.Jaxpr) -> list[jc.JaxprEqn]:
    """A scan, and before it what only rearranges its constants.

    What is read elsewhere in the body as well stays: it would be two constants.
    """
    consts, _ = scan_counts(scan)
    reads = [v for eqn in body.eqns for v in eqn.invars] + list(body.outvars)
    times = collections.Counter(v for v in reads if isinstance(v, jc.Var))
    outside = dict(zip(body.invars[:consts], scan.invars[:consts], strict=True))
    taken, left = [], []
    for eqn in body.eqns:
        operands = [v for v in eqn.invars if isinstance(v, jc.Var)]
        alone = all(v in outside and times[v] == 1 for v in operands)
        all_vars = len(operands) == len(eqn.invars)
        moves = traits_of(eqn.primitive.name).shape in _REARRANGE
        if moves and alone and all_vars:
            (inside,) = eqn.outvars
            invars = [outside.pop(v) for v in operands]
            outside[inside] = new = jc.Var(inside.aval)
            taken.append(jax_internals.equation_before(scan, eqn, invars, new))
        else:
            left.append(eqn)
    if not taken:
        return [scan]
    return [*taken, with_fewer_consts(scan, body, left, outside)]
