"""Finds the jaxprs that an equation holds: one `Subjaxpr` each, for any primitive.

    c d = scan[jaxpr={ w b x. ... in e y }] w a xs

    subjaxprs_of(scan) == [Subjaxpr(jaxpr, "scan", Kind.LOOP, operands=[w, a, xs],
                              results=[c, d], is_open=True, consts=1, carries=1,
                              trips=3)]

JAX does not document these parameters. A new primitive with one jaxpr needs one line
in `_HELD`.
"""

import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.hijax import expanded, hi_primitive, with_jaxpr
from jamp._autocast.primitives import is_listed, primitive_name

CHECKPOINT = "remat2"  # the primitive of `jax.checkpoint`
OBJECT = "HiPrim"  # any other object that has an `expand`, see `hijax`
OPTIMIZED_VJP = "remat_opt"  # the `fwd` of a custom_vjp with `optimize_remat=True`


class Kind(enum.Enum):
    """How an equation runs its jaxprs."""

    CALL = "call"  # once
    BRANCH = "branch"  # one of them
    LOOP = "loop"  # repeatedly, with the carries of the previous iteration
    MAP = "map"  # once on each device, with a shard of the operands


class _Held(NamedTuple):
    """The properties that all equations of a primitive share."""

    kind: Kind
    params: tuple[str, ...]  # the parameters with the jaxprs
    is_open: bool
    own_residuals: bool = False


_HELD = {
    "jit": _Held(Kind.CALL, ("jaxpr",), is_open=True),
    "closed_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),  # JAX 0.11.0
    CHECKPOINT: _Held(Kind.CALL, ("jaxpr",), is_open=True, own_residuals=True),
    OPTIMIZED_VJP: _Held(Kind.CALL, ("fwd_jaxpr",), is_open=False),
    "custom_jvp_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),
    "custom_vjp_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=False),
    "eval_jaxpr": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),
    # A kernel may replace it, and its derivative may be another jaxpr.
    "composite": _Held(Kind.CALL, ("call_jaxpr",), is_open=False),
    "linear_call": _Held(Kind.CALL, ("callee",), is_open=False),
    "shard_map": _Held(Kind.MAP, ("jaxpr",), is_open=False),
    "cond": _Held(Kind.BRANCH, ("branches",), is_open=True),
    "scan": _Held(Kind.LOOP, ("jaxpr",), is_open=True),
    "while": _Held(Kind.LOOP, ("cond_jaxpr", "body_jaxpr"), is_open=False),
    # Objects. An object without such a parameter expands to its jaxpr.
    "RematTraced": _Held(Kind.CALL, ("jaxpr",), is_open=True, own_residuals=True),
    "CustomJVPTraced": _Held(Kind.CALL, (), is_open=True),
    "CustomVJPTraced": _Held(Kind.CALL, (), is_open=False),
    "Scan3": _Held(Kind.LOOP, ("jaxpr",), is_open=True),
    OBJECT: _Held(Kind.CALL, (), is_open=False),
}
HIGHER_ORDER = tuple(_HELD)
OPEN_CALLS = tuple(
    name for name, held in _HELD.items() if held.kind is Kind.CALL and held.is_open
)


class Subjaxpr(NamedTuple):
    """A jaxpr that an equation holds, and how the equation runs it."""

    jaxpr: jc.Jaxpr
    primitive: str  # the name of the equation's primitive or object
    kind: Kind
    operands: Sequence[Any]  # the operands of the equation that the jaxpr takes
    results: Sequence[Any]  # the results of the equation that the jaxpr returns
    # Whether values may pass in any dtype. Otherwise the jaxpr keeps its dtypes,
    # because the user's derivative, a mesh or the next iteration relies on them.
    is_open: bool
    own_residuals: bool = False  # whether the user chose the residuals
    consts: int = 0  # how many operands of a loop are the same in all iterations
    carries: int = 0  # how many operands after them an iteration passes to the next
    trips: int | None = 1  # the number of iterations; None if unknown
    label: str = ""  # names the jaxpr if an equation holds several

    @property
    def has_derivative(self) -> bool:
        """Whether a call's derivative may differ from its jaxpr's."""
        own = not self.is_open or self.primitive in (
            "custom_jvp_call",
            "CustomJVPTraced",
        )
        return self.kind is Kind.CALL and own


