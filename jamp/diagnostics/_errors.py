"""The errors of pairs of operations, and what to do about them."""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast.primitives import primitive_name
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._advice import advice_for
from jamp.diagnostics._comparison import Row
from jamp.diagnostics._locate import location_of
from jamp.diagnostics._pairing import Run, decides, weight_of
from jamp.diagnostics._replay import Event, Value
from jamp.diagnostics._source import Site, short_line
from jamp.diagnostics._step import Step

_ODD = 0.5  # an operand with a larger error is another value, or wrong already
_NOISE = 1e-5  # a float32 sum that is smaller, relative to its terms, has no digits
_SUMS = ("add", "add_any", "sub", "reduce_sum", "dot_general", "conv_general_dilated")


class Errors:
    """Makes rows of pairs of events, one for all iterations of an operation."""

    def __init__(self, half: Any, steps: tuple[Step, Step]):
        self.half = half
        self.rounding = float(jnp.finfo(half).eps) / 2
        self.rows: dict[Any, Row] = {}
        self.runs: Counter[Any] = Counter()
        self.unaligned: dict[str, None] = {}
        left, right = ({path: Value(x) for x, path in s.inputs} for s in steps)
        self.of_inputs = {
            path: self.between(left[path], right[path])[0]
            for path in left
            if path.startswith("params") and is_differentiable(left[path].array)
        }

    def add(self, run: Run, partner: Run) -> None:
        """Adds one run of an operation to its row."""
        (label, _), left, right = run.row, run.event, partner.event
        site = left.site
        assert site is not None
        floats = [v.array for v in (*left.read, *left.outs) if _is_float(v)]
        narrow = min((x.dtype for x in floats), key=lambda dtype: dtype.itemsize)
        is_fp8 = narrow.itemsize == 1
        pairs = [
            (a, b)
            for a, b in zip(left.read, right.read, strict=False)
            if _is_float(a) and np.shape(a.array) == np.shape(b.array)
        ]
        entering = [(a, self._error_of(a, b, is_fp8)) for a, b in pairs]
        outs = zip(left.outs, right.outs, strict=True)
        found = [self.between(a, b, is_fp8) for a, b in outs]
        error, ulps, overflow, underflow = max(found)
        known = [(a.note.partner, b.note) for a, b in pairs]
        known = [(mine, note) for mine, note in known if mine and note.partner]
        is_odd = {id(mine) for mine, _ in known} != {id(note) for _, note in known}
        is_odd |= any(
            e > _ODD and v.maker and v.note.error is None for v, e in entering
        )
        if is_odd or (error > _ODD and _is_noise(site, [b for _, b in pairs], right)):
            self.unaligned[f"{label}: no digits, or other operands"] = None
            return
        for a, b, (own, *_) in zip(left.outs, right.outs, found, strict=True):
            a.note.error, a.note.row = own, run.row
            a.note.partner, b.note.partner = b.note, a.note
        entered = math.hypot(*(e for _, e in entering))
        # A decision does not round: no error of fp8 may change it.
        coarse, kept = max(left.outs[0].note.fp8, right.outs[0].note.fp8)
        is_decision = decides(site.eqn)
        if is_decision:
            # An error e changes e / pi of the signs of normal numbers around zero.
            a, b = left.outs[0].array, right.outs[0].array
            error = math.pi * float(np.mean(np.asarray(a != b)))
        rounding = max(self.rounding, 0.0 if is_decision else coarse)
        row = Row(
            module=label.module,
            source=right.site.line if right.site else site.line,
            phase=label.phase,
            primitive=label.primitive,
            dtype=str(narrow),
            rounding=rounding,
            error=error,
            mean=error,
            added=max(error - entered, 0.0) if entered < _ODD else 0.0,
            ulps=ulps,
            overflow=overflow,
            underflow=underflow,
            loops=site.context.loops,
            entering=tuple((v.maker.module if v.maker else "", e) for v, e in entering),
            advice=self._advice(left, site, str(narrow), entering, error, kept),
        )
        self.runs[run.row] += 1
        if (old := self.rows.get(run.row)) is not None:
            # An operation that reads its own last result, as a sum does: its error
            # grows from the first iteration on.
            is_sum = any(v.note.row == run.row for v, _ in entering)
            grown = error - old.entered if is_sum and old.entered < _ODD else 0.0
            row = dataclasses.replace(
                max(row, old, key=lambda x: x.error),
                mean=old.mean + (error - old.mean) / self.runs[run.row],
                added=max(row.added, old.added, grown),
                entering=old.entering,
            )
        self.rows[run.row] = row

    def between(self, a: Value, b: Value, is_fp8: bool = False) -> list[float]:
        """The error, the ulps, and the shares that overflow and underflow."""
        if not is_differentiable(b.array):
            return [float(np.mean(np.asarray(a.array != b.array))), 0.0, 0.0, 0.0]
        return np.asarray(_statistics(a.array, b.array, self.half, is_fp8)).tolist()

    def _error_of(self, a: Value, b: Value, is_fp8: bool) -> float:
        """The error of an operand before its casts, which are part of its reader."""
        if a.note.error is not None:
            return a.note.error
        if a.maker is None:  # a constant or an argument
            return self.of_inputs.get(next(iter(a.note.inputs), ""), 0.0)
        return self.between(a, b, is_fp8)[0]

    def _advice(
        self,
        event: Event,
        site: Site,
        dtype: str,
        entering: list[tuple[Value, float]],
        error: float,
        kept: str,
    ) -> str:
        """One sentence, with the code to write."""
        if math.isinf(error):
            return advice_for(location_of(site, event.outs[0], event.read))
        is_decision = decides(site.eqn)
        if kept and (is_decision or dtype.startswith("float8")):
            return f"Keep its matmul in half: `fp8=jamp.Fp8(keep={kept!r})`."
        if dtype in ("float16", "bfloat16") or is_decision:
            _, _, inner = site.module.partition("/")  # params omit the outermost
            has_params = any(p.startswith(f"params/{inner}/") for p in self.of_inputs)
            module = f", or its params: `keep_fp32={inner!r}`" * has_params
            why = "Rounding changes it" if is_decision else f"It runs in {dtype}"
            loop = ', and its loop at `promote="widest"`' * bool(site.context.loops)
            return (
                f"{why}: keep the function at this line in float32 by "
                f"`jamp.float_function`{module}{loop}."
            )
        value, most = max(entering, key=lambda pair: pair[1], default=(None, 0.0))
        if value is None or not most:
            return ""
        if weight := weight_of([value.note]):
            return f"It enlarges the rounding of a param: `keep_fp32={weight!r}`."
        line = value.maker and short_line(value.maker.line)
        made = f", made at {line}" if line else ""
        return (
            f"It enlarges the error of its operand{made}: compute that by "
            "`jamp.float_function`."
        )


