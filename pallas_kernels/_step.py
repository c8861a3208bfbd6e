"""An optimizer step over leaves: unscale, update moments and weights, or skip.

A formula takes float32 weights and returns their updates. This module applies it to
each form of a weight.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, UInt16

from pallas_kernels._rounding import (
    INFINITY,
    NAN,
    SIGN,
    WEIGHT,
    Noise,
    keys_of,
    rounded,
)
from pallas_kernels._run import Options, run
from pallas_kernels._xla import (
    Blocks,
    Job,
    Leaf,
    Numbers,
    computed_once,
    saturate,
    widen,
)

type Kind = Literal["own", "copied", "split"]

_LOW = jnp.dtype(jnp.uint16)

# The column names of the two fields of a `Weight`. A formula steps the master.
_COLUMNS = {"own": ["param"], "copied": ["param", "master"], "split": ["param", "low"]}


class Weight(NamedTuple):
    """A param and its master.

    Attributes:
        param: the model's param.
        master: a float32 copy, or the 16 low bits, uint16, of a bfloat16 param. A param
            is its own master if this is None.
    """

    param: Array
    master: Array | None = None

    @property
    def kind(self) -> Kind:
        """The form of the master."""
        if self.master is None:
            return "own"
        return "split" if self.master.dtype == _LOW else "copied"

    @property
    def value(self) -> Array:
        """The master, or the param if it has none, in float32 or wider."""
        if self.master is None:
            return widen(self.param)
        split = self.kind == "split"
        return join(self.param, self.master) if split else self.master


@jax.custom_jvp
def join(high: Array, low: UInt16[Array, "..."]) -> Float[Array, "..."]:
    """Joins the two results of `split_float32` to the float32, bit for bit.

    Only the high half has a derivative.

    >>> import jax.numpy as jnp
    >>> x = jnp.float32(0.1)
    >>> print(bool(join(*split_float32(x)) == x))
    True
    """
    bits = jax.lax.bitcast_convert_type(high.astype(jnp.float32), jnp.uint32)
    low = low.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits - ((low >> 15) << 16)) | low, jnp.float32)


join.defjvps(lambda tangent, *_: tangent.astype(jnp.float32), None)


def split_float32(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], UInt16[Array, "..."]]:
    """Splits a float32 into a bfloat16 and 16 low bits.

    The bfloat16 is `x` rounded to nearest, with exact ties away from zero: 16 bits
    cannot distinguish the 65,537 floats that round to an even bfloat16. All NaNs of a
    sign become one NaN. A number that would round to infinity becomes the largest
    finite one.
    """
    high, low = split_wide(computed_once(x))
    return high.astype(jnp.bfloat16), low.astype(jnp.uint16)


@jax.custom_jvp
def split_wide(x: Array) -> tuple[Array, Array]:
    """Splits like `split_float32`, but returns a float32 and a uint32."""
    # Bit operations, because a clip of floats would flush subnormal numbers on a CPU.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & 0x7FFFFFFF
    size = jnp.where(size > INFINITY, NAN, jnp.minimum(size, _LARGEST))
    bits = (bits & SIGN) | size
    high = ((bits + 0x8000) >> 16) << 16
    return jax.lax.bitcast_convert_type(high, jnp.float32), bits & 0xFFFF


@split_wide.defjvp
def _split_wide_jvp(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    high, low = split_wide(*primals)
    return (high, low), (*tangents, np.zeros(low.shape, jax.dtypes.float0))


# The bits of the largest float32 that does not round to infinity in bfloat16.
_LARGEST = np.uint32(0x7F7F7FFF)


class Rule(Protocol):
    """The formula of an optimizer. Equal rules compile once."""

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        """Returns the float32 update of a weight, and its new moments.

        `s` has numbers by name, `decays` says whether the weight decays, `g` is the
        unscaled gradient, `w` is the weight's float32 value, and `moments` has arrays
        by name.
        """
        ...


class Leaves(NamedTuple):
    """Weights, with their gradients and moments.

    Attributes:
        weights: the weights to step.
        grads: one per weight.
        moments: lists by name, with one array per weight. bfloat16 moments are rounded
            stochastically.
        decays: whether each weight decays.
        dtype: the dtype of a rule's numbers: float64 if a weight is.
    """

    weights: Sequence[Weight]
    grads: Sequence[Array]
    moments: Mapping[str, Sequence[Array]]
    decays: Sequence[bool]
    dtype: DTypeLike = jnp.float32


class _Tag(NamedTuple):
    rule: Rule
    decays: bool
    storage: Kind
    dtype: DTypeLike  # the dtype of the param
    gives: Literal["weights", "updates", "norms"]
    rounded: tuple[tuple[str, int], ...]  # names, and the purpose of their bits


def step(
    rule: Rule,
    leaves: Leaves,
    numbers: Mapping[str, ArrayLike],
    options: Options,
    *,
    count: ArrayLike = 0,
    salts: Sequence[int] | None = None,
    rounds: bool = False,
    only_updates: bool = False,
) -> tuple[list[Any], dict[str, list[Array]]]:
    """Steps every leaf with a rule, in one pass.

    Args:
        rule, leaves, numbers, options: see `run` and `Rule.formula`.
        count: the number of earlier steps, shape (), for stochastic rounding.
        salts: a 32-bit seed of the random bits per leaf; None means its index.
        rounds: whether to round bfloat16 weights without masters stochastically.
        only_updates: whether to return float32 updates instead of new weights.

    Returns:
        The new weights or the updates, and the new moments by name.
    """
    columns, tags = _columns_and_tags(
        rule, leaves, "updates" if only_updates else "weights", rounds
    )
    keys = None
    if any([tag.rounded for tag in tags]):
        keys = keys_of(count, range(len(tags)) if salts is None else salts)
    results = run(_STEP, columns, options, numbers, tags, keys)[0].values()
    moments = {name: [leaf[name] for leaf in results] for name in leaves.moments}
    if only_updates:
        return [leaf["update"] for leaf in results], moments
    written = [
        Weight(*[leaf[name] for name in _COLUMNS[weight.kind]])
        for weight, leaf in zip(leaves.weights, results, strict=True)
    ]
    return written, moments


def step_norms(
    rule: Rule,
    leaves: Leaves,
    numbers: Mapping[str, ArrayLike],
    options: Options,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Returns the norms of each weight and of its update in `step`.

    Kernels compute the update again in `step`. This moves 2 bytes per weight more than
    storing the update, and needs no memory. XLA stores it, with 4 bytes per weight.
    """
    columns, tags = _columns_and_tags(rule, leaves, "norms")
    _, found = run(_NORMS, columns, options, numbers, tags)
    return jnp.sqrt(found["weight"]), jnp.sqrt(found["added"])


