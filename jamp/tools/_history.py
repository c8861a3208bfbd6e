"""`History`: loss scale, skips and what else one wants, along a run."""

import csv
import logging
import numbers
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._core.devices import moves_constants
from jamp._core.show import brief
from jamp._core.tree import is_traced
from jamp._state.amp_state import AmpState

_LOG = logging.getLogger("jamp")
_ALWAYS = 3  # so many messages; then the 4th, 8th, 16th ...
_NORMAL = (
    "This is normal: the scale falls like this in the first steps, and once more each "
    "time that it was raised too far."
)
_LOCATE = (
    "If every step is skipped, print jamp.diagnostics.locate(loss_fn, state, batch)."
)

type Numbers = dict[str, float]
type Writer = Callable[..., Any]


class History:
    """Collects numbers of a run every few steps, and never waits for the device.

    `record` copies a few scalars on the device and starts their way to the host; they
    are read, and given to the writers, at a later call, when they have arrived. If
    steps were skipped since the last row, the logger "jamp" has apex's message as a
    warning, on process 0: the first 3 of them, then the 4th, 8th, 16th.

    Args:
        every: at which calls of `record` to collect: each `every`-th.
        writers: called with each row: `wandb.log`, or any function of `(row, step=)`;
            or what has an `add_scalar(tag, value, step)`, as TensorBoard's
            SummaryWriter.
        prefix: of the tags, as in "amp/loss_scale".

    Raises:
        ValueError: `every` is not an int of at least 1.
        TypeError: a writer is not a function or a SummaryWriter.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
    >>> history = History(every=1)
    >>> for _ in range(3):
    ...     history.record(state, loss=jnp.float32(0.5))
    ...     state = state.apply_gradients(grads=jnp.full(2, 1e-3))
    >>> history.rows()[-1]
    {'call': 3, 'step': 2, 'skipped': 0, 'loss_scale': 65536.0, 'loss': 0.5}
    """

    def __init__(
        self, every: int = 100, writers: Iterable[Any] = (), prefix: str = "amp/"
    ):
        if not isinstance(every, numbers.Integral) or every < 1:
            raise ValueError(f"`every` must be an int, at least 1, got {every}.")
        self.every: int = int(every)
        self.prefix: str = prefix
        self._writers = [_writer(w) for w in writers]
        self._calls = self._messages = 0
        self._arriving: list[tuple[int, dict[str, jax.Array]]] = []
        self._rows: list[Numbers] = []

    @moves_constants
    def record(self, state: AmpState, **scalars: Any) -> None:
        """Collects, if it is time: call it after each step, outside of `jit`.

        Args:
            state: an AmpState, or an Optimizer of `jamp.nnx`.
            **scalars: what else to keep, as `loss=` and `grad_norm=`.

        Raises:
            TypeError: called under `jit`; a scalar is none, or named as one of the
                state.
        """
        self._calls += 1
        if (self._calls - 1) % self.every:
            return
        found = _numbers(state)
        if both := found.keys() & scalars:
            raise TypeError(f"History.record has {sorted(both)} of the state already.")
        found |= scalars
        copied = {name: _copied(name, x) for name, x in found.items()}
        for x in copied.values():
            x.copy_to_host_async()
        self._arriving.append((self._calls, copied))
        self._collect(wait=False)

    def rows(self) -> list[Numbers]:
        """What was collected: a dict of numbers for each time. Waits for the last ones.

        "call" counts calls of `record`, "step" steps that were not skipped.
        """
        self._collect(wait=True)
        return [dict(row) for row in self._rows]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows to a file; a missing number is empty."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)

    def plot(self) -> Any:
        """A matplotlib figure: each number over the calls; scales are logarithmic.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "History.plot needs matplotlib: pip install matplotlib. "
                "`to_csv` needs nothing."
            ) from None
        rows = self.rows()
        names = [n for n in dict.fromkeys(k for r in rows for k in r) if n != "call"]
        figure = Figure(figsize=(8, 1.6 * len(names)), layout="constrained")
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        for panel, name in zip(panels, names, strict=True):
            some = [(row["call"], row[name]) for row in rows if name in row]
            panel.plot(*zip(*some, strict=True), drawstyle="steps-post")
            panel.set_ylabel(name)
            if name.startswith("loss_scale"):
                panel.set_yscale("log", base=2)
        panels[-1].set_xlabel("call")
        return figure

    def _collect(self, wait: bool) -> None:
        while self._arriving:
            call, numbers = self._arriving[0]
            arrays: list[Any] = list(numbers.values())
            if not wait and not all(x.is_ready() for x in arrays):
                return
            del self._arriving[0]
            row: Numbers = {"call": call}
            row |= {name: np.asarray(x).item() for name, x in numbers.items()}
            self._tell(row)
            self._rows.append(row)
            for write in self._writers:
                write({f"{self.prefix}{k}": v for k, v in row.items()}, step=call)

    def _tell(self, row: Numbers) -> None:
        """Warns of what was skipped since the row before: the first has none."""
        before = self._rows[-1] if self._rows else row
        skips = row["skipped"] - before["skipped"]
        if skips <= 0 or jax.process_index():
            return
        self._messages += 1
        n = self._messages
        if n > _ALWAYS and n & (n - 1):
            return
        since = f"{skips:g} skipped since call {before['call']:g}"
        scales = {k: v for k, v in row.items() if k.startswith("loss_scale")}
        fallen = [k for k in scales if scales[k] < before.get(k, 0.0)]
        for name in fallen:
            which = name.removeprefix("loss_scale").lstrip("_") or "0"
            _LOG.warning(
                "Gradient overflow. Skipping step, loss scaler %s reducing loss scale "
                "to %g (%s). %s %s",
                *(which, scales[name], since, _NORMAL, _LOCATE),
            )
        if not fallen:
            now = ", ".join(f"{scale:g}" for scale in scales.values())
            _LOG.warning(
                "Gradient overflow: %s. No loss scale is lower than it was then (now "
                "%s). %s",
                *(since, now, _LOCATE),
            )


def _copied(name: str, x: object) -> jax.Array:
    """A number that lives on when the state is donated to the next step."""
    try:
        array = jnp.array(x, copy=True)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        got = brief(x)
    else:
        if array.ndim == 0 and not is_traced(array):
            return array
        got = "a traced value" if is_traced(array) else f"shape {array.shape}"
    raise TypeError(
        f"History.record takes numbers outside of jit, got {got} for {name!r}."
    )


def _numbers(state: AmpState) -> dict[str, Any]:
    """Step, skips and scales of an AmpState, or of an Optimizer of NNX."""
    try:
        (step,) = jax.tree.leaves(state.step)
        skipped, scales = jax.tree.leaves(state.skipped_steps), state.loss_scale
    except (AttributeError, ValueError):
        raise TypeError(
            "History.record takes an AmpState of jamp.initialize, or an Optimizer of "
            f"jamp.nnx.initialize, got {type(state).__name__}."
        ) from None
    numbers = {"step": step, "skipped": sum(skipped[1:], skipped[0])}
    if not isinstance(scales, tuple):
        return numbers | {"loss_scale": scales}
    return numbers | {f"loss_scale_{i}": scale for i, scale in enumerate(scales)}


def _writer(writer: Any) -> Writer:
    if hasattr(writer, "add_scalar"):
        return lambda row, step: [
            writer.add_scalar(*item, step) for item in row.items()
        ]
    if not callable(writer):
        raise TypeError(
            "A writer is a function of `(row, step=)`, such as wandb.log, or has an "
            f"`add_scalar(tag, value, step)`; got {type(writer).__name__}."
        )
    return writer
