"""Checkpoints that any opt level can read: float32 params, by name, with a version."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._checkpoint.moments import in_formats_of
from jamp._core import groups
from jamp._core.devices import place_like
from jamp._core.names import check_same, from_names, to_names
from jamp._core.numbers import check_counters, check_scale_state, number
from jamp._core.tree import copy_shared
from jamp._policy.levels import LEVELS
from jamp._scaling.rules import LossScaleRule, LossScaleState, check_single
from jamp._state.amp_state import AmpState, extra_fields
from jamp._state.group import groups_of, master_params, pack_groups
from jamp._state.loading import array_fields, load_weight

VERSION = 1
_SCALER_NAMES = ("loss_scale", *LossScaleState._fields[1:])
_SCALER = re.compile(r"loss_scaler\d+")
_FLAX = ("step", "params", "opt_state")
_COUNTERS = ("skipped_steps", "last_step_skipped")
_WHAT_IS_READ = (
    "from_checkpoint takes the result of jamp.to_checkpoint, or the state dict of a "
    "flax.training TrainState"
)


def to_checkpoint(state: AmpState) -> dict[str, Any]:
    """Returns the state as nested dicts of arrays, in the same form at every level.

    The params are the float32 masters, so every level and plain Flax can read them. The
    dicts share the state's float32 arrays. A step that donates the state deletes these,
    so write or copy them first. Flax's msgpack and Orbax can write the
    dicts, because they contain typed PRNG keys as data. Orbax restores into
    `jax.eval_shape(to_checkpoint, state)`.

    Args:
        state: an AmpState.

    Returns:
        A dict with the entries `version` and `opt_level` (2 for "O2"); `step`, `params`
        and `opt_state` as plain Flax names them; `loss_scaler0`, ... per loss;
        `skipped_steps` and `last_step_skipped`; and `fields`, the extra fields.

    Raises:
        TypeError: `state` is not an AmpState.
        ValueError: the state is replicated or an ensemble.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params, tx = {"w": jnp.full(2, 0.1)}, optax.sgd(0.1, momentum=0.9)
    >>> state = jamp.initialize(params, tx, "O2", verbosity=0)
    >>> checkpoint = to_checkpoint(state)
    >>> print(checkpoint["params"]["w"], checkpoint["opt_state"]["0"]["trace"]["w"])
    [0.1 0.1] [0. 0.]
    >>> moved = jamp.initialize(params, tx, "O5", verbosity=0)
    >>> print(jamp.from_checkpoint(moved, checkpoint).params["w"])
    [0.100098 0.100098]
    """
    check_single(state, "jamp.to_checkpoint(state)")
    scalers = zip(state.loss_scale_rules, state.loss_scales, strict=True)
    level = (state.properties.opt_level or "O0").removeprefix("O")
    return {
        "version": place_like(np.int32(VERSION), state.step),
        "opt_level": place_like(np.int32(level), state.step),
        "step": state.step,
        "params": to_names(master_params(state)),
        "opt_state": to_names(_inner_states(state)),
        **{f"loss_scaler{i}": _scaler(*pair) for i, pair in enumerate(scalers)},
        **{name: to_names(getattr(state, name)) for name in _COUNTERS},
        "fields": _fields(state),
    }


def from_checkpoint(state: AmpState, checkpoint: PyTree) -> AmpState:
    """Returns the state with the values of a checkpoint, even from another opt level.

    From the same level, all arrays have the same bits. From another level, masters,
    moments, counters and fields have the same bits, and the params are the masters,
    rounded. Moments of another `moment_dtype` are rounded to nearest. If both levels
    have a dynamic loss scale, the scale continues. Otherwise, it starts again. The
    state has copies of the arrays, so donating it does not delete the checkpoint's.

    Args:
        state: an AmpState with the same model, optimizer and number of losses, or its
            shapes. It sets the level and the placement of the arrays.
        checkpoint: the result of `to_checkpoint`; or a float32 TrainState of plain
            Flax, or its state dict `{"step", "params", "opt_state"}`, of which only
            `params` is required.

    Returns:
        A state like `state`.

    Raises:
        TypeError: `state` is not an AmpState, or `checkpoint` cannot be read.
        ValueError: the version is newer; the number of losses differs; a leaf is
            missing, unexpected, or has another shape or dtype; the state is replicated
            or an ensemble.
    """
    check_single(state, "jamp.from_checkpoint(state, checkpoint)")
    expected = jax.eval_shape(to_checkpoint, state)
    found = _read(checkpoint, state, expected)
    moments = in_formats_of(expected["opt_state"], found.get("opt_state"))
    found = {**found, "opt_state": moments}
    _check_found(found, expected)
    originals = from_names(state.params, found["params"])
    inner = from_names(_inner_states(state), found["opt_state"])
    read = {}
    for key, group in groups_of(state).items():
        leaves = jax.tree.leaves(groups.get(originals, key))
        weights = list(map(load_weight, group.weights, group.layout.pick(leaves)))
        new = {"weights": weights, "inner_state": groups.get(inner, key)}
        read[key] = group._replace(leaves=leaves, **new)
    others = {name: found[name] for name in (*_COUNTERS, "step")}
    others |= {name: found["fields"].get(name) for name in _extra(state)}
    restored = state.replace(
        **pack_groups(read, state.params),
        loss_scales=_scales(state, found),
        **{name: from_names(getattr(state, name), x) for name, x in others.items()},
    )
    restored = jax.tree.map(place_like, restored, state)
    return copy_shared(restored, (state, checkpoint, found))


def _inner_states(state: AmpState) -> Any:
    """Returns each group's optimizer state without masters."""
    inner = {key: group.inner_state for key, group in groups_of(state).items()}
    return groups.pack(inner, state.params)


