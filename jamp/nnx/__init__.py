"""jamp for Flax NNX: models that hold their Variables, and change in place.

May import all rooms but `linen` and `tools`. Arrays go out of a model into the
functions of the other rooms and come back: nothing is scaled or stepped here.
"""

from jamp.nnx._autocast import autocast as autocast
from jamp.nnx._initialize import initialize as initialize
from jamp.nnx._optimizer import Optimizer as Optimizer
from jamp.nnx._pure import pure as pure
from jamp.nnx._scaled_grad import (
    scaled_grad as scaled_grad,
    scaled_value_and_grad as scaled_value_and_grad,
)
