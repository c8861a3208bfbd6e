"""The gradients that `apply_gradients` accepts, by loss and by group."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jamp._core import groups
from jamp._core.dtypes import is_half, widen
from jamp._core.groups import Key
from jamp._core.tree import all_finite
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.loss import find_loss_scale
from jamp._scaling.rules import HasLossScales
from jamp._scaling.unscaled import Origin, origin_of
from jamp._state.group import Group
from jamp._state.incoming import kind_of
from jamp._state.skip import Finite, every

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


class Gradients(NamedTuple):
    """The gradients of one group.

    Attributes:
        grads: one float32 gradient per trained param.
        overwritten: new values of Flax's `_overwrite_with_gradient`.
        finite: whether the losses and all gradients are finite.
        scaled: the gradients times the scale, in the dtypes of the params, and the
            scale; None if they are unknown.
    """

    grads: list[Array]
    overwritten: list[Any]
    finite: Finite
    scaled: tuple[list[Array], Any] | None = None


class LossGrads(NamedTuple):
    """The gradients of one loss. The scale of this loss moves.

    Attributes:
        loss_id: the loss.
        finite: whether the loss and all gradients are finite.
        groups: the gradients of each group of the loss.
    """

    loss_id: int
    finite: Finite
    groups: dict[Key, Gradients]


def read_gradients(
    grads: PyTree, loss_id: Any, state: HasLossScales, by_key: Mapping[Key, Group]
) -> tuple[list[LossGrads], dict[Key, Gradients]]:
    """Checks the gradients, and returns those of each loss and of each group.

    A group's gradients are float32 sums over the losses, and finite if all losses are.

    Raises:
        ValueError: two losses have values of `_overwrite_with_gradient` for one group.
    """
    if not isinstance(loss_id, Sequence):
        loss = _read_loss(grads, loss_id, state, by_key)
        return [loss], loss.groups
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
    pairs = zip(grads, loss_id, strict=True)
    losses = [_read_loss(*pair, state, by_key) for pair in pairs]
    total: dict[Key, Gradients] = {}
    writers: dict[Key, int] = {}
    for loss in losses:
        for key, new in loss.groups.items():
            if new.overwritten and key in writers:
                group = "" if key is groups.SINGLE else f" of group {key!r}"
                raise ValueError(_TWO_WRITERS.format(group, writers[key], loss.loss_id))
            if new.overwritten:
                writers[key] = loss.loss_id
            if key in total:
                old = total[key]
                new = Gradients(
                    list(map(jnp.add, old.grads, new.grads)),
                    new.overwritten or old.overwritten,
                    every([old.finite, new.finite]),
                )
            total[key] = new
    return losses, total


def _read_loss(
    grads: PyTree, loss_id: int, state: HasLossScales, by_key: Mapping[Key, Group]
) -> LossGrads:
    rule, _ = find_loss_scale(state, loss_id)
    loss_id = operator.index(loss_id)  # an array cannot be the key of a dict
    is_single = groups.SINGLE in by_key
    entries = {groups.SINGLE: grads}
    if not is_single:
        entries = _entries_of(grads, tuple(by_key), state)
    read = {}
    for key, entry in entries.items():
        what = "gradients" if is_single else f"gradients of group {key!r}"
        layout, leaves = by_key[key].layout, by_key[key].leaves
        trained, overwritten = layout.read_gradients(entry, leaves, what, _REMEDY)
        wide = list(map(widen, trained))
        if any(map(operator.is_not, wide, trained)):
            _warn_half(entry, what, state)
        read[key] = trained, wide, overwritten
    flat = [x for trained, *_ in read.values() for x in trained]
    origin = origin_of(flat) or Origin(loss_id)
    if origin.loss_id != loss_id and rule.check:
        raise ValueError(
            f"apply_gradients got loss_id={loss_id}, and gradients of "
            f"loss_id={origin.loss_id}: pass `loss_id={origin.loss_id}`."
        )
    finite: Finite = True
    if rule.check:
        finite = all_finite(flat) if origin.finite is None else origin.finite
    # After an overflow, some scaled gradients are finite, so the step needs its skip.
    scaled = origin.scaled if rule.check or origin.finite is None else None
    found = {}
    for key, (trained, wide, overwritten) in read.items():
        own = None
        if scaled:
            own = [scaled[id(x)] for x in trained], origin.scale
        found[key] = Gradients(wide, overwritten, finite, own)
    return LossGrads(loss_id, finite, found)


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
    # In the order of `scaled_value_and_grad`, whose table knows the leaves.
    held = [key for key in keys if not isinstance(grads, Mapping) or key in grads]
    pairs = ((key, grads[key]) for key in held)
    entries: dict[Key, PyTree] = {k: tree for k, tree in pairs if tree is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    return entries


def _warn_half(grads: PyTree, what: str, state: HasLossScales) -> None:
    """Warns of half gradients under a dynamic scale. They probably underflowed."""
    if not any(rule.moves for rule in state.loss_scale_rules):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if is_half(leaf):
            warn(
                f"{what}{jax.tree_util.keystr(path)} are {leaf.dtype}, and the loss "
                "scale is dynamic: the loss was not scaled, or they were not unscaled "
                "in float32. Write `jamp.scaled_grad(loss_fn)(state, ...)`, or "
                "`jamp.scale_loss` before `jax.grad` and `jamp.unscale` after it.",
                PrecisionWarning,
            )
            return
