"""Which line, and which module of the model, an operation was written by."""

import os
import re
import site
import sysconfig

from jax.extend import core as jc

from jamp._autocast import jax_internals

# Where installed packages and Python's own are: not the user's lines.
_INSTALLED = tuple(
    {*sysconfig.get_paths().values(), *site.getsitepackages()}
    - {sysconfig.get_path("data"), sysconfig.get_path("scripts")}
)
_JAMP = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# What JAX and jamp put around the names of modules, and between them.
_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|jit)\(([^()]*)\)")
_MARKS = re.compile(r"^(jamp_\w+.*|rematted_computation|checkpoint|.*->.*|)$")


def is_installed(file: str) -> bool:
    """Whether a file is of an installed package, of Python or of jamp."""
    return file.startswith((*_INSTALLED, _JAMP, "<frozen "))


def user_line(eqn: jc.JaxprEqn) -> str:
    """`file:line`, the innermost in no installed package, or else outside of JAX."""
    lines = list(jax_internals.source_lines(eqn))
    own = (line for line in lines if not is_installed(line))
    return next(own, lines[0] if lines else "")


def module_path(names: str) -> str:
    """The modules and scopes of a name stack, without what JAX adds to them.

    >>> module_path("transpose(jvp(Net))/Block/jvp(Net)/rematted_computation/Block/up")
    'Net/Block/up'
    """
    before = ""
    while before != names:
        before, names = names, _WRAPPED.sub(r"\1", names)
    parts = [part for part in names.split("/") if not _MARKS.match(part)]
    # What is differentiated inside of a module has the path from the model on again.
    begin = len(parts) - 1 - parts[::-1].index(parts[0]) if parts else 0
    return "/".join(parts[begin:])


def is_backward(names: str) -> bool:
    """Whether a name stack is of the backward pass."""
    return "transpose(" in names
