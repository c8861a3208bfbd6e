"""What `apply_gradients` accepts, as parts: the gradients of one loss each."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core import groups
from jamp._core.dtypes import is_half, widen
from jamp._core.groups import Key
from jamp._core.tree import (
    all_finite,
    check_like,
    differentiable,
    split_overwrite,
    trained_params,
)
from jamp._core.warnings import PrecisionWarning, warn
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
        finite: whether all are finite; None if nobody looked.
        raw_finite: whether they were before users changed them; likewise.
        loss_id: whose scale moves; None for no one's.
        scale_state: where that scale moves from; None for where the state has it.
        overwrite: per group, new values of Flax's `_overwrite_with_gradient`, if any.
    """

    trees: dict[Key, PyTree]
    scale: Float[Array, ""] | None
    finite: Bool[Array, ""] | None
    raw_finite: Bool[Array, ""] | None
    loss_id: int | None
    scale_state: LossScaleState | None = None
    overwrite: Mapping[Key, Any] = {}


def gradient_parts(grads: Any, state: HasLossScales) -> list[Part]:
    """Unscales ScaledGrads, several of them, or takes a plain tree as it is.

    Raises:
        TypeError: a sequence holds ScaledGrads and other things.
        ValueError: a tree differs from its params in structure or shape.
    """
    keys = groups.group_keys(state.tx)
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


def clean_flags(parts: list[Part]) -> dict[Key, Bool[Array, ""] | None]:
    """Per group that has gradients, whether all are finite; None if nobody looked."""
    clean: dict[Key, Any] = {}
    for part in parts:
        for key in part.trees:
            both = [f for f in (clean.get(key), part.finite) if f is not None]
            clean[key] = functools.reduce(jnp.logical_and, both) if both else None
    return clean


def total(parts: list[Part], key: Key) -> tuple[PyTree, Any, Any]:
    """A group's gradients, summed over the losses.

    Returns:
        The gradients, its fp8 values if any, and what to divide the gradients by: those
        of one loss are left scaled and in half, for whoever can unscale on the way.
    """
    covering = [part for part in parts if key in part.trees]
    overwrite = covering[-1].overwrite.get(key)
    if len(covering) == 1:
        return covering[0].trees[key], overwrite, covering[0].scale
    unscaled = [
        unscale_tree(part.trees[key], 1.0 if part.scale is None else part.scale)
        for part in covering
    ]
    summed = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), unscaled)
    return summed, overwrite, None


def _scaled(grads: Any, state: HasLossScales, keys: tuple[Key, ...]) -> Part:
    if not isinstance(grads, ScaledGrads):
        raise TypeError(
            f"grads hold ScaledGrads and a {type(grads).__name__}: "
            "pass a sequence of ScaledGrads, one per loss."
        )
    trees = groups.by_group(grads.tree, grads.groups, keys)
    _check_trees(trees, trained_params, state)
    checks = state.loss_scale_rules[grads.loss_id].checks
    return Part(
        trees=trees,
        scale=grads.scale,
        finite=grads.finite if checks else None,
        raw_finite=grads.raw_finite if checks else None,
        loss_id=grads.loss_id,
        scale_state=grads.scale_state,
        overwrite=grads.overwrite,
    )


def _plain(grads: Any, state: HasLossScales, keys: tuple[Key, ...]) -> Part:
    """Gradients that the user unscaled: inf is still inf, so they can be checked.

    A group whose entry is None is not covered.
    """
    entries = {groups.SINGLE: grads}
    if keys != (groups.SINGLE,):
        _check_container(grads, state.params)
        entries = {key: grads[key] for key in keys if grads[key] is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    entries = {key: differentiable(entry) for key, entry in entries.items()}
    _check_trees(entries, differentiable, state)
    both = {key: split_overwrite(entry) for key, entry in entries.items()}
    _check_unscaled([tree for tree, _ in both.values()], state)
    trees = {key: jax.tree.map(widen, tree) for key, (tree, _) in both.items()}
    checks = any(rule.checks for rule in state.loss_scale_rules)
    finite = all_finite(trees) if checks else None
    return Part(
        trees=trees,
        scale=None,
        finite=finite,
        raw_finite=finite,
        # Of several losses nobody can tell whose scale should move.
        loss_id=0 if len(state.loss_scale_rules) == 1 else None,
        overwrite={key: overwrite for key, (_, overwrite) in both.items()},
    )


def _check_unscaled(trees: list[PyTree], state: HasLossScales) -> None:
    """Warns of gradients that are half, under a scale that is there for just those."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if is_half(leaf) and any(rule.moves for rule in state.loss_scale_rules):
            warn(
                f"gradients{jax.tree_util.keystr(path[1:])} are a plain tree in "
                f"{leaf.dtype}, and the loss scale is dynamic: the loss was not "
                "scaled, or they were not unscaled in float32. Write "
                "`jamp.scaled_grad(loss_fn)(state, ...)`, or `jamp.scale_loss` before "
                "`jax.grad` and `jamp.unscale` after it.",
                PrecisionWarning,
            )
            return


def _check_container(grads: Any, params: Any) -> None:
    same = type(grads) is type(params) and len(grads) == len(params)
    if isinstance(params, Mapping):
        same = same and set(grads) == set(params)
    if not same:
        raise ValueError(
            f"gradients of several groups come in the container of `state.params`, got "
            f"{type(grads).__name__}: {_REMEDY}"
        )


def _check_trees(
    trees: Mapping[Key, PyTree], part: Callable[[PyTree], PyTree], state: HasLossScales
) -> None:
    """Raises unless trees are like a part of their params."""
    for key, tree in trees.items():
        what = "gradients" if key is groups.SINGLE else f"gradients of group {key!r}"
        check_like(tree, part(groups.get(state.params, key)), what, _REMEDY)
