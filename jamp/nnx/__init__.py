"""The adapter for Flax NNX, where models hold their Variables and change in place.

May import all packages. It takes the arrays out of models, calls the functions of the
other packages with them, and writes the results back.
"""

from jamp.nnx._autocast import autocast as autocast, cast_forward as cast_forward
from jamp.nnx._initialize import initialize as initialize
from jamp.nnx._optimizer import Optimizer as Optimizer
from jamp.nnx._pure import pure as pure
from jamp.nnx._scaled_grad import (
    scaled_grad as scaled_grad,
    scaled_value_and_grad as scaled_value_and_grad,
)
