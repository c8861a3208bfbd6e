"""Sums the gradients of biases, lookups and weights in loops in float32.

    y = add(dot_general(a, w), b)          y = with_bias(dot_general(a, w), b)
    scan { w c. y = dot_general(c, w) }    scan { w c. y = matmul(c, w, half of w) }
    y = gather(t, i)                       y, t' = with_lookup(t, i)
    y:f32 = add(convert x, convert t)      y:f32 = add_repeated(convert x, convert t)
    scan { v w c. u = concatenate v w }    u = concatenate v w; scan { u c. }

The gradient of a bias is a sum over all examples. XLA sums float16 in float16. If the
bias is cast, XLA stores the cotangent in float32 as well, only for this sum. So the
rewrite first rounds the cotangent, and both the gradients of the matmul and the sum
read the rounded one. On a TPU, XLA fuses the sum with the cotangent.

The gradient of a broadcast half array in a float32 addition is also a sum. It reads the
rounded cotangent of the other operand, so that XLA does not store one in float32.

The gradient of a lookup, such as the rows of an embedding table, is a sum over all
examples that read a row. XLA scatters half cotangents into a half array, and rounds
after each addition. So a lookup in a half array scatters into a float32 array. A lookup
also returns its array, for later readers: the logits of tied embeddings read t'. Then
their gradient is a term of the float32 sum. XLA scatters into it, so that its matmul
runs as soon as the cotangents of the logits are known, and these need no memory later.

The gradient of a weight that all iterations of a loop share is a sum with one matmul
per iteration. In half, separate kernels would write, read and add each matmul. XLA for
CUDA adds a float32 matmul of half operands in the kernel that computes it, which takes
two thirds of the bytes and omits one rounding. If several weights have one cotangent,
XLA would merge their matmuls and add slices of the result. Copies of the cotangent
prevent this.

Flax concatenates the weights of an LSTM's gates in each step. XLA moves the
concatenation out of the loop. But JAX sums the gradients of the separate weights: each
iteration would split the gradient of the joined weight and add each part in a separate
kernel. So the rewrite moves operations that only rearrange a scan's constants out of
the scan.
"""

import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.primitives import REARRANGES, traits_of
from jamp._autocast.products import product_with
from jamp._autocast.scope import size_of_shape
from jamp._autocast.subjaxprs import (
    once_per_jaxpr,
    scan_counts,
    subjaxprs_of,
    with_jaxprs,
)
from jamp._core.dtypes import FLOAT32


@jax.custom_jvp
def with_bias(matmul: Array, bias: Array) -> Array:
    """Adds a float32 bias in half to a half matmul of the same rank."""
    return matmul + bias.astype(matmul.dtype)


def _derivative(primals, tangents):
    (matmul, bias), (of_matmul, of_bias) = primals, tangents
    if isinstance(of_bias, SymbolicZero):
        return with_bias(matmul, bias), of_matmul
    repeated = jnp.ones_like(matmul, of_bias.dtype) * of_bias
    tangent = apart(repeated.astype(matmul.dtype))
    if not isinstance(of_matmul, SymbolicZero):
        tangent = of_matmul + tangent
    return with_bias(matmul, bias), tangent


with_bias.defjvp(_derivative, symbolic_zeros=True)


def apart(tangent: Array) -> Array:
    """Returns the tangent. A GPU stores its cotangent before operations read it."""
    return _apart.bind(tangent)


# This is a primitive because `jax.lax.platform_dependent` would trace two jaxprs.
_apart = Primitive("jamp_apart")
_apart.def_impl(lambda x: x)
_apart.def_abstract_eval(lambda x: x)
ad.deflinear2(_apart, lambda cotangent, _: [apart(cotangent)])
batching.defvectorized(_apart)
mlir.register_lowering(_apart, lambda _, x: [x])
lower_barrier = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
for _gpu in ("cuda", "rocm"):
    mlir.register_lowering(_apart, lower_barrier, platform=_gpu)


@functools.cache
def add_repeated(half: DTypeLike) -> Callable[[Array, Array], Array]:
    """Returns a function that adds a broadcast array, whose cotangent it rounds."""

    def add(x: Array, small: Array) -> Array:
        return x + _repeated.bind(jnp.broadcast_to(small, x.shape), half=half)

    return add


