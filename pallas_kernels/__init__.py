"""Formulas over many arrays at once, in XLA or in Pallas GPU kernels.

Each formula is a function of arrays. XLA runs it on whole arrays, and Pallas block by
block. Functions take lists of arrays and keep no state. The package is private and has
jamp's version.
"""

from pallas_kernels._rounding import (
    Noise as Noise,
    keys_of as keys_of,
    noise_like as noise_like,
    stochastic as stochastic,
)
from pallas_kernels._run import (
    BackendError as BackendError,
    Options as Options,
    check_backend as check_backend,
    check_device as check_device,
    run as run,
    width_of as width_of,
)
from pallas_kernels._step import (
    Leaves as Leaves,
    Rule as Rule,
    Weight as Weight,
    join as join,
    split_float32 as split_float32,
    step as step,
    step_norms as step_norms,
)
from pallas_kernels._xla import (
    Blocks as Blocks,
    Job as Job,
    Numbers as Numbers,
    Results as Results,
    computed_once as computed_once,
    saturate as saturate,
    widen as widen,
)
from pallas_kernels.norms import (
    found_inf as found_inf,
    norm as norm,
)
