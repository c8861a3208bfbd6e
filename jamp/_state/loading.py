"""Loads params into a state, and checks the values that Flax restores.

Flax would put any value into a target, such as float16 params into a bfloat16 state.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.devices import place_like
from jamp._core.dtypes import FLOAT32, cast, is_float, widen
from jamp._core.names import check_same, from_names, to_names
from jamp._core.numbers import check_counters, check_scale_state
from jamp._core.tree import (
    check_like,
    copy_shared,
    strong_array,
)
from jamp._scaling.rules import check_single
from jamp._state.group import groups_of, pack_groups
from jamp._state.incoming import ARRAY_LIKE
from jamp._state.new_state import (
    init_group,
    init_optimizer,
    replicate_uncommitted,
)
from pallas_kernels import Weight, split_float32

_REMEDY = (
    "load a tree like `state.params`. Use `state.add_params` for new layers, and "
    "`jamp.initialize` for other shapes. `replace(params=..., opt_state=...)` sets "
    "both unchanged."
)


def load(state: TrainState, params: PyTree, reset_optimizer: bool) -> dict[str, Any]:
    """Returns the fields that `AmpState.load_params` replaces, by name."""
    if reset_optimizer:
        check_single(state, "state.load_params(params, reset_optimizer=True)")
    given = jax.tree.map(strong_array, params)
    check_like(to_names(given), to_names(state.params), "params", _REMEDY)
    params = from_names(state.params, to_names(given))
    _check_dtypes(params, state.params)
    if reset_optimizer and state.opt_state is None:  # before, it had no `tx`
        wide = jax.tree.map(widen, state.params)
        by_key = {groups.SINGLE: init_group(state.tx, wide, state.params)}
    else:
        by_key = groups_of(state)
    loaded = {}
    for key, group in by_key.items():
        leaves = jax.tree.leaves(groups.get(params, key))
        weights = list(map(load_weight, group.weights, group.layout.pick(leaves)))
        group = group._replace(leaves=leaves, weights=weights)
        resets = reset_optimizer and group.tx is not None
        loaded[key] = init_optimizer(group) if resets else group
    changes = pack_groups(loaded, state.params)
    before = {name: getattr(state, name) for name in changes}
    if jax.tree.structure(changes) == jax.tree.structure(before):
        changes = jax.tree.map(place_like, changes, before)
    else:  # `reset_optimizer` initialized another optimizer, as after `replace(tx=)`
        changes = replicate_uncommitted(changes, params)
    own = {id(x) for x in jax.tree.leaves(state.params)}
    theirs = [x for x in jax.tree.leaves((given, params)) if id(x) not in own]
    return copy_shared(changes, theirs)


def has_values(*trees: PyTree) -> bool:
    """Returns whether trees hold arrays rather than shapes or shardings."""
    return all(isinstance(x, ARRAY_LIKE) for x in jax.tree.leaves(trees))


def load_weight(old: Weight, new: jax.Array) -> Weight:
    """Returns a param whose value is now `new`, with its master.

    A half value that equals the old one keeps the digits of its master, so that
    clipping some weights does not change the others.
    """
    if new is old.param:
        return old
    if old.master is None:
        return Weight(cast(new, old.param.dtype) if is_float(new) else new)
    if new.dtype == old.param.dtype:
        if old.kind == "split":
            fresh = jnp.zeros_like(old.master)
            return Weight(new, jnp.where(new == old.param, old.master, fresh))
        return Weight(new, _widened(new, *old))
    new = new.astype(FLOAT32)
    if old.kind == "split":
        return Weight(*split_float32(new))
    return Weight(cast(new, old.param.dtype), jnp.array(new, copy=True))


@jax.custom_jvp
def _widened(new: jax.Array, param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns the master where `new` equals `param`, and `new` in float32 elsewhere."""
    return jnp.where(new == param, master, widen(new))


@_widened.defjvp
def _widened_jvp(primals: PyTree, tangents: PyTree) -> Any:
    return _widened(*primals), widen(tangents[0])


def _check_dtypes(params: PyTree, old: PyTree) -> None:
    """Raises if a leaf is a float in only one of the trees."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, new), like in zip(leaves, jax.tree.leaves(old), strict=True):
        both = is_float(new) and is_float(like)
        if not both and new.dtype != like.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {new.dtype}, expected "
                f"{like.dtype}: {_REMEDY}"
            )


def to_state_dict(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state, with the names of `flax.serialization`."""
    return {name: to_names(getattr(state, name)) for name in array_fields(state)}


def from_state_dict(state: Any, state_dict: dict[str, Any]) -> Any:
    """Returns the state with restored arrays. They must have its shapes and dtypes."""
    check_same(
        state_dict,
        to_state_dict(state),
        "The checkpoint",
        "Restore into a state that jamp.initialize made with the same options. "
        "jamp.to_checkpoint makes a checkpoint for any opt level.",
    )
    for i, scale_state in state_dict["loss_scales"].items():
        check_scale_state(f"loss_scales/{i}", scale_state)
    check_counters(state_dict)
    fields = {
        k: from_names(getattr(state, k), state_dict.get(k)) for k in array_fields(state)
    }
    return state.replace(**fields)


def array_fields(state: TrainState) -> list[str]:
    """Returns the names of the fields that hold arrays; the others are static."""
    fields = state.__dataclass_fields__.values()
    return [f.name for f in fields if f.metadata.get("pytree_node", True)]
