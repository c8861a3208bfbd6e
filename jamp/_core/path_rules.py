"""Rules that pick leaves by their path, such as `keep_fp32`."""

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
from jaxtyping import PyTree

from jamp._core.tree import path_string

type PathRule = str | re.Pattern[str] | Callable[[str, Any], bool]


def parse_rules(name: str, value: Any) -> tuple[PathRule, ...]:
    """Checks a rule or a list of rules of the option `name`, and returns a tuple."""
    rules = tuple(value) if isinstance(value, list | tuple) else (value,)
    for rule in rules:
        if isinstance(rule, str):
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(f"{name}={rule!r} is not a regex: {error}") from None
        elif not (isinstance(rule, re.Pattern) or callable(rule)):
            raise TypeError(
                f"{name} must be a regex, a predicate (path, leaf) -> bool, or a list "
                f"of them, got {rule!r}."
            )
    return rules


def matches(rules: Collection[PathRule], path: str, leaf: Any) -> bool:
    """Returns whether a rule picks the leaf."""
    return any(
        bool(rule(path, leaf)) if callable(rule) else bool(re.search(rule, path))
        for rule in rules
    )


def check_rules(name: str, rules: Collection[PathRule], *trees: PyTree) -> None:
    """Raises if a regex matches no leaf, because the regex is probably misspelt."""
    regexes = [rule for rule in rules if not callable(rule)]
    leaves = map(jax.tree_util.tree_leaves_with_path, trees if regexes else ())
    paths = [path_string(path) for path, _ in itertools.chain(*leaves)]
    for rule in regexes:
        if not any(re.search(rule, path) for path in paths):
            shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ValueError(
                f"{name}={rule!r} matches no leaf. It is searched as a regex in these "
                f"paths: {shown}."
            )
