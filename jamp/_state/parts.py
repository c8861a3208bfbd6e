"""What `apply_gradients` accepts, as parts: the gradients of one loss each."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core import groups as _groups
from jamp._core.dtypes import widen
from jamp._core.groups import Key
from jamp._core.tree import all_finite, check_like, differentiable, split_overwrite
from jamp._scaling.by_hand import HasLossScales
from jamp._scaling.rules import LossScaleState, unscale_tree
from jamp._scaling.scaled_grads import ScaledGrads

_REMEDY = (
    "pass what jamp.scaled_grad returned, or a tree of gradients like `state.params`."
)


class Part(NamedTuple):
    """The gradients of one loss.

    Attributes:
        trees: per group that the loss covers, gradients times `scale`.
        scale: what to divide them by; None for 1.
        finite: whether all were finite; None if nobody looked.
        loss_id: whose scale moves; None for no one's.
        scale_state: where that scale moves from; None for where the state has it.
    """

    trees: dict[Key, PyTree]
    scale: Float[Array, ""] | None
    finite: Bool[Array, ""] | None
    loss_id: int | None
    scale_state: LossScaleState | None = None


def parts(grads: Any, state: HasLossScales) -> list[Part]:
    """Unscales ScaledGrads, several of them, or takes a plain tree as it is.

    Raises:
        TypeError: a sequence holds ScaledGrads and other things.
        ValueError: a tree differs from its params in structure or shape.
    """
    keys = _groups.group_keys(state.tx)
    if isinstance(grads, ScaledGrads):
        return [_scaled(grads, state, keys)]
    if isinstance(grads, Sequence) and any(isinstance(g, ScaledGrads) for g in grads):
        return [_scaled(g, state, keys) for g in grads]
    if isinstance(grads, Mapping) and any(
        isinstance(g, ScaledGrads) for g in grads.values()
    ):
        raise TypeError(
            "grads are a dict of ScaledGrads, which know their groups themselves: pass "
            "them as a sequence."
        )
    return [_plain(grads, state, keys)]


def clean_flag(parts: list[Part], key: Key | None = None) -> Bool[Array, ""] | None:
    """Whether the parts that cover a group are finite; None if nobody looked."""
    flags = [p.finite for p in parts if key in p.trees and p.finite is not None]
    return functools.reduce(jnp.logical_and, flags) if flags else None


def total(parts: list[Part], key: Key) -> tuple[PyTree, Any, Any]:
    """A group's gradients, summed over the losses.

    Returns:
        The gradients, its fp8 values if any, and what to divide the gradients by: those
        of one loss are left scaled and in half, for whoever can unscale on the way.
    """
    covering = [part for part in parts if key in part.trees]
    trees = [split_overwrite(part.trees[key]) for part in covering]
    overwrite = trees[-1][1]
    if len(covering) == 1:
        return trees[0][0], overwrite, covering[0].scale
    unscaled = [
        unscale_tree(tree, 1.0 if part.scale is None else part.scale)
        for (tree, _), part in zip(trees, covering, strict=True)
    ]
    summed = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), unscaled)
    return summed, overwrite, None


def _scaled(grads: Any, state: HasLossScales, keys: tuple[Key, ...]) -> Part:
    if not isinstance(grads, ScaledGrads):
        raise TypeError(
            f"grads hold ScaledGrads and a {type(grads).__name__}: "
            "pass a sequence of ScaledGrads, one per loss."
        )
    trees = _groups.by_group(grads.tree, grads.groups, keys)
    _check(trees, state)
    checks = state.loss_scale_rules[grads.loss_id].checks
    finite = grads.finite if checks else None
    return Part(trees, grads.scale, finite, grads.loss_id, grads.scale_state)


def _plain(grads: Any, state: HasLossScales, keys: tuple[Key, ...]) -> Part:
    """Gradients that the user unscaled: inf is still inf, so they can be checked.

    A group whose entry is None is not covered.
    """
    if keys != (_groups.SINGLE,):
        _check_container(grads, state.params)
    entries = {key: _groups.get(grads, key) for key in keys}
    if keys != (_groups.SINGLE,):
        entries = {k: entry for k, entry in entries.items() if entry is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    trees = {key: differentiable(entry) for key, entry in entries.items()}
    _check(trees, state)
    trees = {key: jax.tree.map(widen, tree) for key, tree in trees.items()}
    checks = any(rule.checks for rule in state.loss_scale_rules)
    finite = all_finite([split_overwrite(tree)[0] for tree in trees.values()])
    # Of several losses nobody can tell whose scale should move.
    loss_id = 0 if len(state.loss_scale_rules) == 1 else None
    return Part(trees, None, finite if checks else None, loss_id)


def _check_container(grads: Any, params: Any) -> None:
    same = type(grads) is type(params) and len(grads) == len(params)
    if isinstance(params, Mapping):
        same = same and set(grads) == set(params)
    if not same:
        raise ValueError(
            f"gradients of several groups come in the container of `state.params`, got "
            f"{type(grads).__name__}: {_REMEDY}"
        )


def _check(trees: Mapping[Key, PyTree], state: HasLossScales) -> None:
    for key, tree in trees.items():
        what = "gradients" if key is _groups.SINGLE else f"gradients of group {key!r}"
        expected = differentiable(_groups.get(state.params, key))
        check_like(tree, expected, what, _REMEDY)
