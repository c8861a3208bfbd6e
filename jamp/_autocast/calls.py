"""Writes functions as equations, and groups of equations as one equation.

    call(softmax, [x], [y], source)        y = custom_jvp_call[name=softmax] x
    checkpointed([exp, mul], [x], [y])     y = checkpoint[jaxpr={ x. ... in y }] x

Equal calls and equal checkpoints share one jaxpr, which JAX differentiates once. As
for `jax_internals`, the tests check each fact about JAX.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jc
from jax.extend.core import primitives
from jax.sharding import AxisType

from jamp._autocast.jax_internals import at_source, scopes, unnamed, with_scopes
from jamp._autocast.subjaxprs import with_equations


class Replacement(NamedTuple):
    """A function that computes an equation, and its operands."""

    function: Callable[..., Any]
    operands: Sequence[tuple[Any, Any]]  # each value with the dtype of its version
    # Whether the function also returns its first operand, for later readers.
    passes: bool = False


_UNSHARDED = ("max", "min", "cummax", "cummin", "lgamma")


def apart_if_sharded(eqn: jc.JaxprEqn) -> jc.JaxprEqn:
    """Wraps a maximum, or a similar primitive, in a `jit` if its result is sharded.

    Outside of `jit`, the derivative of a maximum on an explicit mesh selects among
    arrays of ones and zeros without a sharding, and JAX raises an error.
    """
    if eqn.primitive.name not in _UNSHARDED:
        return eqn
    (aval,) = (v.aval for v in eqn.outvars)
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not any(sharding.spec):
        return eqn
    function = _jitted(eqn.primitive, tuple(eqn.params.items()))
    (new,) = call(function, eqn.invars, eqn.outvars, eqn) or [eqn]
    return new


@functools.lru_cache(maxsize=256)
def _jitted(primitive: jc.Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def call(
    function: Callable[..., Any],
    operands: Sequence[Any],
    results: Sequence[jc.Var] | None,
    source: jc.JaxprEqn,
    known: dict[Any, Any] | None = None,
) -> list[jc.JaxprEqn]:
    """Traces a function to equations, which replace the equation `source`.

    `known` caches the jaxpr by the types of the operands. Without `results`, the
    results are new variables.

    Returns no equations if a result has a different type, such as an explicit sharding.
    """
    known = {} if known is None else known
    key = function, tuple([v.aval for v in operands]), source.ctx
    if key not in known:
        trace = functools.partial(jax.jit(function).trace, *key[1])
        known[key] = _in_mesh(source.ctx, trace).jaxpr
    jaxpr = known[key]
    if results is None:
        results = [jc.Var(v.aval) for v in jaxpr.outvars]
    if [v.aval for v in jaxpr.outvars] != [v.aval for v in results]:
        return []
    new: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    new |= dict(zip(jaxpr.outvars, results, strict=True))
    eqns: list[jc.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        invars = [v if isinstance(v, jc.Literal) else new[v] for v in eqn.invars]
        outvars = [new.setdefault(v, jc.Var(v.aval)) for v in eqn.outvars]
        eqns.append(at_source(eqn.replace(invars=invars, outvars=outvars), source))
    return eqns


def followed(
    eqn: jc.JaxprEqn,
    function: Callable[..., Any],
    operands: Sequence[Any],
    known: dict[Any, Any],
) -> list[jc.JaxprEqn]:
    """Returns an equation and a call of a function on its result and `operands`.

    The call returns the result of the equation. `call` explains `known`.
    """
    (out,) = eqn.outvars
    before = jc.Var(out.aval)
    new = call(function, [before, *operands], [out], eqn, known)
    return [eqn.replace(outvars=[before]), *new] if new else [eqn]


def _in_mesh(ctx: Any, fn: Callable[[], Any]) -> Any:
    """Calls a function in the context of an equation.

    Types can vary over the axes of a `shard_map` only while JAX traces a `shard_map`.
    """
    mesh, around = ctx.cur_abstract_mesh, jax.sharding.get_abstract_mesh()
    axes = set(mesh.manual_axes) - set(around.manual_axes)
    if not axes:
        with ctx.manager:
            return fn()
    given = zip(mesh.axis_names, mesh.axis_types, strict=True)
    types = tuple(AxisType.Auto if name in axes else kind for name, kind in given)
    found = []
    traced = jax.shard_map(
        lambda: found.append(fn()),
        mesh=mesh.update(axis_types=types),
        in_specs=(),
        out_specs=None,
        axis_names=axes,
    )
    jax.eval_shape(traced)
    return found[0]


def checkpointed(
    eqns: Sequence[jc.JaxprEqn],
    invars: Sequence[jc.Var],
    outvars: Sequence[jc.Var],
    policy: Callable[..., bool],
    jaxprs: dict[Any, jc.Jaxpr],
    around: jc.Jaxpr,
) -> jc.JaxprEqn:
    """Puts equations of the jaxpr `around` into one `jax.checkpoint` equation.

    The checkpoint saves the results that the `policy` selects. It has the line of the
    last equation and the name scopes that all equations share.

    It always uses `remat2`. With the flag `jax_remat3`, JAX uses another primitive,
    which calls the policy for few primitives and for no sums.

    `jaxprs` caches the jaxpr. Equations that differ only in their variables share
    one jaxpr, which JAX differentiates once.
    """
    stacks = list(map(scopes, eqns))
    common = len(os.path.commonprefix([names.stack for names in stacks]))
    key = _structure(eqns, [*invars, *outvars], common)
    inner = jaxprs.get(key)
    if inner is None:
        inner = with_equations(
            unnamed(around),
            [with_scopes(e, s[common:]) for e, s in zip(eqns, stacks, strict=True)],
            constvars=[],
            invars=list(invars),
            outvars=list(outvars),
            effects=set(),
        )
        if key is not None:
            jaxprs[key] = inner
    params = {
        "jaxpr": inner,
        "prevent_cse": False,  # `barriers` has them
        "differentiated": False,
        "policy": policy,
    }
    new = jc.new_jaxpr_eqn(
        list(invars), list(outvars), primitives.remat_p, params, set()
    )
    return at_source(new, with_scopes(eqns[-1], stacks[-1][:common]))


def _structure(
    eqns: Sequence[jc.JaxprEqn], variables: Sequence[jc.Var], common: int
) -> Any:
    """Returns a key of equations that ignores variable names and outer name scopes.

    Returns None if a parameter is not hashable.
    """
    numbers: dict[Any, int] = {}

    def key_of(atom):
        if isinstance(atom, jc.Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return atom.aval, numbers.setdefault(atom, len(numbers))

    parts: list[Any] = [tuple(map(key_of, variables))]
    for eqn in eqns:
        atoms = tuple(map(key_of, eqn.invars)), tuple(map(key_of, eqn.outvars))
        line = eqn.source_info.traceback, scopes(eqn)[common:]
        params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        parts.append((eqn.primitive, params, atoms, line, eqn.ctx))
    try:
        hash(structure := tuple(parts))
    except TypeError:
        return None
    return structure
