"""One operation of a program that is explained, and what it costs.

Floating-point operations are counted as XLA does (xla/service/hlo_cost_analysis.cc,
HandleDot and HandleConvolution): a product and its addition are two; products with
padding or with the holes of a dilation are none.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.extend import core as jc

from jamp._autocast.primitives import Shape, traits_of
from jamp._autocast.program import dtype_of, shape_of, size_of

HALF = ("float16", "bfloat16")
# Beside what only moves values: of these, nothing is gained in another precision.
_TRIVIAL = (Shape.SAME, Shape.MARK)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
        path: the operations that hold the program that it is in, from outside inward.
        source: the user's `file:line`, innermost; of a library's if there is none.
        name_stack: the scopes that it is in, as in profiles.
        module: the modules and scopes of the model among them, as `Net/Block_0`.
        primitive: its name, as `jax.make_jaxpr` prints it.
        trips: how often it runs the program that it holds; None if nobody knows.
        in_dtypes: of its operands in the user's program.
        dtype: what it runs in; None if it holds programs, or results without a dtype.
        rule: of the lists or of the region: "half", "float32", "promote", "move" or
            "recorded".
        why: what decided: "list", "region", "precision", "feeder", "fusion", "bias",
            "carry", "norm", "ratio", "operands", "widest", "narrowest", "smaller
            operand", "literal", "no vote", "recorded", "own dtype", "no float32",
            "unknown primitive" or "program"; of a product, "fp8", or "fp8 ..." for why
            it is not; of a step also "kept" and "no half param" of a half model,
            "derivative", "gradient", and at O0 "level".
        reason: the same in a sentence; for a list, the reason that its row gives.
        flops: of a matmul or convolution, in all trips of the scans around it.
        sizes: of a matmul, M, N and K; of a convolution, its features.
        bytes: of its operands and results, in all trips; XLA fuses, and moves fewer.
    """

    path: tuple[str, ...]
    source: str
    name_stack: str
    module: str
    primitive: str
    trips: int | None
    in_dtypes: tuple[str, ...]
    dtype: str | None
    rule: str | None
    why: str
    reason: str
    flops: int | None
    sizes: tuple[int, ...] | None
    bytes: int

    @property
    def is_float_matmul(self) -> bool:
        """Whether it is a matmul or convolution, and not one of integers."""
        return self.flops is not None and "float" in str(self.dtype)

    @property
    def is_half(self) -> bool:
        """Whether it runs in float16, bfloat16 or fp8."""
        return self.dtype in HALF or is_fp8(self.dtype)

    @property
    def is_backward(self) -> bool:
        """Whether it is of the backward pass of a step."""
        return "transpose(" in self.name_stack

    @property
    def is_forward(self) -> bool:
        """Whether it is of the forward pass, and not there for the backward pass."""
        return not self.is_backward and self.why not in ("derivative", "gradient")

    @property
    def matters(self) -> bool:
        """Whether it computes floats: moves, casts, masks and integers do not."""
        computes = self.why != "program" and self.rule != "move"
        computes = computes and traits_of(self.primitive).shape not in _TRIVIAL
        return computes and "float" in str(self.dtype)


def is_fp8(*dtypes: str | None) -> bool:
    """Whether dtypes, by their names, are of 8 bits."""
    return all(str(dtype).startswith("float8") for dtype in dtypes)


def product_flops(operations: Iterable[Operation]) -> tuple[int, int]:
    """FLOPs of the matmuls and convolutions of floats, and of those in half."""
    matmuls = [op for op in operations if op.is_float_matmul]
    half = sum(op.flops or 0 for op in matmuls if op.is_half)
    return sum(op.flops or 0 for op in matmuls), half


def warnings_of(op: Operation, level: str) -> list[str]:
    """What is to be said of an operation in a program for matrix units."""
    where = f"{op.source}: " if op.source else ""
    if op.why == "unknown primitive":
        return [f"{where}{op.primitive}: {op.why}. {op.reason}"]
    if op.why == "level" and op.rule is None and "float" in str(op.dtype):
        return [f"{where}{op.primitive}: nobody can look inside. It runs as called."]
    if not op.is_float_matmul or op.is_backward or level == "O0":
        return []
    if not op.is_half:
        return [f"{where}{op.primitive} runs in {op.dtype} ({op.why}). {op.reason}"]
    step = 16 if is_fp8(op.dtype) else 8
    odd = [size for size in op.sizes or () if size > step and size % step]
    if not odd:
        return []
    return [
        f"{where}{op.primitive} of {' × '.join(map(str, op.sizes or ()))}: "
        f"{', '.join(map(str, odd))} is not a multiple of {step}, as matrix units want."
    ]


# ---- what an equation costs


def product_of(eqn: jc.JaxprEqn) -> tuple[int | None, tuple[int, ...] | None]:
    """FLOPs of a matmul or convolution, and the sizes that matrix units see, or None.

    - `dot_general`: 2 B M N K, for batch, free and contracted sizes; M, N and K.
    - `ragged_dot_general`: the same without the groups: a row meets one group.
    - `conv_general_dilated`: 2 N O I per pair of an output position and a place of the
      kernel that meet in the input, for batch, output and input features; O and I.
    """
    name, groups = eqn.primitive.name, ()
    numbers: Any = eqn.params.get("dimension_numbers")
    if name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    elif name not in ("dot_general", "conv_general_dilated"):
        return None, None
    lhs, rhs = map(shape_of, eqn.invars[:2])
    if name == "conv_general_dilated":
        features = tuple(rhs[axis] for axis in numbers.rhs_spec[:2])
        return _convolution_flops(eqn), features
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = numbers
    rows = (s for axis, s in enumerate(lhs) if axis not in {*of_lhs, *batch_lhs})
    shared = {*of_rhs, *batch_rhs, *groups}
    n = math.prod(s for axis, s in enumerate(rhs) if axis not in shared)
    sizes = math.prod(rows), n, math.prod(lhs[axis] for axis in of_lhs)
    return 2 * math.prod(lhs) * n, sizes


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