def _columns_and_tags(
    rule: Rule, leaves: Leaves, gives: Any, rounds: bool = False
) -> tuple[list[Leaf], list[_Tag]]:
    """Returns the columns of each leaf by name, and its static tag."""
    columns, tags = [], []
    every = zip(leaves.weights, leaves.grads, leaves.decays, strict=True)
    for k, (weight, grad, decays) in enumerate(every):
        leaf = {"grad": grad, **dict(zip(_COLUMNS[weight.kind], weight, strict=False))}
        leaf |= {name: xs[k] for name, xs in leaves.moments.items()}
        if gives != "weights":
            leaf = {c: x for c, x in leaf.items() if _STEP.copies.get(c) not in leaf}
        places = list(zip(leaves.moments, itertools.count()))
        if rounds and weight.kind == "own" and gives == "weights":
            places.append(("param", WEIGHT))
        rounded = tuple([(c, at) for c, at in places if leaf[c].dtype == jnp.bfloat16])
        columns.append(leaf)
        kept = weight.kind, weight.param.dtype
        tags.append(_Tag(rule, decays, *kept, gives, rounded))
    return columns, tags


def _stepped(numbers: Numbers, tag: _Tag, blocks: Blocks) -> Blocks:
    """Steps joined weights with unscaled gradients."""
    moments, value = dict(blocks), "master" if tag.storage == "copied" else "param"
    weight, grad = moments.pop(value), moments.pop("grad")
    if tag.storage == "split":
        weight = join(weight, moments.pop("low"))
    # The norm of all leaves is float64 if one leaf is.
    numbers = {name: x.astype(weight.dtype) for name, x in numbers.items()}
    moments = {name: x.astype(weight.dtype) for name, x in moments.items()}
    grad = grad.astype(weight.dtype)
    if "unscale" in numbers:
        grad = grad * numbers["unscale"]
    delta, moments = tag.rule.formula(numbers, tag.decays, grad, weight, moments)
    if tag.gives == "norms":
        return {"weight": weight * weight, "added": delta * delta}
    if tag.gives == "updates":
        return {"update": delta, **moments}
    return {value: weight + delta, **moments}


def _stored(tag: _Tag, results: Blocks, noise: Noise | None) -> Blocks:
    """Returns the new weights and moments in the form that is stored."""
    results = dict(results)
    if tag.storage == "split" and tag.gives == "weights":
        results["param"], results["low"] = split_wide(results["param"])
    if tag.storage == "own" and tag.gives == "weights":
        results["param"] = saturate(results["param"], tag.dtype)
    if noise is not None:
        for name, place in tag.rounded:
            results[name] = rounded(results[name], noise.bits(place))
    return results


_STEP = Job(_stepped, copies={"param": "master"}, stored=_stored)
_NORMS = Job(_stepped, reductions={"weight": "sum", "added": "sum"})
