"""`compare` runs a step at two levels and compares each operation."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jamp._core.dtypes import is_differentiable
from jamp._core.groups import Wrt
from jamp._core.path_rules import check_rules
from jamp._policy.casting import cast_to_level
from jamp._policy.forward import forwards_at
from jamp._policy.levels import OptLevel, Properties
from jamp._policy.options import LevelOptions
from jamp._state.amp_state import AmpState
from jamp._state.group import master_params
from jamp.diagnostics._comparison import Comparison
from jamp.diagnostics._errors import Rows, measure
from jamp.diagnostics._pairing import Side, find_common, pair_runs
from jamp.diagnostics._step import (
    Step,
    function_first,
    matmul_dtype,
    trace_scaled_step,
)

_QUIET = 3.0  # seconds until the progress bar appears


@function_first
def compare(
    loss_fn: Callable[..., Any],
    level: OptLevel,
    *,
    only: str = "",
    loss_id: int = 0,
    wrt: Wrt = None,
    **settings: Unpack[LevelOptions],
) -> Callable[..., Comparison]:
    """Finds the operations that lose digits at a state's level.

    It runs the loss and its gradients at two levels from the same masters, with the
    same arguments and keys, one operation at a time. It compares the operations that
    both programs have: forward, backward, and the matmuls in fp8.

    It needs the memory of two steps without compilation.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)`, as in the step.
        level: the level that counts as right, usually "O0".
        only: a part of a module path, such as "decoder/layers_3", to restrict the
            report.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, as in the step.
        **settings: options of the other level, as in `jamp.initialize`: `keep_fp32`,
            `lists`, `fp8`, `promote`. With them, `level` may be the state's own.

    Returns:
        `f(state, *args, **kwargs) -> Comparison`. Print the comparison.

    Raises (when called):
        TypeError: `state` is not an AmpState, or arrays are traced.
        OptLevelError: the level is unknown, or the settings contradict it.
        ValueError: the two levels are the same, or both compute in float32; a regex of
            `keep_fp32` or `only` matches nothing.
        FloatingPointError: the loss is not finite at the other level.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize({"w": jnp.ones(4)}, optax.sgd(1.0), "O5", verbosity=0)
    >>> def loss_fn(params, t):
    ...     angle = t * params["w"].astype("float32")
    ...     return jnp.sin(jamp.half_function(jnp.add)(angle, 1e-3)).sum()
    >>> report = compare(loss_fn, "O0")(state, 100.0)
    >>> worst = report.operations[0]
    >>> print(worst.primitive, worst.error > 0.001)
    sin True
    """

    def compared(state, /, *args, **kwargs):
        rest = args, kwargs, loss_id, wrt
        left = trace_scaled_step("compare", loss_fn, state, *rest)
        other = _at_level(state, level, settings)
        names = state.properties.opt_level, ", ".join([level, *settings])
        half = matmul_dtype(state.properties) or matmul_dtype(other.properties)
        if half is None:
            raise ValueError(
                f"Neither {names[0]} nor {names[1]} computes in half: compare a state "
                "at your training's level, such as O5."
            )
        with forwards_at(other.properties):
            right = trace_scaled_step("compare", loss_fn, other, *rest)
        with (
            jax.transfer_guard("allow"),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            return _compare_steps((left, right), names, jnp.dtype(half), only)

    return compared


def _at_level(state: AmpState, level: OptLevel, settings: LevelOptions) -> AmpState:
    """Returns a state with the same masters at another level."""
    properties = Properties.from_opt_level(level, **settings)
    own = dataclasses.replace(state.properties, loss_scale=properties.loss_scale)
    if properties == own:
        raise ValueError(
            f"compare(loss_fn, {level!r}) compares a state at {level} with itself: "
            "name another level, such as 'O0', or change lists=, keep_fp32=, fp8= or "
            "promote=."
        )
    masters = master_params(state)
    check_rules("keep_fp32", properties.keep_fp32, masters)
    params = cast_to_level(masters, properties, state.batch_stats)
    # `state.replace` would cast the params to the present level.
    return dataclasses.replace(state, params=params, properties=properties)


def _compare_steps(
    steps: tuple[Step, Step], names: tuple[str, str], half: Any, only: str
) -> Comparison:
    sides = left, right = Side(steps[0], only), Side(steps[1], only)
    if not all(side.labels for side in sides):
        raise ValueError(
            f"only={only!r} is in no module path and no line: pass a part of a path in "
            "the report."
        )
    unaligned = [
        f"{label}: in only one of the programs" for label in find_common(*sides)
    ]
    inputs = [{path: x for x, path in step.inputs} for step in steps]
    params = {
        path: measure(x, inputs[1][path], half).error
        for path, x in inputs[0].items()
        if path.startswith("params") and is_differentiable(x)
    }
    rows = Rows(half, params)
    for pair in _with_progress(pair_runs(*sides, params), left.total):
        rows.add(*pair)
    losses = [float(np.asarray(side.results[0].array, np.float32)) for side in sides]
    if not math.isfinite(losses[1]):
        raise FloatingPointError(
            f"The loss is {losses[1]} at {names[1]}, the level that counts as right. "
            "First find the operation that overflows, with a state at that level: "
            "`print(jamp.diagnostics.locate(loss_fn)(state, *args))`."
        )
    for side, name in zip(sides, names, strict=True):
        more = dict.fromkeys(run.label for run in side.waiting.values())
        why = f"more iterations, another branch or other operands at {name}"
        unaligned += [f"{label}: {why}" for label in more]
    grads = zip(steps[0].paths, *(side.results[1:] for side in sides), strict=True)
    return Comparison(
        levels=names,
        loss=(losses[0], losses[1]),
        rows=tuple(rows.rows[row] for row in left.rows if row in rows.rows),
        gradients={p: measure(a.array, b.array, half).error for p, a, b in grads},
        unaligned=(*unaligned, *rows.unaligned),
    )


def _with_progress[T](pairs: Iterator[T], total: int) -> Iterator[T]:
    """Yields the pairs, and shows a progress bar on stderr after three seconds."""
    quiet_until, text = time.monotonic() + _QUIET, ""
    for done, pair in enumerate(pairs, 1):
        yield pair
        if time.monotonic() > quiet_until:
            quiet_until = time.monotonic() + 0.2
            total = max(done, total)  # a while loop may have any number of iterations
            bar = "#" * round(30 * done / total)
            text = f"\rcompare [{bar:<30}] {done} of {total} operations"
            print(text, end="", file=sys.stderr, flush=True)
    if text:
        print("\r" + " " * len(text), end="\r", file=sys.stderr)
