"""The errors of pairs of operations, and the advice on them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._autocast.primitives import primitive_name
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._comparison import Row
from jamp.diagnostics._locate import location_of
from jamp.diagnostics._location import advice_for
from jamp.diagnostics._pairing import Run, decides
from jamp.diagnostics._replay import Array, Value
from jamp.diagnostics._source import short_line

_BLOCK = 1 << 14  # numbers at a time, so that wide copies stay in the cache
_EXPONENT = 0x7F800000  # the bits of a float32's power of two


class Difference(NamedTuple):
    """The difference from the right array, for a row of `compare`."""

    error: float
    ulps: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0


@np.errstate(all="ignore")
def measure(a: Array, b: Array, half: Any, *, is_fp8: bool = False) -> Difference:
    """Compares an array with the right one, which may be wider.

    It ignores infinities in both arrays and the lowest numbers of masks. It removes the
    scale of an fp8 array, a power of two.
    """
    a, b = np.asarray(a), np.asarray(b)
    if not is_differentiable(b):
        return Difference(float(np.mean(a != b)))
    size, limits = max(b.size, 1), jnp.finfo(half)
    lowest = 0.0 if np.iscomplexobj(b) else float(np.min(b, initial=0))
    factor, sizes = 1.0, (norm(a), norm(b)) if is_fp8 else (0.0, 0.0)
    if min(sizes) > 0:
        factor = 2.0 ** round(math.log2(sizes[1] / sizes[0]))
    gaps = total = ulps = 0.0
    overflow = underflow = 0
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        x = x if factor == 1 else x * np.float32(factor)
        gap = np.abs(x - y)
        if lowest < -1e3 or not np.isfinite(gap).all():
            is_right = np.isfinite(y)
            good = np.isfinite(x) & is_right
            overflow += np.count_nonzero(is_right & ~np.isfinite(x))
            good &= (y > lowest / 2) | (lowest >= -1e3)
            x, y, gap = (np.where(good, z, 0) for z in (x, y, gap))
        if not x.all():
            underflow += np.count_nonzero((x == 0) & (y != 0))
        right = np.abs(y)
        floor = np.maximum(right, limits.tiny).astype(np.float32).view(np.int32)
        ulps = max(ulps, float(np.max(gap / (floor & _EXPONENT).view(np.float32))))
        gaps, total = gaps + _square(gap), total + _square(right)
    error = math.sqrt(gaps / total) if total else 0.0
    return Difference(
        error=math.inf if overflow else error,
        ulps=ulps / float(limits.eps),
        overflow=overflow / size,
        underflow=underflow / size,
    )


def norm(x: Array) -> float:
    """Returns the norm of the finite numbers of an array."""
    sizes = (np.abs(block) for block in _blocks(np.asarray(x)))
    return math.sqrt(sum(_square(size[np.isfinite(size)]) for size in sizes))


def _square(x: np.ndarray) -> float:
    if not 1e-30 < (found := np.vdot(x, x)) < np.inf:
        found = np.vdot(x.astype(np.float64), x)  # float32 squares would overflow
    return float(found)


def _blocks(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the numbers of an array in blocks, in float32 or wider."""
    flat, dtype = x.reshape(-1), x.dtype if x.dtype.itemsize > 2 else np.float32
    for i in range(0, flat.size, _BLOCK):
        yield flat[i : i + _BLOCK].astype(dtype, copy=False)


_ODD = 0.5  # an operand with a larger error is another value, or already wrong
_NOISE = 1e-5  # a smaller float32 sum, relative to its terms, has no correct digits
_SUMS = ("add", "add_any", "sub", "reduce_sum", "dot_general", "conv_general_dilated")


class _Operand(NamedTuple):
    """A float that both runs read, with its error before its casts."""

    value: Value
    right: Value
    error: float


