"""Looks at programs and runs, and changes neither.

May import all rooms but `linen` and `nnx`. What was decided comes from `_autocast`
itself, as data; here it is counted, put in sentences and shown.
"""

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
