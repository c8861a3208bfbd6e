"""Pairs the operations of two programs of one loss, while both run."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.frames import Kind, frames_of
from jamp._autocast.primitives import primitive_name, traits_of
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._replay import Event, Value, replay
from jamp.diagnostics._source import MOVES, TO_FP8, Context, Site, short_line
from jamp.diagnostics._step import Step

_ORDERS = ("argmax", "argmin", "top_k")  # their integers are compared, too
_SELECT = ("select_n", "clamp", "copy", "gather", *TO_FP8)


class Label(NamedTuple):
    """Names an operation in both programs. Operations with equal labels are counted."""

    module: str
    phase: str
    primitive: str
    shapes: tuple[Any, ...]
    line: str = ""

    def __str__(self) -> str:
        place = ", ".join(filter(None, (short_line(self.line), self.module)))
        return f"{self.primitive} ({self.phase}) at {place or '(JAX)'}"


def decides(eqn: jc.JaxprEqn) -> bool:
    """Whether it makes a number of a condition, as a router does."""
    name = eqn.primitive.name
    return name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.bool  # pyright: ignore[reportAttributeAccessIssue]


def _label_of(site: Site) -> Label | None:
    """The label, or None if it moves values or JAX computes it a second time."""
    eqn, name = site.eqn, site.eqn.primitive.name
    values = eqn.invars if name in _ORDERS else eqn.outvars
    moves = traits_of(name).shape in MOVES or name in _SELECT
    if (
        not any(is_differentiable(v.aval) for v in values)
        or (moves and name not in _ORDERS and not decides(eqn))
        or any(frame.kind is not Kind.MAP for frame in frames_of(eqn))
        or "rematted_computation" in site.names
    ):
        return None
    shapes = tuple(getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return Label(site.module, site.phase, primitive_name(eqn), shapes, site.line)


def _labels_in(
    program: jc.Jaxpr, context: Context, times: int = 1
) -> Iterator[tuple[Label, int]]:
    """The labels of a program, and how often each operation runs."""
    for eqn in program.eqns:
        site = Site(eqn, program, context)
        if label := _label_of(site):
            yield label, times
        for frame in frames_of(eqn) if label is None else ():
            trips = times * (frame.trips or 1)
            yield from _labels_in(frame.program, site.inside(), trips)


def find_common(
    left: Step, right: Step, only: str
) -> tuple[set[Label], list[str], int]:
    """The labels that both programs have equally often.

    Autocast and JAX's caches move some lines: without lines, more labels are equal.

    Returns:
        The labels whose module or line contains `only`; the other labels in words; and
        how many operations run.

    Raises:
        ValueError: `only` matches nothing.
    """
    found = [
        [x for x in _labels_in(step.program, Context()) if only in f"{x[0]}"]
        for step in (left, right)
    ]
    if not all(found):
        raise ValueError(f"only={only!r} is in no module path and in no line.")
    common = set[Label]()
    rest = [Counter(label for label, _ in pairs) for pairs in found]
    for _ in range(2):
        same = {x for x, n in rest[0].items() if rest[1][x] == n}
        common |= same
        odd = [[x for x in c.elements() if x not in same] for c in rest]
        rest = [Counter(x._replace(line="") for x in labels) for labels in odd]
    words = dict.fromkeys(str(x) for labels in odd for x in labels)
    return common, list(words), sum(times for _, times in found[0])


@dataclasses.dataclass(eq=False, slots=True)
class Note:
    """A note on a value, shared by its casts and moves."""

    inputs: frozenset[str] = frozenset()  # the arguments that it is made of
    error: float | None = None  # None if it was not compared
    partner: "Note | None" = None  # of the value that it was compared with
    row: Any = None  # the row of the operation that made it
    # The unit roundoff and the weight (a regex) of the fp8 matmul that it depends on.
    fp8: tuple[float, str] = (0.0, "")


class Run(NamedTuple):
    """A run of an operation of both programs, and the row that it belongs to."""

    row: tuple[Label, int]
    event: Event


class Side:
    """One of the two replays."""

    def __init__(self, step: Step, common: set[Label]):
        self.events = replay(step, step.scale, whole_loops=False)
        self.common = common
        self.labels: dict[Any, Label | None] = {}  # of equations
        self.waiting: dict[Any, Run] = {}  # runs whose partner has not run
        self.counts: Counter[Any] = Counter()
        self.rows: dict[Any, None] = {}  # in the order of the program
        self.results: list[Value] = []

    def next(self) -> tuple[Any, Run] | None:
        """Runs to the next operation of both programs, and returns its key and run.

        The key has the label, the iterations, the operations that made the operands,
        and the number among equal ones.
        """
        for event in self.events:
            site = event.site
            if site is None:
                self.results = event.read
                break
            for value in event.read:
                path = [value.path] if value.path else []
                value.note = value.note or Note(frozenset(path))
            for value in event.outs:
                value.note = _note_of_result(site, event.read)
            if label := self._label(site):
                floats = [v for v in event.read if is_differentiable(v.array)]
                makers = (*(v.maker and primitive_name(v.maker.eqn) for v in floats),)
                place = label, site.context.loops
                row = label, self._count(place)
                self.rows.setdefault(row)
                return (*place, makers, self._count((place, makers))), Run(row, event)
        return None

    def _count(self, place: Any) -> int:
        self.counts[place] += 1
        return self.counts[place]

    def _label(self, site: Site) -> Label | None:
        key = id(site.eqn), site.context.names, site.context.line
        if key not in self.labels:
            label = _label_of(site)
            both = [label, label._replace(line="")] if label else []
            self.labels[key] = next((x for x in both if x in self.common), None)
        return self.labels[key]


def _note_of_result(site: Site, read: list[Value]) -> Note:
    notes = [value.note for value in read]
    if site.moves and notes:
        return notes[0]
    inputs = frozenset[str]().union(*(note.inputs for note in notes))
    fp8 = max((note.fp8 for note in notes), default=(0.0, ""))
    floats = (v.array.dtype for v in read if is_differentiable(v.array))
    if units := [float(jnp.finfo(x).eps) / 2 for x in floats if x.itemsize == 1]:
        fp8 = max(fp8, (max(units), weight_of(notes) or "..."))
    return Note(inputs, fp8=fp8)


def weight_of(notes: Iterable[Note]) -> str:
    """A regex of the first param among some operands, or ""."""
    inputs = (path for note in notes if len(note.inputs) == 1 for path in note.inputs)
    found = (path for path in inputs if path.startswith("params/"))
    return next((f"{path[7:]}$" for path in found), "")


def pair_runs(left: Side, right: Side) -> Iterator[tuple[Run, Run]]:
    """Runs both sides in turns, so that few runs wait for their partner."""
    sides = {left: right, right: left}
    while sides:
        for side, other in list(sides.items()):
            if (found := side.next()) is None:
                del sides[side]
                continue
            key, run = found
            if partner := other.waiting.pop(key, None):
                yield (run, partner) if side is left else (partner, run)
            else:
                side.waiting[key] = run
    # Autocast may have put an operation before one of the two.
    groups = defaultdict[Any, tuple[list[Any], list[Any]]](lambda: ([], []))
    for place, side in enumerate((left, right)):
        for key in side.waiting:
            groups[key[:2]][place].append(key)
    for keys in groups.values():
        if len(keys[0]) == len(keys[1]):
            for a, b in zip(*keys, strict=True):
                yield left.waiting.pop(a), right.waiting.pop(b)
