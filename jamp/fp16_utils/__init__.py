"""apex's older interfaces in functional form: methods take the state and return it.

May import all packages below it, but not `_checkpoint`, `diagnostics` and `nnx`.
"""

from jamp.fp16_utils._flat import FlatFP16_Optimizer as FlatFP16_Optimizer
from jamp.fp16_utils._fp16_optimizer import (
    FP16_Optimizer as FP16_Optimizer,
    FP16State as FP16State,
)
from jamp.fp16_utils._fp16util import (
    BN_convert_float as BN_convert_float,
    FP16Model as FP16Model,
    clip_grad_norm as clip_grad_norm,
    convert_module as convert_module,
    convert_network as convert_network,
    master_params_to_model_params as master_params_to_model_params,
    model_grads_to_master_grads as model_grads_to_master_grads,
    network_to_half as network_to_half,
    prep_param_lists as prep_param_lists,
    to_python_float as to_python_float,
    tofp16 as tofp16,
)
from jamp.fp16_utils._scalers import (
    DynamicLossScaler as DynamicLossScaler,
    LossScaler as LossScaler,
)
