"""Runs a program again, one operation at a time, and looks at each result.

What a jitted step computes in one piece is computed here as it is written, so that each
value can be looked at. Values are freed when they were read for the last time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.program import Atom
from jamp.diagnostics._advice import words_of
from jamp.diagnostics._causes import Cause, names_of, parents_of
from jamp.diagnostics._location import Location
from jamp.diagnostics._ranges import Array, is_float, not_finite, range_of
from jamp.diagnostics._source import is_backward, module_path, user_line

# They hand on the very values that they read.
MOVES = frozenset(
    "broadcast_in_dim convert_element_type copy dynamic_slice gather name "
    "reduce_precision reshape slice squeeze stop_gradient transpose".split()
)
_ARITHMETIC = frozenset("add div mul sub".split())
_CONSTANT = "a constant"
# What a step's loss was, and what to do, `locate` knows when it is over.
_LOCATION = functools.partial(Location, finite=False, loss=math.nan, scale=math.nan)
_PRODUCTS = frozenset("dot_general conv_general_dilated".split())


class Value(NamedTuple):
    """A value of the program.

    Attributes:
        array: itself.
        cause: why it is not finite; None if it is.
        near: the path of the param that was read last on the way to it.
        maker: the equation that computed it; None if it came in, and was moved at most.
    """

    array: Array
    cause: Cause | None = None
    near: str = ""
    maker: "Site | None" = None


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a program stands, and how its operations are run.

    Attributes:
        names: the name scopes of the operations that hold it.
        source: the user's line of the innermost one that has one.
        loops: the iterations that it is in.
        evaluate: runs an equation, as a function, on its operands.
        whole: whether a loop can be run as a whole.
        item: the i-th slice of what a scan goes through.
        joined: the inverse of `item`.
        number: a scalar that decides where to go on.
        lifted: a constant, as the arrays of this context are.
        shape: the shape that the user knows an array by.
    """

    names: str = ""
    source: str = ""
    loops: tuple[str, ...] = ()
    evaluate: Callable[..., Sequence[Array]] = lambda fn, arrays: fn(*arrays)
    whole: bool = True
    item: Callable[[Array, int], Array] = lambda array, i: array[i]
    joined: Callable[[list[Array]], Array] = jnp.stack
    number: Callable[[Array], int] = int
    lifted: Callable[[Array], Array] = lambda x: x
    shape: Callable[[Array], tuple[int, ...]] = lambda array: array.shape


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

    def context_inside(self, *loops: str) -> Context:
        """The context of a program that the equation holds."""
        loops = (*self.context.loops, *loops)
        return dataclasses.replace(
            self.context, names=self.names, source=self.line, loops=loops
        )


type Rule = Callable[["Replay", Site, list[Value]], list[Value]]


