"""Runs a rewritten jaxpr, so that JAX differentiates equal equations once.

    y = mul a b; z = mul c d      two calls of one `jit`, which JAX inlines

A function of JAX is a small `jit`, and JAX caches its derivative. A rewritten jaxpr
has bare primitives. Here, each becomes a `jit` again. Equal equations share one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jc
from jax.extend.source_info_util import current_name_stack, user_context

from jamp._autocast.subjaxprs import subjaxprs_of

# JAX 0.11 inlines a `jit` only without its name scopes.
_INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", None)


def run(jaxpr: jc.Jaxpr, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a jaxpr. Each equation keeps its line and scopes."""
    if _INLINE is None or not any([isinstance(x, Tracer) for x in values]):
        return jc.jaxpr_as_fun(jaxpr)(*values)
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    shared: dict[Any, Callable[..., Any]] = {}  # the calls of inner jaxprs

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jc.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        function, source = _function_of(eqn, shared), eqn.source_info
        names = current_name_stack() + source.name_stack
        with user_context(source.traceback, name_stack=names), eqn.ctx.manager:
            outs = function(*[read(v) for v in eqn.invars])
        outs = outs if eqn.primitive.multiple_results else [outs]
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _function_of(
    eqn: jc.JaxprEqn, shared: dict[Any, Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns a function that binds an equation. Equal equations have the same one.

    An equation with an effect stays bare, because an effect refers to operands by
    position. So does a primitive that binds itself, to run before a loop for example.
    """
    key = eqn.primitive, tuple(eqn.params.items())
    primitives = [sub.primitive for sub in subjaxprs_of(eqn)]
    is_plain = not primitives and type(eqn.primitive) is jc.Primitive
    if eqn.effects or not (is_plain or primitives == ["custom_jvp_call"]):
        return _bind(*key)
    try:
        if not primitives:
            return jit_of(*key)
        if key not in shared:
            shared[key] = jax.jit(_bind(*key), inline=_INLINE)
        return shared[key]
    except TypeError:  # a parameter has no hash
        return _bind(*key)


# The cache holds no jaxprs, which may hold the user's arrays.
@functools.lru_cache(maxsize=4096)
def jit_of(primitive: jc.Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the `jit` of a primitive with these parameters."""
    return jax.jit(_bind(primitive, params), inline=_INLINE)


def _bind(primitive: jc.Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    given = primitive.get_bind_params(dict(params))
    return functools.partial(primitive.bind, **given)
