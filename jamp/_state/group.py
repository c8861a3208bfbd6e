"""A group of a state as lists: its params, its optimizer and their masters."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.groups import HasGroups, Key
from jamp._core.layout import Layout
from jamp._core.show import kind
from jamp._scaling.rules import check_state
from jamp.optimizers import _masters as masters
from pallas_kernels import Weight

_NO_MASTERS = (
    "state.opt_state is {}, but at this opt level it must be a MasterWeightsState, "
    "which has the masters. For another optimizer, write `state.replace(tx=tx)"
    ".load_params(state.params, reset_optimizer=True)`. For another state of this "
    "optimizer, write `state.opt_state._replace(inner_state=...)`."
)


class Group(NamedTuple):
    """Params with their own optimizer, as lists.

    Attributes:
        tx: the transformation without `master_weights`; None for inference.
        has_masters: whether the state's `tx` is `master_weights(tx)`.
        layout: the layout of the params.
        leaves: all leaves of the params. Of these, `weights` replace the trained ones.
        weights: the trained params with their masters.
        inner_state: the state of `tx`. It has the same form at all levels.
    """

    tx: Any
    has_masters: bool
    layout: Layout
    leaves: list[Any]
    weights: list[Weight]
    inner_state: Any

    @classmethod
    def of(cls, tx: Any, opt_state: Any, params: PyTree) -> Self:
        """Returns the group of params. `tx` may be wrapped in `master_weights`.

        Raises:
            TypeError: `tx` keeps masters, but its state has none.
        """
        check_masters(tx, opt_state)
        has_masters = isinstance(tx, masters.MasterWeights)
        tx = tx.rule.tx if has_masters else tx
        layout, leaves = Layout.of(params)
        trained = layout.pick(leaves)
        if isinstance(opt_state, masters.MasterWeightsState):
            kept, opt_state = opt_state
            weights = masters.join_masters(layout.trained, trained, kept)
        else:
            weights = list(map(Weight, trained))
        return cls(tx, has_masters, layout, leaves, weights, opt_state)

    def wide(self) -> PyTree:
        """Returns the params in float32."""
        every = self.layout.fill(self.leaves, [w.value for w in self.weights])
        return self.layout.structure.unflatten(every)


def check_masters(tx: Any, opt_state: Any) -> None:
    """Raises if an optimizer keeps masters, but its state has none."""
    kept = isinstance(opt_state, masters.MasterWeightsState)
    if isinstance(tx, masters.MasterWeights) and not kept:
        raise TypeError(_NO_MASTERS.format(kind(opt_state)))


def groups_of(state: HasGroups) -> dict[Key, Group]:
    """Returns the groups of a state by key."""
    trees = state.tx, state.opt_state, state.params
    txs, opt_states, params = [groups.split(tree, state.tx) for tree in trees]
    return {key: Group.of(tx, opt_states[key], params[key]) for key, tx in txs.items()}


def pack_groups(by_key: Mapping[Key, Group], like: PyTree = None) -> dict[str, Any]:
    """Returns the params and optimizer states of groups as fields of a state."""
    params, opt_states = {}, {}
    for key, group in by_key.items():
        layout, opt_states[key] = group.layout, group.inner_state
        every = layout.fill(group.leaves, [w.param for w in group.weights])
        params[key] = layout.structure.unflatten(every)
        if group.has_masters:
            kept = masters.masters_of(layout.trained, group.weights)
            opt_states[key] = masters.MasterWeightsState(kept, group.inner_state)
    packed = [groups.pack(values, like) for values in (params, opt_states)]
    return dict(zip(("params", "opt_state"), packed, strict=True))


def master_params(state: TrainState) -> PyTree:
    """Returns the params in float32, from the masters if the state has them.

    Args:
        state: an AmpState.

    Returns:
        A tree like `state.params`. Half params without masters are cast to float32.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = jnp.full(1, 0.1)
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> print(f"{state.params.item():.6f} {master_params(state).item():.6f}")
    0.099976 0.100000
    """
    if not isinstance(state, TrainState):
        check_state(state, "jamp.master_params(state)")
    wide = {key: group.wide() for key, group in groups_of(state).items()}
    return groups.pack(wide, state.params)
