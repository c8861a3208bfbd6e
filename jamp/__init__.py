"""jamp: mixed-precision training for JAX with the semantics of NVIDIA apex's amp."""

from jamp import linen as linen
from jamp._amp_state import AmpState as AmpState
from jamp._amp_state import master_params as master_params
from jamp._cast import cast_model as cast_model
from jamp._check import check as check
from jamp._dtypes import PrecisionWarning as PrecisionWarning
from jamp._forward import cast_forward as cast_forward
from jamp._initialize import initialize as initialize
from jamp._loss_scale import (
    DynamicLossScale as DynamicLossScale,
)
from jamp._loss_scale import (
    LossScaleState as LossScaleState,
)
from jamp._loss_scale import (
    StaticLossScale as StaticLossScale,
)
from jamp._master_weights import (
    MasterWeightsState as MasterWeightsState,
)
from jamp._master_weights import (
    master_weights as master_weights,
)
from jamp._opt_level import OptLevelError as OptLevelError
from jamp._opt_level import Properties as Properties
from jamp._scaled_grad import (
    ScaledGrads as ScaledGrads,
)
from jamp._scaled_grad import (
    scale_loss as scale_loss,
)
from jamp._scaled_grad import (
    scaled_grad as scaled_grad,
)
from jamp._scaled_grad import (
    scaled_value_and_grad as scaled_value_and_grad,
)
from jamp._scaled_grad import (
    unscale as unscale,
)
from jamp._scaled_grad import (
    zero_grads as zero_grads,
)

__version__ = "0.1.0"
