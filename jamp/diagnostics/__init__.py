"""Looks at programs and runs, and changes neither."""

from jamp.diagnostics._explain import explain as explain
from jamp.diagnostics._explanation import (
    Explanation as Explanation,
    Operation as Operation,
)
