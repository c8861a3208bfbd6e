"""`numerics`: what narrow formats would lose of a batch, and which scales are safe."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend import core as jc

from jamp._autocast.frames import frames_of
from jamp._autocast.tracing import fp8_disabled
from jamp._core.devices import moves_constants
from jamp._core.dtypes import is_differentiable, is_half
from jamp._core.tree import all_finite, path_string
from jamp._state.amp_state import AmpState
from jamp.diagnostics._location import Array
from jamp.diagnostics._products import ProductLoss, loss_of_product, table
from jamp.diagnostics._programs import replayed
from jamp.diagnostics._replay import Site, Value
from jamp.diagnostics._source import is_backward, module_path
from jamp.diagnostics._step import Step, scaled_step
from jamp.diagnostics._table import columns

FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
_LARGEST = 24  # the scales that are tried: 2**0 to 2**24, apex's ceiling
_LOST = 1e-3  # the part of the gradients that a safe scale may round to zero
_MARGIN = 8  # between the scale that is recommended and the largest safe one
_TINY = 64
_ROWS = 12  # of values, and of gradients, when printed: the worst


class Loss(NamedTuple):
    """How many of some numbers that are not zero a format would lose."""

    zero: int  # those that would become zero
    subnormal: int  # those that would keep a part of their digits
    over: int  # those beyond the largest finite number


class Counts(NamedTuple):
    """Of some numbers, by format."""

    nonzero: int  # how many are neither zero nor NaN
    losses: dict[str, Loss]  # by the names of `FORMATS`

    def __add__(self, other: "Counts | None") -> "Counts":  # pyright: ignore[reportIncompatibleMethodOverride]
        if other is None:
            return self
        losses = {
            name: Loss(*map(operator.add, loss, other.losses[name]))
            for name, loss in self.losses.items()
        }
        return Counts(self.nonzero + other.nonzero, losses)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What narrow formats would lose of the values of one batch: `print` it.

    Attributes:
        scale: the loss scale that it was run at.
        values: by module and pass, ("Net/Dense_0", "forward"): what operations gave.
            Where the program names no modules, as with NNX, by the layer of the param
            that was read last.
        gradients: by param: of its gradient at that scale.
        products: what fp8 would lose of each product of two matrices, in their order;
            of a loop's, on each trip.
        safe_scales: the smallest scale at which float16 rounds at most 1 in 1,000
            gradients to zero, and the largest at which nothing overflows; None if there
            is none up to 2**24.
        tiny: params of at most 64 numbers that are in half: float32 costs them nothing.
    """

    scale: float
    values: dict[tuple[str, str], Counts]
    gradients: dict[str, Counts]
    products: tuple[ProductLoss, ...]
    safe_scales: tuple[float, float] | None
    tiny: tuple[str, ...]

    def __str__(self) -> str:
        values = [
            (f"{module or '(no module)'}, {phase}", counts)
            for (module, phase), counts in self.values.items()
        ]
        grads = [(f"gradient of {name}", c) for name, c in self.gradients.items()]
        rows = _worst(values) + _worst(grads)
        lines = [
            f"At loss scale {self.scale:g}, in percent of what is not zero:",
            columns(
                ["", *(cell for name in FORMATS for cell in (name, "", ""))],
                ["", *("zero", "subn.", "over") * len(FORMATS)],
                *([name, *_shares(counts)] for name, counts in rows),
            ),
        ]
        if hidden := len(values) + len(grads) - len(rows):
            lines.append(f"and {hidden} more, better ones in `.values`, `.gradients`.")
        lines += table(self.products, _ROWS)
        if self.safe_scales is None:
            lines.append("No loss scale up to 2**24 is safe.")
        else:
            low, high = self.safe_scales
            lines.append(
                f"Loss scales from {low:g} to {high:g} are safe for this batch."
            )
        if self.tiny:
            lines.append(
                f"{len(self.tiny)} params of at most {_TINY} numbers are in half, but "
                f"cost nothing in float32 (keep_fp32=): {', '.join(self.tiny[:4])}."
            )
        return "\n".join(lines)


@moves_constants
def numerics(
    loss_fn: Callable[..., Any],
    state: AmpState,
    *args: Any,
    scale: float | None = None,
    **kwargs: Any,
) -> Numerics:
    """Counts what float16, bfloat16 and two formats of 8 bits would lose of a batch.

    Runs the step operation by operation, as `locate` does, and what is in fp8 in half.
    What is in half already has lost what half loses: of a state at O0 it says what
    other levels would.

    Args:
        loss_fn, state, *args, **kwargs: see `locate`.
        scale: the loss scale; None for the one of `recommend_scale`.

    Returns:
        A `Numerics`: print it.

    Raises:
        TypeError: `state` is not an AmpState, or arrays are traced.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(4), optax.sgd(1.0), "O0", verbosity=0)
    >>> x = jnp.array([1e-9, 1e-6, 1.0, 1e6])
    >>> report = numerics(lambda w, x: (w * x).sum(), state, x, scale=1.0)
    >>> report.gradients[""].losses["float16"]
    Loss(zero=1, subnormal=1, over=1)
    """
    with fp8_disabled(True):
        step = scaled_step("numerics", loss_fn, state, args, kwargs)
    safe = _safe_scales(step)
    if scale is None:
        scale = _middle(safe) if safe else step.scale
    values: dict[tuple[str, str], Counts] = {}
    products: list[ProductLoss] = []

    def observe(site: Site, read: Sequence[Value], array: Array, near: str) -> None:
        if frames_of(site.eqn):  # what it computes is seen by itself
            return
        module = module_path(site.names) or _layer(near)
        if lost := loss_of_product(site, read, module):
            products.append(lost)
        if is_differentiable(array) and site.names.strip("/") and not site.moves:
            key = module, "backward" if is_backward(site.names) else "forward"
            values[key] = counts_of(array) + values.get(key)

    _, *grads = replayed(step, scale, observe)
    gradients = {p: counts_of(g.array) for p, g in zip(step.paths, grads, strict=True)}
    tiny = (
        path_string(path)
        for path, x in jax.tree.leaves_with_path(state.params)
        if is_half(x) and x.size <= _TINY
    )
    return Numerics(scale, values, gradients, tuple(products), safe, tuple(tiny))


