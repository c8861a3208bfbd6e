"""Replays a program one operation at a time, and looks at each result.

The replay frees a value after its last reader.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.frames import frames_of
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._advice import words_of
from jamp.diagnostics._location import Array, Location, range_of
from jamp.diagnostics._source import is_backward, module_path, user_line

_ARITHMETIC = ("add", "div", "mul", "sub")
_CONSTANT = "a constant"
_MOVES = tuple(map(Shape, "same mark reshape rearrange repeat move".split()))


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """Why a value is not finite, with the causes of its operands."""

    order: int  # in the order of execution
    has_nan: bool
    parents: tuple["Cause", ...] = ()
    location: Location | None = None  # None if the parents explain the value
    is_mask: bool = False  # an infinity that came in, and may be intended

    @functools.cached_property
    def is_intended(self) -> bool:
        """Whether all of it comes from masks. The parents' answers are cached."""
        from_masks = bool(self.parents) and all(p.is_intended for p in self.parents)
        return not self.has_nan and (self.is_mask or from_masks)


def parents_of(has_nan: bool, causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The causes that explain a result: a NaN comes from NaNs if there are any."""
    parents = tuple(dict.fromkeys(causes))
    nans = tuple(cause for cause in parents if cause.has_nan)
    return nans if has_nan and nans else parents


def first_location(causes: Iterable[Cause]) -> Location | None:
    """The first location among some causes and all of their ancestors.

    Intended infinities come last, because most of them are harmless.
    """
    found: dict[Cause, None] = {}
    waiting = list(causes)
    while waiting:
        if (cause := waiting.pop()) not in found:
            found[cause] = None
            waiting += cause.parents
    located = (cause for cause in found if cause.location)
    first = min(located, key=lambda c: (c.is_intended, c.order), default=None)
    return first.location if first else None


class Value(NamedTuple):
    """A value of the program."""

    array: Array
    cause: Cause | None = None  # None if the value is finite
    near: str = ""  # the path of the param that was read last before it
    maker: "Site | None" = None  # the operation that computed it


class Context(NamedTuple):
    """The surroundings of a program."""

    names: str = ""  # the name scopes
    source: str = ""  # the user's line
    loops: tuple[str, ...] = ()  # the iterations


class Site(NamedTuple):
    """An equation, its program and the surroundings."""

    eqn: jc.JaxprEqn
    program: jc.Jaxpr
    context: Context

    @property
    def line(self) -> str:
        """The user's line. JAX records none inside of its own jitted functions."""
        return user_line(self.eqn) or self.context.source

    @property
    def names(self) -> str:
        """All name scopes."""
        return f"{self.context.names}/{jax_internals.name_stack(self.eqn)}"

    @property
    def moves(self) -> bool:
        """Whether the result holds the numbers of the one float operand."""
        floats = [v for v in self.eqn.invars if is_differentiable(v.aval)]
        return traits_of(self.eqn.primitive.name).shape in _MOVES and len(floats) <= 1

    def inside(self, *loops: str) -> Context:
        """The context of a program that the equation holds."""
        return Context(self.names, self.line, (*self.context.loops, *loops))


type ReplayRule = Callable[["Replay", Site, list[Value]], list[Value]]


class Replay:
    """One run of a program."""

    def __init__(self, rule_of: Callable[[jc.JaxprEqn], ReplayRule]):
        self.rule_of = rule_of
        self.order = 0
        self.reads: dict[str, int] = {}  # when each param was read first

    def run(
        self, program: jc.Jaxpr, values: list[Value], context: Context
    ) -> list[Value]:
        """Returns the results of a program. Empties `values` to free memory."""
        env = dict(zip(program.invars, values, strict=True))
        for var, x in zip(program.constvars, program.consts, strict=True):
            env[var] = self.incoming(x)
        values.clear()

        def read(atom: Any) -> Value:
            if isinstance(atom, jc.Literal):
                array = np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
                return self.incoming(array)
            return env[atom]

        last = _last_readers(program)
        for i, eqn in enumerate(program.eqns):
            operands = [read(v) for v in eqn.invars]
            for var in eqn.invars:
                if isinstance(var, jc.Var) and last[var] == i:
                    env.pop(var, None)
            outs = self.rule_of(eqn)(self, Site(eqn, program, context), operands)
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(v) for v in program.outvars]

    def incoming(self, array: Array, name: str = _CONSTANT) -> Value:
        """An argument or a constant. -inf, and any infinite constant, may be a mask."""
        near = name if name.startswith("params") else ""
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, near=near)
        found = Location(operation=name, phase="input", result=range_of(array))
        positive = name != _CONSTANT and bool((array == np.inf).any())
        cause = Cause(self.order, nan, location=found, is_mask=not positive)
        return Value(array, cause, near)

    def result(
        self, site: Site, array: Array, read: Sequence[Value], near: str
    ) -> Value:
        """A result of an equation, with its cause if it is not finite."""
        maker = read[0].maker if site.moves and read else site
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, None, near, maker)
        parents = parents_of(nan, (v.cause for v in read if v.cause))
        if site.eqn.primitive.name in _ARITHMETIC and _has_inf_literal(site.eqn):
            parents = ()  # a constant beyond float16, such as 1e5, is not a mask
        intended, location = all(p.is_intended for p in parents), None
        if not parents or (nan and intended):
            location = _location_of(site, array, read, near)
        return Value(array, Cause(self.order, nan, parents, location), near, maker)

    def near(self, site: Site, read: Sequence[Value]) -> str:
        """The param that was read last on the way to an operation.

        A backward operation belongs to the param of its forward operation, which was
        read first. The product that gives a weight's gradient reads the input of that
        layer and the cotangent of its output: the weight was read in between.
        """
        paths = [v.near for v in read if v.near]
        if site.moves:
            return paths[0] if paths else ""
        order = lambda path: self.reads.get(path, self.order)  # noqa: E731
        if not is_backward(site.names):
            # A loop as a whole reads all params of its body at once.
            for path in [] if frames_of(site.eqn) else paths:
                self.reads.setdefault(path, self.order)
            return max(paths, key=order, default="")
        reads_param = any(v.near and v.maker is None for v in read)
        is_product = traits_of(site.eqn.primitive.name).shape is Shape.PRODUCT
        is_weights = is_product and not reads_param
        return (max if is_weights else min)(paths, key=order, default="")


