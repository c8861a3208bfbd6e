"""`state.load_params`, and `state.replace(params=...)`: params from elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.devices import moves_constants, placed_like
from jamp._core.dtypes import FLOAT32, cast, is_castable, widen
from jamp._core.names import filled, named
from jamp._core.tree import check_like, strong_array, trained_params, unshared
from jamp._state.incoming import ARRAY_LIKE
from jamp._state.step import init_around, weights_of, with_weights
from jamp.optimizers._masters import MasterWeightsState
from pallas_kernels import Weight, split

_REMEDY = (
    "load a tree like `state.params`. New layers come by `state.add_params`, other "
    "shapes by a new `jamp.initialize`; `replace(params=..., opt_state=...)` sets both "
    "as they are."
)


@moves_constants
def loaded(state: Any, params: PyTree, reset_optimizer: bool) -> dict[str, Any]:
    """What `AmpState.load_params` replaces in the state, by name."""
    given = jax.tree.map(strong_array, params)
    check_like(named(given), named(state.params), "params", _REMEDY)
    params = filled(state.params, named(given))
    _check_dtypes(params, state.params)
    changes: dict[str, Any] = {"params": {}, "opt_state": {}}
    for key in groups.group_keys(state.tx):
        changes["params"][key], changes["opt_state"][key] = _group(
            groups.get(state.tx, key),
            groups.get(state.opt_state, key),
            groups.get(params, key),
            groups.get(state.params, key),
            reset_optimizer,
        )
    changes = {name: groups.pack(x, state.params) for name, x in changes.items()}
    before = {name: getattr(state, name) for name in changes}
    own = {id(x) for x in jax.tree.leaves(state.params)}
    theirs = [x for x in jax.tree.leaves((given, params)) if id(x) not in own]
    return unshared(jax.tree.map(placed_like, changes, before), theirs)


def has_values(*trees: PyTree) -> bool:
    """Whether trees hold arrays, and not their shapes or shardings."""
    return all(isinstance(x, ARRAY_LIKE) for x in jax.tree.leaves(trees))


def _group(
    tx: optax.GradientTransformation | None,
    opt_state: PyTree,
    params: PyTree,
    old: PyTree,
    reset_optimizer: bool,
) -> tuple[Any, Any]:
    weights = weights_of(tx, opt_state, old)
    is_weight = lambda x: isinstance(x, Weight)  # noqa: E731
    trained = trained_params(params)
    weights = jax.tree.map(_loaded, weights, trained, is_leaf=is_weight)
    if reset_optimizer and tx is not None:
        return init_around(tx, weights, params)
    has_masters = isinstance(opt_state, MasterWeightsState)
    inner = opt_state.inner_state if has_masters else opt_state
    return with_weights(tx, weights, inner, params)


def _loaded(old: Weight, new: jax.Array) -> Weight:
    """A param that is now `new`, and its master.

    Half values that are those of before say nothing of the digits that a master has
    beyond them: what clips weights, or changes some of them, leaves the others alone.
    """
    if new is old.param:
        return old
    if old.master is None:
        castable = is_castable(old.param)
        return Weight(cast(new, old.param.dtype) if castable else new)
    if new.dtype == old.param.dtype:
        if old.kind == "split":
            fresh = jnp.zeros_like(old.master)
            return Weight(new, jnp.where(new == old.param, old.master, fresh))
        return Weight(new, _widened(new, *old))
    new = new.astype(FLOAT32)
    if old.kind == "split":
        return Weight(*split(new))
    return Weight(cast(new, old.param.dtype), jnp.array(new, copy=True))


@jax.custom_jvp
def _widened(new: jax.Array, param: jax.Array, master: jax.Array) -> jax.Array:
    """`new` in float32, with the digits of the master where it is `param`."""
    return jnp.where(new == param, master, widen(new))


@_widened.defjvp
def _widened_jvp(primals: PyTree, tangents: PyTree) -> Any:
    return _widened(*primals), widen(tangents[0])


def _check_dtypes(params: PyTree, old: PyTree) -> None:
    """Raises for what is not a float on one side; floats are cast."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, new), like in zip(leaves, jax.tree.leaves(old), strict=True):
        both = is_castable(new) and is_castable(like)
        if not both and new.dtype != like.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {new.dtype}, expected "
                f"{like.dtype}: {_REMEDY}"
            )