def _extra(state: AmpState) -> list[str]:
    """Returns the names of the extra fields that hold arrays."""
    return [name for name in extra_fields(state) if name in array_fields(state)]


def _fields(state: AmpState) -> dict[str, Any]:
    """Returns the values of the extra fields that are not None, by name."""
    values = {name: to_names(getattr(state, name)) for name in _extra(state)}
    return {name: value for name, value in values.items() if value is not None}


def _scaler(rule: LossScaleRule, scale_state: LossScaleState) -> dict[str, Any]:
    return {
        **dict(zip(_SCALER_NAMES, scale_state, strict=True)),
        "dynamic": place_like(np.bool_(rule.moves), scale_state.unskipped),
    }


def _read(checkpoint: Any, state: AmpState, expected: dict[str, Any]) -> dict[str, Any]:
    """Converts any accepted checkpoint to the current form."""
    if isinstance(checkpoint, AmpState):
        return to_checkpoint(checkpoint)
    if isinstance(checkpoint, TrainState):
        checkpoint = to_names(checkpoint)
    if not isinstance(checkpoint, Mapping):
        raise TypeError(f"{_WHAT_IS_READ}; got {type(checkpoint).__name__}.")
    # A Flax state may also have a field `version`.
    if "opt_level" not in checkpoint and not _scalers(checkpoint):
        return _from_flax(checkpoint, state, expected)
    version, level = (number(checkpoint.get(x, 0)) for x in ("version", "opt_level"))
    if version > VERSION and version % 1 == 0:
        raise ValueError(
            f"The checkpoint has version {int(version)}, but this jamp reads versions "
            f"1 to {VERSION}: install a newer jamp."
        )
    for name, value, allowed in (
        ("version", version, range(1, VERSION + 1)),
        ("opt_level", level, range(len(LEVELS))),
    ):
        if value not in allowed:
            raise ValueError(
                f"The checkpoint's {name} is {checkpoint.get(name)!r}, expected "
                f"{allowed[0]} to {allowed[-1]}: it is damaged."
            )
    found = dict(checkpoint)
    if state.tx is None:  # inference needs no optimizer state
        found |= {"opt_state": None, **_zeros(expected, _COUNTERS)}
    return found


def _from_flax(
    checkpoint: Mapping[str, Any], state: AmpState, expected: dict[str, Any]
) -> dict[str, Any]:
    """Completes a plain Flax state with the values of a fresh state."""
    if "loss_scales" in checkpoint:
        raise ValueError(
            "The checkpoint is the Flax state dict of an AmpState: restore it with "
            "`flax.serialization.from_state_dict` into a state of the same opt level, "
            "and save `jamp.to_checkpoint(state)` from now on."
        )
    if "params" not in checkpoint:
        raise ValueError(
            f"{_WHAT_IS_READ}; got a dict with the keys {sorted(map(str, checkpoint))}."
        )
    names = to_names(checkpoint)  # Orbax without a target restores tuples as lists
    fields = {k: names.pop(k) for k in list(names) if k not in _FLAX}
    if state.tx is None:
        names["opt_state"] = None
    known: dict[str, Any] = {"fields": {}}
    if not isinstance(state.step, jax.ShapeDtypeStruct):  # its values are defaults
        known = {k: x for k, x in to_checkpoint(state).items() if k in _FLAX}
        known["fields"] = _fields(state)
    fresh = _zeros(expected, ("version", "opt_level", *_COUNTERS))
    fresh |= {
        f"loss_scaler{i}": _scaler(rule, rule.init())
        for i, rule in enumerate(state.loss_scale_rules)
    }
    return fresh | known | names | {"fields": known["fields"] | fields}


def _scalers(names: Mapping[Any, Any]) -> list[str]:
    """Returns the names of the loss scales."""
    return sorted(name for name in map(str, names) if _SCALER.fullmatch(name))


def _zeros(expected: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: jax.tree.map(jnp.zeros_like, expected[name]) for name in names}


def _check_found(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises if the checkpoint does not fit the state, or has impossible numbers."""
    given, wanted = _scalers(found), _scalers(expected)
    if given and given != wanted:
        raise ValueError(
            f"The checkpoint has {len(given)} loss scale(s), {given}, and "
            f"the state {len(wanted)}: pass num_losses={len(given)} to jamp.initialize."
        )
    check_same(
        found,
        expected,
        "The checkpoint",
        "Call jamp.initialize with the model, the optimizer and the fields of the run "
        "that saved it; the opt level may differ. If its params "
        "and moments are half, cast them first: `jax.tree.map(lambda x: x.astype("
        "'float32') if getattr(x, 'dtype', None) in ('bfloat16', 'float16') else x, "
        "checkpoint)`.",
    )
    for name in wanted:
        check_scale_state(name, found[name])
    check_counters(found)


def _scales(state: AmpState, found: dict[str, Any]) -> tuple[LossScaleState, ...]:
    """Returns the checkpoint's scales where both rules move or neither does.

    Other scales are new. A static scale is always the scale of its rule.
    """
    scales = []
    for i, rule in enumerate(state.loss_scale_rules):
        scaler, scale = found[f"loss_scaler{i}"], rule.init()
        if bool(scaler["dynamic"]) == rule.moves:
            read = LossScaleState(*(scaler[name] for name in _SCALER_NAMES))
            scale = read if rule.moves else read._replace(scale=scale.scale)
        scales.append(scale)
    return tuple(scales)
