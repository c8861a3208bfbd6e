"""Reports on programs and training steps.

May import all packages except `_checkpoint`, `fp16_utils` and `nnx`. `_autocast`
records its decisions as notes in the program that it writes. These modules count,
explain and print them.

- `explain`: `_explain` converts a program to operations; `_explanation` prints them.
- `locate`: `_step` traces a step, and `_replay` runs it one operation at a time.
  `_location` reports and advises.
- `compare`: `_pairing` pairs the operations of two replays, `_errors` compares their
  results, and `_comparison` prints the report.
"""

from jamp.diagnostics._compare import compare as compare
from jamp.diagnostics._comparison import Comparison as Comparison
from jamp.diagnostics._explanation import (
    Explanation as Explanation,
    Operation as Operation,
)
from jamp.diagnostics._locate import locate as locate
from jamp.diagnostics._location import Location as Location
