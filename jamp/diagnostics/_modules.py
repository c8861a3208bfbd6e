"""Operations by the modules of the model that they are in."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jamp.diagnostics._operation import Operation
from jamp.diagnostics._table import short

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclasses.dataclass
class Module:
    """A module, or a line of the source outside of modules.

    Attributes:
        name: in the module that it is in.
        path: of those that it is in, and its own.
        own: its operations that are in no module of its own.
        inside: the modules in it, by name.
    """

    name: str
    path: str
    own: list[Operation] = dataclasses.field(default_factory=list)
    inside: "dict[str, Module]" = dataclasses.field(default_factory=dict)

    def all(self) -> Iterator[Operation]:
        """The operations in it."""
        yield from self.own
        for module in self.inside.values():
            yield from module.all()

    def groups(self) -> list[list["Module"]]:
        """The modules in it; equal ones next to each other are one group."""
        groups: list[list[Module]] = []
        likeness = None
        for module in self.inside.values():
            new = module.likeness()
            if groups and new == likeness:
                groups[-1].append(module)
            else:
                groups.append([module])
            likeness = new
        return groups

    def likeness(self) -> Any:
        """Equal for modules that compute the same in the same precisions."""
        forward = [op for op in self.own if op.is_forward]
        own = Counter((op.primitive, op.dtype, op.why) for op in forward)
        inside = tuple((m.name, m.likeness()) for m in self.inside.values())
        return own, _products(self.own), inside

    def flops(self) -> str:
        """Those of its products, for people; "" if there are none."""
        return magnitude(_products(self.all())[0])

    def share(self) -> str:
        """How much of them is in half; "" if there are none."""
        total, half = _products(self.all())
        return f"{half / total:.1%}".replace("100.0%", "100%") if total else ""


def modules_of(operations: Iterable[Operation]) -> Module:
    """What holds the modules of all operations that matter."""
    root = Module("", "")
    for op in operations:
        if not op.matters:
            continue
        module = root
        # What is in no module goes by its line.
        names = op.module.split("/") if op.module else [short(op.source) or "(JAX)"]
        for name in names:
            path = f"{module.path}/{name}".lstrip("/") if op.module else name
            module = module.inside.setdefault(name, Module(name, path))
        module.own.append(op)
    return root


def label(group: list[Module]) -> str:
    """What equal modules are called: "Block_0 … Block_11"."""
    names = [module.name for module in group]
    stem = re.escape(re.sub(r"\d+$", "", names[0]))
    if len(names) > 2 and all(re.fullmatch(stem + r"\d+", name) for name in names):
        return f"{names[0]} … {names[-1]}"
    return ", ".join(names)


def flops_of(group: list[Module]) -> str:
    """How many equal modules there are, and the FLOPs of one; "" if it has none."""
    flops = group[0].flops()
    return f"{len(group)} × {flops}" if flops and len(group) > 1 else flops


def magnitude(number: int) -> str:
    """A number in three digits and a letter; "" of 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


def _products(operations: Iterable[Operation]) -> tuple[int, int]:
    """FLOPs of the products, and of those in half."""
    matmuls = [op for op in operations if op.is_float_matmul]
    half = sum(op.flops or 0 for op in matmuls if op.is_half)
    return sum(op.flops or 0 for op in matmuls), half
