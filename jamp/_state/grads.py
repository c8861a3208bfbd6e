"""The gradients that `apply_gradients` accepts, by loss and by group."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.dtypes import is_half
from jamp._core.groups import Key
from jamp._core.tree import check_like, differentiable, split_overwrite, widen_tree
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.loss import find_loss_scale
from jamp._scaling.rules import HasLossScales
from jamp._state.incoming import kind_of
from jamp._state.skip import Flag, every, is_clean

_REMEDY = (
    "pass the `grads` of `loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, "
    "...)`, or a tree like `state.params`. For several losses, pass `grads=(g0, g1), "
    "loss_id=(0, 1)`."
)
_TWO_WRITERS = (
    "apply_gradients got new values of `_overwrite_with_gradient`{} from loss {} and "
    "from loss {}: these values replace the old ones, so they have no sum. Return the "
    "sum of the losses from one loss function, or step once per loss."
)


class LossGrads(NamedTuple):
    """The gradients of one loss. The scale of this loss moves.

    Attributes:
        loss_id: the loss.
        clean: whether the loss and all gradients are finite.
        trees: a pair for each group of the loss: its gradients, and new values of
            Flax's `_overwrite_with_gradient` or None.
    """

    loss_id: int
    clean: Flag
    trees: dict[Key, tuple[PyTree, Any]]


def by_loss(grads: PyTree, loss_id: Any, state: HasLossScales) -> list[LossGrads]:
    """Checks the gradients, and groups them by loss."""
    if not isinstance(loss_id, Sequence):
        return [_loss_grads(grads, loss_id, state)]
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
    return [_loss_grads(*pair, state) for pair in zip(grads, loss_id, strict=True)]


def by_group(losses: list[LossGrads]) -> dict[Key, tuple[PyTree, Any, Flag]]:
    """Returns `(gradients, overwrite, clean)` of each group that has gradients.

    The gradients are float32 sums over the losses. They are clean if all losses are.

    Raises:
        ValueError: two losses have values of `_overwrite_with_gradient` for one group.
    """
    total: dict[Key, tuple[PyTree, Any, Flag]] = {}
    writers: dict[Key, int] = {}
    for loss in losses:
        for key, (tree, overwrite) in loss.trees.items():
            if overwrite is not None and key in writers:
                group = "" if key is groups.SINGLE else f" of group {key!r}"
                raise ValueError(_TWO_WRITERS.format(group, writers[key], loss.loss_id))
            if overwrite is not None:
                writers[key] = loss.loss_id
            tree, clean = widen_tree(tree), loss.clean
            if key in total:
                tree = jax.tree.map(jnp.add, total[key][0], tree)
                clean = every([total[key][2], clean])
            total[key] = tree, overwrite, clean
    return total


def _loss_grads(grads: PyTree, loss_id: int, state: HasLossScales) -> LossGrads:
    rule, _ = find_loss_scale(state, loss_id, "apply_gradients")
    loss_id = operator.index(loss_id)  # an array cannot be the key of a dict
    trees = {}
    keys = groups.group_keys(state.tx)
    is_single = keys == (groups.SINGLE,)
    entries = {groups.SINGLE: grads} if is_single else _entries_of(grads, keys, state)
    params = groups.split(state.params, keys)
    for key, entry in entries.items():
        what = "gradients" if key is groups.SINGLE else f"gradients of group {key!r}"
        entry = differentiable(entry)
        expected = differentiable(params[key])
        check_like(entry, expected, what, _REMEDY)
        trees[key] = split_overwrite(entry)
    whole = [tree for tree, _ in trees.values()]
    leaves = jax.tree.leaves(whole)
    clean = is_clean(leaves, loss_id) if rule.check else True
    _warn_half(whole, state)
    return LossGrads(loss_id, clean, trees)


def _entries_of(
    grads: PyTree, keys: tuple[Key, ...], state: HasLossScales
) -> dict[Key, PyTree]:
    """Returns the gradients by group. It omits groups without gradients."""
    if isinstance(state.params, Mapping):
        fits = isinstance(grads, Mapping) and set(grads) <= set(keys)
    else:
        fits = type(grads) is type(state.params) and len(grads) == len(keys)
    if not fits:
        raise ValueError(
            "gradients of several groups must be in the container of `state.params`, "
            f"with the keys {list(keys)}, and None for a group without gradients; got "
            f"{kind_of(grads)}. Pass gradients of `wrt=key` as `grads={{key: grads}}`. "
            f"Otherwise, {_REMEDY}"
        )
    pairs = grads.items() if isinstance(grads, Mapping) else enumerate(grads)
    entries: dict[Key, PyTree] = {k: tree for k, tree in pairs if tree is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    return entries


def _warn_half(trees: list[PyTree], state: HasLossScales) -> None:
    """Warns of half gradients under a dynamic scale. They probably underflowed."""
    if not any(rule.moves for rule in state.loss_scale_rules):
        return
    if not any(map(is_half, jax.tree.leaves(trees))):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if is_half(leaf):
            warn(
                f"gradients{jax.tree_util.keystr(path[1:])} are {leaf.dtype}, and the "
                "loss scale is dynamic: the loss was not scaled, or they were not "
                "unscaled in float32. Write `jamp.scaled_grad(loss_fn)(state, ...)`, "
                "or `jamp.scale_loss` before `jax.grad` and `jamp.unscale` after it.",
                PrecisionWarning,
            )
            return
