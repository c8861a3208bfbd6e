"""Lists the precision of functions, and stores the rules that the user adds.

`primitives` has the table of operations.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Sequence
from typing import Any

from jamp._autocast.primitives import ROWS, Row, Rule
from jamp._autocast.subjaxprs import HIGHER_ORDER


def _row(rule: Rule, names: str, reason: str, descends_from: str) -> Row:
    return Row(rule, tuple(names.split()), reason, descends_from)


# JAX functions by the name of their `jit`. One rule applies to the whole function. It
# does not apply to a user's function of the same name.
FUNCTION_ROWS = (
    _row(
        Rule.FLOAT32,
        "softmax log_softmax logsumexp standardize cumulative_logsumexp softplus "
        "log_sigmoid",
        "Rounding inside a stabilized exponential or logarithm loses digits.",
        "apex FP32_FUNCS: softmax, log_softmax, softmin, softplus, layer_norm",
    ),
)

# JAX functions by path. `module.*` matches all functions that no other row names.
LIBRARY_ROWS = (
    _row(
        Rule.FLOAT32,
        "jax.numpy.linalg.* jax.scipy.linalg.* jax.lax.linalg.* jax.scipy.stats.* "
        "jax.scipy.signal.* jax.scipy.spatial.* jax.numpy.cov jax.numpy.corrcoef "
        "jax.numpy.poly jax.numpy.polydiv jax.numpy.polyfit jax.numpy.polymul "
        "jax.numpy.roots jax.numpy.interp jax.random.multivariate_normal",
        "Terms nearly cancel in linear algebra and statistics.",
        "torch: most raise in half, and none contains a matmul that is cast",
    ),
    _row(
        Rule.HALF,
        "jax.numpy.linalg.cross jax.numpy.linalg.matmul jax.numpy.linalg.multi_dot "
        "jax.numpy.linalg.outer jax.numpy.linalg.tensordot jax.numpy.linalg.vecdot "
        "jax.scipy.signal.convolve jax.scipy.signal.convolve2d "
        "jax.scipy.signal.correlate jax.scipy.signal.correlate2d",
        "These functions are matmuls and convolutions.",
        "apex FP16_FUNCS: matmul, conv1d, conv2d; torch: chain_matmul",
    ),
)

# JAX functions that call the user's functions. The rule covers only their own matmuls.
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
    """The kind of target that a user's rule applies to."""

    PRIMITIVE = "primitive"  # a name, as `jax.make_jaxpr` prints it
    FUNCTION = "function"  # the name of a jitted function, or its path
    REGION = "region"  # a regex that is searched in the name stack
    ATTRIBUTE = "attribute"  # a module or object, and a name: marks the function
    KERNEL = "kernel"  # the same, for a function that requires half


