"""apex's `amp.state_dict` and `amp.load_state_dict`: only the loss scales, by name."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jamp._core.devices import moves_constants, place_like
from jamp._core.numbers import check_count, check_scale, number
from jamp._core.tree import is_traced
from jamp._scaling.rules import StaticLossScale, check_single, current_scale
from jamp._state.amp_state import AmpState

_ENTRIES = ["loss_scale", "unskipped"]


@moves_constants
def state_dict(state: AmpState) -> dict[str, dict[str, float | int]]:
    """Returns the loss scales in apex's form, as Python numbers, static ones too.

    For a whole state, with masters and moments, see `to_checkpoint`.

    Raises:
        TypeError: `state` is not an AmpState; or it is traced.
        ValueError: the state is replicated or an ensemble.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> state_dict(state)
    {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    losses = _losses(state, "jamp.state_dict(state)")
    pairs = [(float(current_scale(*loss)), int(loss[1].unskipped)) for loss in losses]
    return {
        f"loss_scaler{i}": dict(zip(_ENTRIES, pair, strict=True))
        for i, pair in enumerate(pairs)
    }


@moves_constants
def load_state_dict(state: AmpState, state_dict: Mapping[str, Any]) -> AmpState:
    """Returns the state with the loss scales of a state dict, jamp's or apex's.

    Limits and window of a rule do not change. A static scale is a constant of the
    compiled step, so another value compiles the step again.

    Raises:
        TypeError: `state` is not an AmpState, or `state_dict` is not a mapping.
        ValueError: a key is missing or unexpected; a value is not a scale or a count;
            or the state is replicated or an ensemble.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> loaded = {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 7}}
    >>> print(load_state_dict(state, loaded).loss_scale)
    256.0
    """
    losses = _losses(state, "jamp.load_state_dict(state, state_dict)")
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        raise TypeError(f"load_state_dict takes a mapping, got {kind}.")
    names = [f"loss_scaler{i}" for i in range(len(losses))]
    if set(state_dict) != set(names):
        raise ValueError(
            f"The state dict has the entries {sorted(map(str, state_dict))}, expected "
            f"{names}: the state has num_losses={len(names)}. Pass as many losses to "
            "jamp.initialize as the run that saved it."
        )
    rules, scales = [], []
    for name, (rule, old) in zip(names, losses, strict=True):
        entry = state_dict[name]
        if not isinstance(entry, Mapping) or set(entry) != set(_ENTRIES):
            raise ValueError(f"{name} must hold {_ENTRIES}, got {entry!r}.")
        check_scale(f"{name}['loss_scale']", entry["loss_scale"])
        check_count(f"{name}['unskipped']", entry["unskipped"])
        scale, unskipped = (number(entry[key]) for key in _ENTRIES)
        if isinstance(rule, StaticLossScale):
            rule = StaticLossScale(scale, check=rule.check)
        rules.append(rule)
        scales.append(
            old._replace(
                scale=place_like(jnp.float32(scale), old.scale),
                unskipped=place_like(jnp.int32(int(unskipped)), old.unskipped),
            )
        )
    return state.replace(loss_scales=tuple(scales), loss_scale_rules=tuple(rules))


def _losses(state: AmpState, call: str) -> list[tuple[Any, Any]]:
    """Returns the rule and the state of each loss scale of one state, outside `jit`."""
    check_single(state, call)
    if is_traced(state.step):
        raise TypeError(f"{call} gives numbers of Python: call it outside of `jit`.")
    return list(zip(state.loss_scale_rules, state.loss_scales, strict=True))
