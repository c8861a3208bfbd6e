"""What `locate` returns: where a batch overflowed, of what it came, and what to do.

Beside it what is in an array: its range, and how much of it is not finite.
"""

import dataclasses
import functools
import math
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._core.dtypes import is_differentiable

_SHOWN = 4

type Array = jax.Array | np.ndarray


class Range(NamedTuple):
    """The values of an array.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        low: the least finite value; None if there is none.
        high: the greatest finite value; likewise.
        nans: how many are NaN.
        infs: how many are infinite.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    @property
    def magnitude(self) -> float:
        """The largest absolute value of the finite ones; 0 if there is none."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        bad = [(self.nans, "NaN"), (self.infs, "inf")]
        parts = [f"{count:,} {word}" for count, word in bad if count]
        size = int(np.prod(self.shape))
        of = f" of {size:,}" if parts and size > 1 else ""
        counts = " and ".join(parts) + of if size > 1 or not parts else parts[0][2:]
        within = "" if self.low is None else f"in [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.dtype}[{shape}] {', '.join(filter(None, (within, counts)))}"


@dataclasses.dataclass(frozen=True)
class Location:
    """The first operation of a step whose result is not finite: `print` it.

    Attributes:
        finite: whether loss and gradients are all finite; then the rest is empty.
        loss: the loss, unscaled.
        scale: the loss scale; 1 if the gradients overflow at that, too.
        operation: in words, as "a matrix product"; or what came in not finite.
        primitive: its name, as `jax.make_jaxpr` prints it; "" of what came in.
        phase: "forward", "backward", or "input" of what came in.
        source: `file:line`.
        module: the modules or name scopes that it is in, as `Net/Block_0`.
        near: the path of the param that was read last on the way to it.
        loops: in which iterations of which loops it ran, from outside inward.
        operands: the dtypes, shapes and ranges of what it read.
        result: the same of what it gave.
        made_by: what computed the operand of a cast, and on which line.
        infinities: where infinite operands came from, if they may be meant so.
        params: the paths of the params whose gradients are not finite.
        total: how many gradients there are.
        advice: what to do, in a sentence.
    """

    finite: bool = False
    loss: float = math.nan
    scale: float = math.nan
    operation: str = ""
    primitive: str = ""
    phase: str = ""
    source: str = ""
    module: str = ""
    near: str = ""
    loops: tuple[str, ...] = ()
    operands: tuple[Range, ...] = ()
    result: Range | None = None
    made_by: str = ""
    infinities: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    total: int = 0
    advice: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the result; "" if all is finite."""
        return self.result.dtype if self.result else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; () if all is finite."""
        return self.result.shape if self.result else ()

    def __str__(self) -> str:
        """A line for each thing, in at most 20."""
        if self.finite:
            return f"All is finite: the loss is {self.loss:g}, at scale {self.scale:g}."
        shown = ", ".join(self.params[:_SHOWN])
        more = ", ..." if len(self.params) > _SHOWN else ""
        names = f": {shown}{more}" if shown else ""
        is_operation = f" ({self.primitive}) in the {self.phase} pass"
        rows = [
            ("first", self.operation + (is_operation if self.primitive else "")),
            ("line", self.source),
            ("module", self.module),
            ("params", f"{self.near} was read last before it" if self.near else ""),
            ("inside", ", ".join(self.loops)),
            *(("operand", str(x)) for x in self.operands[:_SHOWN]),
            ("made by", self.made_by),
            ("inf from", ", ".join(self.infinities)),
            ("result", str(self.result)),
            ("loss", f"{self.loss:g}, at scale {self.scale:g}"),
            ("gradients", f"{len(self.params)} of {self.total} are not finite{names}"),
            ("advice", self.advice),
        ]
        wrap = textwrap.TextWrapper(
            width=88,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines = ["Not finite:"]
        for name, text in rows:
            line = f"  {name:<10}{text}"
            # A line of the source stays whole, to click on.
            whole = name in ("line", "made by")
            lines += ([line] if whole else wrap.wrap(line)) if text else []
        return "\n".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """Why a value is not finite: it knows those before it."""

    order: int  # the place of what made it, in order of execution
    has_nan: bool
    parents: tuple["Cause", ...] = ()  # what is not finite among what it was made of
    location: Location | None = None  # what to report if it is the first, if it can be
    is_wish: bool = False  # an infinity of the program or in the arguments, as a mask's

    @functools.cached_property
    def is_intended(self) -> bool:
        """Whether it may be meant so: it is made of such infinities, and holds no NaN.

        The parents were asked when it was made: this does not go far back.
        """
        of_wishes = bool(self.parents) and all(p.is_intended for p in self.parents)
        return not self.has_nan and (self.is_wish or of_wishes)


def parents_of(has_nan: bool, causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Those of some causes that account for a result: for a NaN, NaNs if there are."""
    parents = tuple(dict.fromkeys(causes))
    nans = tuple(cause for cause in parents if cause.has_nan)
    return nans if has_nan and nans else parents


def first_location(causes: Iterable[Cause]) -> Location | None:
    """The first operation, or argument, that some values are not finite for.

    In order of execution, among all that these were made of: what came in not finite,
    what overflowed on finite operands, and what made NaN of infinities that may be
    meant so, such as a mask's. If there is none of these, the first of such infinities.
    """
    located = (cause for cause in _with_ancestors(causes) if cause.location)
    first = min(located, key=lambda c: (c.is_intended, c.order), default=None)
    return first.location if first else None


def names_of(causes: Iterable[Cause]) -> tuple[str, ...]:
    """What came in not finite, of all that some values were made of."""
    found = (c.location for c in _with_ancestors(causes) if not c.parents)
    return tuple(dict.fromkeys(f.primitive or f.operation for f in found if f))


def _with_ancestors(causes: Iterable[Cause]) -> list[Cause]:
    """Some causes, and all those before them."""
    found: dict[Cause, None] = {}
    waiting = list(causes)
    while waiting:
        cause = waiting.pop()
        if cause not in found:
            found[cause] = None
            waiting += cause.parents
    return list(found)


# ---- what is in an array


def not_finite(x: object) -> tuple[bool, bool]:
    """Whether an array holds NaN, and whether it holds infinities."""
    nan, inf = np.asarray(_flags(x)) if is_differentiable(x) else (False, False)
    return bool(nan), bool(inf)


def range_of(x: Array, shape: tuple[int, ...] | None = None) -> Range:
    """The range of a float array.

    Args:
        x: the array.
        shape: what to call its shape, if it is another than the user knows.
    """
    low, high, finite, nans, infs = _statistics(x)
    some = bool(finite)
    return Range(
        dtype=str(x.dtype),
        shape=np.shape(x) if shape is None else shape,
        low=float(low) + 0.0 if some else None,  # a zero without its sign
        high=float(high) + 0.0 if some else None,
        nans=int(nans),
        infs=int(infs),
    )


@jax.jit
def _flags(x):
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])


@jax.jit
def _statistics(x):
    nan, inf = jnp.isnan(x), jnp.isinf(x)
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    finite = ~(nan | inf)
    low = jnp.where(finite, x, jnp.inf).min(initial=jnp.inf)
    high = jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf)
    return low, high, finite.any(), nan.sum(), inf.sum()
