"""Count calls of our functions, which are the same in each run."""

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

from tests.support.pages import ROOT

ROOMS = tuple(f"{ROOT / name}/" for name in ("jamp", "pallas_kernels"))
type Function = tuple[str, int, str]  # its file, line and name


def calls_of(fn: Callable[..., Any], *args: Any) -> tuple[Any, dict[Function, int]]:
    """Returns the result of `fn`, and how often it called each of our functions."""
    profile = cProfile.Profile()
    result = profile.runcall(fn, *args)
    found = pstats.Stats(profile).stats.items()  # pyright: ignore
    return result, {key: row[1] for key, row in found if key[0].startswith(ROOMS)}