def _is_float(value: Value) -> bool:
    return is_differentiable(value.array)


@functools.partial(jax.jit, static_argnames=("half", "is_fp8"))
def _statistics(a, b, half, is_fp8):
    wide, limits = jnp.promote_types(b.dtype, jnp.float32), jnp.finfo(half)
    a, b = a.astype(wide), b.astype(wide)
    tiny = float(jnp.finfo(jnp.float32).tiny)
    good = jnp.isfinite(a) & jnp.isfinite(b)
    if not jnp.iscomplexobj(b):  # without a mask's lowest number
        good &= (b > -1e3) | (b > b.min(initial=0) / 2)
    size = jnp.where(good, jnp.abs(b), 0)
    most = size.max(initial=tiny)

    def norm(x):
        return jnp.linalg.norm(jnp.where(good, x / most, 0).ravel())

    if is_fp8:  # it has a scale of its own, a power of two
        a = a * jnp.exp2(jnp.round(jnp.log2(norm(b) / jnp.maximum(norm(a), tiny))))
    overflow, underflow = jnp.isfinite(b) & ~jnp.isfinite(a), (a == 0) & (b != 0)
    error = jnp.where(norm(b) > 0, norm(a - b) / norm(b), 0)
    exponent = jnp.floor(jnp.log2(jnp.maximum(size, tiny / limits.eps)))
    ulps = jnp.where(good, jnp.abs(a - b), 0) / jnp.exp2(exponent) / limits.eps
    return jnp.stack(
        [
            jnp.where(overflow.any(), jnp.inf, error),
            ulps.max(initial=0),
            overflow.mean(),
            (good & underflow).mean(),
        ]
    )


def _is_noise(site: Site, read: list[Value], right: Event) -> bool:
    """Whether the right result is a sum whose terms cancel to float32's rounding."""

    def rms(value: Value) -> float:
        return float(np.sqrt(np.mean(np.abs(np.asarray(value.array, np.float64)) ** 2)))

    if primitive_name(site.eqn) not in _SUMS or not read:
        return False
    sizes = [rms(value) for value in read]
    terms = math.prod(sizes) if "_general" in site.eqn.primitive.name else max(sizes)
    return rms(right.outs[0]) < _NOISE * terms
