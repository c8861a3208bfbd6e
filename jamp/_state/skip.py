"""A skip: the flag of a loss, the choice between two values, and the counters."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jamp._core import groups
from jamp._core.groups import Key
from jamp._core.tree import all_finite, select
from jamp._scaling.rules import LossScaleState, count_skips
from jamp._scaling.unscaled import raw_of

# Whether a loss and its gradients are finite. It is Python's True if the rule does not
# check.
type Flag = Bool[Array, ""] | bool


def every(flags: Iterable[Flag]) -> Flag:
    """Returns whether all flags are set; Python's True if none is an array."""
    arrays = [flag for flag in flags if flag is not True]
    return functools.reduce(jnp.logical_and, arrays) if arrays else True


def keep_on_skip[T](clean: Flag, new: T, old: T) -> T:
    """Returns `new` if the step is clean, otherwise the bits of `old`."""
    return new if clean is True else select(clean, new, old)


def is_clean(grads: Sequence[Array], loss_id: int) -> Flag:
    """Returns whether all gradients of a loss are finite.

    It reuses the flag of `scaled_value_and_grad` if it is known. Otherwise, it checks
    the gradients.

    Raises:
        ValueError: the gradients belong to another loss.
    """
    flags, others = {}, []
    for grad in grads:
        raw = raw_of(grad)
        if raw is not None and raw.loss_id != loss_id:
            raise ValueError(
                f"apply_gradients got loss_id={loss_id}, and gradients of "
                f"loss_id={raw.loss_id}: pass `loss_id={raw.loss_id}`."
            )
        if raw is None or raw.finite is None:
            others.append(grad)
        else:
            flags[id(raw.finite)] = raw.finite
    checked = [all_finite(others)] if others or not flags else []
    return functools.reduce(jnp.logical_and, [*flags.values(), *checked])


def next_counters(state: Any, clean: Mapping[Key, Flag]) -> dict[str, Any]:
    """Returns `step` and the counters of skips, from the flag of each group.

    `step` advances if at least one group steps.
    """
    keys = groups.group_keys(state.tx)
    skips = groups.split(state.skipped_steps, keys)
    skipped = groups.split(state.last_step_skipped, keys)
    for key, flag in clean.items():
        skipped[key] = jnp.logical_not(flag)
        skips[key] = skips[key] + skipped[key].astype(jnp.int32)
    moves = functools.reduce(jnp.logical_or, [~skipped[key] for key in clean])
    return {
        "step": state.step + moves.astype(jnp.int32),
        "skipped_steps": groups.pack(skips, state.params),
        "last_step_skipped": groups.pack(skipped, state.params),
    }


def next_scales(
    state: Any, flags: Sequence[tuple[int, Flag]]
) -> tuple[LossScaleState, ...]:
    """Returns the loss scales after the flags of losses, `(loss_id, clean)` in order.

    Losses that share a scale move it one after another, as in apex.
    """
    scales = list(state.loss_scales)
    for loss_id, clean in flags:
        rule = state.loss_scale_rules[loss_id]
        scales[loss_id] = rule.update(scales[loss_id], jnp.asarray(clean))
    for loss_id in {i for i, _ in flags}:
        own = [clean for i, clean in flags if i == loss_id]
        if len(own) > 1 and state.loss_scale_rules[loss_id].check:
            # A clean loss must not reset the count of a loss that always overflows.
            skips = count_skips(state.loss_scales[loss_id], jnp.asarray(every(own)))
            scales[loss_id] = scales[loss_id]._replace(consecutive_skips=skips)
    return tuple(scales)
