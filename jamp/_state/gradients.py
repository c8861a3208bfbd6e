"""What `apply_gradients` accepts: unscaled gradients, of one loss or of several."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._core.dtypes import is_half
from jamp._core.groups import Key
from jamp._core.tree import (
    all_finite,
    check_like,
    differentiable,
    split_overwrite,
    widen_tree,
)
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.loss import HasLossScales, check_loss_id
from jamp._scaling.unscaled import raw_of

_REMEDY = (
    "pass the `grads` of jamp.scaled_value_and_grad, or a tree like `state.params`; of "
    "several losses `grads=(g0, g1), loss_id=(0, 1)`."
)

# True, of Python, where the rule does not check.
type Flag = Bool[Array, ""] | Literal[True]


class LossGrads(NamedTuple):
    """The gradients of one loss.

    Attributes:
        loss_id: whose scale moves.
        finite: whether all are finite.
        trees: per group that the loss covers, its gradients in float32.
        overwrite: per group, new values of Flax's `_overwrite_with_gradient`, or None.
    """

    loss_id: int
    finite: Flag
    trees: dict[Key, PyTree]
    overwrite: dict[Key, Any]


class GroupGrads(NamedTuple):
    """The gradients of one group.

    Attributes:
        tree: in float32, summed.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether all are finite.
    """

    tree: PyTree
    overwrite: Any
    clean: Flag


def by_loss(grads: PyTree, loss_id: Any, state: HasLossScales) -> list[LossGrads]:
    """The gradients of each loss, checked.

    Raises:
        TypeError: `loss_id` is a sequence and `grads` is not.
        IndexError: a `loss_id` is out of range.
        ValueError: one for each loss is wanted, and there are more or fewer; a tree
            differs from its params in structure or shape, or is of another loss.
    """
    if not isinstance(loss_id, Sequence):
        return [_of_loss(grads, loss_id, state)]
    if not isinstance(grads, Sequence):
        raise TypeError(
            f"loss_id={loss_id!r} is for a sequence of gradients, one tree per loss; "
            f"got {type(grads).__name__}."
        )
    if not loss_id or len(grads) != len(loss_id):
        raise ValueError(
            f"grads are {len(grads)} trees, and loss_id={loss_id!r} names "
            f"{len(loss_id)} losses: pass one tree for each, as in "
            "`apply_gradients(grads=(g0, g1), loss_id=(0, 1))`."
        )
    return [_of_loss(*pair, state) for pair in zip(grads, loss_id, strict=True)]


def by_group(losses: list[LossGrads]) -> dict[Key, GroupGrads]:
    """The gradients of each group that has some, summed over the losses."""
    total: dict[Key, GroupGrads] = {}
    for loss in losses:
        for key, tree in loss.trees.items():
            clean = loss.finite
            if key in total:
                before = total[key]
                tree = jax.tree.map(jnp.add, before.tree, tree)
                if before.clean is not True:
                    clean = before.clean if clean is True else before.clean & clean
            total[key] = GroupGrads(tree, loss.overwrite[key], clean)
    return total


def _of_loss(grads: PyTree, loss_id: int, state: HasLossScales) -> LossGrads:
    check_loss_id(loss_id, state)
    trees, overwrite = {}, {}
    keys = groups.group_keys(state.tx)
    is_single = keys == (groups.SINGLE,)
    entries = {groups.SINGLE: grads} if is_single else _entries_of(grads, keys, state)
    for key, entry in entries.items():
        what = "gradients" if key is groups.SINGLE else f"gradients of group {key!r}"
        entry = differentiable(entry)
        expected = differentiable(groups.get(state.params, key))
        check_like(entry, expected, what, _REMEDY)
        trees[key], overwrite[key] = split_overwrite(entry)
    leaves = jax.tree.leaves(trees)
    finite = (
        _finite(leaves, loss_id) if state.loss_scale_rules[loss_id].checks else True
    )
    if any(map(is_half, leaves)):
        _warn_half(trees, state)
        trees = widen_tree(trees)
    return LossGrads(loss_id, finite, trees, overwrite)


def _entries_of(
    grads: PyTree, keys: tuple[Key, ...], state: HasLossScales
) -> dict[Key, PyTree]:
    """The entries of the groups that have gradients."""
    if isinstance(state.params, Mapping):
        fits = isinstance(grads, Mapping) and set(grads) <= set(keys)
    else:
        fits = type(grads) is type(state.params) and len(grads) == len(keys)
    if not fits:
        raise ValueError(
            "gradients of several groups come in the container of `state.params`, "
            f"with the keys {list(keys)}, and None for a group without; got "
            f"{_described(grads)}. Those of `wrt=key` are `grads={{key: grads}}`; "
            f"else {_REMEDY}"
        )
    pairs = grads.items() if isinstance(grads, Mapping) else enumerate(grads)
    entries: dict[Key, PyTree] = {k: tree for k, tree in pairs if tree is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    return entries


def _described(grads: PyTree) -> str:
    name = type(grads).__name__
    if isinstance(grads, Mapping):
        return f"a {name} with the keys {list(grads)}"
    return f"a {name} of {len(grads)}" if isinstance(grads, Sequence) else f"a {name}"


def _finite(leaves: Sequence[Array], loss_id: int) -> Flag:
    """Whether all are finite: by the flag where it is known, else by a look.

    Raises for gradients that are known to be of another loss, whose scale should move.
    """
    flags, others = {}, []
    for leaf in leaves:
        raw = raw_of(leaf)
        if raw is not None and raw.loss_id != loss_id:
            raise ValueError(
                f"The gradients are of loss_id={raw.loss_id}, and apply_gradients got "
                f"loss_id={loss_id}: pass `loss_id={raw.loss_id}`, whose scale moves."
            )
        if raw is None or raw.finite is None:
            others.append(leaf)
        else:
            flags[id(raw.finite)] = raw.finite
    looked = [all_finite(others)] if others or not flags else []
    return functools.reduce(jnp.logical_and, [*flags.values(), *looked])


def _warn_half(trees: Mapping[Key, PyTree], state: HasLossScales) -> None:
    """Warns of gradients that are half, under a scale that is there for just those."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(list(trees.values())):
        if is_half(leaf) and any(rule.moves for rule in state.loss_scale_rules):
            warn(
                f"gradients{jax.tree_util.keystr(path[1:])} are {leaf.dtype}, and the "
                "loss scale is dynamic: the loss was not scaled, or they were not "
                "unscaled in float32. Write `jamp.scaled_grad(loss_fn)(state, ...)`, "
                "or `jamp.scale_loss` before `jax.grad` and `jamp.unscale` after it.",
                PrecisionWarning,
            )
            return