def subjaxprs_of(eqn: jc.JaxprEqn) -> list[Subjaxpr]:
    """Returns the jaxprs of an equation that autocast can read.

    It does not read an object that `primitives` lists.
    """
    name = eqn.primitive.name
    if name == "call_hi_primitive":
        name, prim = primitive_name(eqn), eqn.params["_prim"]
        of_older = "static_argnums" in prim.params  # before JAX 0.12
        if (name not in _HELD or of_older) and not is_listed(name):
            name = OBJECT if expanded(prim) is not None else ""
    return list(_subjaxprs_of(eqn, name)) if name in _HELD else []


def _subjaxprs_of(eqn: jc.JaxprEqn, name: str) -> Iterator[Subjaxpr]:
    held, invars, outvars = _HELD[name], eqn.invars, eqn.outvars
    prim, names = hi_primitive(eqn), held.params
    params = (eqn if prim is None else prim).params
    jaxpr: Any = params[names[0]] if names else expanded(prim)
    sub = Subjaxpr(
        jaxpr=jaxpr,
        primitive=name,
        kind=held.kind,
        operands=invars,
        results=outvars,
        is_open=held.is_open,
        own_residuals=held.own_residuals,
    )
    if name == "cond":
        # The first operand is the index.
        for i, branch in enumerate(eqn.params["branches"]):
            operands, label = invars[1:], f"branch {i}"
            yield sub._replace(jaxpr=branch, operands=operands, label=label)
    elif name == "scan":
        consts, carries = scan_counts(eqn)
        trips = eqn.params["length"]
        yield sub._replace(consts=consts, carries=carries, trips=trips)
    elif name == "while":
        _, body, first, second = while_jaxprs(eqn)
        carry = invars[first + second :]
        sub = sub._replace(carries=len(carry), trips=None)
        test, label = [*invars[:first], *carry], "cond"
        yield sub._replace(operands=test, results=[], consts=first, label=label)
        sub = sub._replace(jaxpr=body, operands=invars[first:])
        yield sub._replace(consts=second, label="body")
    elif name == "Scan3":
        # It has no carries: references among its constants take their place.
        consts, trips = list(params["extensives"]).count(False), params["length"]
        yield sub._replace(consts=consts, trips=trips)
    else:
        yield sub


def once_per_jaxpr[T](fn: Callable[[jc.Jaxpr], T]) -> Callable[[jc.Jaxpr], T]:
    """Calls a function of a jaxpr once, because many equations may call one jaxpr.

    The results live as long as the jaxpr.
    """
    known: weakref.WeakKeyDictionary[jc.Jaxpr, T] = weakref.WeakKeyDictionary()

    @functools.wraps(fn)
    def known_or_called(jaxpr: jc.Jaxpr) -> T:
        if jaxpr not in known:
            known[jaxpr] = fn(jaxpr)
        return known[jaxpr]

    return known_or_called


def with_equations(
    jaxpr: jc.Jaxpr, eqns: Sequence[jc.JaxprEqn], **changes: Any
) -> jc.Jaxpr:
    """Returns a jaxpr with other equations, and with the named `changes`.

    `is_high` tells JAX to lower the objects in a jaxpr first.
    """
    are_high = [
        e.primitive.is_high(*[v.aval for v in e.invars], **e.params)
        for e in eqns
        if e.primitive.name in _HELD or "_prim" in e.params
    ]
    is_high = jaxpr.is_high or any(are_high)
    return jaxpr.replace(eqns=list(eqns), is_high=is_high, **changes)


def with_jaxprs(eqn: jc.JaxprEqn, jaxprs: Sequence[jc.Jaxpr]) -> dict[str, Any]:
    """Returns the parameters of an equation with other jaxprs."""
    prim = hi_primitive(eqn)
    names = _HELD.get(primitive_name(eqn), _HELD[OBJECT]).params
    if names == ("branches",):
        return {**eqn.params, "branches": tuple(jaxprs)}
    if prim is None:
        return {**eqn.params, **dict(zip(names, jaxprs, strict=True))}
    if not names:
        return {"_prim": with_jaxpr(prim, *jaxprs)}
    # The constructor takes the parameters by name.
    return {"_prim": type(prim)(**prim.params | {names[0]: jaxprs[0]})}


def scan_counts(eqn: jc.JaxprEqn) -> tuple[int, int]:
    """Returns how many constants and carries a scan takes before its sliced operands.

    JAX stores the tree of the operands, `(consts, carry, xs)`.
    """
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def while_jaxprs(eqn: jc.JaxprEqn) -> tuple[jc.Jaxpr, jc.Jaxpr, int, int]:
    """Returns the condition, the body, and how many constants each takes.

    The operands are the condition's constants, the body's constants, and the carry.
    """
    params = eqn.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    return params["cond_jaxpr"], params["body_jaxpr"], *counts
