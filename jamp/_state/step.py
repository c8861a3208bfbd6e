"""The optimizer step of one group: in float32, rounded to the dtypes of the params."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import ArrayLike

from jamp._core import groups
from jamp._core.groups import Key
from jamp._state.grads import Gradients
from jamp._state.group import Group
from jamp._state.skip import keep_on_skip
from jamp.optimizers import _masters as masters
from jamp.optimizers._fused import FusedTransformation

_UPDATE_ARGS = (
    "If the optimizer needs more arguments, pass them to `state.apply_gradients("
    "grads=grads, update_args=...)`. A line search takes `{'value': loss, 'grad': "
    "grads, 'value_fn': jamp.closure(loss_fn)(state, ...)}`."
)


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
    inner, layout = group.tx, group.layout
    structure, weights, state = layout.trained, group.weights, group.inner_state
    finite = None if given.finite is True else jnp.asarray(given.finite)
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
        old = layout.pick(group.leaves, "overwritten")
        new = keep_on_skip(given.finite, given.overwritten, old)
        leaves = layout.fill(group.leaves, new, "overwritten")
        group = group._replace(leaves=leaves)
    return group._replace(weights=weights, inner_state=state)
