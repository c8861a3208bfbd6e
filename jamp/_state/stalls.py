"""Remembers the states that `jamp.check` saw, to notice a state that has stalled.

Between two calls, a run that trains changes `step` or `skipped_steps`.
"""

import collections
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._core.dtypes import is_float

_MOST_RUNS = 16
_MOST_LEAVES, _MOST_ELEMENTS = 32, 2**14


class Seen(NamedTuple):
    """The record of a run that `check` keeps, without arrays.

    Attributes:
        values: a hash of the counters and of a sample of the weights.
        skips: the number of skipped steps.
        scales: the scale of each loss.
        stalls: the number of states with these values after the first one.
        steps: the `step` arrays with these values that are still alive.
    """

    values: int
    skips: int
    scales: tuple[float, ...]
    stalls: int
    steps: tuple[weakref.ref[Any], ...]


_runs: collections.OrderedDict[int, Seen] = collections.OrderedDict()


def watch(state: Any) -> tuple[Seen | None, Seen]:
    """Returns the old and the new record of the state's run.

    A state has stalled if its arrays are new and its values are not. The same arrays,
    as in an evaluation, are not a stall.
    """
    leaves = jax.tree.leaves(state.params)
    static = state.tx, state.apply_fn, state.loss_scale_rules
    run = hash((*static, *(jax.numpy.shape(x) for x in leaves)))
    counters = jax.device_get((state.step, state.skipped_steps))
    values = hash(
        (*(np.asarray(x).tobytes() for x in jax.tree.leaves(counters)), *_sample(state))
    )
    before = _runs.pop(run, None)
    stalls, steps = 0, ()
    if before is not None and before.values == values:
        stalls, steps = before.stalls, tuple(r for r in before.steps if r() is not None)
    if isinstance(state.step, jax.Array) and all(r() is not state.step for r in steps):
        stalls += before is not None and before.values == values
        steps += (weakref.ref(state.step),)
    skips = sum(int(np.sum(x)) for x in jax.tree.leaves(counters[1]))
    scales = tuple(float(np.min(s.scale)) for s in state.loss_scales)
    _runs[run] = Seen(values, skips, scales, stalls, steps)
    while len(_runs) > _MOST_RUNS:
        _runs.popitem(last=False)
    return before, _runs[run]


def forget() -> None:
    """Forgets all runs. A new or restored state does not continue one of them."""
    _runs.clear()


def _sample(state: Any) -> list[bytes]:
    """Returns the smallest leaves, which distinguish runs with equal counters."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    arrays = [x for x in leaves if isinstance(x, jax.Array) and is_float(x)]
    local = [x.addressable_data(0) for x in arrays if not x.is_deleted()]
    small = sorted((x for x in local if x.size <= _MOST_ELEMENTS), key=lambda x: x.size)
    return [np.asarray(x).tobytes() for x in small[:_MOST_LEAVES]]
