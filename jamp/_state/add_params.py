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
from jamp._core.tree import copy_shared, mapping_like, path_string, strong_array
from jamp._policy.casting import cast_to_level
from jamp._state.incoming import check_containers, check_float32
from jamp._state.new_state import new_state
from jamp._state.step import groups_of, master_params
from jamp.optimizers._masters import MasterWeights, bare


def grown[S](
    state: S,
    params: PyTree,
    tx: Any,
    allow_not_fp32: bool,
    extra: Sequence[str],
    fields: Mapping[str, Any],
) -> S:
    """What `AmpState.add_params` returns: a new state of all params, with the old bits.

    `extra` names the state's extra fields, `fields` holds more of some of them.
    """
    old: Any = state
    if old.tx is None:
        raise TypeError(
            "The state has no optimizer: make another with jamp.initialize."
        )
    by_key = groups_of(old)
    keys = tuple(by_key)
    params = jax.tree.map(strong_array, params)
    if not allow_not_fp32:
        check_float32(params)
    cast = cast_to_level(params, old.properties, fields.get("batch_stats"))
    txs = groups.pack({k: bare(group.tx) for k, group in by_key.items()}, old.params)
    if keys == (SINGLE,):
        _check_leaves(params, tx, old.params)
        put = _merged
    else:
        _check_groups(params, tx, old.params)
        put, txs = _extended, _extended(txs, tx, "tx")
    wrapped = [x.tx for x in by_key.values() if isinstance(x.tx, MasterWeights)]
    new = new_state(
        type(old),
        put(master_params(old), params, "params"),
        put(old.params, cast, "params"),
        txs,
        store_remainder=any(tx.store_remainder for tx in wrapped),
        apply_fn=old.apply_fn,
        properties=old.properties,
        loss_scale_rules=old.loss_scale_rules,
        **_fields(old, keys, extra, fields),
    )
    return copy_shared(_keeping_bits(new, old), (params, fields))


def _fields(
    state: Any, keys: tuple[Key, ...], extra: Sequence[str], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Extra fields, which grow as the params do."""
    grown = {name: getattr(state, name) for name in extra}
    for name, more in fields.items():
        if name in extra:
            more = jax.tree.map(strong_array, more)
            per_group = groups.is_per_group(grown[name], keys)
            grown[name] = (_extended if per_group else _merged)(grown[name], more, name)
        elif name != "batch_stats":  # which has said which params are BatchNorm's
            raise TypeError(
                f"add_params got {name!r}, but the state's extra fields are "
                f"{list(extra)}. Declare it with `jamp.initialize(..., {name}=...)`."
            )
    for name in extra:
        if name not in fields and groups.is_per_group(getattr(state, name), keys):
            raise ValueError(
                f"The field {name} has one entry per group, so the new groups need "
                f"theirs: `add_params(..., {name}=...)`, in the same container."
            )
    return grown


def _keeping_bits[T](new: T, old: PyTree) -> T:
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


def _check_groups(params: PyTree, txs: Any, old: PyTree) -> None:
    kind = type(old)
    if txs is None or groups.is_transformation(txs) or type(params) is not kind:
        raise TypeError(
            "The state has several groups: add_params takes new ones in a "
            f"{kind.__name__}, with their optimizers in another, got "
            f"{type(params).__name__} and tx={txs!r}."
        )
    check_containers(params, txs)


def _check_leaves(params: PyTree, tx: Any, old: PyTree) -> None:
    if tx is not None:
        raise TypeError(
            "add_params got a tx, but the state has one group, whose optimizer takes "
            "the params on. Leave tx out; or hand params and optimizers to "
            "jamp.initialize in a dict, to which groups can be added."
        )
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


def _merged(old: PyTree, new: PyTree, where: str) -> Any:
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
    return mapping_like(old, entries)


def _extended(old: PyTree, new: PyTree, name: str) -> Any:
    """The container of the groups with those of `new` after them."""
    if not isinstance(old, Mapping):
        return type(old)([*old, *new])
    twice = set(old) & set(new)
    if twice:
        raise ValueError(f"{name} has a group {sorted(twice, key=str)[0]!r} already.")
    return mapping_like(old, {**old, **new})
