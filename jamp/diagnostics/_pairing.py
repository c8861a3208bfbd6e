"""Pairs the operations of two programs of one loss, while both run."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.primitives import primitive_name, traits_of
from jamp._autocast.subjaxprs import Kind, subjaxprs_of
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._replay import Event, Value, replay
from jamp.diagnostics._source import MOVES, TO_FP8, Context, Site, short_line
from jamp.diagnostics._step import Step

_ORDERS = ("argmax", "argmin", "top_k")  # integers to compare
_SELECT = ("select_n", "clamp", "copy", "gather", *TO_FP8)
_REFERENCES = ("new_ref", "get", "swap", "freeze")


class Label(NamedTuple):
    """Identifies an operation in both programs, together with a number."""

    module: str
    phase: str
    primitive: str
    shapes: tuple[Any, ...]
    line: str = ""

    def __str__(self) -> str:
        place = ", ".join(filter(None, (short_line(self.line), self.module)))
        return f"{self.primitive} ({self.phase}) at {place or '(JAX)'}"


@dataclasses.dataclass(eq=False, slots=True)
class Note:
    """A note on a value, shared by its casts and moves.

    Attributes:
        inputs: the arguments from which it is computed.
        error: its error; None if it was not compared.
        run: the row that compared it, and the number of the run.
        fp8: the unit roundoff and the weight (a regex) of the fp8 matmul before it.
    """

    inputs: frozenset[str]
    error: float | None = None
    run: tuple[Any, int] | None = None
    fp8: tuple[float, str] = (0.0, "")

    @property
    def param(self) -> str:
        """A regex for the param, if it is computed from only one, or ""."""
        path = next(iter(self.inputs)) if len(self.inputs) == 1 else ""
        return f"{path[7:]}$" if path.startswith("params/") else ""


class Run(NamedTuple):
    """A run of an operation that both programs have."""

    label: Label
    loops: tuple[str, ...]
    number: int
    line: str  # the user's line, which the label may lack
    site: Site
    event: Event

    @property
    def row(self) -> tuple[Label, int]:
        """The row of this run and of other iterations."""
        return self.label, self.number


class Side:
    """One program: its labels, results, and runs without a partner."""

    def __init__(self, step: Step, only: str):
        self.step = step
        found = [x for x in _labels_in(step.program, Context()) if only in f"{x[1]}"]
        self.labels = {place: label for place, label, _ in found}
        # Two calls of a program in one line have their operations in the same place.
        self.sizes = Counter(place for place, *_ in found)
        self.total = sum(times for *_, times in found)
        self.common: dict[Any, Label] = {}
        self.rows: dict[Any, None] = {}  # in the order of the program
        self.waiting: dict[Any, Run] = {}
        self.results: list[Value] = []

    def runs(self, errors: dict[str, float]) -> Iterator[Run]:
        """Replays the program, and yields the runs of operations in both programs.

        `errors` has the errors of the params.
        """
        counts = Counter[Any]()
        for event in replay(self.step, self.step.scale, whole_loops=False):
            for value in event.read:
                if value.note is None:
                    inputs = frozenset(filter(None, [value.path]))
                    value.note = Note(inputs, errors.get(value.path, 0.0))
            if event.site is None:
                self.results = event.read
                return
            for value in event.outs:
                value.note = _note_of_result(event, value)
            if label := self.common.get(place := _place(event.site)):
                key = label, event.site.context.loops
                counts[key] += 1
                line = self.labels[place].line
                run = Run(*key, counts[key], line, event.site, event)
                self.rows[run.row] = None
                yield run


def _place(site: Site) -> tuple[int, str, str]:
    """Identifies an equation by its place in the program."""
    return id(site.eqn), site.context.names, site.context.line


def decides(eqn: jc.JaxprEqn) -> bool:
    """Returns whether an equation casts a condition to a number, as routers do."""
    name = eqn.primitive.name
    return name == "convert_element_type" and eqn.invars[0].aval.dtype == jnp.bool  # pyright: ignore[reportAttributeAccessIssue]


def _label_of(site: Site) -> Label | None:
    """Returns the label, or None for an equation that moves values or recomputes."""
    eqn, name = site.eqn, site.eqn.primitive.name
    values = eqn.invars if name in _ORDERS else eqn.outvars
    moves = traits_of(name).shape in MOVES or name in (*_SELECT, *_REFERENCES)
    if (
        not any(is_differentiable(v.aval) for v in values)
        or (moves and name not in _ORDERS and not decides(eqn))
        or any(sub.kind is not Kind.MAP for sub in subjaxprs_of(eqn))
        or "rematted_computation" in site.names
    ):
        return None
    shapes = tuple(getattr(v.aval, "shape", ()) for v in eqn.outvars)
    # A weight's gradient in a loop is a `jamp_product` at levels with autocast.
    name = "dot_general" if name == "jamp_product" else primitive_name(eqn)
    return Label(site.module, site.phase, name, shapes, site.line)


def _labels_in(
    program: jc.Jaxpr, context: Context, times: int = 1
) -> Iterator[tuple[Any, Label, int]]:
    """Returns the place, the label and the number of runs of each operation."""
    for eqn in program.eqns:
        site = Site(eqn, program, context)
        if label := _label_of(site):
            yield _place(site), label, times
            continue
        for sub in subjaxprs_of(eqn):
            trips = times * (sub.trips or 1)
            yield from _labels_in(sub.jaxpr, site.inside(), trips)


def find_common(left: Side, right: Side) -> dict[Label, None]:
    """Finds the labels that occur equally often in both programs.

    Autocast and JAX's caches change some lines. Without lines, more labels are equal.

    Returns:
        The other labels.
    """
    sides = left, right
    rest = [dict(side.labels) for side in sides]
    for _ in range(2):
        counts = Counter[Label](), Counter[Label]()
        for side, labels, count in zip(sides, rest, counts, strict=True):
            for place, label in labels.items():
                count[label] += side.sizes[place]
        for side, labels in zip(sides, rest, strict=True):
            for place, label in list(labels.items()):
                labels[place] = label._replace(line="")
                if counts[0][label] == counts[1][label]:
                    side.common[place] = label
                    del labels[place]
    pairs = zip(sides, rest, strict=True)
    return dict.fromkeys(side.labels[x] for side, labels in pairs for x in labels)


def _note_of_result(event: Event, value: Value) -> Note:
    notes = [value.note for value in event.read]
    # The slices of an argument also have its error.
    if notes and (event.moves or value.maker is None):
        return notes[0]
    inputs = frozenset[str]().union(*(note.inputs for note in notes))
    fp8 = max((note.fp8 for note in notes), default=(0.0, ""))
    floats = (v.array.dtype for v in event.read if is_differentiable(v.array))
    if units := [float(jnp.finfo(x).eps) / 2 for x in floats if x.itemsize == 1]:
        weight = next(filter(None, (note.param for note in notes)), "...")
        fp8 = max(fp8, (max(units), weight))
    return Note(inputs, fp8=fp8)


def pair_runs(
    left: Side, right: Side, errors: dict[str, float]
) -> Iterator[tuple[Run, Run]]:
    """Runs both sides alternately, so that few runs wait for their partner."""
    waiting = left.waiting, right.waiting
    turns = itertools.zip_longest(left.runs(errors), right.runs(errors))
    for i, run in ((i, run) for pair in turns for i, run in enumerate(pair) if run):
        key = run[:3]
        if partner := waiting[1 - i].pop(key, None):
            yield (partner, run) if i else (run, partner)
        else:
            waiting[i][key] = run
