"""Which operation runs in which precision: the functions in the table, and the user's.

`primitives` has the operations themselves.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Sequence
from typing import Any

from jamp._autocast.frames import HOLDERS
from jamp._autocast.primitives import ROWS, Row, Rule


def _row(rule: Rule, names: str, reason: str, descends_from: str) -> Row:
    return Row(rule, tuple(names.split()), reason, descends_from)


# Functions of JAX by the name that they are jitted under: the whole of them runs by one
# rule. A user's function of that name is another one.
FUNCTION_ROWS = (
    _row(
        Rule.FLOAT32,
        "softmax log_softmax logsumexp standardize cumulative_logsumexp softplus "
        "log_sigmoid",
        "Each is one exponential or logarithm with its safeguard: no rounding inside.",
        "apex FP32_FUNCS: softmax, log_softmax, softmin, softplus, layer_norm",
    ),
)

# Functions of JAX by their place; of a module with a star all but those of other rows.
LIBRARY_ROWS = (
    _row(
        Rule.FLOAT32,
        "jax.numpy.linalg.* jax.scipy.linalg.* jax.lax.linalg.* jax.scipy.stats.* "
        "jax.scipy.signal.* jax.scipy.spatial.* jax.numpy.cov jax.numpy.corrcoef "
        "jax.numpy.poly jax.numpy.polydiv jax.numpy.polyfit jax.numpy.polymul "
        "jax.numpy.roots jax.random.multivariate_normal",
        "Their products nearly cancel in linear algebra and statistics.",
        "torch: most raise in half, and none contains a matmul that is cast",
    ),
    _row(
        Rule.HALF,
        "jax.numpy.linalg.cross jax.numpy.linalg.matmul jax.numpy.linalg.multi_dot "
        "jax.numpy.linalg.outer jax.numpy.linalg.tensordot jax.numpy.linalg.vecdot "
        "jax.scipy.signal.convolve jax.scipy.signal.convolve2d "
        "jax.scipy.signal.correlate jax.scipy.signal.correlate2d",
        "These are matmuls and convolutions under another name.",
        "apex FP16_FUNCS: matmul, conv1d, conv2d; torch: chain_matmul",
    ),
)

# The same of functions that call the user's: only the products that are their own.
SOLVER_ROWS = (
    _row(
        Rule.FLOAT32,
        "jax.experimental.ode.* jax.scipy.integrate.* jax.scipy.optimize.* "
        "jax.scipy.sparse.*",
        "Solvers add small steps. The functions that they call follow the usual rules.",
        "torch: has none",
    ),
)


type Entry = tuple["What", Any, Rule | None]


class What(enum.Enum):
    """What a rule of the user is for."""

    PRIMITIVE = "primitive"  # a name, as `jax.make_jaxpr` prints it
    FUNCTION = "function"  # the name of a jitted function, or its place in the table
    REGION = "region"  # a regex that is searched in the name stack
    ATTRIBUTE = "attribute"  # a module or an object, and a name: a function to mark
    KERNEL = "kernel"  # the same: a function that only runs in half


@dataclasses.dataclass(frozen=True)
class AutocastLists:
    """The user's rules, after those of the table. Immutable: `autocast(lists=...)`.

    Attributes:
        rules: `(what, which, rule)`, in order: of those that match an operation the
            last decides, and the table where none does. None for a rule is the table's.

    A rule that matches nothing has no effect, so a misspelt name is not an error: it
    may belong to another model. `jamp.explain` names the rule of each operation.

    >>> import jax.numpy as jnp, jamp
    >>> lists = jamp.AutocastLists().with_primitive("tanh", "float32")
    >>> lists = lists.with_region("head/", "float32")
    >>> explain = jamp.explain(lambda x: jnp.tanh(x @ x), lists=lists)
    >>> [(op.primitive, op.dtype) for op in explain(jnp.ones((2, 2))).operations]
    [('dot_general', 'float16'), ('tanh', 'float32')]
    """

    rules: "tuple[Entry, ...]" = ()

    def with_primitive(self, name: str, rule: "Rule | str") -> "AutocastLists":
        """With a rule for a primitive.

        Raises:
            ValueError: it holds programs: the rules are for what is in them.
        """
        if name in HOLDERS:
            raise ValueError(
                f"with_primitive got {name!r}, which holds a program. Name what is in "
                "it; or write `with_region(regex, rule)`, or `with_function`."
            )
        return self._with(What.PRIMITIVE, name, Rule(rule))

    def with_function(self, name: str, rule: "Rule | str") -> "AutocastLists":
        """With a rule for the functions that were jitted under a name.

        And for JAX's own, by their name or by their place in the table; "default"
        takes them out of it.
        """
        return self._with(What.FUNCTION, name, _rule_or_default(rule))

    def with_region(self, regex: str, rule: "Rule | str") -> "AutocastLists":
        """With a rule for what the name stack matches; "default" is the table's.

        Raises:
            ValueError: `regex` is not a regular expression, or `rule` not a rule.
        """
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"with_region got no regex, {regex!r}: {error}.") from None
        return self._with(What.REGION, regex, _rule_or_default(rule))

    def register_half_function(self, module: object, name: str) -> "AutocastLists":
        """With `module.name` run in half, wherever a program looks it up there.

        Raises:
            ValueError: the module has no such function.
        """
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.HALF)

    def register_float_function(self, module: object, name: str) -> "AutocastLists":
        """With `module.name` run in float32; see `register_half_function`."""
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.FLOAT32)

    def register_promote_function(self, module: object, name: str) -> "AutocastLists":
        """With `module.name` run in its widest operand's dtype; see the other two."""
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.PROMOTE)

    def register_half_kernel(self, module: object, name: str) -> "AutocastLists":
        """With `module.name` called with half operands; see `jamp.half_kernel`.

        Raises:
            ValueError: the module has no such function.
        """
        return self._with(What.KERNEL, _attribute(module, name), None)

    def _with(self, what: What, which: Any, rule: Rule | None) -> "AutocastLists":
        return AutocastLists((*self.rules, (what, which, rule)))

    @functools.cached_property
    def _primitives(self) -> dict[str, Rule | None]:
        return _rules_in(ROWS) | dict(rules_for(self, What.PRIMITIVE))

    @functools.cached_property
    def _functions(self) -> dict[str, Rule | None]:
        return dict(rules_for(self, What.FUNCTION))


