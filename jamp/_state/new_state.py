"""A state before its first step, of params that are cast already."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from jamp._core import groups
from jamp._policy.levels import Properties
from jamp._scaling.rules import LossScaleRule
from jamp._state.step import begin


def new_state[S](
    state_class: Callable[..., S],
    originals: PyTree,
    params: PyTree,
    txs: Any,
    *,
    store_remainder: bool,
    apply_fn: Any,
    properties: Properties,
    loss_scale_rules: tuple[LossScaleRule, ...],
    **fields: Any,
) -> S:
    """A state with fresh optimizer states, loss scales and counters.

    Args:
        state_class: AmpState or a subclass, which declares `fields`.
        originals: the params in float32, one tree per group.
        params: what was cast from them.
        txs: a bare transformation per group.
        store_remainder: whether masters are the low bits beside the params.
        apply_fn, properties, loss_scale_rules, **fields: fields of the state.
    """
    keys = groups.group_keys(txs)
    begun = {
        key: begin(
            groups.get(txs, key),
            groups.get(originals, key),
            groups.get(params, key),
            keeps_masters=properties.master_weights,
            store_remainder=store_remainder,
        )
        for key in keys
    }

    def packed(values):
        return groups.pack(dict(zip(keys, values, strict=True)), params)

    wrapped, trees, opt_states = zip(*begun.values(), strict=True)
    return state_class(
        step=jnp.int32(0),
        apply_fn=apply_fn,
        params=packed(trees),
        tx=groups.hashable(dict(zip(keys, wrapped, strict=True)), txs),
        opt_state=packed(opt_states),
        loss_scales=tuple(rule.init() for rule in loss_scale_rules),
        skipped_steps=packed([jnp.int32(0) for _ in keys]),
        last_step_skipped=packed([jnp.bool_(False) for _ in keys]),
        properties=properties,
        loss_scale_rules=loss_scale_rules,
        **fields,
    )
