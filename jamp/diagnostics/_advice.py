"""What an operation is called, and what to do about one that overflowed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jamp.diagnostics._origins import Event

_WORDS = {
    "dot_general": "a matrix product",
    "ragged_dot_general": "a matrix product",
    "conv_general_dilated": "a convolution",
    "mul": "a product x * y",
    "add": "a sum x + y",
    "add_any": "a sum of two gradients",
    "sub": "a difference x - y",
    "div": "a quotient x / y",
    "integer_pow": "a power x ** n",
    "square": "a square",
    "pow": "a power x ** y",
    "exp": "an exponential",
    "exp2": "an exponential",
    "expm1": "an exponential",
    "log": "a logarithm",
    "log1p": "a logarithm",
    "sqrt": "a square root",
    "rsqrt": "a reciprocal square root",
    "reduce_sum": "a sum over axes",
    "cumsum": "a cumulative sum",
    "psum": "a sum over devices",
    "scatter-add": "a sum into rows, as of an embedding's gradient",
}

_CASTS = ("convert_element_type", "reduce_precision")
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_SUMS = ("reduce_sum", "cumsum", "psum", "scatter-add")
_ROOTS = ("rsqrt", "sqrt", "pow", "integer_pow", "cbrt")
# Larger params than these are rare but where a learning rate is too high.
_LARGE_PARAM = 1e3


class Finding(NamedTuple):
    """What advice depends on.

    Attributes:
        event: the operation, or the argument.
        backward: whether it is of the backward pass.
        largest: the largest absolute value of the params, and its path.
    """

    event: Event
    backward: bool
    largest: tuple[float, str]

    @property
    def name(self) -> str:
        """Of the operation, or the path of the argument."""
        return self.event.name

    @property
    def dtype(self) -> str:
        """The dtype whose range the result has."""
        return _dtype(self.event)

    @property
    def most(self) -> str:
        """The largest number of that dtype."""
        largest: Any = jnp.finfo(self.dtype).max
        return f"{float(largest):.5g}"

    @property
    def in_half(self) -> bool:
        """Whether that dtype is float16."""
        return self.dtype == "float16"

    @property
    def reads_zero(self) -> bool:
        """Whether the last operand holds zero, or may."""
        if not self.event.operands:
            return False
        last = self.event.operands[-1]
        return last.low is not None and last.low <= 0 <= (last.high or 0)

    @property
    def reads_infinite_number(self) -> bool:
        """Whether one of two operands is an infinite number of the program."""
        operands = self.event.operands
        return len(operands) == 2 and any(x.infs and x.shape == () for x in operands)


def words_of(event: Event) -> str:
    """An operation in words; that of a cast says to what."""
    if event.name in _CASTS:
        return f"a cast to {_dtype(event)}"
    return _WORDS.get(event.name, f"`{event.name}`")


def advice_for(finding: Finding) -> str:
    """One sentence: the first row of the table that applies."""
    text = next(text for applies, text in _TABLE if applies(finding))
    return text.format(f=finding)


def _dtype(event: Event) -> str:
    if event.name == "reduce_precision" and event.eqn.params["exponent_bits"] == 5:
        return "float16"
    return event.result.dtype


_TABLE: tuple[tuple[Callable[[Finding], bool], str], ...] = (
    (
        lambda f: f.event.eqn is None and f.name.startswith("params"),
        "The params were not finite before this step: go back to a checkpoint, and "
        "lower the learning rate or warm it up; a static loss scale does not skip.",
    ),
    (
        lambda f: f.event.eqn is None,
        "It came in like this: look for it in the data, with "
        "`np.isfinite(batch).all()`, before the step.",
    ),
    (
        lambda f: f.largest[0] >= _LARGE_PARAM and not f.backward,
        "The params have grown to {f.largest[0]:.3g} ({f.largest[1]}): the "
        "learning rate is too high; lower it, warm it up, or clip the gradients.",
    ),
    (
        lambda f: f.reads_infinite_number,
        "A number in the program is beyond {f.most}, {f.dtype}'s largest: multiply by "
        "smaller ones in turn, or compute this in float32.",
    ),
    (
        lambda f: f.event.result.nans > 0 and any(x.infs for x in f.event.operands),
        "Infinities met, as where all of a row is masked: mask with "
        "`jnp.finfo(x.dtype).min` in place of -inf, or give such rows a value.",
    ),
    (
        lambda f: f.name in ("exp", "exp2", "expm1"),
        "An exponential of a large number: subtract the maximum first, as "
        "`jax.nn.softmax` and `jax.nn.logsumexp` do, or take the loss of logits.",
    ),
    (
        lambda f: f.name in ("log", "log1p", "log2"),
        "A logarithm of zero or less: `jnp.log(jnp.maximum(x, eps))`, or "
        "`jax.nn.log_softmax` of the logits in place of log(softmax(x)).",
    ),
    (
        lambda f: f.name == "div" and f.backward and f.reads_zero,
        "A derivative divides by zero, as those of roots, norms and logarithms do "
        "at zero: add an epsilon inside, or put a `jnp.where` before it, not after.",
    ),
    (
        lambda f: f.name in ("div", "rem") and f.reads_zero,
        "A division by zero: add an epsilon that the dtype can hold to what is "
        "divided by, or replace its zeros by `jnp.where` before dividing.",
    ),
    (
        lambda f: f.name in _ROOTS and f.reads_zero,
        "A root or a negative power at zero, whose value or slope is infinite: "
        "add an epsilon inside, `sqrt(x + eps)`; 1e-8 is zero in float16.",
    ),
    (
        lambda f: f.backward and f.in_half,
        "The gradient itself is beyond {f.most}, float16's largest: take the "
        "mean of the loss in place of its sum, weigh it less, or use O4 or O5.",
    ),
    (
        lambda f: f.name in _CASTS and f.in_half,
        "A float32 value is beyond {f.most}, float16's largest: scale it down, "
        "keep what reads it in float32 (`keep_fp32=`), or use O4 or O5.",
    ),
    (
        lambda f: f.name in _PRODUCTS and f.in_half,
        "The sum of products is beyond {f.most}, float16's largest: scale an "
        "operand before the product (queries by 1/sqrt(d)), normalize, or use O5.",
    ),
    (
        lambda f: f.name in _SUMS and f.in_half,
        "The sum is beyond {f.most}, float16's largest: sum in float32, "
        "`x.sum(dtype=jnp.float32)`, or take the mean.",
    ),
    (
        lambda f: f.event.result.infs == 0,
        "The operation is not defined there: keep its operands where it is, "
        "by `jnp.where` or `jnp.clip` before it.",
    ),
    (
        lambda f: f.in_half,
        "The result is beyond {f.most}, float16's largest: train in bfloat16 (O4, O5), "
        "whose range is that of float32, or compute this in float32 "
        "(`jamp.float_function`, `keep_fp32=`).",
    ),
    (
        lambda f: True,
        "The result is beyond {f.most}, {f.dtype}'s largest: bound its input: "
        "normalize it, clip it, or lower the learning rate.",
    ),
)


def scale_advice(scale: float, clean: float, moves: bool) -> str:
    """When the gradients are finite at a lower loss scale.

    Args:
        scale: the present one.
        clean: the largest power of two below it at which they are.
        moves: whether the scale is dynamic.
    """
    if moves:
        skips = math.ceil(math.log2(scale / clean))
        return (
            f"Only the loss scale is too high: at {clean:g} all gradients are finite. "
            f"It comes down by itself, in {skips} skipped step(s): nothing to mend."
        )
    return (
        f"Only the loss scale is too high: at {clean:g} all gradients are finite. It "
        'is static: write loss_scale="dynamic".'
    )
