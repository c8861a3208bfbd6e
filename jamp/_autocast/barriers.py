"""Makes the backward pass of a checkpoint compute float32 values again.

    y = residual x      forward, this is `y = x`; backward, a barrier

XLA keeps the float32 values of a forward pass if the backward pass computes the same
values from the same residuals. Behind a barrier, a residual is a different value.
`jax.checkpoint` has one barrier for all residuals and cotangents. A TPU then stores
each cotangent, which it would otherwise compute inside the matmuls that read it. A
*residual barrier* is for one residual.

A TPU needs no barrier for a half array with an axis of 2 to 32 before its last two. XLA
packs the mask inside an `erfc` along this axis into words of 8, 16 or 32 bits. It saves
only this mask, and computes the rest inside each matmul. Behind a barrier, it saves the
result, and BERT moves 1.08 times the bytes on a v5e. With larger axes and no barrier,
XLA saves a float32 `erfc`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jax import Array
from jax.extend import core as jc
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jamp._autocast.calls import followed
from jamp._autocast.jax_internals import at_source
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.scope import size_of_shape
from jamp._autocast.sums import lower_barrier
from jamp._core.dtypes import HALF_DTYPES


def with_barriers(
    eqns: Sequence[jc.JaxprEqn], variables: Collection[jc.Var]
) -> list[jc.JaxprEqn]:
    """Puts a barrier on variables before the equations read them."""
    guarded: dict[Any, jc.Var] = {}

    def barrier(v: jc.Var, source: jc.JaxprEqn) -> jc.JaxprEqn:
        guarded[v] = jc.Var(v.aval)
        params = {"backward": False}
        eqn = jc.new_jaxpr_eqn([v], [guarded[v]], _barrier, params, set())
        return at_source(eqn, source)

    made = {v for eqn in eqns for v in eqn.outvars}
    written = [barrier(v, eqns[0]) for v in variables if v not in made]
    for eqn in eqns:
        read = [guarded.get(v, v) if isinstance(v, jc.Var) else v for v in eqn.invars]
        written.append(eqn.replace(invars=read))
        written += [barrier(v, eqn) for v in eqn.outvars if v in variables]
    return written


def with_kept_sums(
    eqns: Sequence[jc.JaxprEqn], in_rows: bool, jaxprs: dict[Any, Any]
) -> list[jc.JaxprEqn]:
    """Keeps the sums and maxima of a checkpoint, which are small, by its policy.

    A GPU recomputes those `in_rows`, in one kernel with the cotangents of the rows.
    """
    written, function = list[jc.JaxprEqn](), kept_on_tpu if in_rows else kept
    for eqn in eqns:
        found = followed(eqn, function, [], jaxprs) if is_reduction(eqn) else [eqn]
        written += found
    return written


def is_reduction(eqn: jc.JaxprEqn) -> bool:
    """Returns whether an equation is a sum, a maximum or a similar reduction."""
    return traits_of(primitive_name(eqn)).shape is Shape.REDUCE


def is_kept(primitive: jc.Primitive, *_: Any, **__: Any) -> bool:
    """The policy of a checkpoint: it saves what `kept` returns."""
    return primitive is _kept


def kept(x: Array) -> Array:
    """Returns a value that the checkpoint saves."""
    return _kept.bind(x)


def kept_on_tpu(x: Array) -> Array:
    """Returns a value that a TPU's backward pass reads, and a GPU's recomputes."""
    return _sum.bind(kept(x), x)


def _split(
    keeps: Any, unknown: Sequence[bool], saved: Sequence[bool], eqn: jc.JaxprEqn
) -> tuple[Any, ...]:
    """Returns the barriers of both passes, for `jax.checkpoint`.

    The values of the forward pass are known. The backward pass gets the operand as a
    residual if it does not have it yet.
    """
    backward = eqn.replace(params={"backward": True})
    residuals = [] if saved[0] else list(eqn.invars)
    return None if unknown[0] else eqn, backward, unknown, [True], residuals


def _lower(ctx: Any, x: Any, backward: bool) -> Any:
    return lower_barrier(ctx, x) if backward else [x]


def _lower_on_tpu(ctx: Any, x: Any, backward: bool) -> Any:
    (aval,) = ctx.avals_in
    short = any(2 <= size_of_shape((n,)) <= 32 for n in aval.shape[:-2])
    packs = aval.dtype in HALF_DTYPES and short
    return _lower(ctx, x, backward and not packs)


def _derivative(primals: Any, tangents: Any, backward: bool) -> tuple[Array, Any]:
    return _barrier.bind(*primals, backward=backward), *tangents


_barrier = Primitive("jamp_residual")
_barrier.def_impl(lambda x, backward: x)
_barrier.def_abstract_eval(lambda x, backward: x)
ad.primitive_jvps[_barrier] = _derivative
# A user's JVP rule has islands too. Their inputs may be tangents, which JAX transposes.
ad.primitive_transposes[_barrier] = lambda cotangent, *_, **__: [cotangent]
batching.defvectorized(_barrier)
mlir.register_lowering(_barrier, _lower)
mlir.register_lowering(_barrier, _lower_on_tpu, platform="tpu")
partial_eval.partial_eval_jaxpr_custom_rules[_barrier] = _split

_kept = Primitive("jamp_kept")
_kept.def_impl(lambda x: x)
_kept.def_abstract_eval(lambda x: x)
ad.deflinear2(_kept, lambda cotangent, _: [cotangent])
batching.defvectorized(_kept)
mlir.register_lowering(_kept, lambda _, x: [x])

_sum = Primitive("jamp_sum")
_sum.def_impl(lambda kept, again: again)
_sum.def_abstract_eval(lambda kept, again: again)
ad.primitive_jvps[_sum] = lambda primals, tangents: (_sum.bind(*primals), tangents[1])
ad.primitive_transposes[_sum] = lambda cotangent, x, _: [ad.Zero(x.aval), cotangent]
batching.defbroadcasting(_sum)
mlir.register_lowering(_sum, lambda _, kept, again: [again])
mlir.register_lowering(_sum, lambda _, kept, again: [kept], platform="tpu")
