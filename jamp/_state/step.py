"""One optimizer step of one group, in float32, rounded to the params' dtypes."""

from typing import Any

import jax
import optax
from jaxtyping import Array, Bool, PyTree

from jamp._core.tree import select, split_overwrite, trained_params, with_trained
from jamp._scaling.unscaled import still_scaled
from jamp._state.placement import moments_like_params, with_shardings
from jamp.optimizers import FusedTransformation, _masters as masters
from pallas_kernels import Weight

_NO_MASTERS = (
    "state.opt_state is a {}, and this opt level keeps masters in it, a "
    "MasterWeightsState. To reset the optimizer write "
    "`state.load_params(state.params, reset_optimizer=True)`; another state of it goes "
    "in with `state.opt_state._replace(inner_state=...)`."
)


def begin(
    tx: optax.GradientTransformation | None,
    originals: PyTree,
    params: PyTree,
    *,
    keeps_masters: bool | None,
    store_remainder: bool,
) -> tuple[Any, PyTree, Any]:
    """One new group: its transformation as the level wants it, params and state.

    `originals` are the user's params, float32; `params` were cast from them.
    """
    if tx is not None:
        tx = with_shardings(tx, params)
        if keeps_masters:
            tx = masters.master_weights(tx, store_remainder=store_remainder)
    return tx, *init_optimizer(tx, originals, params)


def init_optimizer(
    tx: optax.GradientTransformation | None, originals: PyTree, params: PyTree
) -> tuple[PyTree, Any]:
    """Params and optimizer state, from the user's params rather than rounded ones.

    Raises:
        ValueError: the transformation keeps masters somewhere inside already.
    """
    if tx is None:
        return params, None
    return init_around(tx, first_weights(tx, originals, params), params)


def init_around(
    tx: optax.GradientTransformation | None, weights: PyTree, params: PyTree
) -> tuple[PyTree, Any]:
    """The same from a tree of `Weight`."""
    opt_state = masters.inside(tx).init(masters.values(weights))
    is_masters = lambda x: isinstance(x, masters.MasterWeightsState)  # noqa: E731
    if any(map(is_masters, jax.tree.leaves(opt_state, is_leaf=is_masters))):
        raise ValueError(masters.ALREADY_WRAPPED)
    opt_state = moments_like_params(opt_state, params)
    return with_weights(tx, weights, opt_state, params)


def first_weights(
    tx: optax.GradientTransformation | None, originals: PyTree, params: PyTree
) -> PyTree:
    """A tree of `Weight` as `tx` steps them; `params` were cast from `originals`."""
    trained = trained_params(params)
    if not isinstance(tx, masters.MasterWeights):
        return jax.tree.map(Weight, trained)
    originals = trained_params(originals)
    return masters.with_masters(trained, originals, store_remainder=tx.store_remainder)


def with_weights(
    tx: optax.GradientTransformation | None,
    weights: PyTree,
    state: PyTree,
    params: PyTree,
    overwrite: PyTree = None,
) -> tuple[PyTree, Any]:
    """Params and optimizer state from stepped weights and their inner state.

    Args: see `step`; `state` is that of the transformation inside.
    """
    trained, kept = masters.parted(weights)
    if isinstance(tx, masters.MasterWeights):
        state = masters.MasterWeightsState(kept, state)
    return with_trained(params, trained, overwrite), state


def step(
    tx: optax.GradientTransformation | None,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    overwrite: PyTree = None,
    clean: Bool[Array, ""] | None = None,
    update_args: dict[str, Any],
) -> tuple[PyTree, Any]:
    """Steps the masters, or where there are none the params, widened for the step.

    A fused optimizer does so in one pass over each leaf.

    Moments of half params are in float32 too: in float16 the second would underflow,
    and an epsilon of 1e-8 would be zero.

    Args:
        tx: a transformation, maybe wrapped in `master_weights`.
        grads: unscaled gradients, in float32.
        opt_state: its state.
        params: the whole params, non-float leaves included.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether to step; if not, all bits stay. On a GPU by select: a `lax.cond`
            would spare the work of a rare skip, and cost 40 % more traffic always. None
            for always.
        update_args: extra arguments for `tx.update`.

    Returns:
        New params and optimizer state.
    """
    inner, weights = masters.inside(tx), weights_of(tx, opt_state, params)
    has_masters = isinstance(tx, masters.MasterWeights)
    state = opt_state.inner_state if has_masters else opt_state
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
        overwrite = select(clean, overwrite, split_overwrite(params)[1])
    return with_weights(tx, weights, state, params, overwrite)


def weights_of(
    tx: optax.GradientTransformation | None, opt_state: PyTree, params: PyTree
) -> PyTree:
    """What is trained of the params, with the masters that `tx` keeps beside it."""
    trained = trained_params(params)
    if isinstance(tx, masters.MasterWeights):
        if not isinstance(opt_state, masters.MasterWeightsState):
            raise TypeError(_NO_MASTERS.format(type(opt_state).__name__))
        return masters.joined(trained, opt_state.masters)
    return jax.tree.map(Weight, trained)


def widened(
    tx: optax.GradientTransformation | None, opt_state: PyTree, params: PyTree
) -> PyTree:
    """The params in float32: the masters where `tx` keeps some."""
    return with_trained(params, masters.values(weights_of(tx, opt_state, params)))
