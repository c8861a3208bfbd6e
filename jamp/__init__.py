"""jamp: mixed-precision training for JAX with the semantics of NVIDIA apex's amp."""

from jamp import (
    fp16_utils as fp16_utils,
    linen as linen,
    multi_tensor as multi_tensor,
    nnx as nnx,
    optimizers as optimizers,
)
from jamp._amp_state import AmpState as AmpState, master_params as master_params
from jamp._autocast._lists import AutocastLists as AutocastLists
from jamp._autocast._regions import (
    disable_casts as disable_casts,
    float_function as float_function,
    half_function as half_function,
    promote_function as promote_function,
)
from jamp._autocast._transform import autocast as autocast
from jamp._cast import cast_model as cast_model
from jamp._check import check as check
from jamp._checkpoint import (
    from_checkpoint as from_checkpoint,
    to_checkpoint as to_checkpoint,
)
from jamp._closure import closure as closure
from jamp._forward import cast_forward as cast_forward
from jamp._initialize import initialize as initialize
from jamp._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    LossScaleState as LossScaleState,
    StaticLossScale as StaticLossScale,
)
from jamp._master_weights import (
    MasterWeightsState as MasterWeightsState,
    master_weights as master_weights,
)
from jamp._opt_level import OptLevelError as OptLevelError, Properties as Properties
from jamp._scale_loss import scale_loss as scale_loss, unscale as unscale
from jamp._scaled_grad import (
    scaled_grad as scaled_grad,
    scaled_value_and_grad as scaled_value_and_grad,
    zero_grads as zero_grads,
)
from jamp._scaled_grads import ScaledGrads as ScaledGrads
from jamp._state_dict import (
    load_state_dict as load_state_dict,
    state_dict as state_dict,
)
from jamp._warnings import (
    AutocastWarning as AutocastWarning,
    PrecisionWarning as PrecisionWarning,
    UnusedOptionWarning as UnusedOptionWarning,
)
from jamp.diagnostics import explain as explain

__version__ = "0.1.0"
