"""A look at the loss scales from the host: has one collapsed?"""

from collections.abc import Callable
from numbers import Integral

import numpy as np

from jamp._core.devices import moves_constants
from jamp._scaling.incoming import check_scale_state
from jamp._scaling.rules import check_state, lowest_scale
from jamp._state.amp_state import AmpState

_ASK = (
    "`print(jamp.diagnostics.locate(loss_fn)(state, batch))` names the operation, its "
    "line and the fix."
)


@moves_constants
def check(
    state: AmpState,
    max_consecutive_skips: int = 50,
    *,
    locate: Callable[[], object] | None = None,
) -> None:
    """Raises, on the host, when a loss scale has collapsed: the run is lost.

    A skip now and then is how dynamic scaling works. Nothing raises under `jit`, so
    call this outside of it, every few hundred steps: it waits for the step.

    Args:
        state: an AmpState with concrete arrays.
        max_consecutive_skips: how many skips in a row are too many.
        locate: what to add to the message, called only then: `lambda:
            jamp.diagnostics.locate(loss_fn)(state, batch)` names the operation that
            overflowed, with its line.

    Raises:
        TypeError: `state` is not an AmpState.
        ValueError: `max_consecutive_skips` is less than 1; or a loss scale is 0,
            negative, inf or NaN, as Orbax may restore it into a state.
        FloatingPointError: a dynamic scale sits at its floor after a skip, or there
            were `max_consecutive_skips` in a row.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> bad = jnp.full(2, jnp.inf)
    >>> for _ in range(3):
    ...     state = state.apply_gradients(grads=bad)
    >>> jamp.check(state, max_consecutive_skips=3)
    Traceback (most recent call last):
    FloatingPointError: Loss 0 skipped 3 steps in a row, its scale is 8192: ...
    """
    check_state(state, "jamp.check(state)")
    most = max_consecutive_skips
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise ValueError(
            f"max_consecutive_skips must be an integer of at least 1, got {most!r}."
        )
    for loss_id, (rule, scale_state) in enumerate(
        zip(state.loss_scale_rules, state.loss_scales, strict=True)
    ):
        check_scale_state(f"loss_scales/{loss_id}", scale_state._asdict(), rule)
        members = scale_state.consecutive_skips, scale_state.scale
        for skips, scale in zip(*map(np.ravel, members), strict=True):
            at_floor = rule.moves and skips > 0 and scale <= lowest_scale(rule)
            if skips >= max_consecutive_skips or at_floor:
                raise FloatingPointError(
                    f"Loss {loss_id} skipped {skips} steps in a row, its scale is "
                    f"{scale:g}: the gradients are not finite at any scale. "
                    + (_ASK if locate is None else str(locate()))
                )
