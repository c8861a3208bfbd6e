"""`state.add_params` adds parameters to a running state.

After apex/amp/_process_optimizer.py:_amp_add_param_group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.groups import SINGLE
from jamp._core.tree import copy_shared, mapping_like, strong_array
from jamp._policy.casting import cast_to_level
from jamp._state.incoming import check_containers, check_float32
from jamp._state.new_state import new_state
from jamp._state.step import groups_of, master_params
from jamp.optimizers._masters import MasterWeights, bare

_COLLECTIONS = ("params", OVERWRITE_WITH_GRADIENT)
_NOT_PER_PARAM = (
    "This optimizer cannot take more params, because its state is not kept per param "
    "at {}. Start again: jamp.initialize(params, tx) with all params, of which "
    "jamp.master_params(state) returns the old ones."
)


def with_more_params[S](
    state: S,
    params: PyTree,
    tx: Any,
    allow_not_fp32: bool,
    extra: Sequence[str],
    fields: Mapping[str, Any],
) -> S:
    """Returns a new state of all params with the bits of the old one.

    `extra` names the state's extra fields; `fields` has more entries of some of them.
    """
    old: Any = state
    if old.tx is None:
        raise TypeError(
            "The state has no optimizer: make another with jamp.initialize."
        )
    by_key = groups_of(old)
    keys = tuple(by_key)
    _check(params, tx, old.params, keys)
    params = jax.tree.map(strong_array, params)
    if not allow_not_fp32:
        check_float32(params)
    txs = groups.pack({k: bare(group.tx) for k, group in by_key.items()}, old.params)
    cast = cast_to_level(params, old.properties, fields.get("batch_stats"))
    masters = [x.tx for x in by_key.values() if isinstance(x.tx, MasterWeights)]
    values = {name: getattr(old, name) for name in extra}
    for name, more in fields.items():
        if name not in extra:
            raise TypeError(
                f"add_params got {name!r}, but the state's extra fields are "
                f"{list(extra)}. Declare it on a subclass of jamp.AmpState."
            )
        more = jax.tree.map(strong_array, more)
        values[name] = more if values[name] is None else _add(values[name], more, name)
    for name in set(extra).difference(fields):
        if groups.is_per_group(values[name], keys):
            raise ValueError(
                f"The field {name} has one entry per group, so the new groups need "
                f"theirs: `add_params(..., {name}=...)`, in the same container."
            )
    new = new_state(
        type(old),
        _add(master_params(old), params, "params"),
        _add(old.params, cast, "params"),
        txs if keys == (SINGLE,) else _add(txs, tx, "tx"),
        store_remainder=any(tx.store_remainder for tx in masters),
        apply_fn=old.apply_fn,
        properties=old.properties,
        loss_scale_rules=old.loss_scale_rules,
        **values,
    )
    return copy_shared(_keep_bits(new, old), (params, fields))


def _keep_bits[T](new: T, old: PyTree) -> T:
    """Returns `new` with the leaves of `old` at the paths that both have."""
    keystr = jax.tree_util.keystr
    kept = {keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(old)}

    def leaf(path, x):
        before = kept.pop(keystr(path), None)
        if before is None:
            return strong_array(x)
        if before.shape != jnp.shape(x):
            raise ValueError(_NOT_PER_PARAM.format(keystr(path)))
        return before

    result = jax.tree_util.tree_map_with_path(leaf, new)
    if kept:
        raise ValueError(_NOT_PER_PARAM.format(next(iter(kept))))
    return result


def _check(params: PyTree, tx: Any, old: PyTree, keys: tuple[Any, ...]) -> None:
    kind = type(old).__name__
    if keys != (SINGLE,):
        if tx is None or groups.is_transformation(tx) or type(params) is not type(old):
            raise TypeError(
                f"The state has several groups: add_params takes new ones in a {kind}, "
                "with their optimizers in another, got "
                f"{type(params).__name__} and tx={tx!r}."
            )
        check_containers(params, tx)
    elif tx is not None:
        raise TypeError(
            "add_params got a tx, but the state has one group, whose optimizer steps "
            "the new params too. Leave tx out; or pass params and optimizers to "
            "jamp.initialize in a dict, to which groups can be added."
        )
    elif not isinstance(params, Mapping) or not isinstance(old, Mapping):
        raise TypeError(
            f"add_params merges a mapping of new entries into the params, got "
            f"{type(params).__name__} for params that are {kind}."
        )
    elif OVERWRITE_WITH_GRADIENT in old and not {*params} <= {*_COLLECTIONS}:
        raise ValueError(
            f"The params are collections: pass a dict with keys of {_COLLECTIONS}, got "
            f"{sorted(params)}."
        )


def _add(old: PyTree, new: PyTree, where: str) -> Any:
    """Merges mappings, also nested ones, and appends the groups of a list or tuple."""
    if "[" not in where and isinstance(old, list | tuple):
        return type(old)([*old, *new])
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        raise ValueError(
            f"add_params adds entries, but {where} exists already. Change it with "
            "`state.replace(...)`."
        )
    both = {k: _add(old[k], new[k], f"{where}[{k!r}]") for k in new if k in old}
    return mapping_like(old, {**old, **new, **both})
