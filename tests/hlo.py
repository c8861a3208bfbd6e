"""Compiled programs as `jamp.diagnostics` counts them, and what tests ask beside."""

import dataclasses
import functools
import re
from collections.abc import Callable

from jamp.tools import _hlo
from jamp.tools._hlo import (
    Computation,
    Cost as Cost,
    Instruction,
    parameter_number,
    parse as parse,
    shape_bytes as shape_bytes,
)


@dataclasses.dataclass(frozen=True)
class Program(_hlo.Program):
    """A compiled program.

    Attributes:
        unread: whether a custom call that writes to an operand of a shape in place
            leaves unread what was there, as kernels of Mosaic do: the HLO does not
            tell.
    """

    unread: Callable[[str], bool] = lambda shape: False

    def _cost(self, instruction: Instruction, outer: Computation) -> Cost:
        kernels, traffic = super()._cost(instruction, outer)
        names = (instruction.operands[n] for n in aliased_operands(instruction))
        spared = [outer[n].bytes for n in names if self.unread(outer[n].shape)]
        return Cost(kernels, traffic - sum(spared))

    @functools.cached_property
    def aliased_bytes(self) -> int:
        """Bytes of the parameters whose buffers outputs take over."""
        header = self.text[: self.text.index("entry_computation_layout")]
        aliased = {int(n) for n in re.findall(r"\}?: \((\d+), \{", header)}
        found = [i for i in self.entry.values() if i.opcode == "parameter"]
        return round(sum(p.bytes for p in found if parameter_number(p) in aliased))

    @functools.cached_property
    def copies(self) -> list[int]:
        """Bytes of the result of each copy in ENTRY."""
        found = self.entry.values()
        return [round(i.bytes) for i in found if i.opcode in ("copy", "copy-done")]


def aliased_operands(instruction: Instruction) -> list[int]:
    """The operands whose memory the results of a custom call take over."""
    aliasing = r"output_to_operand_aliasing=(\{(?:[^{}]|\{[^{}]*\})*\})"
    pairs = instruction.attribute(aliasing) or ""
    return [int(n) for n in re.findall(r": \((\d+), \{", pairs)]