# ---- what the lists say of an operation


def rules_for(lists: AutocastLists, what: What) -> list[tuple[Any, Rule | None]]:
    """The user's rules of one kind: what each is for, and the rule."""
    return [(which, rule) for kind, which, rule in lists.rules if kind is what]


def last_of(
    lists: AutocastLists, primitive: str, function: str, names: str
) -> Entry | None:
    """The last of the user's rules that matches an operation.

    Args:
        primitive: its name.
        function: the function with a rule that it is a part of, or "".
        names: its name stack.
    """
    for entry in reversed(lists.rules):
        what, which, _ = entry
        if (
            (what is What.PRIMITIVE and which == primitive)
            or (what is What.FUNCTION and function and which in _names_of(function))
            or (what is What.REGION and re.search(which, names))
        ):
            return entry
    return None


def rule_of(lists: AutocastLists, primitive: str) -> Rule | None:
    """The rule of a primitive; None if no list has it."""
    return lists._primitives.get(primitive)


def rule_of_function(lists: AutocastLists, name: str, is_jax: bool) -> Rule | None:
    """The rule of a function by the name that it was jitted under, if there is one.

    `is_jax` says whether the function is JAX's own: the table has no others.
    """
    return lists._functions.get(name, _FUNCTIONS.get(name) if is_jax else None)


def rule_of_library(
    lists: AutocastLists, paths: Sequence[str], whole: bool = False
) -> tuple[Rule | None, str]:
    """The rule for what a function of JAX does by other functions of JAX.

    Args:
        paths: of the functions, innermost first, such as "jax.numpy.cov".
        whole: whether to ask for all that the function does, or for a product.

    Returns:
        The rule of the outermost that the table has, and its path; None for the
        rule if the table is to decide by operation, no path if it has none.
    """
    listed = [path for path in paths if library_place(path)]
    path = listed[-1] if listed else ""
    row = _LIBRARY.get(library_place(path))
    if row is None or (whole and row in SOLVER_ROWS):
        return None, ""
    users = [lists._functions[n] for n in _names_of(path) if n in lists._functions]
    rule = users[0] if users else row.rule
    return (None if row.rule is rule is Rule.HALF else rule), path


def _rule_or_default(rule: "Rule | str") -> Rule | None:
    return None if rule == "default" else Rule(rule)


def _attribute(module: object, name: str) -> tuple[object, str]:
    if not callable(getattr(module, name, None)):
        raise ValueError(f"No function named {name!r} in module {module!r}.")
    return module, name


def _rules_in(rows: Sequence[Row]) -> dict[str, Rule | None]:
    return {name: row.rule for row in rows for name in row.primitives}


_FUNCTIONS = _rules_in(FUNCTION_ROWS)
_LIBRARY = {
    place: row for row in LIBRARY_ROWS + SOLVER_ROWS for place in row.primitives
}


def _names_of(function: str) -> tuple[str, ...]:
    """The names by which the user's rules may mean a function of JAX."""
    return function, function.rpartition(".")[2], library_place(function)


@functools.cache
def library_place(path: str) -> str:
    """How the table names a function of JAX, by itself or with its module; or ""."""
    if path in _LIBRARY:
        return path
    modules = (place for place in _LIBRARY if place.endswith(".*"))
    return next((m for m in modules if path.startswith(m.removesuffix("*"))), "")
