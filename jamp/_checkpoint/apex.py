"""apex's `amp.state_dict` and `amp.load_state_dict`: the loss scales alone.

After apex/amp/frontend.py, but by name, and checked before anything is taken.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jamp._core.devices import moves_constants, place_like
from jamp._core.numbers import check_count, check_scale, number
from jamp._core.tree import is_traced
from jamp._scaling.rules import StaticLossScale, check_state, current_scale
from jamp._state.amp_state import AmpState

_ENTRIES = ("loss_scale", "unskipped")


@moves_constants
def state_dict(state: AmpState) -> dict[str, dict[str, float | int]]:
    """The loss scales in apex's form, as numbers of Python.

    For a whole state, masters and moments included, see `to_checkpoint`.

    Args:
        state: an AmpState with concrete arrays.

    Returns:
        `{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}`, one entry per
        loss, static scales too.

    Raises:
        TypeError: `state` is not an AmpState; or it is traced.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> state_dict(state)
    {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    _check_state(state, "jamp.state_dict(state)")
    return {
        f"loss_scaler{loss_id}": {
            "loss_scale": float(current_scale(rule, scale_state)),
            "unskipped": int(scale_state.unskipped),
        }
        for loss_id, (rule, scale_state) in enumerate(
            zip(state.loss_scale_rules, state.loss_scales, strict=True)
        )
    }


@moves_constants
def load_state_dict(state: AmpState, state_dict: Mapping[str, Any]) -> AmpState:
    """The state with the loss scales of `state_dict`, matched by name.

    Limits, window and the rest of a rule stay. A static scale is part of what is
    compiled: if another is loaded, the step is compiled again.

    Args:
        state: an AmpState.
        state_dict: what `jamp.state_dict` gave; or apex's, of as many losses.

    Returns:
        The state with other `loss_scales`, and `loss_scale_rules` of static scales.

    Raises:
        TypeError: `state` is not an AmpState, or `state_dict` not a mapping.
        ValueError: a key is missing or unexpected, or a value not a scale or a count.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> loaded = {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 7}}
    >>> print(load_state_dict(state, loaded).loss_scale)
    256.0
    """
    _check_state(state, "jamp.load_state_dict(state, state_dict)")
    loaded = _checked(state_dict, len(state.loss_scale_rules))
    rules, scales = list(state.loss_scale_rules), list(state.loss_scales)
    for loss_id, (scale, unskipped) in enumerate(loaded):
        rule, old = rules[loss_id], scales[loss_id]
        if isinstance(rule, StaticLossScale):
            rules[loss_id] = StaticLossScale(scale, check=rule.check)
        scales[loss_id] = old._replace(
            scale=place_like(jnp.float32(scale), old.scale),
            unskipped=place_like(jnp.int32(unskipped), old.unskipped),
        )
    return state.replace(loss_scales=tuple(scales), loss_scale_rules=tuple(rules))


def _check_state(state: object, call: str) -> None:
    check_state(state, call)
    if is_traced(state.loss_scales[0].scale):
        raise TypeError(f"{call} gives numbers of Python: call it outside of `jit`.")


def _checked(state_dict: Any, num_losses: int) -> list[tuple[float, int]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict takes a mapping, got {type(state_dict).__name__}."
        )
    wanted = [f"loss_scaler{loss_id}" for loss_id in range(num_losses)]
    if set(state_dict) != set(wanted):
        raise ValueError(
            f"The state dict has the entries {sorted(map(str, state_dict))}, expected "
            f"{wanted}: the state has num_losses={num_losses}. Pass as many losses to "
            "jamp.initialize as the run that saved it."
        )
    found = []
    for name in wanted:
        entry = state_dict[name]
        if not isinstance(entry, Mapping) or set(entry) != set(_ENTRIES):
            raise ValueError(f"{name} must hold {list(_ENTRIES)}, got {entry!r}.")
        check_scale(f"{name}['loss_scale']", entry["loss_scale"])
        check_count(f"{name}['unskipped']", entry["unskipped"])
        found.append((number(entry["loss_scale"]), int(number(entry["unskipped"]))))
    return found