class Rows:
    """Makes rows from pairs of runs. All iterations of an operation share a row."""

    def __init__(self, half: Any, params: dict[str, float]):
        self.half, self.params = half, params
        self.rows: dict[Any, Row] = {}
        self.runs = Counter[Any]()
        self.unaligned: dict[str, None] = {}

    def add(self, run: Run, partner: Run) -> None:
        """Adds one run of an operation to its row."""
        left, right = run.event, partner.event
        floats = (v.array.dtype for v in (*left.read, *left.outs) if _is_float(v))
        dtype = min(floats, key=lambda dtype: dtype.itemsize)
        is_fp8 = dtype.itemsize == 1
        operands = [
            self._operand(a, b, is_fp8)
            for a, b in zip(left.read, right.read, strict=False)
            if _is_float(a) and np.shape(a.array) == np.shape(b.array)
        ]
        outs = [*zip(left.outs, right.outs, strict=True)]
        found = [measure(a.array, b.array, self.half, is_fp8=is_fp8) for a, b in outs]
        worst = max(found)
        is_noise = worst.error > _ODD and _is_noise(run, operands, right.outs[0])
        if is_noise or _are_others(operands):
            self.unaligned[f"{run.label}: no correct digits, or other operands"] = None
            return
        self.runs[run.row] += 1
        for (a, b), difference in zip(outs, found, strict=True):
            a.note.error = difference.error
            a.note.run = b.note.run = run.row, self.runs[run.row]
        coarse, weight = max(v.note.fp8 for v in outs[0])
        if decides(run.site.eqn):
            # An error e changes e / pi of the signs of normal numbers around zero.
            # A decision does not round, so fp8's error must not excuse a change.
            differ = np.asarray(outs[0][0].array) != np.asarray(outs[0][1].array)
            worst, coarse = worst._replace(error=math.pi * float(differ.mean())), 0.0
        entered = math.hypot(*(x.error for x in operands))
        row = Row(
            module=run.label.module,
            source=partner.line,
            phase=run.label.phase,
            primitive=run.label.primitive,
            dtype=str(dtype),
            rounding=max(float(jnp.finfo(self.half).eps) / 2, coarse),
            **worst._asdict(),
            mean=worst.error,
            added=max(worst.error - entered, 0.0) if entered < _ODD else 0.0,
            loops=run.loops,
            entering=tuple(
                (x.value.maker.module if x.value.maker else "", x.error)
                for x in operands
            ),
            advice=self._advice(run, str(dtype), worst.error, operands, weight),
        )
        if (old := self.rows.get(run.row)) is not None:
            # An operation that reads its last result, such as a sum, has an error that
            # grows from the first iteration on.
            runs = (x.value.note.run for x in operands)
            is_sum = any(before and before[0] == run.row for before in runs)
            grown = row.error - old.entered if is_sum and old.entered < _ODD else 0.0
            row = dataclasses.replace(
                max(row, old, key=lambda x: x.error),
                mean=old.mean + (row.error - old.mean) / self.runs[run.row],
                added=max(row.added, old.added, grown),
                entering=old.entering,
            )
        self.rows[run.row] = row

    def _operand(self, a: Value, b: Value, is_fp8: bool) -> _Operand:
        error = a.note.error
        if error is None:
            error = measure(a.array, b.array, self.half, is_fp8=is_fp8).error
        return _Operand(a, b, error)

    def _advice(
        self,
        run: Run,
        dtype: str,
        error: float,
        operands: list[_Operand],
        weight: str,
    ) -> str:
        """Returns a sentence with the code to write."""
        if math.isinf(error):
            return advice_for(location_of(run.event, run.site, run.event.outs[0]))
        is_decision = decides(run.site.eqn)
        if weight and (is_decision or dtype.startswith("float8")):
            return f"Keep its matmul in half: `fp8=jamp.Fp8(keep={weight!r})`."
        if dtype in ("float16", "bfloat16") or is_decision:
            _, _, inner = run.label.module.partition("/")  # without the model
            has_params = any(p.startswith(f"params/{inner}/") for p in self.params)
            module = f", or its params: `keep_fp32={inner!r}`" * has_params
            why = "Rounding changes it" if is_decision else f"It runs in {dtype}"
            loop = ', and its loop at `promote="widest"`' * bool(run.loops)
            return (
                f"{why}: keep the function at this line in float32 with "
                f"`jamp.float_function`{module}{loop}."
            )
        worst = max(operands, key=lambda x: x.error, default=None)
        if worst is None or not worst.error:
            return ""
        if param := worst.value.note.param:
            return f"It enlarges the rounding of a param: `keep_fp32={param!r}`."
        maker = worst.value.maker
        made = f", made at {short_line(maker.line)}" if maker and maker.line else ""
        return (
            f"It enlarges the error of its operand{made}: compute the operand with "
            "`jamp.float_function`."
        )


def _is_float(value: Value) -> bool:
    return is_differentiable(value.array)


def _are_others(operands: list[_Operand]) -> bool:
    """Returns whether the partner reads the results of other operations."""
    runs = [(x.value.note.run, x.right.note.run) for x in operands]
    known = [pair for pair in runs if all(pair)]
    return {mine for mine, _ in known} != {other for _, other in known} or any(
        x.value.note.error is None and x.error > _ODD for x in operands
    )


def _is_noise(run: Run, operands: list[_Operand], right: Value) -> bool:
    """Returns whether the right result is a sum that cancels to float32's rounding."""
    rms = lambda v: norm(v.array) / math.sqrt(max(1, np.size(v.array)))  # noqa: E731
    if primitive_name(run.site.eqn) not in _SUMS or not operands:
        return False
    sizes = [rms(x.right) for x in operands]
    is_matmul = "_general" in run.site.eqn.primitive.name
    return rms(right) < _NOISE * (math.prod(sizes) if is_matmul else max(sizes))
