"""A skip: the flag of a loss, the choice between two values, and the counters."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jamp._core import groups
from jamp._core.groups import Key
from jamp._core.tree import select
from jamp._scaling.rules import LossScaleState, count_skips

# Whether a loss and its gradients are finite. It is Python's True if the rule does not
# check.
type Flag = Bool[Array, ""] | bool


def every(flags: Iterable[Flag]) -> Flag:
    """Returns whether all flags are set; Python's True if none is an array."""
    arrays = [flag for flag in flags if flag is not True]
    return functools.reduce(jnp.logical_and, arrays) if arrays else True


def keep_on_skip[T](finite: Flag, new: T, old: T) -> T:
    """Returns `new` if the step is finite, otherwise the bits of `old`."""
    return new if finite is True else select(finite, new, old)


def next_counters(state: Any, finite: Mapping[Key, Flag]) -> dict[str, Any]:
    """Returns `step` and the counters of skips, from the flag of each group.

    `step` advances if at least one group steps.
    """
    keys = groups.group_keys(state.tx)
    skips = groups.split(state.skipped_steps, keys)
    skipped = groups.split(state.last_step_skipped, keys)
    for key, flag in finite.items():
        skipped[key] = jnp.logical_not(flag)
        skips[key] = skips[key] + skipped[key].astype(jnp.int32)
    moves = functools.reduce(jnp.logical_or, [~skipped[key] for key in finite])
    return {
        "step": state.step + moves.astype(jnp.int32),
        "skipped_steps": groups.pack(skips, state.params),
        "last_step_skipped": groups.pack(skipped, state.params),
    }


def next_scales(
    state: Any, flags: Sequence[tuple[int, Flag]]
) -> tuple[LossScaleState, ...]:
    """Returns the loss scales after the flags of losses, `(loss_id, finite)` in order.

    Losses that share a scale move it one after another, as in apex.
    """
    scales = list(state.loss_scales)
    for loss_id, finite in flags:
        rule = state.loss_scale_rules[loss_id]
        scales[loss_id] = rule.update(scales[loss_id], jnp.asarray(finite))
    for loss_id in {i for i, _ in flags}:
        own = [finite for i, finite in flags if i == loss_id]
        if len(own) > 1 and state.loss_scale_rules[loss_id].check:
            # A finite loss must not reset the count of a loss that always overflows.
            skips = count_skips(state.loss_scales[loss_id], jnp.asarray(every(own)))
            scales[loss_id] = scales[loss_id]._replace(consecutive_skips=skips)
    return tuple(scales)
