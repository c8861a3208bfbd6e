"""Compiled programs as `jamp.diagnostics` counts them, and the products in them."""

import dataclasses
import functools

from jamp.diagnostics import _hlo
from jamp.diagnostics._hlo import (
    Computation,
    Cost as Cost,
    Instruction,
    aliased_operands as aliased_operands,
    parse as parse,
    shape_bytes as shape_bytes,
)
from tests.programs import Product

PRODUCTS = frozenset(("dot", "ragged-dot", "scaled-dot", "convolution"))
LIBRARIES = ("__cublas$", "__cudnn$")


@dataclasses.dataclass(frozen=True)
class Program(_hlo.Program):
    """A compiled program."""

    @functools.cached_property
    def products(self) -> list[Product]:
        """Every product of the module: in fusions and loops, and of the libraries."""
        return [
            _product(instruction, computation)
            for computation in self.computations.values()
            for instruction in computation.values()
            if is_product(instruction)
        ]


def is_product(instruction: Instruction) -> bool:
    target = instruction.attribute(r'custom_call_target="([^"]+)"') or ""
    return instruction.opcode in PRODUCTS or target.startswith(LIBRARIES)


def _product(instruction: Instruction, computation: Computation) -> Product:
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    where = instruction.attribute(r'op_name="([^"]*)"')
    lhs, rhs = (computation[name].shape for name in instruction.operands[:2])
    return Product(
        target or instruction.opcode,
        _dtype(lhs),
        _dtype(rhs),
        where or instruction.name,
    )


def _dtype(shape: str) -> str:
    return shape.lstrip("(").partition("[")[0]
