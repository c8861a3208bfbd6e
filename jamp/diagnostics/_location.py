"""The report of `locate`: the operation that overflowed, its operands and advice."""

import dataclasses
import math
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from jamp.diagnostics._replay import Array

_SHOWN = 4


class Range(NamedTuple):
    """The type and the values of an array.

    Attributes:
        dtype, shape: the dtype and the shape of the array.
        low, high: the smallest and the largest finite value; None if there is none.
        nans, infs: the numbers of NaN and infinite values.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    def __str__(self) -> str:
        counts = [(self.nans, "NaN"), (self.infs, "inf")]
        bad = " and ".join(f"{n:,} {word}" for n, word in counts if n)
        size = math.prod(self.shape)
        bad += f" of {size:,}" if bad and size > 1 else ""
        within = "" if self.low is None else f"in [{self.low:.4g}, {self.high:.4g}]"
        shape = ", ".join(map(str, self.shape))
        return f"{self.dtype}[{shape}] {', '.join(filter(None, (within, bad)))}"


@dataclasses.dataclass(frozen=True)
class Location:
    """The first operation of a step whose result is not finite: `print` it.

    If the loss and all gradients are finite, it has only the loss and the scale.

    Attributes:
        loss: the loss, unscaled.
        scale: the loss scale, or 1 if the gradients overflow even at 1.
        operation: words such as "a matmul", or the argument that is not finite.
        primitive: the name in `jax.make_jaxpr`, or "" for an argument.
        phase: "forward", "backward", or "input" for an argument.
        source: `file:line`.
        module: the modules or name scopes around the operation, such as `Net/Block_0`.
        loops: the iterations of the loops around it, the outermost first.
        operands: the types and ranges of its operands.
        result: the type and range of its result; None if everything is finite.
        made_by: the operation and line that computed the operand of a cast.
        params: the paths of the params whose gradients are not finite.
        total: the number of gradients.
        advice: a sentence with the fix.
    """

    loss: float = math.nan
    scale: float = math.nan
    operation: str = ""
    primitive: str = ""
    phase: str = ""
    source: str = ""
    module: str = ""
    loops: tuple[str, ...] = ()
    operands: tuple[Range, ...] = ()
    result: Range | None = None
    made_by: str = ""
    params: tuple[str, ...] = ()
    total: int = 0
    advice: str = ""

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return self.result is None

    def __str__(self) -> str:
        """Returns at most 20 lines, one for each fact."""
        if self.finite:
            return f"All is finite: the loss is {self.loss:g}, at scale {self.scale:g}."
        phase = f" ({self.primitive}) in the {self.phase} pass"
        names = ", ".join(self.params[:_SHOWN])
        more = ", ..." if len(self.params) > _SHOWN else ""
        rows = [
            ("first", self.operation + (phase if self.primitive else "")),
            ("line", self.source),
            ("module", self.module),
            ("inside", ", ".join(self.loops)),
            *(("operand", str(x)) for x in self.operands[:_SHOWN]),
            ("made by", self.made_by),
            ("result", str(self.result)),
            ("loss", f"{self.loss:g}, at scale {self.scale:g}"),
            ("gradients", f"{len(self.params)} of {self.total} are not finite"),
            ("", names + more),
            *(("" if i else "advice", x) for i, x in enumerate(wrap(self.advice, 76))),
        ]
        return "\n".join(["Not finite:", *(f"  {k:<10}{x}" for k, x in rows if x)])

    __repr__ = __str__


def range_of(x: Array) -> Range:
    """Returns the range of a float array."""
    array = np.asarray(x)
    nan, inf = np.isnan(array), np.isinf(array)
    finite = array[~(nan | inf)]
    finite = np.abs(finite) if np.iscomplexobj(finite) else finite
    # Adding 0 turns -0 into 0.
    ends = [float(f(finite)) + 0.0 for f in (np.min, np.max) if finite.size]
    low, high = ends or (None, None)
    return Range(str(x.dtype), array.shape, low, high, int(nan.sum()), int(inf.sum()))
