"""Looks at programs and runs, and changes neither.

May import all rooms but `linen`, `nnx` and `tools`, which stands on it: the public
names of that are loaded when they are first used. What was decided comes from
`_autocast`, as notes in the program that it writes; here it is counted, put in
sentences and shown.

- `explain`: `_explain` makes `_operation`s of a program and says why; `_table` lists
  them, or sums them by module.
- `locate`, `numerics`: `_step` traces a step, `_replay` runs it one operation at a
  time, `_programs` goes into loops and branches, `_location` knows where inf and NaN
  come from, `_advice` what to do, `_products` what fp8 loses.
- `SkipLog`: along a run.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jamp.diagnostics._explain import explain as explain
from jamp.diagnostics._explanation import Explanation as Explanation
from jamp.diagnostics._locate import locate as locate
from jamp.diagnostics._location import Location as Location
from jamp.diagnostics._numerics import (
    Numerics as Numerics,
    numerics as numerics,
    recommend_scale as recommend_scale,
)
from jamp.diagnostics._operation import Operation as Operation
from jamp.diagnostics._products import ProductLoss as ProductLoss
from jamp.diagnostics._skip_log import Skip as Skip, SkipLog as SkipLog

if TYPE_CHECKING:
    from jamp.tools._cost import (
        Costs as Costs,
        Part as Part,
        StepCost as StepCost,
        cost as cost,
    )
    from jamp.tools._history import History as History

_TOOLS: dict[str, str] = {
    **dict.fromkeys(("Costs", "Part", "StepCost", "cost"), "_cost"),
    "History": "_history",
}


def __getattr__(name: str) -> Any:
    """Loads a tool when it is first used: the tools import this room."""
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jamp.tools.{_TOOLS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_TOOLS})
