"""Looks at programs and runs, and changes neither.

May import all rooms but `linen` and `nnx`. What was decided comes from `_autocast`
itself, as data; here it is counted, put in sentences and shown.

- `explain`: `_explain` makes `_operation`s of a program, `_reasons` says why;
  `_modules`, `_tree`, `_table`, `_page` and `_diff` show them.
- `locate`, `numerics`: `_step` traces a step, `_replay` runs it one operation at a
  time, `_programs` goes into loops and branches, `_origins` knows where inf and NaN
  come from, `_advice` what to do.
- `History`, `SkipLog`: along a run. `cost`: `_hlo` reads what XLA compiled for `_gpus`.
- `python -m jamp`: `_command`.
"""

from jamp.diagnostics._cost import (
    Costs as Costs,
    Part as Part,
    StepCost as StepCost,
    cost as cost,
)
from jamp.diagnostics._explain import explain as explain
from jamp.diagnostics._explanation import Explanation as Explanation
from jamp.diagnostics._history import History as History
from jamp.diagnostics._locate import locate as locate
from jamp.diagnostics._location import Location as Location
from jamp.diagnostics._numerics import (
    Numerics as Numerics,
    numerics as numerics,
    recommend_scale as recommend_scale,
)
from jamp.diagnostics._operation import Operation as Operation
from jamp.diagnostics._skip_log import Skip as Skip, SkipLog as SkipLog
