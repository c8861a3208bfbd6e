"""apex's fused optimizers as optax transformations, and masters for any optimizer.

May import `_core` and `pallas_kernels`. Each optimizer has one file. `_fused` has the
code that they share, and `_masters` steps half params with any optax transformation.
"""

from jamp.optimizers._adagrad import (
    FusedAdagradState as FusedAdagradState,
    fused_adagrad as fused_adagrad,
)
from jamp.optimizers._adam import (
    FusedAdamState as FusedAdamState,
    fused_adam as fused_adam,
)
from jamp.optimizers._codes import EightBit as EightBit
from jamp.optimizers._eight_bit import (
    EightBitState as EightBitState,
    eight_bit as eight_bit,
)
from jamp.optimizers._lamb import fused_lamb as fused_lamb
from jamp.optimizers._larc import LARCState as LARCState, larc as larc
from jamp.optimizers._masters import (
    StochasticRoundingState as StochasticRoundingState,
    stochastic_rounding as stochastic_rounding,
)
from jamp.optimizers._novograd import (
    FusedNovoGradState as FusedNovoGradState,
    fused_novograd as fused_novograd,
)
from jamp.optimizers._sgd import FusedSGDState as FusedSGDState, fused_sgd as fused_sgd
