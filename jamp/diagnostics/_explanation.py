"""The report of `explain`: operations, their FLOPs, and a tree of modules.

A multiplication and its addition are two FLOPs.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax.extend import core as jc

from jamp._autocast.primitives import Shape, is_matmul, traits_of
from jamp._autocast.scope import shape_of, size_of
from jamp.diagnostics._modules import rows_of, table, tree_of

# Operations that compute nothing.
_TRIVIAL = (Shape.SAME, Shape.MARK)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
        path: the operations that contain it, the outermost first.
        source: `file:line` in the user's code, or otherwise in a library.
        module: the modules and name scopes around it, such as `Net/Block_0`.
        phase: "backward" if it exists for a derivative, else "forward".
        primitive: the name in `jax.make_jaxpr`.
        dtype: the dtype in which it runs; None if it contains a program.
        rule: the rule of the lists or the region: "half", "float32", "promote", "move"
            or "recorded".
        why: the decision in one or two words, such as "list" or "widest".
        reason: the decision in a sentence.
        flops: the FLOPs of a float matmul or convolution, in all iterations of scans.
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

    def __str__(self) -> str:
        return f"{self.primitive} in {self.dtype} ({self.why}) at {self.source}"


def is_half(dtype: str | None) -> bool:
    """Returns whether a dtype is float16, bfloat16 or fp8."""
    return dtype in ("float16", "bfloat16") or is_fp8(dtype)


def is_fp8(*dtypes: str | None) -> bool:
    """Returns whether the names of dtypes have 8 bits."""
    return all(str(dtype).startswith("float8") for dtype in dtypes)


def computes(op: Operation) -> bool:
    """Returns whether an operation computes floats, and does not only move or cast."""
    return (
        op.why != "program"
        and op.rule != "move"
        and traits_of(op.primitive).shape not in _TRIVIAL
        and "float" in str(op.dtype)
    )


def total_flops(operations: Iterable[Operation]) -> tuple[int, int]:
    """Returns the FLOPs of all matmuls and convolutions, and of those in half."""
    found = [(op.flops or 0, is_half(op.dtype)) for op in operations]
    return sum(n for n, _ in found), sum(n for n, half in found if half)


def warning_of(op: Operation, level: str) -> str:
    """Warns of an operation that is slow, or that autocast does not know; or ""."""
    where = f"{op.source}: {op.primitive}" if op.source else op.primitive
    if op.why in ("unknown primitive", "half condition"):
        return f"{where}: {op.why}. {op.reason}"
    if op.why == "level" and op.rule is None and "float" in str(op.dtype):
        return f"{where}: jamp cannot look inside. It runs as called."
    is_wide = op.flops is not None and not is_half(op.dtype)
    if is_wide and op.phase == "forward" and level != "O0":
        return f"{where} runs in {op.dtype} ({op.why}). {op.reason}"
    return ""


def flops_of(eqn: jc.JaxprEqn) -> int | None:
    """Returns the FLOPs of a matmul or convolution, or None.

    - `dot_general`: 2 B M N K, for batch, free and contracted sizes.
    - `ragged_dot_general`: the same without the groups, because a row has one group.
    - `conv_general_dilated`: 2 I for each output value and kernel position, for I input
      features of a group, padding included.
    """
    if not is_matmul(eqn):
        return None
    numbers: Any = eqn.params.get("dimension_numbers")
    lhs, rhs = map(shape_of, eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        _, inputs, *positions = (rhs[axis] for axis in numbers.rhs_spec)
        return 2 * size_of(eqn.outvars[0]) * inputs * math.prod(positions)
    groups = ()
    if eqn.primitive.name == "ragged_dot_general":
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = numbers
    shared = {*contracted, *batch, *groups}
    n = math.prod(s for axis, s in enumerate(rhs) if axis not in shared)
    return 2 * math.prod(lhs) * n


_SHOWN = 6  # warnings below the tree
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The precision of each operation: `print` it.

    `print` shows a tree of modules, with equal modules in one line. FLOPs count a while
    loop once, each branch of a cond, and one device of a `shard_map`.

    Attributes:
        dtype: the half dtype.
        operations: the operations in the order of the program. The operations of an
            inner program follow the operation that contains it.
        promote: "widest" or "narrowest", for a function under autocast.
        level: the opt level of a step; "" for a function.
    """

    dtype: str
    operations: tuple[Operation, ...]
    promote: str = ""
    level: str = ""

    @property
    def half_share(self) -> float | None:
        """The share of the matmul FLOPs that runs in half; None if there are none."""
        total, half = total_flops(self.operations)
        return half / total if total else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings: float32 matmuls, unknown operations."""
        found = Counter(warning_of(op, self.level) for op in self.operations)
        return tuple(w if n == 1 else f"{w} ({n} ×)" for w, n in found.items() if w)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON."""
        totals = {"half_share": self.half_share, "warnings": self.warnings}
        return json.loads(json.dumps(dataclasses.asdict(self) | totals))

    def __str__(self) -> str:
        rows = [("module", "FLOPs", "in half", "computed in float32, and why")]
        for label, times, node in rows_of(tree_of(filter(computes, self.operations))):
            # The numbers are averages over equal modules.
            count = len(node.paths)
            total, half = total_flops(node.operations)
            flops = (f"{times} × " if times > 1 else "") + _magnitude(total // count)
            share = f"{half / total:.1%}".replace("100.0%", "100%") if total else ""
            words = _float32_words(node.own, count)
            rows.append((label, flops if total else "", share, words))
        warnings = [f"! {warning}" for warning in self.warnings]
        if len(warnings) > _SHOWN:
            more = len(warnings) - _SHOWN
            warnings[_SHOWN:] = [f"! and {more} more in `.warnings`."]
        return "\n".join([self._title(), table(rows), *warnings])

    def __repr__(self) -> str:
        """Returns the totals."""
        return f"<jamp.Explanation {self._title()} print() shows the modules>"

    def _title(self) -> str:
        matmuls = sum(op.flops is not None for op in self.operations)
        total, half = total_flops(self.operations)
        fp8, _ = total_flops(op for op in self.operations if is_fp8(op.dtype))
        share = f", {half / total:.1%} in half" if total else ""
        share += f", {fp8 / total:.1%} in fp8" if fp8 else ""
        of = f"A step at {self.level}" if self.level else f"autocast, {self.promote}"
        return (
            f"{of}: {matmuls} matmuls and convolutions, {total:.3g} FLOPs{share} "
            f"({self.dtype})."
        )


def _magnitude(number: int) -> str:
    """Formats a number as three digits and a letter, or "" for 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


def _float32_words(operations: Iterable[Operation], modules: int) -> str:
    """Describes the float32 operations in one of several equal modules."""
    counts: dict[str, Counter[str]] = {}
    for op in operations:
        if op.phase == "forward" and not is_half(op.dtype):
            counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        pairs = ((name, -(-n // modules)) for name, n in names.items())
        words = (name if n == 1 else f"{name} {n}×" for name, n in pairs)
        parts.append(", ".join(words) + (f" ({why})" if why != "level" else ""))
    return "; ".join(parts)
