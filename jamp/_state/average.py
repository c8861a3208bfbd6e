"""`incremental_update` moves averages and target networks in float32.

An average in half loses updates below half a unit in the last place. With decay 0.999,
an average in bfloat16 covers 1 % of the distance.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jamp._core import groups
from jamp._core.dtypes import is_castable, is_half
from jamp._core.tree import check_like, select
from jamp._scaling.rules import check_single
from jamp._state.amp_state import AmpState
from jamp._state.group import master_params

_REMEDY = "start the average from `jamp.master_params(new)`."
_IN_HALF = (
    "old{} is {}, which loses small updates. Start an average from "
    "`jamp.master_params(state)`. A target state has masters at O2, O5 and O6; its tx "
    "is `optax.set_to_zero()` if nothing trains it."
)


def incremental_update[T](
    new: PyTree, old: T, step_size: float | Float[Array, ""]
) -> T:
    r"""Moves an average or a target network, as `optax.incremental_update` does.

    $$m_\mathrm{old}' = s\,m_\mathrm{new} + (1 - s)\,m_\mathrm{old}$$

    in float32, at every level. If `new` skipped its last step, `old` keeps its bits.

    Args:
        new: an AmpState, or a tree in float32.
        old: a tree in float32, initially `jamp.master_params(state)`, or an AmpState.
            In a state, the masters move, and the params are cast from them.
        step_size: $s$, shape (): 1 - decay of an average, tau of a target network.

    Returns:
        The new value of `old`, with the non-float leaves of `new`.

    Raises:
        ValueError: `old` is half, without masters; it differs from `new` in structure
            or shape; or a state is replicated or an ensemble.

    >>> import jamp, jax.numpy as jnp, optax
    >>> make = lambda w: jamp.initialize(w, optax.sgd(0.1), "O2", verbosity=0)
    >>> state, target = make(jnp.ones(1)), make(jnp.zeros(1))
    >>> print(incremental_update(state, jnp.zeros(1), 0.25))
    [0.25]
    >>> print(incremental_update(state, target, 0.25).params)
    [0.25]
    """
    for state in (new, old):
        if isinstance(state, AmpState):
            check_single(state, "jamp.incremental_update(new, old, step_size)")
    towards = master_params(new) if isinstance(new, AmpState) else new
    start: Any = old
    if isinstance(old, AmpState):
        has_masters = old.properties.master_weights and old.tx is not None
        start = master_params(old) if has_masters else old.params
    check_like(towards, start, "new", _REMEDY)
    for path, leaf in jax.tree_util.tree_leaves_with_path(start):
        if is_half(leaf):
            where = jax.tree_util.keystr(path)
            raise ValueError(_IN_HALF.format(where, jnp.result_type(leaf)))

    def leaf(n, o):
        return optax.incremental_update(n, o, step_size) if is_castable(o) else n

    moved = jax.tree.map(leaf, towards, start)
    if isinstance(new, AmpState):
        trees = new.last_step_skipped, moved, start
        skipped, moves, stays = (groups.split(x, new.tx) for x in trees)
        chosen = {k: select(~skipped[k], moves[k], stays[k]) for k in skipped}
        moved = groups.pack(chosen, start)
    return old.replace(params=moved) if isinstance(old, AmpState) else moved  # pyright: ignore[reportReturnType]