def run_operation(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    """The rule for an equation that holds no program."""
    replay.order += 1
    near = replay.near(site, read)
    fn = jc.jaxpr_as_fun(jax_internals.program_around(site.eqn, site.program))
    outs = fn(*(v.array for v in read))
    return [replay.result(site, x, read, near) for x in outs]


def not_finite(x: object) -> tuple[bool, bool]:
    """Whether an array holds NaN, and whether it holds infinities."""
    nan, inf = np.asarray(_flags(x)) if is_differentiable(x) else (False, False)
    return bool(nan), bool(inf)


@jax.jit
def _flags(x):
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])


def _last_readers(program: jc.Jaxpr) -> dict[jc.Var, int]:
    """The last equation that reads each variable; -1 for a result of the program."""
    readers = [(v, i) for i, eqn in enumerate(program.eqns) for v in eqn.invars]
    readers += [(v, -1) for v in program.outvars]
    return {v: i for v, i in readers if isinstance(v, jc.Var)}


def _has_inf_literal(eqn: jc.JaxprEqn) -> bool:
    literals = [np.asarray(v.val) for v in eqn.invars if isinstance(v, jc.Literal)]
    return any(is_differentiable(x) and bool(np.isinf(x)) for x in literals)


def _location_of(
    site: Site, array: Array, read: Sequence[Value], near: str
) -> Location:
    """The location of an operation, without the loss and the gradients."""
    floats = [v for v in read if is_differentiable(v.array)]
    result, made_by = range_of(array), ""
    if site.moves and floats and (maker := floats[0].maker):
        line = f" at {maker.line}" if maker.line else ""
        made_by = f"`{primitive_name(maker.eqn)}`{line}"
    return Location(
        operation=words_of(site.eqn, result.dtype),
        primitive=primitive_name(site.eqn),
        phase="backward" if is_backward(site.names) else "forward",
        source=site.line,
        module=module_path(site.names),
        near=near.removeprefix("params/"),
        loops=site.context.loops,
        operands=tuple(range_of(v.array) for v in floats),
        result=result,
        made_by=made_by,
    )
