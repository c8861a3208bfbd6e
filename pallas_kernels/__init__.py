"""GPU kernels for mixed-precision training, in Pallas; they know nothing of jamp.

Each operation is one file that holds its formula once: XLA runs it on whole arrays,
Pallas the same function block by block. Nothing here keeps state, and every function
takes lists of arrays, so that the package is of use without jamp.
"""

from pallas_kernels._backend import (
    BACKENDS as BACKENDS,
    Backend as Backend,
    BackendError as BackendError,
    check_backend as check_backend,
    resolve as resolve,
)
from pallas_kernels._run import Options as Options
from pallas_kernels._step import (
    Leaves as Leaves,
    Rule as Rule,
    Stepped as Stepped,
    step as step,
    step_norms as step_norms,
)
from pallas_kernels._weights import Weight as Weight, join as join, split as split
from pallas_kernels._xla import Blocks as Blocks, Numbers as Numbers
from pallas_kernels.axpby import axpby as axpby
from pallas_kernels.l2norm import (
    Norms as Norms,
    found_inf as found_inf,
    l2norm as l2norm,
    max_norm as max_norm,
)
from pallas_kernels.scale import Checked as Checked, scale as scale
