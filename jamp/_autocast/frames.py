"""The programs that an equation holds: one `Frame` for each, whatever the primitive is.

    c d = scan[jaxpr={ w b x. ... in e y }] w a xs

    frames_of(scan) == [Frame(program, "scan", Kind.LOOP, operands=[w, a, xs],
                              results=[c, d], is_open=True, consts=1, carries=1,
                              trips=3)]

JAX documents none of it. A new primitive with one program is one line of `_HELD`.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.hijax import (
    fwd_consts,
    hi_primitive,
    program_of_hi,
    with_program,
)
from jamp._autocast.primitives import is_listed, primitive_name

CHECKPOINT = "remat2"  # the primitive of `jax.checkpoint`
OBJECT = "HiPrim"  # any other of the newer kind that says what it does
OPTIMIZED_VJP = "remat_opt"  # of a custom_vjp's fwd, with `optimize_remat=True`


class Kind(enum.Enum):
    """How an equation runs its programs."""

    CALL = "call"  # once
    BRANCH = "branch"  # one of them
    LOOP = "loop"  # some times, the carries on what the last time gave
    MAP = "map"  # once on each device, on a part of the operands


class _Held(NamedTuple):
    """What is the same in all equations of a primitive."""

    kind: Kind
    params: tuple[str, ...]  # the parameters with the programs
    is_open: bool
    own_residuals: bool = False


_HELD = {
    "jit": _Held(Kind.CALL, ("jaxpr",), is_open=True),
    "closed_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),  # of JAX 0.11.0
    CHECKPOINT: _Held(Kind.CALL, ("jaxpr",), is_open=True, own_residuals=True),
    OPTIMIZED_VJP: _Held(Kind.CALL, ("fwd_jaxpr",), is_open=False),
    "custom_jvp_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),
    "custom_vjp_call": _Held(Kind.CALL, ("call_jaxpr",), is_open=False),
    "eval_jaxpr": _Held(Kind.CALL, ("call_jaxpr",), is_open=True),
    # A kernel may stand for it, or another program for its derivative.
    "composite": _Held(Kind.CALL, ("call_jaxpr",), is_open=False),
    "linear_call": _Held(Kind.CALL, ("callee",), is_open=False),
    "shard_map": _Held(Kind.MAP, ("jaxpr",), is_open=False),
    "cond": _Held(Kind.BRANCH, ("branches",), is_open=True),
    "scan": _Held(Kind.LOOP, ("jaxpr",), is_open=True),
    "while": _Held(Kind.LOOP, ("cond_jaxpr", "body_jaxpr"), is_open=False),
    # Objects, of which `hijax` says where their programs are.
    "RematTraced": _Held(Kind.CALL, (), is_open=True, own_residuals=True),
    "CustomJVPTraced": _Held(Kind.CALL, (), is_open=True),
    "CustomVJPTraced": _Held(Kind.CALL, (), is_open=False),
    "Scan3": _Held(Kind.LOOP, (), is_open=True),
    OBJECT: _Held(Kind.CALL, (), is_open=False),
}
HOLDERS = tuple(_HELD)
OPEN_CALLS = tuple(
    name for name, held in _HELD.items() if held.kind is Kind.CALL and held.is_open
)


class Frame(NamedTuple):
    """A program that an equation holds, and how it is run there."""

    program: jc.Jaxpr
    holder: str  # the name that the equation is known by
    kind: Kind
    operands: Sequence[Any]  # of the equation, those that the program takes
    results: Sequence[Any]  # and those that it gives
    # Values pass in any dtype. Else the program must keep those it was traced with: the
    # user's derivative, a mesh or the next trip rely on them.
    is_open: bool
    own_residuals: bool = False  # the user has said what the backward pass keeps
    consts: int = 0  # how many operands of a loop are the same in all trips
    carries: int = 0  # how many come after them that a trip hands to the next
    trips: int | None = 1  # None if nobody knows
    label: str = ""  # where an equation holds several

    @property
    def has_derivative(self) -> bool:
        """Whether the derivative of a call may be another one than of its program."""
        own = not self.is_open or self.holder in ("custom_jvp_call", "CustomJVPTraced")
        return self.kind is Kind.CALL and own


def frames_of(eqn: jc.JaxprEqn) -> list[Frame]:
    """The programs that an equation holds and that can be looked into.

    Objects that are listed are known otherwise.
    """
    name = eqn.primitive.name
    if name == "call_hi_primitive":
        name, prim = primitive_name(eqn), eqn.params["_prim"]
        of_older = "static_argnums" in prim.params  # than JAX 0.12
        if (name not in _HELD or of_older) and not is_listed(name):
            name = OBJECT if program_of_hi(prim) is not None else ""
    return list(_frames_of(eqn, name)) if name in _HELD else []


def _frames_of(eqn: jc.JaxprEqn, name: str) -> Iterator[Frame]:
    held, invars, outvars = _HELD[name], eqn.invars, eqn.outvars
    frame = Frame(
        program=program_of(eqn),
        holder=name,
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
            yield frame._replace(program=branch, operands=operands, label=label)
    elif name == "scan":
        consts, carries = scan_counts(eqn)
        trips = eqn.params["length"]
        yield frame._replace(consts=consts, carries=carries, trips=trips)
    elif name == "while":
        _, body, first, second = while_programs(eqn)
        carry = invars[first + second :]
        frame = frame._replace(carries=len(carry), trips=None)
        test, label = [*invars[:first], *carry], "cond"
        yield frame._replace(operands=test, results=[], consts=first, label=label)
        frame = frame._replace(program=body, operands=invars[first:])
        yield frame._replace(consts=second, label="body")
    elif name == "Scan3":
        # Without carries: these are references among its constants.
        sliced = list(hi_primitive(eqn).extensives)
        consts, trips = sliced.count(False), hi_primitive(eqn).length
        yield frame._replace(consts=consts, trips=trips)
    elif name == "CustomVJPTraced":
        begin, end = fwd_consts(hi_primitive(eqn))
        yield frame._replace(operands=[*invars[:begin], *invars[end:]])
    else:
        yield frame


def program_of(eqn: jc.JaxprEqn) -> jc.Jaxpr:
    """The program of an equation that holds one."""
    if "_prim" in eqn.params:
        return program_of_hi(eqn.params["_prim"])  # type: ignore[return-value]
    return eqn.params[_HELD[eqn.primitive.name].params[0]]


def with_equations(
    program: jc.Jaxpr, eqns: Sequence[jc.JaxprEqn], **changes: Any
) -> jc.Jaxpr:
    """A program with other equations, and other parts that are named.

    JAX lowers objects of the newer kind first, where a program says that it has some.
    """
    held = [e for e in eqns if e.primitive.name in _HELD or "_prim" in e.params]
    is_high = program.is_high or any(
        e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in held
    )
    return program.replace(eqns=list(eqns), is_high=is_high, **changes)


def with_programs(eqn: jc.JaxprEqn, programs: Sequence[jc.Jaxpr]) -> dict[str, Any]:
    """The parameters of an equation, with other programs in the place of its own."""
    if "_prim" in eqn.params:
        return {"_prim": with_program(eqn.params["_prim"], *programs)}
    names = _HELD[eqn.primitive.name].params
    if names == ("branches",):
        return {**eqn.params, "branches": tuple(programs)}
    return {**eqn.params, **dict(zip(names, programs, strict=True))}


def scan_counts(eqn: jc.JaxprEqn) -> tuple[int, int]:
    """How many constants and carries a scan takes; what it slices comes after them.

    JAX 0.11 and newer keep it as the tree of the operands, `(consts, carry, xs)`.
    """
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def with_fewer_consts(
    eqn: jc.JaxprEqn,
    body: jc.Jaxpr,
    eqns: Sequence[jc.JaxprEqn],
    consts: dict[Any, Any],
) -> jc.JaxprEqn:
    """A scan of other equations, with as many constants or fewer.

    `eqns` take the place of those of its `body`, and `consts` are, by their variables
    in it, those outside.
    """
    before, _ = scan_counts(eqn)
    body = body.replace(
        invars=[*consts, *body.invars[before:]],
        eqns=list(eqns),
        debug_info=body.debug_info.with_unknown_names(),
    )
    keep = [not len(consts) <= i < before for i in range(len(eqn.invars))]
    operands = eqn.params["ft_in"].filter_with_mask(keep)
    params = {**with_programs(eqn, [body]), "ft_in": operands}
    invars = [*consts.values(), *eqn.invars[before:]]
    return eqn.replace(invars=invars, params=params)


def while_programs(eqn: jc.JaxprEqn) -> tuple[jc.Jaxpr, jc.Jaxpr, int, int]:
    """The condition and the body of a while loop, and how many constants each takes.

    The operands are the constants of the one, those of the other, and the carry.
    """
    params = eqn.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    return params["cond_jaxpr"], params["body_jaxpr"], *counts
