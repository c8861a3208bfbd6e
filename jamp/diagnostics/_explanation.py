"""What `explain` returns: the operations, their totals, and how they are shown."""

import dataclasses
import json
from collections import Counter
from typing import Any

from jamp.diagnostics import _table
from jamp.diagnostics._operation import Operation, is_fp8, product_flops, warnings_of

_SHOWN = 6  # warnings below the tree


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs in which precision: `print` it, or take one of its other forms.

    A while loop's FLOPs count once, each branch of a cond counts, and what is inside of
    `shard_map` counts for one device.

    Attributes:
        dtype: the half dtype.
        operations: in the order of the program; what one holds comes right after it.
        promote: "widest" or "narrowest", of a function under autocast.
        level: of a step; "" of a function.
        memory: of a step, what its state keeps in fewer bits than by default, and what
            is summed in more, in words.
    """

    dtype: str
    operations: tuple[Operation, ...]
    promote: str = ""
    level: str = ""
    memory: tuple[str, ...] = ()

    @property
    def matmul_flops(self) -> int:
        """FLOPs of all matmuls and convolutions of floats."""
        return product_flops(self.operations)[0]

    @property
    def half_matmul_flops(self) -> int:
        """FLOPs of those that run in half."""
        return product_flops(self.operations)[1]

    @property
    def half_share(self) -> float | None:
        """The part of the matmul FLOPs that runs in half; None if there are none."""
        total, half = product_flops(self.operations)
        return half / total if total else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Products not in half or of awkward sizes, and what autocast does not know."""
        found = Counter(
            w for op in self.operations for w in warnings_of(op, self.level)
        )
        return tuple(w if n == 1 else f"{w} ({n} ×)" for w, n in found.items())

    @property
    def title(self) -> str:
        """The totals, in a line; of a step, what is special about its memory too."""
        matmuls = sum(op.is_float_matmul for op in self.operations)
        share = "" if self.half_share is None else f", {self.half_share:.1%} in half"
        fp8, _ = product_flops([op for op in self.operations if is_fp8(op.dtype)])
        share += f", {fp8 / self.matmul_flops:.1%} in fp8" if fp8 else ""
        of = f"A step at {self.level}" if self.level else f"autocast, {self.promote}"
        memory = "".join(f"; {words}" for words in self.memory)
        return (
            f"{of}: {matmuls} matmuls and convolutions, {self.matmul_flops:.3g} FLOPs"
            f"{share} ({self.dtype}){memory}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers, for JSON."""
        totals = {
            "matmul_flops": self.matmul_flops,
            "half_matmul_flops": self.half_matmul_flops,
            "half_share": self.half_share,
            "warnings": self.warnings,
        }
        # Tuples become lists.
        return json.loads(json.dumps(dataclasses.asdict(self) | totals))

    def show(
        self, *, depth: int | None = None, filter: str | None = None, width: int = 100
    ) -> str:
        """The tree of the model's modules, equal ones in one line; or some operations.

        Args:
            depth: how many levels of modules to show; None for all.
            filter: lists operations instead, each with its line; with `depth`, the tree
                is of those alone: "products", "float32" (those that do not run in
                half), "all", or a regex that is looked for in "module operation
                file:line", as in " exp ".
            width: of the text. Lines of the source are never cut.

        Raises:
            ValueError: `depth` is less than 1, or `filter` is not a regex.
        """
        shown = _table.chosen(self.operations, filter)
        if filter is not None and depth is None:
            return _table.text(shown)
        tree = _table.tree(shown, depth, width)
        warnings = [f"! {warning}" for warning in self.warnings]
        more = len(warnings) - _SHOWN
        if more > 0:
            warnings[_SHOWN:] = [f"! and {more} more in `.warnings`."]
        return "\n".join([self.title, tree, *warnings])

    def __str__(self) -> str:
        return self.show()

    def __repr__(self) -> str:
        """The totals: `print` shows more."""
        return f"<jamp.Explanation {self.title} print() shows the modules>"
