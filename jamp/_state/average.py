"""`incremental_update` moves averages and target networks in float32.

An average in half loses updates below half a unit in the last place. With decay 0.999,
an average in bfloat16 covers 1 % of the distance.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jamp._core import groups
from jamp._core.dtypes import is_castable, is_half
from jamp._core.tree import check_like, select
from jamp._scaling.rules import check_single
from jamp._state.amp_state import AmpState
from jamp._state.step import groups_of, master_params

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
    if isinstance(old, AmpState):
        for group in groups_of(old).values():
            if not old.properties.master_weights or group.tx is None:
                _check_wide(group.params)  # a state without masters
        moved = incremental_update(new, master_params(old), step_size)
        return old.replace(params=moved)
    towards = master_params(new) if isinstance(new, AmpState) else new
    check_like(towards, old, "new", _REMEDY)
    _check_wide(old)

    def leaf(n, o):
        return optax.incremental_update(n, o, step_size) if is_castable(o) else n

    moved = jax.tree.map(leaf, towards, old)
    if not isinstance(new, AmpState):
        return moved
    keys = groups.group_keys(new.tx)
    parts = (groups.split(x, keys) for x in (new.last_step_skipped, moved, old))
    skipped, moved, old_parts = parts
    chosen = {k: select(~skipped[k], moved[k], old_parts[k]) for k in keys}
    return groups.pack(chosen, old)


def _check_wide(tree: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_half(leaf):
            where = jax.tree_util.keystr(path)
            raise ValueError(_IN_HALF.format(where, jnp.result_type(leaf)))
