"""What an operation is called, and what to do about one that overflowed."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jamp.diagnostics._origins import Event
from jamp.diagnostics._ranges import Range

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


def words_of(event: Event) -> str:
    """An operation in words; that of a cast says to what."""
    if event.name in _CASTS:
        return f"a cast to {_dtype(event)}"
    return _WORDS.get(event.name, f"`{event.name}`")


def advice_for(finding: Finding) -> str:
    """One sentence: the first row of the table that applies."""
    return next(says(finding) for applies, says in _TABLE if applies(finding))


# Larger params than these are rare but where a learning rate is too high.
_LARGE_PARAM = 1e3


def _is(*names: str) -> Callable[[Finding], bool]:
    return lambda finding: finding.event.name in names


def _reads_zero(finding: Finding) -> bool:
    """Whether its last operand holds zero, or may."""
    operands = finding.event.operands
    return bool(operands) and _may_be_zero(operands[-1])


def _may_be_zero(operand: Range) -> bool:
    return operand.low is not None and operand.low <= 0 <= (operand.high or 0)


def _of_infinities(finding: Finding) -> bool:
    event = finding.event
    return event.result.nans > 0 and any(x.infs for x in event.operands)


def _of_infinite_number(finding: Finding) -> bool:
    operands = finding.event.operands
    return any(x.infs and x.shape == () for x in operands) and len(operands) == 2


def _dtype(event: Event) -> str:
    """The dtype whose range a result has."""
    if event.name == "reduce_precision" and event.eqn.params["exponent_bits"] == 5:
        return "float16"
    return event.result.dtype


def _in_half(finding: Finding) -> bool:
    return _dtype(finding.event) == "float16"


def _most(finding: Finding) -> str:
    largest: Any = jnp.finfo(_dtype(finding.event)).max
    return f"{float(largest):.5g}"


def _too_large(finding: Finding) -> str:
    dtype = finding.event.result.dtype
    instead = (
        "train in bfloat16 (O4, O5), whose range is that of float32, or compute this "
        "in float32 (`jamp.float_function`, `keep_fp32=`)"
        if dtype == "float16"
        else "bound its input: normalize it, clip it, or lower the learning rate"
    )
    return f"The result is beyond {_most(finding)}, {dtype}'s largest: {instead}."


def _is_cast(finding: Finding) -> bool:
    return finding.event.name in _CASTS


def _is_input(finding: Finding) -> bool:
    return finding.event.eqn is None


def _is_param(finding: Finding) -> bool:
    return _is_input(finding) and finding.event.name.startswith("params")


def _says(text: str) -> Callable[[Finding], str]:
    return lambda _: text


_TABLE: tuple[tuple[Callable[[Finding], bool], Callable[[Finding], str]], ...] = (
    (
        _is_param,
        _says(
            "The params were not finite before this step: go back to a checkpoint, and "
            "lower the learning rate or warm it up; a static loss scale does not skip."
        ),
    ),
    (
        _is_input,
        _says(
            "It came in like this: look for it in the data, with "
            "`np.isfinite(batch).all()`, before the step."
        ),
    ),
    (
        lambda f: f.largest[0] >= _LARGE_PARAM and not f.backward,
        lambda f: (
            f"The params have grown to {f.largest[0]:.3g} ({f.largest[1]}): the "
            "learning rate is too high; lower it, warm it up, or clip the gradients."
        ),
    ),
    (
        _of_infinite_number,
        lambda f: (
            f"A number in the program is beyond {_most(f)}, {f.event.result.dtype}'s "
            "largest: multiply by smaller ones in turn, or compute this in float32."
        ),
    ),
    (
        _of_infinities,
        _says(
            "Infinities met, as where all of a row is masked: mask with "
            "`jnp.finfo(x.dtype).min` in place of -inf, or give such rows a value."
        ),
    ),
    (
        _is("exp", "exp2", "expm1"),
        _says(
            "An exponential of a large number: subtract the maximum first, as "
            "`jax.nn.softmax` and `jax.nn.logsumexp` do, or take the loss of logits."
        ),
    ),
    (
        _is("log", "log1p", "log2"),
        _says(
            "A logarithm of zero or less: `jnp.log(jnp.maximum(x, eps))`, or "
            "`jax.nn.log_softmax` of the logits in place of log(softmax(x))."
        ),
    ),
    (
        lambda f: f.event.name == "div" and f.backward and _reads_zero(f),
        _says(
            "A derivative divides by zero, as those of roots, norms and logarithms do "
            "at zero: add an epsilon inside, or put a `jnp.where` before it, not after."
        ),
    ),
    (
        lambda f: f.event.name in ("div", "rem") and _reads_zero(f),
        _says(
            "A division by zero: add an epsilon that the dtype can hold to what is "
            "divided by, or replace its zeros by `jnp.where` before dividing."
        ),
    ),
    (
        lambda f: (
            f.event.name in ("rsqrt", "sqrt", "pow", "integer_pow", "cbrt")
            and _reads_zero(f)
        ),
        _says(
            "A root or a negative power at zero, whose value or slope is infinite: "
            "add an epsilon inside, `sqrt(x + eps)`; 1e-8 is zero in float16."
        ),
    ),
    (
        lambda f: f.backward and _in_half(f),
        lambda f: (
            f"The gradient itself is beyond {_most(f)}, float16's largest: take the "
            "mean of the loss in place of its sum, weigh it less, or use O4 or O5."
        ),
    ),
    (
        lambda f: _is_cast(f) and _in_half(f),
        lambda f: (
            f"A float32 value is beyond {_most(f)}, float16's largest: scale it down, "
            "keep what reads it in float32 (`keep_fp32=`), or use O4 or O5."
        ),
    ),
    (
        lambda f: (
            _is("dot_general", "ragged_dot_general", "conv_general_dilated")(f)
            and _in_half(f)
        ),
        lambda f: (
            f"The sum of products is beyond {_most(f)}, float16's largest: scale an "
            "operand before the product (queries by 1/sqrt(d)), normalize, or use O5."
        ),
    ),
    (
        lambda f: _is("reduce_sum", "cumsum", "psum", "scatter-add")(f) and _in_half(f),
        lambda f: (
            f"The sum is beyond {_most(f)}, float16's largest: sum in float32, "
            "`x.sum(dtype=jnp.float32)`, or take the mean."
        ),
    ),
    (
        lambda f: f.event.result.infs == 0,
        _says(
            "The operation is not defined there: keep its operands where it is, "
            "by `jnp.where` or `jnp.clip` before it."
        ),
    ),
    (lambda _: True, _too_large),
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
