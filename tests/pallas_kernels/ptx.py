"""Reads what Mosaic prints of kernels while it compiles them."""

import dataclasses
import functools
import re
from typing import NamedTuple

THREADS = 128


class Instruction(NamedTuple):
    """One line: `@guard opcode operands;`."""

    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its code, what ptxas said of it, and what launches it."""

    ptx: str = dataclasses.field(repr=False)
    info: str
    host: str = dataclasses.field(repr=False)

    @property
    def registers(self) -> int:
        return int(_find(r"Used (\d+) registers", self.info))

    @property
    def spilled(self) -> int:
        """Bytes of stack and of spills."""
        words = ("stack frame", "spill stores", "spill loads")
        return sum(int(_find(rf"(\d+) bytes {word}", self.info)) for word in words)

    @property
    def target(self) -> str:
        return _find(r"for '(sm_\w+)'", self.info)

    @functools.cached_property
    def grid(self) -> int:
        """How many blocks it is launched with."""
        numbers = _find(r"build_kernel_spec\(ptr %\d+((?:, i32 \d+){7})", self.host)
        x, *rest = map(int, re.findall(r"i32 (\d+)", numbers))
        assert rest == [1, 1, 0, 0, 0, THREADS]  # of y, z, cluster and block
        return x

    @functools.cached_property
    def buffers(self) -> list[int]:
        """For each parameter, which operand or result of the call it is."""
        entry = r"(%\d+) = getelementptr ptr, ptr %1, i32 (\d+)"
        field = r"(%\d+) = getelementptr \{[^}]*\}, ptr %\d+, i32 0, i32 (\d+)"
        place = {"%1": "0"} | dict(re.findall(entry, self.host))
        loads = re.findall(r"(%\d+) = load ptr, ptr (%\d+)", self.host)
        buffer = {name: int(place[address]) for name, address in loads}
        number = {name: int(n) for name, n in re.findall(field, self.host)}
        stores = re.findall(r"store ptr (%\d+), ptr (%\d+)", self.host)
        of = {number[where]: buffer[x] for x, where in stores if x in buffer}
        return [of[n] for n in range(len(of))]

    @functools.cached_property
    def code(self) -> tuple[list[Instruction], dict[str, int]]:
        """Its instructions, and the place of each label."""
        code, labels = [], {}
        body = re.sub(r"//.*", "", self.ptx[self.ptx.index("\n{") :])
        for statement in re.findall(r"\$\w+:|[^\n;{]+(?:\{[^}]*\}[^;{]*)*;", body):
            words = statement.strip().rstrip(";")
            if words.endswith(":"):
                labels[words[:-1]] = len(code)
            elif not words.startswith("."):
                code.append(_instruction(words))
        return code, labels


def kernels(output: str) -> list[Kernel]:
    """The kernels that a process printed while it compiled them.

    Under MOSAIC_GPU_DUMP_PTX, _PTXAS and _HOST_LLVM.
    """
    found = []
    for part in re.split(r"^(?=\.version )", output, flags=re.MULTILINE)[1:]:
        info, host = part.index("\nptxas "), part.index("; ModuleID")
        found.append(Kernel(part[:info], part[info:host], part[host:]))
    return found


def _instruction(words: str) -> Instruction:
    guard, rest = words[1:].split(None, 1) if words.startswith("@") else ("", words)
    opcode, *operands = rest.split(None, 1)
    parts = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", "".join(operands))
    return Instruction(guard, opcode, tuple(parts))


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, (pattern, text)
    return match[1]
