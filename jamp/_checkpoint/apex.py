"""apex's `amp.state_dict` and `amp.load_state_dict`: only the loss scales, by name."""

from collections.abc import Mapping
from typing import Any

from jamp._core.devices import place_like
from jamp._core.numbers import check_count, check_scale, number
from jamp._core.tree import is_traced
from jamp._scaling.rules import StaticLossScale, check_single, current_scale
from jamp._state.amp_state import AmpState


def state_dict(state: AmpState) -> dict[str, dict[str, float | int]]:
    """Returns the loss scales in apex's form; `to_checkpoint` saves a whole state.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> state_dict(state)
    {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    check_single(state, "jamp.state_dict(state)")
    if is_traced(state.step):
        raise TypeError("jamp.state_dict returns numbers: call it outside of `jit`.")
    pairs = zip(state.loss_scale_rules, state.loss_scales, strict=True)
    numbers = [(float(current_scale(*pair)), int(pair[1].unskipped)) for pair in pairs]
    entries = [{"loss_scale": scale, "unskipped": count} for scale, count in numbers]
    return {f"loss_scaler{i}": entry for i, entry in enumerate(entries)}


def load_state_dict(state: AmpState, state_dict: Mapping[str, Any]) -> AmpState:
    """Returns the state with the loss scales of a state dict, jamp's or apex's.

    A rule keeps its limits and its window. A different static scale compiles the step
    again.
    """
    check_single(state, "jamp.load_state_dict(state, state_dict)")
    names = [f"loss_scaler{i}" for i in range(len(state.loss_scales))]
    if not isinstance(state_dict, Mapping) or set(state_dict) != set(names):
        raise ValueError(
            f"The state dict must map {names} to scales, got {state_dict!r}. Pass the "
            "num_losses of the run that saved it to jamp.initialize."
        )
    rules, scales = list(state.loss_scale_rules), list(state.loss_scales)
    for i, name in enumerate(names):
        entry, old = state_dict[name], scales[i]
        if not isinstance(entry, Mapping) or set(entry) != {"loss_scale", "unskipped"}:
            raise ValueError(
                f"{name} must hold loss_scale and unskipped, got {entry!r}."
            )
        check_scale(f"{name}['loss_scale']", entry["loss_scale"])
        check_count(f"{name}['unskipped']", entry["unskipped"])
        scale, count = number(entry["loss_scale"]), int(number(entry["unskipped"]))
        if isinstance(rules[i], StaticLossScale):
            rules[i] = StaticLossScale(scale, check=rules[i].check)
        scale, count = place_like(scale, old.scale), place_like(count, old.unskipped)
        scales[i] = old._replace(scale=scale, unskipped=count)
    return state.replace(loss_scales=tuple(scales), loss_scale_rules=tuple(rules))
