"""One operation of an explained program, and its FLOPs.

A multiplication and its addition are two FLOPs.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core as jc

from jamp._autocast.primitives import Shape, is_product, traits_of
from jamp._autocast.program import shape_of, size_of

# Operations that move values compute nothing; nor do these, in any precision.
_TRIVIAL = (Shape.SAME, Shape.MARK)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
        path: the operations whose programs hold it, from the outside in.
        source: the user's `file:line`, or a library's if the user has none.
        module: the modules and name scopes around it, such as `Net/Block_0`.
        phase: "backward" if it exists for a derivative, else "forward".
        primitive: the name in `jax.make_jaxpr`.
        dtype: the dtype that it runs in; None if it holds a program.
        rule: of the lists or the region: "half", "float32", "promote", "move" or
            "recorded".
        why: one or two words for the decision, such as "list" or "widest".
        reason: the same in a sentence.
        flops: of a float matmul or convolution, times the trips of the scans around it.
        sizes: M, N and K of a matmul; the features of a convolution.
    """

    path: tuple[str, ...]
    source: str
    module: str
    phase: str
    primitive: str
    dtype: str | None
    rule: str | None
    why: str
    reason: str
    flops: int | None
    sizes: tuple[int, ...] | None


def is_half(dtype: str | None) -> bool:
    """Whether a dtype is float16, bfloat16 or fp8."""
    return dtype in ("float16", "bfloat16") or is_fp8(dtype)


def is_fp8(*dtypes: str | None) -> bool:
    """Whether dtypes, by their names, have 8 bits."""
    return all(str(dtype).startswith("float8") for dtype in dtypes)


def computes(op: Operation) -> bool:
    """Whether it computes floats: moves, casts, masks and integers do not."""
    return (
        op.why != "program"
        and op.rule != "move"
        and traits_of(op.primitive).shape not in _TRIVIAL
        and "float" in str(op.dtype)
    )


def total_flops(operations: Iterable[Operation]) -> tuple[int, int]:
    """FLOPs of all matmuls and convolutions, and of those in half."""
    found = [(op.flops or 0, is_half(op.dtype)) for op in operations]
    return sum(n for n, _ in found), sum(n for n, half in found if half)


def warnings_of(op: Operation, level: str) -> list[str]:
    """Reasons why an operation wastes matrix units, or is unknown to autocast."""
    where = f"{op.source}: " if op.source else ""
    if op.why in ("unknown primitive", "half condition"):
        return [f"{where}{op.primitive}: {op.why}. {op.reason}"]
    if op.why == "level" and op.rule is None and "float" in str(op.dtype):
        return [f"{where}{op.primitive}: jamp cannot look inside. It runs as called."]
    if op.flops is None or op.phase == "backward" or level == "O0":
        return []
    if not is_half(op.dtype):
        return [f"{where}{op.primitive} runs in {op.dtype} ({op.why}). {op.reason}"]
    step, sizes = 16 if is_fp8(op.dtype) else 8, op.sizes or ()
    odd = [str(size) for size in sizes if size > step and size % step]
    if not odd:
        return []
    return [
        f"{where}{op.primitive} of {' × '.join(map(str, sizes))}: {', '.join(odd)} is "
        f"not a multiple of {step}, which matrix units need."
    ]


def flops_of(eqn: jc.JaxprEqn) -> tuple[int | None, tuple[int, ...] | None]:
    """FLOPs of a matmul or convolution, and the sizes that matrix units see, or None.

    - `dot_general`: 2 B M N K, for batch, free and contracted sizes; M, N and K.
    - `ragged_dot_general`: the same without the groups: a row meets one group.
    - `conv_general_dilated`: 2 I for each output value and kernel position, for I input
      features of a group, padding included; the features of the kernel.
    """
    if not is_product(eqn):
        return None, None
    name, groups = eqn.primitive.name, ()
    numbers: Any = eqn.params.get("dimension_numbers")
    if name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    lhs, rhs = map(shape_of, eqn.invars[:2])
    if name == "conv_general_dilated":
        features, inputs, *positions = (rhs[axis] for axis in numbers.rhs_spec)
        flops = 2 * size_of(eqn.outvars[0]) * inputs * math.prod(positions)
        return flops, (features, inputs)
    (of_lhs, of_rhs), (batch_lhs, batch_rhs) = numbers
    rows = (s for axis, s in enumerate(lhs) if axis not in {*of_lhs, *batch_lhs})
    shared = {*of_rhs, *batch_rhs, *groups}
    n = math.prod(s for axis, s in enumerate(rhs) if axis not in shared)
    sizes = math.prod(rows), n, math.prod(lhs[axis] for axis in of_lhs)
    return 2 * math.prod(lhs) * n, sizes
