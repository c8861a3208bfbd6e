"""An optimizer step over leaves: unscale, update moments and weights, or skip."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from pallas_kernels._run import Options, run
from pallas_kernels._weights import Kind, Weight, join, saturate, split_wide
from pallas_kernels._xla import Blocks, Job, Leaf, Numbers


class Rule(Protocol):
    """What an optimizer does with a weight. Equal rules are compiled once."""

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        """One step, in float32.

        Args:
            s: numbers by name.
            decays: whether the weight decays.
            g: the gradient, unscaled.
            w: the weight, its master where it has one.
            moments: by name, of its shape.

        Returns:
            What to add to the weight, and new moments.
        """
        ...


class Leaves(NamedTuple):
    """What is stepped.

    Attributes:
        weights: what to step.
        grads: one per weight, of its shape.
        moments: by name, one per weight, of its shape.
        decays: whether each weight decays.
    """

    weights: Sequence[Weight]
    grads: Sequence[Array]
    moments: Mapping[str, Sequence[Array]]
    decays: Sequence[bool]


class _Tag(NamedTuple):
    rule: Any
    decays: bool
    storage: Kind
    dtype: jax.typing.DTypeLike  # of the param
    only_updates: bool


class Stepped(NamedTuple):
    """What a step gave.

    Attributes:
        weights: per leaf the new weights; with `only_updates` the updates.
        moments: by name, per leaf.
    """

    weights: list[Weight] | list[Array]
    moments: dict[str, list[Array]]


def step(
    rule: Rule,
    leaves: Leaves,
    numbers: Mapping[str, ArrayLike],
    options: Options,
    per_leaf: Mapping[str, ArrayLike] | None = None,
) -> Stepped:
    """Steps every leaf by a rule, in one pass.

    Args:
        rule: the formula.
        leaves: what to step.
        numbers: for the formula.
        options: how to run.
        per_leaf: further numbers, one per leaf.
    """
    only_updates = options.only_updates
    unread = {} if only_updates else {"copy": _copy}
    job = Job(_stepped, unread=unread, stored=_stored)
    columns, tags = _columns_and_tags(rule, leaves, only_updates)
    how = {"scalars": numbers, "per_leaf": per_leaf, "tags": tags}
    results = run(job, columns, options, **how).leaves
    if only_updates:
        stepped = [leaf["update"] for leaf in results]
    else:
        pairs = zip(leaves.weights, results, strict=True)
        stepped = [weight.written(leaf) for weight, leaf in pairs]
    names = leaves.moments
    return Stepped(stepped, {name: [leaf[name] for leaf in results] for name in names})


def step_norms(
    rule: Rule,
    leaves: Leaves,
    numbers: Mapping[str, ArrayLike],
    options: Options,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Per leaf, the norms of the weight and of what `step` would add to it.

    Nothing is written, and kernels compute the step again when it is taken: that moves
    2 B per weight more than to store it, and takes no memory. XLA keeps it, 4 B per
    weight.
    """
    job = Job(_squares, reductions={"weight": "sum", "added": "sum"})
    columns, tags = _columns_and_tags(rule, leaves, only_updates=True)
    found = run(job, columns, options, scalars=numbers, tags=tags).reductions
    return jnp.sqrt(found["weight"]), jnp.sqrt(found["added"])


def _columns_and_tags(
    rule: Rule, leaves: Leaves, only_updates: bool
) -> tuple[list[Leaf], list[_Tag]]:
    """Per leaf, its arrays by the names that kernels know, and what is static."""
    columns, tags = [], []
    every = zip(leaves.weights, leaves.grads, leaves.decays, strict=True)
    for k, (weight, grad, decays) in enumerate(every):
        leaf = {"grad": grad, **weight.columns}
        leaf |= {name: xs[k] for name, xs in leaves.moments.items()}
        if only_updates:
            leaf.pop("copy", None)
        columns.append(leaf)
        tags.append(_Tag(rule, decays, weight.kind, weight.param.dtype, only_updates))
    return columns, tags


def _stepped(numbers: Numbers, tag: _Tag, blocks: Blocks) -> Blocks:
    numbers, grad, weight, moments = _read(numbers, tag, blocks)
    delta, moments = tag.rule.formula(numbers, tag.decays, grad, weight, moments)
    if tag.only_updates:
        return {"update": delta, **moments}
    return {"weight": weight + delta, **moments}


def _squares(numbers: Numbers, tag: _Tag, blocks: Blocks) -> Blocks:
    numbers, grad, weight, moments = _read(numbers, tag, blocks)
    delta, _ = tag.rule.formula(numbers, tag.decays, grad, weight, moments)
    return {"weight": weight * weight, "added": delta * delta}


def _stored(tag: _Tag, results: Blocks) -> Blocks:
    """The new weights as they are kept."""
    if tag.storage == "copied" or tag.only_updates:
        return results
    new = results["weight"]
    if tag.storage == "split":
        high, low = split_wide(new)
        return results | {"weight": high, "low": low}
    return results | {"weight": saturate(new, tag.dtype)}


def _copy(results: Blocks, dtype: jax.typing.DTypeLike) -> Array:
    return saturate(results["weight"], dtype)


def _read(
    numbers: Numbers, tag: _Tag, blocks: Blocks
) -> tuple[Numbers, Array, Array, Blocks]:
    """What a formula takes: the weights joined, the gradient unscaled.

    Float64 weights, which only XLA steps, are stepped in float64.
    """
    rest = dict(blocks)
    weight, grad = rest.pop("weight"), rest.pop("grad")
    if tag.storage == "split":
        weight = join(weight, rest.pop("low"))
    # Norms of all leaves together are float64 where one leaf is.
    numbers = {name: x.astype(weight.dtype) for name, x in numbers.items()}
    rest = {name: x.astype(weight.dtype) for name, x in rest.items()}
    grad = grad.astype(weight.dtype)
    if "unscale" in numbers:
        grad = grad * numbers["unscale"]
    return numbers, grad, weight, rest
