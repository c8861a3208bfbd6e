"""The optimizer step of one group: in float32, rounded to the dtypes of the params."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jaxtyping import ArrayLike, PyTree

from jamp._core import groups
from jamp._core.groups import HasGroups, Key
from jamp._core.layout import Layout
from jamp._core.show import kind
from jamp._state.grads import Gradients
from jamp._state.skip import keep_on_skip
from jamp.optimizers import _masters as masters
from jamp.optimizers._fused import FusedTransformation
from pallas_kernels import Weight

_UPDATE_ARGS = (
    "If the optimizer needs more arguments, pass them to `state.apply_gradients("
    "grads=grads, update_args=...)`. A line search takes `{'value': loss, 'grad': "
    "grads, 'value_fn': jamp.closure(loss_fn)(state, ...)}`."
)
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
    wide = {key: group.wide() for key, group in groups_of(state).items()}
    return groups.pack(wide, state.params)


def step(
    group: Group,
    given: Gradients,
    *,
    count: ArrayLike | None = None,
    key: Key = groups.SINGLE,
    update_args: Mapping[str, Any],
) -> Group:
    """Steps the masters, or the params if there are none, in float32.

    A fused optimizer does this in one pass over each leaf. Moments of half params are
    float32 too: in float16, the second moment would underflow, and an epsilon of 1e-8
    would be zero.

    Args:
        group: the params and the state of their optimizer.
        given: their gradients. If these are not finite, all bits stay. The step uses a
            select: a `lax.cond` would save work only on a rare skip, and cost a GPU
            40 % more traffic in every step.
        count: the number of earlier steps, to round params without masters
            stochastically.
        key: the group's key, on which the random bits depend.
        update_args: extra arguments for `tx.update`.

    Returns:
        The group with new params and optimizer state.
    """
    inner, weights, state = masters.bare(group.tx), group.weights(), group.inner_state
    finite = None if given.finite is True else jnp.asarray(given.finite)
    structure = group.layout.trained
    if isinstance(inner, FusedTransformation):
        grads, scale = given.grads, None
        if given.scaled is not None:
            grads, scale = given.scaled
        weights, state = inner.rule.apply(
            structure,
            grads,
            state,
            weights,
            grad_scale=scale,
            skip=None if finite is None else ~finite,
            rounds=count is not None,
            group=key,
        )
    else:
        how = finite, count, key
        try:
            weights, state, _ = masters.step_weights(
                inner, structure, given.grads, state, weights, *how, **update_args
            )
        except TypeError as error:
            if not update_args:
                error.add_note(_UPDATE_ARGS)
            raise
    if given.overwritten:
        old = group.layout.pick(group.leaves, "overwritten")
        new = keep_on_skip(given.finite, given.overwritten, old)
        leaves = group.layout.fill(group.leaves, new, "overwritten")
        group = group._replace(leaves=leaves)
    return group.with_weights(weights, state)
