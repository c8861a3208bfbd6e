"""`state.add_params`: more parameters for a running state.

After apex/amp/_process_optimizer.py:_amp_add_param_group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.groups import SINGLE, Key
from jamp._core.tree import path_string, strong_array, unshared
from jamp._policy.casting import cast_to_level
from jamp._state.incoming import check_containers, check_float32
from jamp._state.placement import with_shardings
from jamp._state.step import begin, init_optimizer, widened
from jamp.optimizers._masters import MasterWeights, fused_inside, master_weights


def grown(
    state: Any,
    params: Any,
    tx: Any,
    allow_not_fp32: bool,
    extra: Sequence[str],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """What `AmpState.add_params` replaces in the state, by name.

    `extra` names the state's extra fields, `fields` holds more of some of them.
    """
    if state.tx is None:
        raise TypeError(
            "The state has no optimizer: make another with jamp.initialize."
        )
    keys = groups.group_keys(state.tx)
    params = jax.tree.map(strong_array, params)
    if not allow_not_fp32:
        check_float32(params)
    cast = cast_to_level(params, state.properties, fields.get("batch_stats"))
    if keys == (SINGLE,):
        changes = _with_more_leaves(state, params, cast, tx)
    else:
        changes = _with_more_groups(state, params, cast, tx)
    changes |= _with_fields(state, keys, extra, fields)
    tx = changes.pop("tx")
    return {"tx": tx, **unshared(changes, (params, fields))}


def _with_more_leaves(state: Any, params: Any, cast: Any, tx: Any) -> dict[str, Any]:
    """One group: its optimizer takes them on."""
    if tx is not None:
        raise TypeError(
            "add_params got a tx, but the state has one group, whose optimizer takes "
            "the params on. Leave tx out; or hand params and optimizers to "
            "jamp.initialize in a dict, to which groups can be added."
        )
    _check_mapping(params, state.params)
    masters = widened(state.tx, state.opt_state, state.params)
    originals = _merged(masters, params, "params")
    merged = _merged(state.params, cast, "params")
    tx = _for_params(state.tx, merged)
    begun = init_optimizer(tx, originals, merged)
    new_params, opt_state = _keeping_bits(begun, (state.params, state.opt_state))
    return {"params": new_params, "opt_state": opt_state, "tx": tx}


def _with_more_groups(state: Any, params: Any, cast: Any, txs: Any) -> dict[str, Any]:
    """Several groups: each of the new ones begins by itself."""
    kind = type(state.params)
    if txs is None or groups.is_transformation(txs) or type(params) is not kind:
        raise TypeError(
            "The state has several groups: add_params takes new ones in a "
            f"{kind.__name__}, with their optimizers in another, got "
            f"{type(params).__name__} and tx={txs!r}."
        )
    check_containers(params, txs)
    begun = {
        key: begin(
            txs[key],
            params[key],
            cast[key],
            keeps_masters=state.properties.master_weights,
            store_remainder=_stores_remainder(state.tx),
        )
        for key in groups.group_keys(txs)
    }
    new = {
        "tx": {key: entry[0] for key, entry in begun.items()},
        "params": {key: entry[1] for key, entry in begun.items()},
        "opt_state": {key: entry[2] for key, entry in begun.items()},
        "skipped_steps": {key: jnp.zeros((), jnp.int32) for key in begun},
        "last_step_skipped": {key: jnp.zeros((), bool) for key in begun},
    }
    return {
        name: _extended(getattr(state, name), groups.pack(entries, params), name)
        for name, entries in new.items()
    }


def _with_fields(
    state: Any, keys: tuple[Key, ...], extra: Sequence[str], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Extra fields, which grow as the params do."""
    changes = {}
    for name, more in fields.items():
        if name in extra:
            old, more = getattr(state, name), jax.tree.map(strong_array, more)
            per_group = groups.is_container(old, keys)
            changes[name] = (_extended if per_group else _merged)(old, more, name)
        elif name != "batch_stats":  # which has said which params are BatchNorm's
            raise TypeError(
                f"add_params got {name!r}, but the state's extra fields are "
                f"{list(extra)}. Declare it with `jamp.initialize(..., {name}=...)`."
            )
    for name in extra:
        if name not in fields and groups.is_container(getattr(state, name), keys):
            raise ValueError(
                f"The field {name} has one entry per group, so the new groups need "
                f"theirs: `add_params(..., {name}=...)`, in the same container."
            )
    return changes


def _for_params(tx: Any, params: PyTree) -> Any:
    """The same optimizer; a fused one is told again how its params are sharded."""
    inner = fused_inside(tx)
    if inner is None:
        return tx
    inner = with_shardings(inner.replace(shardings=None), params)
    if not isinstance(tx, MasterWeights):
        return inner
    return master_weights(inner, store_remainder=tx.store_remainder)


def _stores_remainder(txs: Any) -> bool:
    entries = txs.values() if isinstance(txs, Mapping) else txs
    return any(isinstance(tx, MasterWeights) and tx.store_remainder for tx in entries)


def _keeping_bits[T](new: T, old: Any) -> T:
    """`new`, with the leaves of `old` at the paths that both have."""
    keystr = jax.tree_util.keystr
    kept = {keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(old)}

    def leaf(path, x):
        before = kept.pop(keystr(path), None)
        if before is None:
            return strong_array(x)
        if before.shape != jnp.shape(x):
            raise ValueError(_ONE_PIECE.format(path=path_string(path)))
        return before

    filled = jax.tree_util.tree_map_with_path(leaf, new)
    if kept:
        raise ValueError(_ONE_PIECE.format(path=next(iter(kept))))
    return filled


_ONE_PIECE = (
    "This optimizer cannot take on params: its state is not kept per param at {path}. "
    "Start again: jamp.initialize(jamp.master_params(state) and the new ones, tx)."
)


def _check_mapping(params: Any, old: Any) -> None:
    if not isinstance(params, Mapping) or not isinstance(old, Mapping):
        raise TypeError(
            f"add_params merges a mapping of new entries into the params, got "
            f"{type(params).__name__} for params that are {type(old).__name__}."
        )
    collections = {"params", OVERWRITE_WITH_GRADIENT}
    if OVERWRITE_WITH_GRADIENT in old and not collections.issuperset(params):
        raise ValueError(
            f"The params are collections: pass {{'params': ..., "
            f"{OVERWRITE_WITH_GRADIENT!r}: ...}}, got {sorted(params)}."
        )


def _merged(old: Any, new: Any, where: str) -> Any:
    """A mapping with the entries of both, in mappings inside of it too."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        raise ValueError(
            f"add_params adds entries, but {where} is there already. Change it with "
            "`state.replace(...)`."
        )
    entries = {**old, **new}
    for key, value in new.items():
        if key in old:
            entries[key] = _merged(old[key], value, f"{where}[{key!r}]")
    return _of_kind(old, entries)


def _extended(old: Any, new: Any, name: str) -> Any:
    """The container of the groups with those of `new` after them."""
    if not isinstance(old, Mapping):
        return type(old)([*old, *new])
    twice = set(old) & set(new)
    if twice:
        raise ValueError(f"{name} has a group {sorted(twice, key=str)[0]!r} already.")
    return _of_kind(old, {**old, **new})


def _of_kind(old: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    return entries if isinstance(old, dict) else type(old)(entries)  # pyright: ignore[reportCallIssue]
