"""`state.add_params` adds parameters to a running state.

Based on apex/amp/_process_optimizer.py:_amp_add_param_group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.groups import SINGLE
from jamp._core.tree import by_keystr, copy_shared, mapping_like, strong_array
from jamp._policy.casting import cast_to_level
from jamp._state.group import groups_of, master_params
from jamp._state.incoming import check_containers, check_float32, kind_of
from jamp._state.new_state import new_state

_COLLECTIONS = ("params", OVERWRITE_WITH_GRADIENT)


def with_more_params[S](
    state: S,
    params: PyTree,
    tx: Any,
    allow_not_fp32: bool,
    extra: Sequence[str],
    fields: Mapping[str, Any],
) -> S:
    """Returns a state with all params. `fields` extends the state's `extra` fields."""
    old: Any = state
    by_key = groups_of(old)
    is_single = SINGLE in by_key
    if old.tx is None or is_single != (tx is None):
        raise TypeError(
            f"add_params got tx={tx!r} for params stepped by {old.tx!r}. New params of "
            "one group share its optimizer: leave tx out. New groups need their own "
            "tx, in the container of the params."
        )
    if not is_single:
        check_containers(params, tx)
    elif OVERWRITE_WITH_GRADIENT in old.params and not {*params} <= {*_COLLECTIONS}:
        raise ValueError(
            f"The params are collections: pass a dict with keys of {_COLLECTIONS}, got "
            f"{sorted(params)}."
        )
    params = jax.tree.map(strong_array, params)
    if not allow_not_fp32:
        check_float32(params)
    wrapped = groups.split(old.tx, old.tx).values()
    txs = groups.pack({key: group.tx for key, group in by_key.items()}, old.params)
    values = {}
    for name in extra:
        now, more = getattr(old, name), fields.get(name)
        if more is not None:
            now = _add({} if now is None else now, more, name)
        values[name] = now
    whole = _add(master_params(old), params, "params")
    # Rules on paths need the paths in all params: new groups of a list begin at 0.
    cast = cast_to_level(whole, old.properties, values["batch_stats"])
    new = new_state(
        type(old),
        whole,
        _keep_bits(cast, old.params),
        txs if is_single else _add(txs, tx, "tx"),
        store_remainder=any(getattr(tx, "store_remainder", False) for tx in wrapped),
        apply_fn=old.apply_fn,
        properties=old.properties,
        loss_scale_rules=old.loss_scale_rules,
        **{**fields, **values},
    )
    return copy_shared(_keep_bits(new, old), (params, fields))


def _keep_bits[T](new: T, old: PyTree) -> T:
    """Returns `new` with the leaves of `old` at the paths in both trees."""
    before, after = by_keystr(old), by_keystr(new)
    for path, x in before.items():
        if path not in after or jnp.shape(after[path]) != x.shape:
            raise ValueError(
                f"This optimizer cannot take more params: its state at {path} is not "
                "kept per param. Pass all params to jamp.initialize, and take the old "
                "ones from jamp.master_params(state)."
            )
    return jax.tree.structure(new).unflatten((after | before).values())


def _add(old: PyTree, new: PyTree, where: str) -> Any:
    """Merges mappings, even nested ones, and appends the groups of a list or tuple."""
    if "[" not in where and isinstance(old, list | tuple) and type(new) is type(old):
        return type(old)([*old, *new])
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        raise ValueError(
            f"add_params adds entries, but {where} exists already as {kind_of(old)}; "
            f"got {kind_of(new)}. Change it with `state.replace(...)`."
        )
    both = {k: _add(old[k], new[k], f"{where}[{k!r}]") for k in new if k in old}
    return mapping_like(old, {**old, **new, **both})