def _rounded(cotangent: Array, x: Any, half: DTypeLike) -> list[Array]:
    return [apart(cotangent.astype(half)).astype(cotangent.dtype)]


# This is a primitive because islands contain only primitives.
_repeated = Primitive("jamp_repeated")
_repeated.def_impl(lambda x, half: x)
_repeated.def_abstract_eval(lambda x, half: x)
ad.deflinear2(_repeated, _rounded)
batching.defvectorized(_repeated)
mlir.register_lowering(_repeated, lambda _, x, half: [x])


@functools.cache
def joined(half: DTypeLike) -> Callable[..., Array]:
    """Returns a function that returns its first operand, computed from the others.

    It rounds the cotangent to half if another operand has a gradient.
    """

    @jax.custom_jvp
    def join(x: Array, *_: Array) -> Array:
        return x

    def derivative(primals, tangents):
        (x, *_), (tangent, *others) = primals, tangents
        summed = not all(isinstance(t, SymbolicZero) for t in others)
        return x, _repeated.bind(tangent, half=half) if summed else tangent

    join.defjvp(derivative, symbolic_zeros=True)
    return join


@functools.lru_cache(maxsize=256)
def with_weight(numbers: Any, first: bool, copies: int) -> Callable[..., Array]:
    """Returns a matmul of a half array and a float32 weight with a half copy.

    `numbers` are the dimension numbers of the `dot_general`. `first` states whether
    the weight is its first operand. `copies` is the number of copies of the cotangent,
    which differs among the matmuls of a jaxpr.
    """

    def dot(x: Array, weight: Array) -> Array:
        operands = (weight, x) if first else (x, weight)
        return jax.lax.dot_general(*operands, numbers, preferred_element_type=x.dtype)

    @jax.custom_jvp
    def matmul(x: Array, weight: Array, in_half: Array) -> Array:
        return dot(x, in_half)

    def derivative(primals, tangents):
        (x, weight, in_half), (of_x, of_weight, _) = primals, tangents
        known = [] if isinstance(of_x, SymbolicZero) else [dot(of_x, in_half)]
        if not isinstance(of_weight, SymbolicZero):
            tangent = product_with(x, of_weight, numbers, first)
            for _ in range(copies):
                tangent = apart(tangent)
            known.append(tangent)
        return matmul(x, weight, in_half), sum(known[1:], known[0])

    matmul.defjvp(derivative, symbolic_zeros=True)
    return matmul


LOOKUPS = ("gather", "dynamic_slice")


@functools.lru_cache(maxsize=256)
def with_lookup(
    primitive: Primitive, params: tuple[tuple[str, Any], ...]
) -> Callable[..., tuple[Array, Array]]:
    """Returns a lookup in a half array whose gradient is a float32 sum.

    It returns the result and the array. The sum contains the cotangents of both.
    `params` are the parameters of the `primitive`, one of `LOOKUPS`.
    """
    bind = functools.partial(primitive.bind, **dict(params))

    @jax.custom_jvp
    def lookup(table: Array, *places: Array) -> tuple[Array, Array]:
        return bind(table, *places), table

    def derivative(primals, tangents):
        table, *places = primals
        gathers = primitive.name == "gather"
        rows = _rows(table, *places, **dict(params)) if gathers else None

        def in_float32(table):
            if rows is not None and 2 * size_of_shape(rows.shape) < len(table):
                return _of_distinct_rows(table, rows), table
            wide = table.astype(FLOAT32)
            return bind(wide, *places).astype(table.dtype), wide.astype(table.dtype)

        _, tangent = jax.jvp(in_float32, (table,), tangents[:1])
        return lookup(*primals), tangent

    lookup.defjvp(derivative)
    return lookup


