"""Cases that take minutes each run only on request: `make sweep`, `fuzz`, `budgets`."""

import os
from collections.abc import Iterable
from typing import Any


def more(name: str, cases: Iterable[Any]) -> list[Any]:
    """Returns the cases if the variable JAMP_<name> is set, and none otherwise."""
    return list(cases) if f"JAMP_{name}" in os.environ else []
