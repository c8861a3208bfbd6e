"""Choose the cases of a test that `make test`, or only a longer run, includes."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def more(name: str, cases: Iterable[Any]) -> list[Any]:
    """Returns the cases if the variable JAMP_<name> is set, and none otherwise.

    `make sweep`, `make fuzz` and `make budgets` set it.
    """
    return list(cases) if f"JAMP_{name}" in os.environ else []


def slow_except(fast: Collection[str], names: Iterable[str]) -> list[Any]:
    """Marks all names as slow cases, except for the fast ones."""
    names = list(names)
    assert set(fast) <= set(names), "no such case"
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]
