"""`check` raises, on the host, if a loss scale has collapsed or a state has stalled."""

from collections.abc import Callable
from numbers import Integral

import jax
import numpy as np

from jamp._core.devices import moves_constants
from jamp._core.tree import is_traced
from jamp._scaling.incoming import check_scale_state
from jamp._scaling.rules import check_state, lowest_scale
from jamp._state.amp_state import AmpState
from jamp._state.stalls import Seen, watch

_ASK = (
    "`print(jamp.diagnostics.locate(loss_fn)(state, batch))` names the operation, its "
    "line and the fix."
)
_STALLED = (
    "{} new states in a row have the same step ({}) and the same skipped_steps ({}): "
    "nothing trains. If a guard of yours keeps the old state, such as `lax.cond(ok, "
    "apply, keep)` or `jnp.where(ok, new, old)`, delete it, because apply_gradients "
    "skips the step itself; or select the gradients: `jax.tree.map(lambda g: "
    "jnp.where(ok, g, jnp.nan), grads)`. Do not check a state that you do not train."
)


@moves_constants
def check(
    state: AmpState,
    max_consecutive_skips: int = 50,
    *,
    locate: Callable[[], object] | None = None,
    verbosity: int = 1,
) -> None:
    """Raises, on the host, if training has collapsed or stalled.

    A few skips are normal. A jitted step cannot raise, so call `check` outside of it,
    every few hundred steps. It waits for the step.

    `check` remembers the counters of its last call with this run. If it gets a new
    state with the same `step` and `skipped_steps`, the state has stalled. If
    `skipped_steps` has increased, it prints apex's line, once per call and loss.

    Args:
        state: an AmpState with concrete arrays.
        max_consecutive_skips: the number of skips in a row, or of stalled states in a
            row, that raises.
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
            `max_consecutive_skips` steps in a row were skipped, or states in a row had
            stalled.

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
    before, now = watch(state)
    if verbosity > 0 and before is not None and now.skips > before.skips:
        _print_skips(state, before, now)
    for loss_id, (rule, scale_state) in enumerate(
        zip(state.loss_scale_rules, state.loss_scales, strict=True)
    ):
        check_scale_state(f"loss_scales/{loss_id}", scale_state._asdict())
        members = scale_state.consecutive_skips, scale_state.scale
        for skips, scale in zip(*map(np.ravel, members), strict=True):
            at_floor = rule.moves and skips > 0 and scale <= lowest_scale(rule)
            if skips >= max_consecutive_skips or at_floor:
                raise FloatingPointError(
                    f"Loss {loss_id} skipped {skips} steps in a row, and its scale is "
                    f"{scale:g}: the gradients are not finite at any scale. "
                    + (_ASK if locate is None else str(locate()))
                )
    if now.stalls >= most and state.tx is not None:
        counters = jax.device_get((state.step, state.skipped_steps))
        raise FloatingPointError(_STALLED.format(now.stalls, *counters))


def _print_skips(state: AmpState, before: Seen, now: Seen) -> None:
    """Prints apex's line for each loss that overflowed since the last call."""
    if jax.process_index() != 0:
        return
    for i, rule in enumerate(state.loss_scale_rules):
        # `skipped_steps` does not say which of several losses overflowed.
        overflowed = (
            len(state.loss_scales) == 1
            or now.scales[i] < before.scales[i]
            or np.any(state.loss_scales[i].consecutive_skips)
        )
        if rule.check and overflowed:
            does = "reducing" if now.scales[i] < before.scales[i] else "keeping"
            preposition = " to" if does == "reducing" else ""
            print(
                f"Gradient overflow.  Skipping step, loss scaler {i} {does} loss "
                f"scale{preposition} {now.scales[i]}"
            )