class Replay:
    """One run: what it has seen so far."""

    def __init__(
        self,
        rules: dict[str, Rule],
        observe: Callable[[Site, Array, str], None] | None = None,
    ):
        self.rules, self.observe = rules, observe
        self.order = 0
        self.reads: dict[str, int] = {}  # when a param was first computed with
        self.last: dict[int, tuple[jc.Jaxpr, list[list[jc.Var]]]] = {}

    def run(
        self, program: jc.Jaxpr, values: list[Value], context: Context
    ) -> list[Value]:
        """The results of a program. It empties `values`: memory is freed as it goes."""
        env = dict(zip(program.invars, values, strict=True))
        env |= {
            v: self.constant(context.lifted(x))
            for v, x in zip(program.constvars, program.consts, strict=True)
        }
        values.clear()
        for eqn, dying in zip(program.eqns, self._last_reads(program), strict=True):
            read = [self._read(v, env, context) for v in eqn.invars]
            for var in dying:
                env.pop(var, None)
            rule = self.rules.get(eqn.primitive.name, operation)
            outs = rule(self, Site(eqn, program, context), read)
            env |= zip(eqn.outvars, outs, strict=True)
        return [self._read(v, env, context) for v in program.outvars]

    def argument(self, array: Array, name: str) -> Value:
        """A value that the function is given. -inf in it may be a mask's."""
        return self._incoming(array, name, name if name.startswith("params") else "")

    def constant(self, x: Array) -> Value:
        """A constant of the program. Infinities in it are the program's wish."""
        return self._incoming(x, _CONSTANT, "")

    def _incoming(self, array: Array, name: str, near: str) -> Value:
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, near=near)
        location = _LOCATION(operation=name, phase="input", result=range_of(array))
        positive = name != _CONSTANT and bool((array == np.inf).any())
        intended = not nan and not positive
        return Value(array, Cause(self.order, (), nan, intended, location), near)

    def seen(self, site: Site, array: Array, read: Sequence[Value], near: str) -> Value:
        """A result of an equation, with where it comes from if it is not finite."""
        name = site.eqn.primitive.name
        maker = read[0].maker if name in MOVES and read else site
        if self.observe is not None:
            self.observe(site, array, near)
        nan, inf = not_finite(array)
        if not (nan or inf):
            return Value(array, None, near, maker)
        parents = parents_of(nan, (v.cause for v in read if v.cause))
        if name in _ARITHMETIC and _reads_infinite_number(site.eqn):
            parents = ()  # 1e5 in float16: no mask, but where it begins
        was_intended = bool(parents) and all(p.intended for p in parents)
        location = None
        if not parents or (nan and was_intended):
            location = _location(site, array, read, near, names_of(parents))
        intended = was_intended and not nan
        cause = Cause(self.order, parents, nan, intended, location)
        return Value(array, cause, near, maker)

    def near(self, site: Site, read: Sequence[Value]) -> str:
        """The param that was read last on the way to an operation.

        Of the backward pass: of the operation that it is the derivative of, which reads
        what that read. The product that gives a weight's gradient reads what came
        before that weight, and what comes back to it.
        """
        name, paths = site.eqn.primitive.name, [v.near for v in read if v.near]
        if name in MOVES:
            return paths[0] if paths else ""
        if not is_backward(site.names):
            # A loop as a whole reads all params of its body at once.
            for path in [] if jax_internals.programs_in(site.eqn) else paths:
                self.reads.setdefault(path, self.order)
            return max(paths, key=self._order, default="")
        reads_param = any(v.near and v.maker is None for v in read)
        is_weights = name in _PRODUCTS and not reads_param
        return (max if is_weights else min)(paths, key=self._order, default="")

    def _order(self, path: str) -> int:
        return self.reads.get(path, self.order)

    def _read(self, atom: Atom, env: dict[jc.Var, Value], context: Context) -> Value:
        if isinstance(atom, jc.Literal):
            aval: Any = atom.aval
            return self.constant(context.lifted(np.asarray(atom.val, aval.dtype)))
        return env[atom]

    def _last_reads(self, program: jc.Jaxpr) -> list[list[jc.Var]]:
        """For each equation, the variables that nothing reads after it."""
        if id(program) not in self.last:
            kept, dying = {v for v in program.outvars if isinstance(v, jc.Var)}, []
            for eqn in reversed(program.eqns):
                atoms = {
                    v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, jc.Var)
                }
                dying.append([v for v in atoms if v not in kept])
                kept |= atoms
            self.last[id(program)] = program, dying[::-1]
        return self.last[id(program)][1]


def operation(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    """The rule of what holds no program, or none that can be looked into."""
    replay.order += 1
    near = replay.near(site, read)
    fn = jc.jaxpr_as_fun(jax_internals.program_around(site.eqn, site.program))
    outs = site.context.evaluate(fn, [v.array for v in read])
    return [replay.seen(site, x, read, near) for x in outs]


def _reads_infinite_number(eqn: jc.JaxprEqn) -> bool:
    literals = [v.val for v in eqn.invars if isinstance(v, jc.Literal)]
    return any(is_float(x) and bool(np.isinf(x)) for x in map(np.asarray, literals))


def _location(
    site: Site,
    array: Array,
    read: Sequence[Value],
    near: str,
    infinities: tuple[str, ...],
) -> Location:
    """The report of an operation, if it turns out to be the first."""
    floats, shape = [v for v in read if is_float(v.array)], site.context.shape
    moves = site.eqn.primitive.name in MOVES and floats
    result = range_of(array, shape(array))
    return _LOCATION(
        operation=words_of(site.eqn, result.dtype),
        primitive=jax_internals.primitive_name(site.eqn),
        phase="backward" if is_backward(site.names) else "forward",
        source=site.line,
        module=module_path(site.names),
        near=near.removeprefix("params/"),
        loops=site.context.loops,
        operands=tuple(range_of(v.array, shape(v.array)) for v in floats),
        result=result,
        made_by=_maker_words(floats[0].maker) if moves else "",
        infinities=infinities,
    )


def _maker_words(maker: Site | None) -> str:
    """What computed the value that an operation only hands on, and where."""
    if maker is None:
        return ""
    parts = f"`{jax_internals.primitive_name(maker.eqn)}`", maker.line
    return " at ".join(filter(None, parts))
