"""Reads and rewrites JAX's hijax primitives: objects that hold their own jaxprs.

    y = call_hi_primitive[_prim=RematTraced(jaxpr=f)] x
    y = call_hi_primitive[_prim=RematTraced(jaxpr=f')] x

JAX 0.12 uses them for `custom_vjp(generic_batching=True)`, and under the flags
`jax_custom_vjp3`, `jax_custom_jvp3`, `jax_remat3` and `jax_scan3`, which will become
the default. Autocast traces with the user's flags, because `custom_vjp.defremat` and
others need them. The equations that autocast adds are correct with and without them.

`jax.experimental.hijax` has the interface of an object: `params`, `expand`, the types
of its operands and results, and its derivatives.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.hijax import HiPrim
from jax.extend import core as jc

from jamp._autocast.tracing import Itself
from jamp._core.warnings import AutocastWarning, warn


def hi_primitive(eqn: jc.JaxprEqn) -> Any:
    """Returns the object that an equation applies, or None if it applies none."""
    is_hi = eqn.primitive.name == "call_hi_primitive"
    return eqn.params["_prim"] if is_hi else None


def expanded(prim: Any) -> jc.Jaxpr | None:
    """Traces the `expand` of an object. Returns None if the trace fails.

    An `expand` may need the context in which the object is bound, such as a named axis.
    So an error in it becomes a warning, and the object runs in the user's dtypes.
    """
    return _expanded(Itself(prim))


@functools.lru_cache(maxsize=256)
def _expanded(same: Itself) -> jc.Jaxpr | None:
    prim = same.it

    def expand(*leaves):
        return jax.tree.leaves(prim.expand(*prim.in_tree.unflatten(leaves)))

    try:
        jaxpr = jax.make_jaxpr(expand)(*prim.in_avals_flat)
    except NotImplementedError:  # it has no `expand`
        return None
    except Exception as error:  # noqa: BLE001
        name, kind = type(prim).__name__, type(error).__name__
        warn(
            f"autocast cannot read {name!r}, because its `expand` raised {kind}: "
            f"{error}",
            AutocastWarning,
        )
        return None
    same_types = [v.aval for v in jaxpr.outvars] == list(prim.out_avals_flat)
    called = _called(jaxpr)
    if called is None and jaxpr.effects:
        return None  # the object would need other effects
    return (called or jaxpr) if same_types else None


def _called(jaxpr: jc.Jaxpr) -> jc.Jaxpr | None:
    """Returns the jaxpr that a jaxpr only calls, or None."""
    if [eqn.primitive.name for eqn in jaxpr.eqns] != ["eval_jaxpr"]:
        return None
    (call,) = jaxpr.eqns
    same = call.invars == jaxpr.invars and call.outvars == jaxpr.outvars
    return call.params["call_jaxpr"] if same else None


def with_jaxpr(prim: Any, jaxpr: jc.Jaxpr) -> Any:
    """Returns a copy of an object that expands to another jaxpr of the same types."""
    new = copy.copy(prim)
    new.expand = lambda *args: prim.out_tree.unflatten(
        jc.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args))
    )
    new.params = prim.params | {"jamp_program": jaxpr}  # JAX compares the params
    return new


def with_dtypes(prim: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any:
    """Returns a copy of an object for operands and results in other dtypes."""
    new = copy.copy(prim)
    avals = map(_in_dtype, prim.in_avals_flat, ins)
    new.in_avals = prim.in_tree.unflatten(avals)
    new.out_aval = prim.out_tree.unflatten(map(_in_dtype, prim.out_avals_flat, outs))
    HiPrim.__init__(new)
    return new


def _in_dtype(aval: Any, dtype: Any) -> Any:
    same = getattr(aval, "dtype", None) == dtype
    return aval if same else aval.update(dtype=dtype, weak_type=False)