def _rows(table: Array, places: Array, **params: Any) -> Array | None:
    """Returns the rows that a gather looks up, or None if it looks up other slices.

    A row beyond the table is `len(table)`.
    """
    numbers = params["dimension_numbers"]
    ndim, n = places.ndim - 1, len(table)
    whole = params["slice_sizes"] == (1, *table.shape[1:])
    trailing = tuple(range(ndim, ndim + table.ndim - 1))
    expected = trailing, (0,), (0,), ()
    if not whole or expected != (
        *(numbers.offset_dims, numbers.collapsed_slice_dims),
        *(numbers.start_index_map, numbers.operand_batching_dims),
    ):
        return None
    rows = as_indices(places[..., 0])
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        return jnp.clip(rows, 0, n - 1)
    return jnp.where((rows >= 0) & (rows < n), rows, n)


def as_indices(x: Array) -> Array:
    """Casts integers of few bits, which cannot count the rows of a large array."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def _of_distinct_rows(table: Array, rows: Array) -> Array:
    """Looks up each row once in half, and the rows among these in float32.

    The transpose sums the cotangents of equal rows in a float32 array with one row per
    lookup, and scatters the rounded sums into the half table. If the lookups are few,
    this array is smaller than a float32 table.
    """
    flat, n = rows.reshape(-1), len(table)
    places = jnp.arange(flat.size)
    # The first lookup of each row stands for all lookups of this row.
    first = jnp.full(n, flat.size).at[flat].min(places, mode="drop")
    first = first.at[flat].get(mode="fill", fill_value=flat.size)
    distinct = jnp.where(first == places, flat, n)
    found = table.at[distinct].get(mode="fill", fill_value=0).astype(FLOAT32)
    found = found.at[first].get(mode="fill", fill_value=0)
    return found.reshape(*rows.shape, *table.shape[1:]).astype(table.dtype)


# ---- moving rearrangements of constants out of a loop


def moves_taken_out(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
    """Moves rearrangements of a scan's constants out of all scans of a jaxpr.

    Returns the same jaxpr if nothing moves.
    """
    return _moved(jaxpr) or jaxpr


@once_per_jaxpr
def _moved(jaxpr: jc.Jaxpr) -> jc.Jaxpr | None:
    """Returns None if nothing moves, because a cached jaxpr would stay alive."""
    eqns: list[jc.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _taken_out_of(eqn)
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return None if same else jaxpr.replace(eqns=eqns)


def _taken_out_of(eqn: jc.JaxprEqn) -> list[jc.JaxprEqn]:
    old = [sub.jaxpr for sub in subjaxprs_of(eqn)]
    new = list(map(moves_taken_out, old))
    if not all(map(operator.is_, new, old)):
        eqn = eqn.replace(params=with_jaxprs(eqn, new))
    # An effect refers to operands by position.
    split = eqn.primitive.name == "scan" and not new[0].effects
    return _split(eqn, new[0]) if split else [eqn]


def _split(scan: jc.JaxprEqn, body: jc.Jaxpr) -> list[jc.JaxprEqn]:
    """Returns a scan, preceded by the operations that only rearrange its constants.

    If another equation also reads the constant, the operation stays in the body.
    Moving it would add a constant.
    """
    consts, _ = scan_counts(scan)
    reads = [v for eqn in body.eqns for v in eqn.invars] + list(body.outvars)
    times = collections.Counter(v for v in reads if isinstance(v, jc.Var))
    inner, outer = list(body.invars), list(scan.invars)
    places = {v: i for i, v in enumerate(inner[:consts]) if times[v] == 1}
    taken, left = [], []
    for eqn in body.eqns:
        operands = [v for v in eqn.invars if isinstance(v, jc.Var) and v in places]
        moves = traits_of(eqn.primitive.name).shape in REARRANGES
        if not moves or len(operands) < len(eqn.invars):
            left.append(eqn)
            continue
        # The result takes the place of the first operand. No equation of the body reads
        # the others any more.
        given = [places.pop(v) for v in operands]
        (inside,), outside = eqn.outvars, jc.Var(eqn.outvars[0].aval)
        invars = [outer[i] for i in given]
        taken.append(jax_internals.equation_before(scan, eqn, invars, outside))
        inner[given[0]], outer[given[0]] = inside, outside
        if times[inside] == 1:
            places[inside] = given[0]
    if not taken:
        return [scan]
    body = jax_internals.unnamed(body).replace(invars=inner, eqns=left)
    return [*taken, scan.replace(invars=outer, params=with_jaxprs(scan, [body]))]