@dataclasses.dataclass(frozen=True)
class AutocastLists:
    """The user's additions to the table, for `autocast(lists=...)`. It is immutable.

    Attributes:
        rules: `(what, which, rule)`, in order. The last rule that matches an operation
            decides. The table decides if no rule matches, or if `rule` is None.

    A rule that matches nothing has no effect and raises no error, because its name may
    belong to another model. `jamp.explain` names the rule of each operation.

    >>> import jax.numpy as jnp, jamp
    >>> lists = jamp.AutocastLists().with_primitive("tanh", "float32")
    >>> lists = lists.with_region("head/", "float32")
    >>> explain = jamp.explain(lambda x: jnp.tanh(x @ x), lists=lists)
    >>> [(op.primitive, op.dtype) for op in explain(jnp.ones((2, 2))).operations]
    [('dot_general', 'float16'), ('tanh', 'float32')]
    """

    rules: "tuple[Entry, ...]" = ()

    def with_primitive(self, name: str, rule: "Rule | str") -> "AutocastLists":
        """Adds a rule for a primitive.

        Raises:
            ValueError: the primitive contains a program, such as `scan`, or `rule` is
                not a rule.
        """
        if name in HIGHER_ORDER:
            raise ValueError(
                f"with_primitive got {name!r}, which contains a program. Name a "
                "primitive in it, or use `with_region` or `with_function`."
            )
        return self._with(What.PRIMITIVE, name, Rule(rule))

    def with_function(self, name: str, rule: "Rule | str") -> "AutocastLists":
        """Adds a rule for the functions that are jitted under a name.

        The name may also be the path of a JAX function in the table. The rule "default"
        removes the function from the table.
        """
        return self._with(What.FUNCTION, name, _rule_or_default(rule))

    def with_region(self, regex: str, rule: "Rule | str") -> "AutocastLists":
        """Adds a rule for operations by their name stack; "default" uses the table.

        Raises:
            ValueError: `regex` is not a regular expression, or `rule` is not a rule.
        """
        try:
            re.compile(regex)
        except re.error as error:
            message = f"with_region got a bad regex, {regex!r}: {error}."
            raise ValueError(message) from None
        return self._with(What.REGION, regex, _rule_or_default(rule))

    def register_half_function(self, module: object, name: str) -> "AutocastLists":
        """Runs `module.name` in half wherever the program looks it up in `module`.

        Raises:
            ValueError: the module has no such function.
        """
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.HALF)

    def register_float_function(self, module: object, name: str) -> "AutocastLists":
        """Runs `module.name` in float32; see `register_half_function`."""
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.FLOAT32)

    def register_promote_function(self, module: object, name: str) -> "AutocastLists":
        """Runs each operation of `module.name` in the widest dtype of its operands."""
        return self._with(What.ATTRIBUTE, _attribute(module, name), Rule.PROMOTE)

    def register_half_kernel(self, module: object, name: str) -> "AutocastLists":
        """Calls `module.name` with half operands; see `jamp.half_kernel`.

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


# ---- looking up rules


def rules_for(lists: AutocastLists, what: What) -> list[tuple[Any, Rule | None]]:
    """Returns the target and the rule of each user's rule of one kind."""
    return [(which, rule) for kind, which, rule in lists.rules if kind is what]


def last_of(
    lists: AutocastLists, primitive: str, function: str, names: str
) -> Entry | None:
    """Returns the last of the user's rules that matches an operation.

    Args:
        primitive: the name of the operation.
        function: the function with a rule that contains the operation, or "".
        names: the name stack of the operation.
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
    """Returns the rule of a primitive, or None if no list contains it."""
    return lists._primitives.get(primitive)


def rule_of_function(lists: AutocastLists, name: str, is_jax: bool) -> Rule | None:
    """Returns the rule of a function by the name of its `jit`, or None.

    `is_jax` states whether the function is part of JAX. The table has only those.
    """
    return lists._functions.get(name, _FUNCTIONS.get(name) if is_jax else None)


def rule_of_library(
    lists: AutocastLists, paths: Sequence[str], whole: bool = False
) -> tuple[Rule | None, str]:
    """Returns the rule and the path of the outermost listed function in a call stack.

    Args:
        paths: the JAX functions of the stack, innermost first, as "jax.numpy.cov".
        whole: whether the rule applies to the whole function or only to a matmul.

    Returns:
        The rule, or None if the table decides per operation; and the path, or "" if
        the table contains none of the functions.
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
        raise ValueError(f"{module!r} has no function named {name!r}.")
    return module, name


def _rules_in(rows: Sequence[Row]) -> dict[str, Rule | None]:
    return {name: row.rule for row in rows for name in row.primitives}


_FUNCTIONS = _rules_in(FUNCTION_ROWS)
_LIBRARY = {
    place: row for row in LIBRARY_ROWS + SOLVER_ROWS for place in row.primitives
}


def _names_of(function: str) -> tuple[str, ...]:
    """Returns the names by which a user's rule can refer to a JAX function."""
    return function, function.rpartition(".")[2], library_place(function)


@functools.cache
def library_place(path: str) -> str:
    """Returns the entry of a JAX function in the table, or "" if there is none."""
    if path in _LIBRARY:
        return path
    modules = (place for place in _LIBRARY if place.endswith(".*"))
    return next((m for m in modules if path.startswith(m.removesuffix("*"))), "")
