"""jamp: mixed-precision training for JAX with the semantics of NVIDIA apex's amp."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 12):  # noqa: UP036
    raise ImportError(
        f"jamp needs Python 3.12 or newer; this is {sys.version.split()[0]}."
    )

from jamp._core import requirements as _requirements

if _problem := _requirements.jax_problem():
    raise ImportError(_problem)

from jamp import optimizers as optimizers
from jamp._autocast.lists import AutocastLists as AutocastLists
from jamp._autocast.marks import (
    disable_casts as disable_casts,
    disable_fp8 as disable_fp8,
    float_function as float_function,
    half_function as half_function,
    half_kernel as half_kernel,
    promote_function as promote_function,
)
from jamp._autocast.transform import autocast as autocast
from jamp._checkpoint.apex import (
    load_state_dict as load_state_dict,
    state_dict as state_dict,
)
from jamp._checkpoint.portable import (
    from_checkpoint as from_checkpoint,
    to_checkpoint as to_checkpoint,
)
from jamp._core.warnings import (
    AutocastWarning as AutocastWarning,
    PrecisionWarning as PrecisionWarning,
    UnusedOptionWarning as UnusedOptionWarning,
)
from jamp._fp8.options import Fp8 as Fp8
from jamp._policy.casting import cast_model as cast_model
from jamp._policy.forward import cast_forward as cast_forward
from jamp._policy.levels import OptLevelError as OptLevelError, Properties as Properties
from jamp._scaling.loss import scale_loss as scale_loss, unscale as unscale
from jamp._scaling.rules import (
    DynamicLossScale as DynamicLossScale,
    LossScaleState as LossScaleState,
    StaticLossScale as StaticLossScale,
)
from jamp._scaling.value_and_grad import (
    scaled_grad as scaled_grad,
    scaled_value_and_grad as scaled_value_and_grad,
)
from jamp._state.amp_state import AmpState as AmpState
from jamp._state.average import incremental_update as incremental_update
from jamp._state.check import check as check
from jamp._state.closure import closure as closure
from jamp._state.group import master_params as master_params
from jamp._state.initialize import initialize as initialize
from jamp.optimizers._masters import (
    MasterWeightsState as MasterWeightsState,
    master_weights as master_weights,
)

__version__ = "0.1.0"  # pyproject.toml reads it from here


def _is_ours(name: str) -> bool:
    return getattr(globals()[name], "__module__", "").startswith("jamp.")


if TYPE_CHECKING:
    from jamp import fp16_utils as fp16_utils, nnx as nnx
    from jamp.diagnostics._explain import explain as explain

# Names from other libraries, and the hint in the error.
_ELSEWHERE = {
    "GradScaler": "Write jamp.scaled_value_and_grad(loss_fn)(state, ...).",
    "DynamicScale": "Pass loss_scale=jamp.DynamicLossScale(...) to jamp.initialize.",
    "Policy": "Pass opt_level to jamp.initialize; jamp.Properties has its properties.",
    "compare": "It is jamp.diagnostics.compare.",
    "amp": "jamp has amp's functions itself: jamp.initialize, jamp.scale_loss.",
}
_LATE = ("diagnostics", "fp16_utils", "nnx")
# The names for `help(jamp)` and `import *`, which must not import NNX.
__all__ = [*filter(_is_ours, globals()), "explain"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a subpackage on first use, because most programs use none of them."""
    if name == "explain":
        return importlib.import_module("jamp.diagnostics._explain").explain
    if name in _LATE:
        return importlib.import_module(f"jamp.{name}")
    remedy = f" {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{remedy}")


def __dir__() -> list[str]:
    return sorted({*globals(), "explain", *_LATE})
