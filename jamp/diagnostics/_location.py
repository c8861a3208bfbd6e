"""The report of `locate`: the operation that overflowed, its operands and advice."""

import dataclasses
import math
from collections.abc import Callable
from textwrap import wrap
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast.primitives import primitive_name
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


_WORDS = {
    "dot_general": "a matmul",
    "ragged_dot_general": "a matmul",
    "conv_general_dilated": "a convolution",
    "mul": "a product x * y",
    "add": "a sum x + y",
    "add_any": "a sum of two gradients",
    "sub": "a difference x - y",
    "div": "a quotient x / y",
    "integer_pow": "a power x ** {y}",
    "pow": "a power x ** y",
    "square": "a square",
    "exp": "an exponential",
    "log": "a logarithm",
    "sqrt": "a square root",
    "rsqrt": "a reciprocal square root",
    "reduce_sum": "a sum over axes",
    "psum": "a sum over devices",
    "scatter-add": "a sum into rows, as in an embedding's gradient",
}
_CAST = "a cast to "
_CASTS = ("convert_element_type", "reduce_precision")
# These operations, and derivatives that contain them, are infinite at zero.
_POLES = ("div", "log", "rsqrt")
# The keys say whether the scale is dynamic.
SCALE_TOO_HIGH = {
    True: "Only the loss scale is too high. It falls by itself: there is nothing to "
    "fix.",
    False: "Only the loss scale is too high, and it is static: write "
    'loss_scale="dynamic", or a smaller scale.',
}


def words_of(eqn: jc.JaxprEqn, dtype: str) -> str:
    """Describes an operation in words. A cast names the dtype of its result."""
    name = primitive_name(eqn)
    if name not in _CASTS:
        return _WORDS.get(name, f"`{name}`").format_map(eqn.params)
    in_float16 = name == "reduce_precision" and eqn.params["exponent_bits"] == 5
    return f"{_CAST}{'float16' if in_float16 else dtype}"


def advice_for(found: Location) -> str:
    """Returns a sentence: the first row of the table that applies."""
    dtype = _dtype_of_range(found)
    most: Any = jnp.finfo(dtype).max
    text = next(text for applies, text in _TABLE if applies(found))
    return text.format(most=f"{float(most):.5g}", dtype=dtype)


def overflows(found: Location) -> bool:
    """Returns whether a forward operation exceeds the range of its dtype."""
    is_overflow = bool(found.result and found.result.infs) and not _is_at_pole(found)
    return is_overflow and found.phase == "forward"


def _dtype_of_range(found: Location) -> str:
    """Returns the dtype that limits the result, which a rounding may narrow."""
    if found.primitive in _CASTS:
        return found.operation.removeprefix(_CAST)
    return found.result.dtype if found.result else ""


def _is_float16(found: Location) -> bool:
    return _dtype_of_range(found) == "float16"


def _is_at_pole(found: Location) -> bool:
    """Returns whether the operand of a quotient, root or negative power is zero."""
    divides = found.primitive in _POLES or found.operation.startswith("a power x ** -")
    ranges = [(x.low or 0, x.high or 0) for x in found.operands[-1:]]
    return divides and any(low <= 0 <= high for low, high in ranges)


_TABLE: tuple[tuple[Callable[[Location], bool], str], ...] = (
    (
        lambda f: f.phase == "input" and f.operation.startswith("params"),
        "The params were not finite before this step: go back to a checkpoint, and "
        "lower the learning rate or warm it up; a static loss scale does not skip.",
    ),
    (
        lambda f: f.phase == "input",
        "This argument is not finite: check the data before the step, with "
        "`np.isfinite(batch).all()`.",
    ),
    (
        lambda f: bool(f.result and f.result.nans) and any(x.infs for x in f.operands),
        "The operands are infinite, for example because a whole row is masked: mask "
        "with `jnp.finfo(x.dtype).min` instead of -inf, or give such rows a value.",
    ),
    (
        lambda f: f.operation == "an exponential",
        "An exponential of a large number: subtract the maximum first, as "
        "`jax.nn.softmax` and `jax.nn.logsumexp` do, or compute the loss from logits.",
    ),
    (
        lambda f: f.operation == "a logarithm",
        "A logarithm of zero or less: write `jnp.log(jnp.maximum(x, eps))`, or "
        "`jax.nn.log_softmax` of the logits instead of log(softmax(x)).",
    ),
    (
        _is_at_pole,
        "A division by zero, perhaps in a root, a norm or their derivatives: add an "
        "epsilon inside, `sqrt(x + eps)`, that the dtype can represent (1e-8 is zero "
        "in float16), or put a `jnp.where` before it, not after.",
    ),
    (
        lambda f: f.phase == "backward" and _is_float16(f),
        "The gradient itself is beyond {most}, float16's largest: take the mean of the "
        "loss instead of its sum, give it a smaller weight, or use O4 or O5.",
    ),
    (
        lambda f: f.operation in ("a matmul", "a convolution") and _is_float16(f),
        "The matmul is beyond {most}, float16's largest: scale an operand before it "
        "(queries by 1/sqrt(d)), normalize the operand, or use O5.",
    ),
    (
        lambda f: f.result is not None and f.result.infs == 0,
        "The operation is not defined for these operands: bound them before it, with "
        "`jnp.where` or `jnp.clip`.",
    ),
    (
        _is_float16,
        "A value is beyond {most}, float16's largest: scale it down, compute this in "
        "float32 (`jamp.float_function`), keep its reader in float32 (`keep_fp32=`), "
        "or train in bfloat16 (O4, O5), which has the range of float32.",
    ),
    (
        lambda f: True,
        "The result is beyond {most}, {dtype}'s largest: normalize its operands, clip "
        "them, or lower the learning rate.",
    ),
)
