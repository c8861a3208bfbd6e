"""A skip: whether losses are finite, the choice between two values, the counters."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jamp._core import groups
from jamp._core.groups import Key
from jamp._core.tree import select
from jamp._scaling.rules import count_skips

# Whether a loss and its gradients are finite. It is Python's True if the rule does not
# check.
type Finite = Bool[Array, ""] | bool


def every(each: Iterable[Finite]) -> Finite:
    """Returns whether all are finite; Python's True if none is an array."""
    arrays = [finite for finite in each if finite is not True]
    return functools.reduce(jnp.logical_and, arrays) if arrays else True


def keep_on_skip[T](finite: Finite, new: T, old: T) -> T:
    """Returns `new` if the step is finite, otherwise the bits of `old`."""
    return new if finite is True else select(finite, new, old)


def next_counters(
    state: Any, losses: Sequence[tuple[int, Finite]], by_group: Mapping[Key, Finite]
) -> dict[str, Any]:
    """Returns the loss scales, `step` and the counters of skips.

    Args:
        state: an AmpState.
        losses: `(loss_id, finite)` of each loss. Losses that share a scale move it one
            after another, as in apex.
        by_group: whether each group steps. `step` advances if at least one does.
    """
    scales, rules = list(state.loss_scales), state.loss_scale_rules
    for loss_id, finite in losses:
        scales[loss_id] = rules[loss_id].update(scales[loss_id], jnp.asarray(finite))
    for loss_id in {i for i, _ in losses}:
        own = [finite for i, finite in losses if i == loss_id]
        if len(own) > 1 and rules[loss_id].check:
            # A finite loss must not reset the count of a loss that always overflows.
            skips = count_skips(state.loss_scales[loss_id], jnp.asarray(every(own)))
            scales[loss_id] = scales[loss_id]._replace(consecutive_skips=skips)
    skips = groups.split(state.skipped_steps, state.tx)
    skipped = groups.split(state.last_step_skipped, state.tx)
    for key, finite in by_group.items():
        skipped[key] = jnp.logical_not(finite)
        skips[key] = skips[key] + skipped[key].astype(jnp.int32)
    moves = functools.reduce(jnp.logical_or, [~skipped[key] for key in by_group])
    return {
        "loss_scales": tuple(scales),
        "step": state.step + moves.astype(jnp.int32),
        "skipped_steps": groups.pack(skips, state.params),
        "last_step_skipped": groups.pack(skipped, state.params),
    }
