"""Runs a program again, one operation at a time, and looks at each result.

What a jitted step computes in one piece is computed here as it is written, so that each
value can be looked at. Values are freed when they were read for the last time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.frames import frames_of
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.program import Atom
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._advice import words_of
from jamp.diagnostics._location import (
    Array,
    Cause,
    Location,
    Range,
    names_of,
    not_finite,
    parents_of,
    range_of,
)
from jamp.diagnostics._source import is_backward, module_path, user_line

_ARITHMETIC = ("add", "div", "mul", "sub")
_CONSTANT = "a constant"
# Of one operand each: of several, a result is made of all of them.
_MOVES = tuple(map(Shape, "same mark reshape rearrange repeat move".split()))


class Value(NamedTuple):
    """A value of the program."""

    array: Array
    cause: Cause | None = None  # why it is not finite; None if it is
    near: str = ""  # the path of the param that was read last on the way to it
    maker: "Site | None" = None  # what computed it; None if it came in


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a program stands, and how its operations are run."""

    names: str = ""  # the name scopes of the operations that hold it
    source: str = ""  # the user's line of the innermost one that has one
    loops: tuple[str, ...] = ()  # the iterations that it is in
    # How many devices' values are side by side in each array: its first axis, if any.
    devices: tuple[int, ...] = ()
    # Runs an equation, as a function, on its operands.
    evaluate: Callable[..., Sequence[Array]] = lambda fn, arrays: fn(*arrays)

    def lifted(self, x: Array) -> Array:
        """A constant, as the arrays of this context are."""
        if not self.devices:
            return x
        return jnp.broadcast_to(x, (*self.devices, *np.shape(x)))

    def range_of(self, x: Array) -> Range:
        """The range of an array in the shape that the user knows it by."""
        return range_of(x, np.shape(x)[len(self.devices) :])


class Site(NamedTuple):
    """An equation, the program that it is of, and where that stands."""

    eqn: jc.JaxprEqn
    program: jc.Jaxpr
    context: Context

    @property
    def line(self) -> str:
        """The user's line. JAX keeps none in its jitted functions."""
        return user_line(self.eqn) or self.context.source

    @property
    def names(self) -> str:
        """All name scopes."""
        return f"{self.context.names}/{jax_internals.name_stack(self.eqn)}"

    @property
    def shape(self) -> Shape:
        """Of which numbers of its operands its results are made."""
        return traits_of(self.eqn.primitive.name).shape

    @property
    def moves(self) -> bool:
        """Whether it hands on the very numbers of its one array of floats."""
        floats = [v for v in self.eqn.invars if is_differentiable(v.aval)]
        return self.shape in _MOVES and len(floats) <= 1

    def context_inside(self, *loops: str) -> Context:
        """The context of a program that the equation holds."""
        loops = (*self.context.loops, *loops)
        return dataclasses.replace(
            self.context, names=self.names, source=self.line, loops=loops
        )


type ReplayRule = Callable[["Replay", Site, list[Value]], list[Value]]
# Is called with an operation, what it reads, each result, and the param before it.
type Observe = Callable[[Site, Sequence[Value], Array, str], None]


