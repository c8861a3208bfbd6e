"""Implements `autocast`: traces a function, and rewrites and runs its jaxpr.

autocast(lambda x, w: x @ w)(x, w)
{ x:f32 w:f32. y:f32 = dot_general x w; in y }                  traced
{ x w. ... y:f16 = dot_general x' w'; z:f32 = convert y; in z } written, and run
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.control_flow import RULES
from jamp._autocast.derivatives import advising, has_rules
from jamp._autocast.lists import AutocastLists
from jamp._autocast.marks import MARKERS, traced_for
from jamp._autocast.primitives import Rule
from jamp._autocast.rewrite import rewritten
from jamp._autocast.run import run
from jamp._autocast.scope import Policy, Scope, recorded
from jamp._autocast.sums import moves_taken_out
from jamp._autocast.traced import Traced, traced
from jamp._autocast.tracing import disabled, fp8_disabled, tracing
from jamp._autocast.values import input_of
from jamp._core.dtypes import HALF_DTYPES
from jamp._core.show import short_repr

type Promote = Literal["widest", "narrowest"]

_NO_LISTS = AutocastLists()  # one object, which reads the table once


def autocast[**P, R](
    fn: Callable[P, R] = None,  # pyright: ignore[reportArgumentType]
    dtype: DTypeLike = "float16",
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[P, R]:
    """Runs each operation of a function in the precision that suits it.

    Matmuls and convolutions run in half. Exponentials, sums and losses run in float32.
    Other operations run in the widest dtype of their operands. Inputs, outputs and
    gradients keep the dtypes that they have without autocast.

    Args:
        fn: any function of arrays. Arguments that are not arrays are static.
        dtype: float16 or bfloat16.
        lists: additions to the table of operations.
        promote: "widest", or "narrowest" to keep sums of half and float32 in half.

    Returns:
        A function like `fn`.

    Raises:
        ValueError: `dtype` or `promote` is invalid.
        TypeError: `fn` is not callable, or `lists` is not an `AutocastLists`.

    >>> import jax.numpy as jnp
    >>> f = lambda w, x: jax.nn.softmax(x @ w)
    >>> x = jnp.ones((2, 2))
    >>> print(f(x, x).dtype, autocast(f)(x, x).dtype)
    float32 float32
    """
    if not callable(fn):
        got = "no function" if fn is None else short_repr(fn)
        raise TypeError(
            f"autocast takes a function, got {got}. It is not a context manager: write "
            "`jamp.autocast(fn)(x)`. For a decorator with options, write "
            '`@functools.partial(jamp.autocast, dtype="bfloat16")`.'
        )
    return autocast_in(scope_of(dtype, lists, promote), fn)


def autocast_in[**P, R](scope: Scope, fn: Callable[P, R]) -> Callable[P, R]:
    """Applies `autocast` to a function in a given scope."""

    @functools.wraps(fn)
    def autocasted(*args, **kwargs):
        if disabled.value:
            return fn(*args, **kwargs)
        jaxpr, values, rebuild = _traced(fn, args, kwargs, scope)
        # This mark makes an outer autocast leave the rewritten jaxpr unchanged.
        mark = jax.named_scope(MARKERS[Rule.RECORDED])
        nothing = contextlib.nullcontext()
        advice = advising() if has_rules(jaxpr) else nothing
        with mark if tracing.value else nothing, advice:
            outs = run(_rewritten(jaxpr, scope), values)
        # Outside of `jit`, constants may not be arrays. Casts drop weak types.
        pairs = zip(outs, jaxpr.outvars, strict=True)
        out = rebuild([jax_internals.array_of_type(x, v.aval) for x, v in pairs])
        # JAX's own functions return no NumPy floats.
        return jax.tree.map(
            lambda x: jnp.array(x) if isinstance(x, np.inexact) else x, out
        )

    return autocasted


def scope_of(
    dtype: DTypeLike,
    lists: AutocastLists | None,
    promote: Promote,
    of_model: bool = False,
    fp8: Any = None,
    marked: bool = False,
) -> Scope:
    """Returns the scope of a whole jaxpr, from the arguments of `autocast`."""
    try:
        half = np.dtype(dtype)
    except TypeError:
        half = None
    if half not in HALF_DTYPES:
        raise ValueError(f"`dtype` must be float16 or bfloat16, got {dtype!r}.")
    if promote not in get_args(Promote.__value__):
        raise ValueError(f"`promote` must be 'widest' or 'narrowest', got {promote!r}.")
    lists = _NO_LISTS if lists is None else lists
    if not isinstance(lists, AutocastLists):
        raise TypeError(
            f"`lists` must be a jamp.AutocastLists, got {short_repr(lists)}."
        )
    return Scope(Policy(half, lists, promote, of_model, fp8, marked))


def rewritten_jaxpr(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope
) -> jc.Jaxpr:
    """Returns the jaxpr that `autocast` would run for a call, without running it.

    An argument may be a `jax.ShapeDtypeStruct` instead of an array.
    """
    jaxpr = _traced(fn, args, kwargs, scope).jaxpr
    return jaxpr if disabled.value else _rewritten(jaxpr, scope)


def _traced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope
) -> Traced:
    """Traces a call of a function. Scalars are known, so that Python can branch."""
    args, kwargs = jax.tree.map(_array, (args, kwargs))
    with traced_for(scope.policy.dtype, scope.policy.lists):
        found = traced(fn, args, lambda x: isinstance(x, _INPUTS), kwargs)
        return found._replace(jaxpr=moves_taken_out(found.jaxpr))


_INPUTS = jax.Array | jax.ShapeDtypeStruct


def _array(x: Any) -> Any:
    """Copies a NumPy array of floats, so that a later change reaches no result."""
    has_floats = isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.array(x) if has_floats else x


def _rewritten(jaxpr: jc.Jaxpr, scope: Scope) -> jc.Jaxpr:
    policy = scope.policy
    if fp8_disabled.value:
        policy = dataclasses.replace(policy, fp8=None)
    scope = scope._replace(cache={}, policy=policy)
    given = list(map(input_of, jaxpr.invars))
    return rewritten(jaxpr, given, scope, RULES).returning(recorded(jaxpr.outvars))
