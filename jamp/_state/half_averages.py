"""Warns of averages that are kept in half, or computed of half params.

Half params are rounded masters. What moves them by less than their unit is lost, each
time anew: an average of them, or a target network, stands still, and nothing fails.
"""

import gc
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jaxtyping import Array, Bool, PyTree

from jamp._autocast.tracers import ancestors, equation_of
from jamp._core import groups
from jamp._core.dtypes import is_half, widen
from jamp._core.groups import Key
from jamp._core.tree import is_traced
from jamp._core.warnings import PrecisionWarning, warn

_FIELD = (
    "The field {} is {}, and like the params: an average in half stands still. Begin "
    "with `jamp.master_params(state)`, or float32 params given to jamp.initialize, and "
    "move it by `jamp.incremental_update(state, state.{}, step_size)`."
)
_EDIT = (
    "params{} is computed of params in {}: what moves them by less than a unit of that "
    "is lost, and an average or a target network stands still. Compute it of "
    "`jamp.master_params(state)`; `jamp.incremental_update(new, old, step_size)` moves "
    "a state in float32."
)
_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "add_any")
_CAST = "convert_element_type"
# What came in, is handed on, or was rounded from float32.
_HANDED_ON = ("", _CAST, "bitcast_convert_type", "select_n", "jit", "scan")


def warn_of_half_field(
    name: str, new: PyTree, params: PyTree, keys: tuple[Key, ...], old: PyTree = None
) -> None:
    """Warns of a tree like the params, in half, where there was none in half before.

    Args:
        name: of the field.
        new: its value, in which such a tree may be anywhere: an optax state.
        params: the state's.
        keys: of its groups.
        old: the value before; None for a new state.
    """
    halves = [x for x in jax.tree.leaves(new) if is_half(x)]
    if not halves or any(map(is_half, jax.tree.leaves(old))):
        return
    wanted = [_form(x) for x in (params, *groups.split(params, keys).values())]
    is_average = lambda x: _form(x) in wanted and any(map(is_half, jax.tree.leaves(x)))  # noqa: E731
    if any(map(is_average, jax.tree.leaves(new, is_leaf=is_average))):
        warn(_FIELD.format(name, halves[0].dtype, name), PrecisionWarning)


def warn_of_half_edit(state: TrainState, params: PyTree) -> None:
    """Warns of params that are computed of the half params of the same state."""
    olds, structure = jax.tree.flatten_with_path(state.params)
    if jax.tree.structure(params) != structure:
        return
    rows = zip(olds, jax.tree.leaves(params), strict=True)
    edited = [(p, x, new) for (p, x), new in rows if is_half(x) and new is not x]
    if not edited:
        return
    path, old, new = max(edited, key=lambda row: row[1].size)
    if _is_moved(old, new):
        where = jax.tree_util.keystr(path)
        warn(_EDIT.format(where, old.dtype), PrecisionWarning)


def _form(tree: PyTree) -> Any:
    return jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _is_moved(old: Any, new: Any) -> bool:
    """Whether `new` is `old`, moved by arithmetic of halves."""
    if is_traced(new):
        return _is_computed_of(old, new)
    if is_traced(old) or not isinstance(new, jax.Array) or old.dtype != new.dtype:
        return False
    return bool(jax.device_get(_is_near(old, new))) and not _is_of_a_state(new)


def _is_computed_of(old: Any, new: Any) -> bool:
    """Whether a program computes `new` by arithmetic of halves, `old` among them."""
    values = ancestors([new], lambda x: x is not old and _is_arithmetic(x))
    others = (x for x in values if x is not old and jnp.ndim(x) > 0)
    # Else a gradient, noise: a state of a moment, for one evaluation.
    known = (_is_arithmetic(x) or is_half(x) and _name(x) in _HANDED_ON for x in others)
    return any(x is old for x in values) and all(known)


def _is_arithmetic(x: Any) -> bool:
    """Whether an array is computed of others, by arithmetic or from half."""
    if jnp.ndim(x) == 0:
        return False
    return _name(x) in _ARITHMETIC or (
        _name(x) == _CAST and is_half(equation_of(x).invars[0])
    )


def _name(x: Any) -> str:
    eqn = equation_of(x)
    return eqn.primitive.name if eqn else ""


@jax.jit
def _is_near(old: Array, new: Array) -> Bool[Array, ""]:
    """Whether nine in ten of the numbers that moved did so by little.

    Those that are clipped or masked are of one size.
    """
    moved = new != old
    before, after = widen(old), widen(new)
    near = moved & (jnp.abs(after - before) < jnp.abs(before) / 8)
    size = jnp.abs(after)
    largest = jnp.max(size, where=moved, initial=0)
    smallest = jnp.min(size, where=moved, initial=jnp.inf)
    return (10 * near.sum() > 9 * moved.sum()) & (largest > smallest)


def _is_of_a_state(array: Array) -> bool:
    """Whether a state that is alive has these params: then this is a copy of it."""
    states = (x for x in gc.get_objects() if issubclass(type(x), TrainState))
    return any(array is x for s in states for x in jax.tree.leaves(s.params))
