"""What `locate` returns: where a batch overflowed, and what to do about it."""

import dataclasses
import textwrap

from jamp.diagnostics._ranges import Range

_WIDTH = 88
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Location:
    """The first operation of a step whose result is not finite: `print` it.

    Attributes:
        finite: whether loss and gradients are all finite; then the rest is empty.
        loss: the loss, unscaled.
        scale: the loss scale; 1 if the gradients overflow at that, too.
        operation: in words, as "a matrix product"; or what came in not finite.
        primitive: its name, as `jax.make_jaxpr` prints it; "" of what came in.
        phase: "forward", "backward", or "input" of what came in.
        source: `file:line`.
        module: the modules or name scopes that it is in, as `Net/Block_0`.
        near: the path of the param that was read last on the way to it.
        loops: in which iterations of which loops it ran, from outside inward.
        operands: the dtypes, shapes and ranges of what it read.
        result: the same of what it gave.
        made_by: what computed the operand of a cast, and on which line.
        infinities: where infinite operands came from, if they may be meant so.
        params: the paths of the params whose gradients are not finite.
        total: how many gradients there are.
        advice: what to do, in a sentence.
    """

    finite: bool
    loss: float
    scale: float
    operation: str = ""
    primitive: str = ""
    phase: str = ""
    source: str = ""
    module: str = ""
    near: str = ""
    loops: tuple[str, ...] = ()
    operands: tuple[Range, ...] = ()
    result: Range | None = None
    made_by: str = ""
    infinities: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    total: int = 0
    advice: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the result; "" if all is finite."""
        return self.result.dtype if self.result else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result; () if all is finite."""
        return self.result.shape if self.result else ()

    def __str__(self) -> str:
        """A line for each thing, in at most 20."""
        if self.finite:
            return f"All is finite: the loss is {self.loss:g}, at scale {self.scale:g}."
        name = f" ({self.primitive})" if self.primitive else ""
        where = f" in the {self.phase} pass" if self.primitive else ""
        rows = [
            ("first", f"{self.operation}{name}{where}"),
            ("line", self.source),
            ("module", self.module),
            ("params", f"{self.near} was read last before it" if self.near else ""),
            ("inside", ", ".join(self.loops)),
            *(("operand", str(x)) for x in self.operands[:_SHOWN]),
            ("made by", self.made_by),
            ("inf from", ", ".join(self.infinities)),
            ("result", str(self.result)),
            ("loss", f"{self.loss:g}, at scale {self.scale:g}"),
            ("gradients", self._gradients()),
            ("advice", self.advice),
        ]
        lines = [_row(name, text) for name, text in rows if text]
        return "\n".join(["Not finite:", *lines])

    __repr__ = __str__

    def _gradients(self) -> str:
        shown = ", ".join(self.params[:_SHOWN])
        more = ", ..." if len(self.params) > _SHOWN else ""
        names = f": {shown}{more}" if shown else ""
        return f"{len(self.params)} of {self.total} are not finite{names}"


def _row(name: str, text: str) -> str:
    """A line with a name before it; further ones below its text."""
    if name in ("line", "made by"):  # to click on
        return f"  {name:<10}{text}"
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"  {name:<10}",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
