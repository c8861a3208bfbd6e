"""The optimizer step of one group: in float32, rounded to the dtypes of the params."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jaxtyping import ArrayLike, PyTree

from jamp._core import groups
from jamp._core.groups import HasGroups, Key
from jamp._core.show import kind
from jamp._core.tree import split_overwrite, trained_params, with_trained
from jamp._scaling.unscaled import still_scaled
from jamp._state.skip import Flag, keep_on_skip
from jamp.optimizers import _masters as masters
from jamp.optimizers._fused import FusedTransformation
from pallas_kernels import Weight

_NO_UPDATE_ARGS = (
    "{}: pass them to `state.apply_gradients(grads=grads, update_args=...)`. A line "
    'search takes `{{"value": loss, "grad": grads, "value_fn": '
    "jamp.closure(loss_fn)(state, ...)}}`."
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
        params: all params, including non-float leaves.
    """

    tx: optax.GradientTransformation | None
    opt_state: Any
    params: PyTree

    @property
    def inner_state(self) -> Any:
        """The optimizer's state without masters. It has the same form at all levels."""
        kept = self.opt_state
        return (
            kept.inner_state if isinstance(kept, masters.MasterWeightsState) else kept
        )

    def weights(self) -> PyTree:
        """Returns the trained params with their masters, as a tree of `Weight`."""
        trained = trained_params(self.params)
        if isinstance(self.tx, masters.MasterWeights):
            return masters.join_masters(trained, self.opt_state.masters)
        return jax.tree.map(Weight, trained)

    def check_masters(self) -> None:
        """Raises if the optimizer keeps masters, but its state has none."""
        kept = isinstance(self.opt_state, masters.MasterWeightsState)
        if isinstance(self.tx, masters.MasterWeights) and not kept:
            raise TypeError(_NO_MASTERS.format(kind(self.opt_state)))

    def with_weights(
        self, weights: PyTree, inner_state: PyTree, overwrite: PyTree = None
    ) -> Self:
        """Returns the group with other weights, optimizer state and fp8 scales."""
        trained, kept = masters.split_masters(weights)
        if isinstance(self.tx, masters.MasterWeights):
            inner_state = masters.MasterWeightsState(kept, inner_state)
        params = with_trained(self.params, trained, overwrite)
        return self._replace(opt_state=inner_state, params=params)


def groups_of(state: HasGroups) -> dict[Key, Group]:
    """Returns the groups of a state by key."""
    keys = groups.group_keys(state.tx)
    parts = [groups.split(x, keys) for x in (state.tx, state.opt_state, state.params)]
    return {key: Group(*[part[key] for part in parts]) for key in keys}


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
    wide = {key: wide_group(group) for key, group in groups_of(state).items()}
    return groups.pack(wide, state.params)


def wide_group(group: Group) -> PyTree:
    """Returns the params of one group in float32."""
    return with_trained(group.params, masters.values(group.weights()))


def step(
    group: Group,
    grads: PyTree,
    *,
    overwrite: PyTree = None,
    clean: Flag = True,
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
        grads: unscaled gradients in float32.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether to step. If not, all bits stay. The step uses a select: a
            `lax.cond` would save work only on a rare skip, and cost a GPU 40 % more
            traffic in every step.
        count: the number of earlier steps, to round params without masters
            stochastically.
        key: the group's key, on which the random bits depend.
        update_args: extra arguments for `tx.update`.

    Returns:
        The group with new params and optimizer state.
    """
    inner, weights, state = masters.bare(group.tx), group.weights(), group.inner_state
    flag = None if clean is True else jnp.asarray(clean)
    skip = None if flag is None else ~flag
    if isinstance(inner, FusedTransformation):
        grads, scale = still_scaled(grads, skips=skip is not None)
        weights, state = inner.rule.apply(
            grads,
            state,
            weights,
            grad_scale=scale,
            found_inf=skip,
            rounds=count is not None,
            group=key,
        )
    else:
        try:
            weights, state, _ = masters.step_weights(
                inner, grads, state, weights, flag, count, key, **update_args
            )
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(_NO_UPDATE_ARGS.format(error)) from error
    if overwrite is not None:
        old = split_overwrite(group.params)[1]
        overwrite = keep_on_skip(clean, overwrite, old)
    return group.with_weights(weights, state, overwrite)
