"""Looks at programs and runs, and changes neither.

May import all packages but `nnx`. `_autocast` records its decisions as notes in the
program that it writes; these modules count them, explain them and print them.

- `explain`: `_explain` makes `_operation`s of a program and says why; `_table` lists
  them, or sums them by module.
- `locate`, `numerics`: `_step` traces a step, `_replay` runs it one operation at a
  time, `_programs` goes into loops and branches, `_location` knows where inf and NaN
  come from, `_advice` what to do, `_products` what fp8 loses.
- `SkipLog`: along a run. `_doctor`: what `python -m jamp` prints.
"""

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
