"""The place of an operation: its line, its module and its pass."""

import os
import re
import site
import sysconfig
from typing import NamedTuple

from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.primitives import Shape, traits_of
from jamp._core.dtypes import is_differentiable

# The folders of installed packages and of Python, which contain no user code.
_INSTALLED = tuple(
    {*sysconfig.get_paths().values(), *site.getsitepackages()}
    - {sysconfig.get_path("data"), sysconfig.get_path("scripts")}
)
_JAMP = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Words that JAX and jamp add around and between the names of modules.
_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|jit)\(([^()]*)\)")
_MARKS = re.compile(r"^(jamp_\w+.*|rematted_computation|checkpoint|.*->.*|)$")
_REGION = re.compile(r"\bjamp_\w+\([^()]*\)")
# jamp's casts to fp8, whose results have another scale than their operands.
TO_FP8 = ("jamp_quantize", "jamp_fp8_once")
MOVES = tuple(map(Shape, "same mark reshape rearrange repeat move".split()))


def is_installed(file: str) -> bool:
    """Returns whether a file belongs to an installed package, to Python or to jamp."""
    return file.startswith((*_INSTALLED, _JAMP, "<frozen "))


def user_line(eqn: jc.JaxprEqn) -> str:
    """Returns the innermost `file:line` of the user, or of a library except JAX."""
    lines = list(jax_internals.source_lines(eqn))
    own = (line for line in lines if not is_installed(line))
    return next(own, lines[0] if lines else "")


def short_line(line: str) -> str:
    """Returns a line relative to the current folder."""
    return line.removeprefix(os.path.join(os.getcwd(), ""))


def module_path(names: str) -> str:
    """Returns the modules and scopes of a name stack, without the words that JAX adds.

    >>> module_path("transpose(jvp(Net))/Block/jvp(Net)/rematted_computation/Block/up")
    'Net/Block/up'
    >>> module_path("Net/transpose(jvp(jamp_float32(jax.numpy.linalg.solve)))")
    'Net'
    """
    before, names = "", _REGION.sub("", names)
    while before != names:
        before, names = names, _WRAPPED.sub(r"\1", names)
    parts = [part for part in names.split("/") if not _MARKS.match(part)]
    # A derivative inside a module repeats the path of the module.
    begin = len(parts) - 1 - parts[::-1].index(parts[0]) if parts else 0
    return "/".join(parts[begin:])


def moves(eqn: jc.JaxprEqn) -> bool:
    """Returns whether the result has the numbers of its only float operand."""
    name = eqn.primitive.name
    is_move = traits_of(name).shape in MOVES or name in TO_FP8
    return is_move and sum(is_differentiable(v.aval) for v in eqn.invars) <= 1


def is_backward(names: str) -> bool:
    """Returns whether a name stack belongs to the backward pass."""
    return "transpose(" in names


class Context(NamedTuple):
    """The context of a program in a larger program."""

    names: str = ""  # the name scopes
    line: str = ""  # the user's line
    loops: tuple[str, ...] = ()  # the iterations of the loops around it


class Site(NamedTuple):
    """An equation, its program and the context of the program."""

    eqn: jc.JaxprEqn
    program: jc.Jaxpr
    context: Context

    @property
    def line(self) -> str:
        """The user's line. JAX records none inside its own jitted functions."""
        return user_line(self.eqn) or self.context.line

    @property
    def names(self) -> str:
        """All name scopes."""
        return f"{self.context.names}/{jax_internals.scopes(self.eqn)}"

    @property
    def module(self) -> str:
        """The modules and name scopes."""
        return module_path(self.names)

    @property
    def phase(self) -> str:
        """ "forward" or "backward"."""
        return "backward" if is_backward(self.names) else "forward"

    def inside(self, *loops: str) -> Context:
        """Returns the context of a program that the equation contains."""
        return Context(self.names, self.line, (*self.context.loops, *loops))
