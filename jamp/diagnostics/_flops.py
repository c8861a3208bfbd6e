"""What an equation costs: floating-point operations of products, and bytes.

As XLA counts them (xla/service/hlo_cost_analysis.cc, HandleDot and HandleConvolution),
a product and its addition are two operations; products with padding or with the holes
of a dilation are none.
"""

import math
from typing import Any

import numpy as np
from jax.extend import core as jc

from jamp._autocast.program import dtype_of, shape_of, size_of


def flops(eqn: jc.JaxprEqn) -> int | None:
    """The operations of an equation; None if it is not a matmul or convolution.

    - `dot_general`: 2 B M N K, for batch, free and contracted sizes.
    - `ragged_dot_general`: the same without the groups: a row meets one group.
    - `conv_general_dilated`: 2 N O I per pair of an output position and a place of the
      kernel that meet in the input, for batch, output and input features.
    """
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution_flops(eqn)
    if (found := sizes(eqn)) is None:
        return None
    _, columns, _ = found
    return 2 * math.prod(shape_of(eqn.invars[0])) * columns


def sizes(eqn: jc.JaxprEqn) -> tuple[int, ...] | None:
    """The sizes that matrix units see: M, N and K; None if it is not a product.

    - `dot_general`, `ragged_dot_general`: free sizes of each operand, contracted size.
    - `conv_general_dilated`: output and input features.
    """
    name, groups = eqn.primitive.name, ()
    numbers: Any = eqn.params.get("dimension_numbers")
    if name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    elif name not in ("dot_general", "conv_general_dilated"):
        return None
    lhs, rhs = map(shape_of, eqn.invars[:2])
    if name == "conv_general_dilated":
        return tuple(rhs[axis] for axis in numbers.rhs_spec[:2])
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = numbers
    rows = (s for axis, s in enumerate(lhs) if axis not in {*of_lhs, *batch_lhs})
    shared = {*of_rhs, *batch_rhs, *groups}
    columns = (s for axis, s in enumerate(rhs) if axis not in shared)
    return math.prod(rows), math.prod(columns), math.prod(lhs[axis] for axis in of_lhs)


def _convolution_flops(eqn: jc.JaxprEqn) -> int:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = map(shape_of, (*eqn.invars, *eqn.outvars))
    batch, features, *positions = (out[axis] for axis in numbers.out_spec)
    inputs, *kernel = (rhs[axis] for axis in numbers.rhs_spec[1:])
    found = 2 * batch * features * inputs
    for i, axis in enumerate(numbers.lhs_spec[2:]):
        starts = np.arange(positions[i]) * params["window_strides"][i]
        places = np.arange(kernel[i]) * params["rhs_dilation"][i]
        places = starts[:, None] + places - params["padding"][i][0]
        holes = params["lhs_dilation"][i]
        meets = (places >= 0) & (places <= (lhs[axis] - 1) * holes)
        found *= int((meets & (places % holes == 0)).sum())
    return found


def bytes_of(eqn: jc.JaxprEqn) -> int:
    """Of operands and results."""
    atoms = (*eqn.invars, *eqn.outvars)
    return sum(size_of(v) * getattr(dtype_of(v), "itemsize", 0) for v in atoms)
