"""A group of a state as lists: its params, its optimizer and their masters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import optax
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
    """Params with their own optimizer.

    Attributes:
        tx: a transformation, with or without `master_weights`; None for inference.
        opt_state: the state of `tx`.
        layout: the layout of the params.
        leaves: all leaves of the params.
    """

    tx: optax.GradientTransformation | None
    opt_state: Any
    layout: Layout
    leaves: list[Any]

    @classmethod
    def of(cls, tx: Any, opt_state: Any, params: PyTree) -> Self:
        """Returns the group of params."""
        return cls(tx, opt_state, *Layout.of(params))

    @property
    def params(self) -> PyTree:
        """All params."""
        return self.layout.structure.unflatten(self.leaves)

    @property
    def trained(self) -> list[Any]:
        """The trained params."""
        return self.layout.pick(self.leaves)

    @property
    def inner_state(self) -> Any:
        """The optimizer's state without masters. It has the same form at all levels."""
        kept = self.opt_state
        return (
            kept.inner_state if isinstance(kept, masters.MasterWeightsState) else kept
        )

    def weights(self) -> list[Weight]:
        """Returns the trained params with their masters."""
        if isinstance(self.tx, masters.MasterWeights):
            kept, structure = self.opt_state.masters, self.layout.trained
            return masters.join_masters(structure, self.trained, kept)
        return list(map(Weight, self.trained))

    def check_masters(self) -> None:
        """Raises if the optimizer keeps masters, but its state has none."""
        kept = isinstance(self.opt_state, masters.MasterWeightsState)
        if isinstance(self.tx, masters.MasterWeights) and not kept:
            raise TypeError(_NO_MASTERS.format(kind(self.opt_state)))

    def with_weights(self, weights: Sequence[Weight], inner_state: PyTree) -> Self:
        """Returns the group with other weights and another optimizer state."""
        if isinstance(self.tx, masters.MasterWeights):
            kept = masters.masters_of(self.layout.trained, weights)
            inner_state = masters.MasterWeightsState(kept, inner_state)
        leaves = self.layout.fill(self.leaves, [w.param for w in weights])
        return self._replace(opt_state=inner_state, leaves=leaves)

    def wide(self) -> PyTree:
        """Returns the params in float32."""
        leaves = self.layout.fill(self.leaves, [w.value for w in self.weights()])
        return self.layout.structure.unflatten(leaves)


def groups_of(state: HasGroups) -> dict[Key, Group]:
    """Returns the groups of a state by key."""
    keys = groups.group_keys(state.tx)
    parts = [groups.split(x, keys) for x in (state.tx, state.opt_state, state.params)]
    return {key: Group.of(*[part[key] for part in parts]) for key in keys}


def pack_groups(by_key: Mapping[Key, Group], like: PyTree) -> dict[str, Any]:
    """Returns the params and optimizer states of groups as fields of a state."""
    return {
        name: groups.pack({k: getattr(x, name) for k, x in by_key.items()}, like)
        for name in ("params", "opt_state")
    }


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
