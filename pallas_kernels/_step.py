"""An optimizer step over leaves: unscale, update moments and weights, or skip."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
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


class Measuring(Rule, Protocol):
    """A rule whose step needs norms of each leaf first."""

    def measured(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> Blocks:
        """What to sum over the leaf, by name."""
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

    def columns(self, *, with_copies: bool) -> list[Leaf]:
        """The arrays of each leaf, by the names under which kernels know them."""
        leaves = []
        for k, (weight, grad) in enumerate(zip(self.weights, self.grads, strict=True)):
            leaf = {"grad": grad, **weight.columns}
            leaf |= {name: xs[k] for name, xs in self.moments.items()}
            if not with_copies:
                leaf.pop("copy", None)
            leaves.append(leaf)
        return leaves

    def tags(self, rule: Rule, only_updates: bool) -> "list[_Tag]":
        """What is static of each leaf."""
        pairs = zip(self.weights, self.decays, strict=True)
        return [
            _Tag(rule, decays, w.kind, w.param.dtype, only_updates)
            for w, decays in pairs
        ]


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
    results = run(
        Job(_stepped, unread={} if only_updates else {"copy": _copy}, stored=_stored),
        leaves.columns(with_copies=not only_updates),
        options,
        scalars=numbers,
        per_leaf=per_leaf,
        tags=leaves.tags(rule, only_updates),
    ).leaves
    if only_updates:
        stepped = [leaf["update"] for leaf in results]
    else:
        pairs = zip(leaves.weights, results, strict=True)
        stepped = [weight.written(leaf) for weight, leaf in pairs]
    names = leaves.moments
    return Stepped(stepped, {name: [leaf[name] for leaf in results] for name in names})


def sums(
    rule: Measuring,
    leaves: Leaves,
    numbers: Mapping[str, ArrayLike],
    options: Options,
    names: Sequence[str],
) -> dict[str, Float[Array, " n"]]:
    """Sums what `rule.measured` gives over each leaf, and writes nothing."""
    return run(
        Job(_measured, reductions=dict.fromkeys(names, "sum")),
        leaves.columns(with_copies=False),
        options,
        scalars=numbers,
        tags=leaves.tags(rule, options.only_updates),
    ).reductions


def _stepped(numbers: Numbers, tag: _Tag, blocks: Blocks) -> Blocks:
    numbers, grad, weight, moments = _read(numbers, tag, blocks)
    delta, moments = tag.rule.formula(numbers, tag.decays, grad, weight, moments)
    if tag.only_updates:
        return {"update": delta, **moments}
    return {"weight": weight + delta, **moments}


def _measured(numbers: Numbers, tag: _Tag, blocks: Blocks) -> Blocks:
    numbers, *arrays = _read(numbers, tag, blocks)
    return tag.rule.measured(numbers, tag.decays, *arrays)


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
