"""Keeps float32 islands out of memory between the forward and the backward pass.

An *island* is what a painted program computes in float32 between values in half: a
softmax between two matmuls, a gelu. Differentiated, it would keep exponentials in
float32, twice the bytes of the same model written in half. So an island becomes one
`jax.checkpoint`: its half inputs are kept, and its sums and maxima, which are small;
the rest is computed again, from the same bits. XLA computes what is cheap again by
itself: only islands with a costly operation are written so.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.program import dtype_of, size_of
from jamp._core.dtypes import FLOAT32, HALF_DTYPES

_COSTLY = frozenset(
    "exp exp2 expm1 log log1p pow cbrt tanh logistic sin cos tan asin acos atan atan2 "
    "sinh cosh asinh acosh atanh erf erfc erf_inv lgamma digamma".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())
# Computing these again costs no memory: they may belong to several islands.
_SPREAD = frozenset(("convert_element_type", "broadcast_in_dim"))
_CHEAP = frozenset(
    "add sub mul div max min neg abs sign sqrt rsqrt square integer_pow clamp select_n "
    "add_any reshape squeeze expand_dims transpose stop_gradient eq ne ge gt le lt "
    "and or not".split()
)
_INSIDE = _COSTLY | _REDUCTIONS | _SPREAD | _CHEAP
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


def checkpoint_islands(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
    """Writes each island of a painted program as one checkpointed equation."""
    if not any(map(_is_costly, jaxpr.eqns)):
        return jaxpr
    program = _Program(jaxpr)
    islands = [program.island(i) for i in range(len(jaxpr.eqns))]
    eqns: list[jc.JaxprEqn | None] = list(jaxpr.eqns)
    for exit, members in enumerate(islands):
        for i in members - program.leaks(exit, members):
            eqns[i] = None
        if members:
            eqns[exit] = _checkpointed([jaxpr.eqns[i] for i in sorted(members)])
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


class _Program:
    """A program, and who makes and who uses its values, by the place of the
    equation."""

    def __init__(self, jaxpr: jc.Jaxpr):
        self.eqns = jaxpr.eqns
        self.makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.users: dict[jc.Var, set[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in _variables(eqn.invars):
                self.users.setdefault(v, set()).add(i)
        for v in _variables(jaxpr.outvars):
            self.users.setdefault(v, set()).add(len(jaxpr.eqns))

    def island(self, exit: int) -> set[int]:
        """The equations of the island that a cast to half ends; none if it is none.

        What is used outside too stays outside, if it is small. If it is large it would
        be kept anyway, and so would large float32 inputs: then nothing is won.
        """
        if not _is_exit(self.eqns[exit]):
            return set()
        size = size_of(self.eqns[exit].outvars[0])
        outside: set[int] = set()
        while True:
            members = self._reach(exit, outside)
            leaks = self.leaks(exit, members)
            leaks = {i for i in leaks if self.eqns[i].primitive.name not in _SPREAD}
            if not leaks:
                break
            if any(_holds(self.eqns[i].outvars, size) for i in leaks):
                return set()
            outside |= leaks
        eqns = [self.eqns[i] for i in members]
        costly = any(_is_costly(e) and _holds(e.outvars, size) for e in eqns)
        return members if costly and not _holds(_inputs(eqns), size) else set()

    def leaks(self, exit: int, members: set[int]) -> set[int]:
        """The equations inside an island whose results are used outside of it too."""
        leaks: set[int] = set()
        for i in sorted(members - {exit}, reverse=True):
            users = set().union(*(self.users.get(v, ()) for v in self.eqns[i].outvars))
            if users - members or users & leaks:
                leaks.add(i)
        return leaks

    def _reach(self, exit: int, outside: set[int]) -> set[int]:
        members, waiting = {exit}, [exit]
        while waiting:
            for v in _variables(self.eqns[waiting.pop()].invars):
                i = self.makers.get(v)
                if i is None or i in members or i in outside:
                    continue
                if _is_castable(v) and _may_be_inside(self.eqns[i]):
                    members.add(i)
                    waiting.append(i)
        return members


def _checkpointed(eqns: list[jc.JaxprEqn]) -> jc.JaxprEqn:
    """One equation for those of an island; the last is the cast that ends it."""
    exit, template = eqns[-1], _template()
    invars: list[Any] = list(_inputs(eqns))
    outvars: list[Any] = exit.outvars
    inner = template.params["jaxpr"]
    inner = inner.replace(
        constvars=[],
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        debug_info=inner.debug_info.with_unknown_names(),
    )
    # The names of the user's functions stand in the equations inside.
    names = type(exit.source_info.name_stack)()
    return template.replace(
        invars=invars,
        outvars=outvars,
        params={**template.params, "jaxpr": inner},
        source_info=exit.source_info.replace(name_stack=names),
        ctx=exit.ctx,
    )


@functools.cache
def _template() -> jc.JaxprEqn:
    def keep(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name in _REDUCTIONS

    checkpoint = jax.checkpoint(jnp.negative, policy=keep)
    (eqn,) = jax.make_jaxpr(checkpoint)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    return eqn


def _is_exit(eqn: jc.JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    (source,), (result,) = eqn.invars, eqn.outvars
    return dtype_of(source) == FLOAT32 and dtype_of(result) in HALF_DTYPES


def _may_be_inside(eqn: jc.JaxprEqn) -> bool:
    if eqn.effects:
        return False
    inner = _CALLS.get(eqn.primitive.name)
    if inner is not None:
        return all(map(_may_be_inside, eqn.params[inner].eqns))
    return eqn.primitive.name in _INSIDE and not _is_exit(eqn)


def _is_costly(eqn: jc.JaxprEqn) -> bool:
    inner = _CALLS.get(eqn.primitive.name)
    if inner is not None:
        return any(map(_is_costly, eqn.params[inner].eqns))
    return eqn.primitive.name in _COSTLY


def _inputs(eqns: list[jc.JaxprEqn]) -> list[jc.Var]:
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars))
    return [v for v in read if v not in made]


def _holds(variables: Iterable[jc.Var], size: int) -> bool:
    """Whether a float32 among them is as large as what leaves the island."""
    return any(dtype_of(v) == FLOAT32 and size_of(v) >= size for v in variables)


def _is_castable(v: jc.Var) -> bool:
    return dtype_of(v) in (FLOAT32, jnp.bool_)


def _variables(atoms: Iterable[jc.Var | jc.Literal]) -> list[jc.Var]:
    return [v for v in atoms if not isinstance(v, jc.Literal)]
