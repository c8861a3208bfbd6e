"""The groups of a state, and one optimizer step of one of them.

A step is in float32, and is rounded to the dtypes of the params.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import optax
from flax.training.train_state import TrainState
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._core.groups import Key
from jamp._core.tree import select, split_overwrite, trained_params, with_trained
from jamp._scaling.unscaled import still_scaled
from jamp.optimizers import FusedTransformation, _masters as masters
from pallas_kernels import Weight

_NO_MASTERS = (
    "state.opt_state is a {}, and this opt level keeps masters in it, a "
    "MasterWeightsState. To reset the optimizer write "
    "`state.load_params(state.params, reset_optimizer=True)`; another state of it goes "
    "in with `state.opt_state._replace(inner_state=...)`."
)


class Group(NamedTuple):
    """Params with an optimizer of their own.

    Attributes:
        tx: a transformation, maybe wrapped in `master_weights`; None for inference.
        opt_state: its state.
        params: the whole params, non-float leaves included.
    """

    tx: optax.GradientTransformation | None
    opt_state: Any
    params: PyTree

    @property
    def inner_state(self) -> Any:
        """The state of the optimizer without masters, alike at all levels."""
        kept = self.opt_state
        return (
            kept.inner_state if isinstance(kept, masters.MasterWeightsState) else kept
        )

    def weights(self) -> PyTree:
        """What is trained of the params, with the masters that are kept beside it."""
        trained = trained_params(self.params)
        if isinstance(self.tx, masters.MasterWeights):
            if not isinstance(self.opt_state, masters.MasterWeightsState):
                raise TypeError(_NO_MASTERS.format(type(self.opt_state).__name__))
            return masters.joined(trained, self.opt_state.masters)
        return jax.tree.map(Weight, trained)

    def with_weights(
        self, weights: PyTree, inner_state: Any, overwrite: PyTree = None
    ) -> Self:
        """The group with other weights, optimizer state, and values of fp8 scales."""
        trained, kept = masters.parted(weights)
        if isinstance(self.tx, masters.MasterWeights):
            inner_state = masters.MasterWeightsState(kept, inner_state)
        params = with_trained(self.params, trained, overwrite)
        return self._replace(opt_state=inner_state, params=params)


def groups_of(state: TrainState) -> dict[Key, Group]:
    """The groups of a state, by key."""
    keys = groups.group_keys(state.tx)
    parts = [groups.split(x, keys) for x in (state.tx, state.opt_state, state.params)]
    return {key: Group(*(part[key] for part in parts)) for key in keys}


def packed(by_key: Mapping[Key, Group], like: PyTree) -> dict[str, Any]:
    """The params and optimizer states of groups, as fields of a state."""
    return {
        name: groups.pack({k: getattr(x, name) for k, x in by_key.items()}, like)
        for name in ("params", "opt_state")
    }


def wide_params(state: TrainState) -> PyTree:
    """The params in float32: the masters where there are some."""
    wide = {key: wide_group(group) for key, group in groups_of(state).items()}
    return groups.pack(wide, state.params)


def wide_group(group: Group) -> PyTree:
    """The same of one group."""
    return with_trained(group.params, masters.values(group.weights()))


def step(
    group: Group,
    grads: PyTree,
    *,
    overwrite: PyTree = None,
    clean: Bool[Array, ""] | None = None,
    update_args: Mapping[str, Any],
) -> Group:
    """Steps the masters, or where there are none the params, widened for the step.

    A fused optimizer does so in one pass over each leaf.

    Moments of half params are in float32 too: in float16 the second would underflow,
    and an epsilon of 1e-8 would be zero.

    Args:
        group: params and the state of their optimizer.
        grads: unscaled gradients, in float32.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether to step; if not, all bits stay. On a GPU by select: a `lax.cond`
            would spare the work of a rare skip, and cost 40 % more traffic always. None
            for always.
        update_args: extra arguments for `tx.update`.

    Returns:
        The group with new params and optimizer state.
    """
    inner, weights, state = masters.inside(group.tx), group.weights(), group.inner_state
    if isinstance(inner, FusedTransformation):
        skip = None if clean is None else ~clean
        grads, scale = still_scaled(grads, skips=skip is not None)
        weights, state = inner.rule.apply(
            grads, state, weights, grad_scale=scale, found_inf=skip
        )
    else:
        weights, state, _ = masters.step_weights(
            inner, grads, state, weights, clean, **update_args
        )
    if overwrite is not None and clean is not None:
        overwrite = select(clean, overwrite, split_overwrite(group.params)[1])
    return group.with_weights(weights, state, overwrite)