def recommend_scale(
    loss_fn: Callable[..., Any], state: AmpState, *args: Any, **kwargs: Any
) -> float:
    """A loss scale for a batch: an eighth of the largest at which nothing overflows.

    But no less than the smallest at which float16 holds 999 of 1,000 gradients, if that
    is safe. Compiles the step once. For `DynamicLossScale(init_scale=...)`, which then
    skips no first steps, or as a static scale.

    Args:
        loss_fn, state, args, kwargs: see `numerics`.

    Raises:
        TypeError: `state` is not an AmpState, or arrays are traced.
        FloatingPointError: no scale from 1 to 2**24 is safe: ask `locate`.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(4), optax.sgd(1.0), "O2", verbosity=0)
    >>> loss_fn = lambda w: 100 * w.sum(dtype="float32")
    >>> recommend_scale(loss_fn, state)  # 100 * 512 < 65504
    64.0
    """
    step = scaled_step("recommend_scale", loss_fn, state, args, kwargs)
    safe = _safe_scales(step)
    if safe is None:
        raise FloatingPointError(
            "The gradients are not finite at any loss scale from 1 to 2**24. "
            "`print(jamp.diagnostics.locate(loss_fn, state, ...))` says where."
        )
    return _middle(safe)


@moves_constants
def _safe_scales(step: Step) -> tuple[float, float] | None:
    """See `Numerics.safe_scales`; of what is compiled, in powers of two."""
    run = jax.jit(jc.jaxpr_as_fun(step.program))
    finite = jax.jit(all_finite)

    @functools.cache
    def grads(power: int) -> list[Array]:
        return run(*(x for x, _ in step.values_at(2.0**power)))[1:]

    powers = range(_LARGEST + 1)
    high = next((p for p in reversed(powers) if bool(finite(grads(p)))), None)
    if high is None:
        return None

    def lost(power: int) -> float:
        factor = 2.0 ** (power - high)
        counts = [counts_of(g, factor) for g in grads(high)]
        zeros = sum(c.losses["float16"].zero for c in counts)
        return zeros / max(1, sum(c.nonzero for c in counts))

    low = next((p for p in powers[:high] if lost(p) <= _LOST), high)
    return 2.0**low, 2.0**high


def _layer(path: str) -> str:
    """The layer of a param: what its path is in; of a param in no layer, itself."""
    path = path.removeprefix("params/")
    return path.rpartition("/")[0] or path


def _middle(safe: tuple[float, float]) -> float:
    low, high = safe
    return min(high, max(low, high / _MARGIN, 1.0))


def _worst(rows: list[tuple[str, Counts]]) -> list[tuple[str, Counts]]:
    """Those that float16 would lose most of, in their order."""

    def lost(i: int) -> tuple[float, ...]:
        total, (zero, subnormal, over) = (
            rows[i][1].nonzero,
            rows[i][1].losses["float16"],
        )
        return (zero + over) / max(1, total), subnormal / max(1, total)

    kept = sorted(range(len(rows)), key=lost, reverse=True)[:_ROWS]
    return [rows[i] for i in sorted(kept)]


def _shares(counts: Counts) -> list[str]:
    total = max(1, counts.nonzero)
    lost = (n for name in FORMATS for n in counts.losses[name])
    return [f"{100 * n / total:.3g}" if n else "-" for n in lost]


# ---- what formats lose


def counts_of(x: Array, factor: float = 1.0) -> Counts:
    """What each format would lose of a float array times a factor."""
    nonzero, losses = jax.tree.map(int, jax.device_get(_counts(x, factor)))
    return Counts(nonzero, {name: Loss(*losses[name]) for name in FORMATS})


@functools.cache
def limits(name: str) -> tuple[float, float, float]:
    """Half the smallest number of a format, its smallest normal one, its largest one.

    What is at most half the smallest rounds to zero; what is less than half a step
    beyond the largest rounds to that.
    """
    info: Any = ml_dtypes.finfo(FORMATS[name])
    largest = float(info.max)
    step = largest - float(np.nextafter(info.max, info.dtype.type(0)))
    return float(info.smallest_subnormal) / 2, float(info.tiny), largest + step / 2


@jax.jit
def _counts(x, factor):
    size = jnp.abs(x).astype(jnp.float32) * jnp.float32(factor)
    some = (size > 0) & ~jnp.isnan(size)
    losses: dict[str, list[jax.Array]] = {}
    for name in FORMATS:
        least, normal, most = (jnp.float32(limit) for limit in limits(name))
        zero, over = some & (size <= least), some & (size >= most)
        subnormal = some & (size > least) & (size < normal)
        losses[name] = [zero.sum(), subnormal.sum(), over.sum()]
    return some.sum(), losses