class Replay:
    """One run: what it has seen so far."""

    def __init__(
        self,
        rule_of: Callable[[jc.JaxprEqn], ReplayRule],
        observe: Observe | None = None,
    ):
        self.rule_of, self.observe = rule_of, observe
        self.order = 0
        self.reads: dict[str, int] = {}  # when a param was first computed with

    def run(
        self, program: jc.Jaxpr, values: list[Value], context: Context
    ) -> list[Value]:
        """The results of a program. It empties `values`: memory is freed as it goes."""
        env = dict(zip(program.invars, values, strict=True))
        for var, x in zip(program.constvars, program.consts, strict=True):
            env[var] = self.incoming(context.lifted(x))
        values.clear()
        last = _last_readers(program)
        for i, eqn in enumerate(program.eqns):
            read = [self._read(v, env, context) for v in eqn.invars]
            for var in eqn.invars:
                if isinstance(var, jc.Var) and last[var] == i:
                    env.pop(var, None)
            outs = self.rule_of(eqn)(self, Site(eqn, program, context), read)
            env |= zip(eqn.outvars, outs, strict=True)
        return [self._read(v, env, context) for v in program.outvars]

    def incoming(self, array: Array, name: str = _CONSTANT) -> Value:
        """A value that the function is given, or a constant of the program.

        Infinities may be meant so: those of the program, and -inf, a mask's.
        """
        near = name if name.startswith("params") else ""
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, near=near)
        found = Location(operation=name, phase="input", result=range_of(array))
        positive = name != _CONSTANT and bool((array == np.inf).any())
        cause = Cause(self.order, nan, location=found, is_wish=not positive)
        return Value(array, cause, near)

    def seen(self, site: Site, array: Array, read: Sequence[Value], near: str) -> Value:
        """A result of an equation, with where it comes from if it is not finite."""
        maker = read[0].maker if site.moves and read else site
        if self.observe is not None:
            self.observe(site, read, array, near)
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, None, near, maker)
        parents = parents_of(nan, (v.cause for v in read if v.cause))
        if site.eqn.primitive.name in _ARITHMETIC and _reads_infinite_number(site.eqn):
            parents = ()  # 1e5 in float16: no mask, but where it begins
        meant, location = all(p.is_intended for p in parents), None
        if not parents or (nan and meant):
            location = _location_of(site, array, read, near, names_of(parents))
        return Value(array, Cause(self.order, nan, parents, location), near, maker)

    def near(self, site: Site, read: Sequence[Value]) -> str:
        """The param that was read last on the way to an operation.

        Of the backward pass: of the operation that it is the derivative of, which reads
        what that read. The product that gives a weight's gradient reads what came
        before that weight, and what comes back to it.
        """
        paths = [v.near for v in read if v.near]
        if site.moves:
            return paths[0] if paths else ""
        if not is_backward(site.names):
            # A loop as a whole reads all params of its body at once.
            for path in [] if frames_of(site.eqn) else paths:
                self.reads.setdefault(path, self.order)
            return max(paths, key=self._order, default="")
        reads_param = any(v.near and v.maker is None for v in read)
        is_weights = site.shape is Shape.PRODUCT and not reads_param
        return (max if is_weights else min)(paths, key=self._order, default="")

    def _order(self, path: str) -> int:
        return self.reads.get(path, self.order)

    def _read(self, atom: Atom, env: dict[jc.Var, Value], context: Context) -> Value:
        if isinstance(atom, jc.Literal):
            aval: Any = atom.aval
            return self.incoming(context.lifted(np.asarray(atom.val, aval.dtype)))
        return env[atom]


def operation(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    """The rule of what holds no program, or none that can be looked into."""
    replay.order += 1
    near = replay.near(site, read)
    fn = jc.jaxpr_as_fun(jax_internals.program_around(site.eqn, site.program))
    outs = site.context.evaluate(fn, [v.array for v in read])
    return [replay.seen(site, x, read, near) for x in outs]


def _last_readers(program: jc.Jaxpr) -> dict[jc.Var, int]:
    """By variable, the place of the last equation that reads it; -1 of a result."""
    last = dict.fromkeys((v for v in program.outvars if isinstance(v, jc.Var)), -1)
    for i, eqn in reversed(list(enumerate(program.eqns))):
        for var in eqn.invars:
            if isinstance(var, jc.Var):
                last.setdefault(var, i)
    return last


def _reads_infinite_number(eqn: jc.JaxprEqn) -> bool:
    literals = [v.val for v in eqn.invars if isinstance(v, jc.Literal)]
    return any(
        is_differentiable(x) and bool(np.isinf(x)) for x in map(np.asarray, literals)
    )


def _location_of(
    site: Site,
    array: Array,
    read: Sequence[Value],
    near: str,
    infinities: tuple[str, ...],
) -> Location:
    """The report of an operation, if it turns out to be the first: without the loss."""
    floats, context = [v for v in read if is_differentiable(v.array)], site.context
    made_by, maker = ("", ""), floats[0].maker if site.moves and floats else None
    if maker is not None:
        made_by = f"`{primitive_name(maker.eqn)}`", maker.line
    result = context.range_of(array)
    return Location(
        operation=words_of(site.eqn, result.dtype),
        primitive=primitive_name(site.eqn),
        phase="backward" if is_backward(site.names) else "forward",
        source=site.line,
        module=module_path(site.names),
        near=near.removeprefix("params/"),
        loops=context.loops,
        operands=tuple(context.range_of(v.array) for v in floats),
        result=result,
        made_by=" at ".join(filter(None, made_by)),
        infinities=infinities,
    )
