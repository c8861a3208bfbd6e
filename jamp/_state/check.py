"""`check` raises, on the host, if a loss scale has collapsed."""

from collections.abc import Callable
from numbers import Integral

import jax
import numpy as np

from jamp._core.numbers import check_scale_state
from jamp._core.tree import is_traced
from jamp._scaling.rules import check_state, lowest_scale
from jamp._state.amp_state import AmpState

_ASK = (
    "`print(jamp.diagnostics.locate(loss_fn)(state, batch))` names the operation, its "
    "line and the fix."
)
_SKIPS = "Gradient overflow.  Skipping step, loss scaler {} {} {}"


def check(
    state: AmpState,
    max_consecutive_skips: int = 50,
    *,
    locate: Callable[[], object] | None = None,
    verbosity: int = 1,
) -> None:
    """Raises, on the host, if training has collapsed.

    A few skips are normal. A jitted step cannot raise, so call `check` outside of it,
    every few hundred steps. It waits for the step.

    If the last step of a loss was skipped, `check` prints apex's line.

    Args:
        state: an AmpState with concrete arrays.
        max_consecutive_skips: the number of skips in a row that raises.
        locate: a function without arguments, which returns a text for the error. It is
            called only before an error. `lambda:
            jamp.diagnostics.locate(loss_fn)(state, batch)` names the operation that
            overflowed.
        verbosity: 1 prints skips on process 0; 0 prints nothing.

    Raises:
        TypeError: `state` is not an AmpState.
        ValueError: `max_consecutive_skips` is less than 1; or a loss scale is 0,
            negative, inf or NaN, for example after Orbax restored it.
        FloatingPointError: a dynamic scale is at its floor after a skip;
            `max_consecutive_skips` steps in a row were skipped.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> bad = jnp.full(2, jnp.inf)
    >>> for _ in range(3):
    ...     state = state.apply_gradients(grads=bad)
    >>> jamp.check(state, max_consecutive_skips=3)
    Traceback (most recent call last):
    FloatingPointError: Loss 0 skipped 3 steps in a row, and its scale is 8192: ...
    """
    check_state(state, "jamp.check(state)")
    if is_traced(state.step):
        raise TypeError(
            "jamp.check got a traced state, and reads values, so it cannot run inside "
            "jit, scan or vmap: call it on the host, with the state that the jitted "
            "step returned."
        )
    most = max_consecutive_skips
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise ValueError(
            f"max_consecutive_skips must be an integer of at least 1, got {most!r}."
        )
    for loss_id, (rule, scale_state) in enumerate(
        zip(state.loss_scale_rules, state.loss_scales, strict=True)
    ):
        check_scale_state(f"loss_scales/{loss_id}", scale_state._asdict())
        skipped, scales = map(
            np.ravel, (scale_state.consecutive_skips, scale_state.scale)
        )
        for skips, scale in zip(skipped, scales, strict=True):
            at_floor = rule.moves and skips > 0 and scale <= lowest_scale(rule)
            if skips >= max_consecutive_skips or at_floor:
                raise FloatingPointError(
                    f"Loss {loss_id} skipped {skips} steps in a row, and its scale is "
                    f"{scale:g}: in each, the loss or a gradient was not finite. "
                    + (_ASK if locate is None else str(locate()))
                )
        if verbosity > 0 and rule.check and np.any(skipped) and not jax.process_index():
            fell = rule.moves and np.any((skipped > 0) & (scale_state.hysteresis == 0))
            does = "reducing loss scale to" if fell else "keeping loss scale"
            print(_SKIPS.format(loss_id, does, np.min(scales[skipped > 0])))
