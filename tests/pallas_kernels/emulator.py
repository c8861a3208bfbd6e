"""Runs compiled kernels in NumPy: one block of 128 threads at a time.

What a GPU would execute, executed without one. Beside results it gives every access to
global memory, and it raises where a GPU would go wrong in silence: accesses past the
end of an array or not aligned, and barriers that not all threads reach. For races
Pallas' own emulator looks, in test_launch.py.

It knows the instructions that our kernels are made of, and no others.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tests.pallas_kernels.ptx import THREADS, Kernel

WARP = 32
SPACE = 44  # bits of an address within an array; above them the array's number

type Lanes = np.ndarray  # one value per thread


class Access(NamedTuple):
    """What all threads together did to global memory by one instruction.

    To which array, with how many bytes per thread, and where; `offsets` are in bytes.
    """

    array: int
    width: int
    is_write: bool
    offsets: np.ndarray

    @property
    def words(self) -> np.ndarray:
        """The places of all that was accessed, in units of two bytes."""
        return (self.offsets[:, None] + np.arange(0, self.width, 2)).ravel() // 2


def run(kernel: Kernel, arrays: Sequence[np.ndarray], block: int) -> list[Access]:
    """Runs one block of a kernel on operands, and room for results, in place."""
    used = [arrays[k] for k in kernel.buffers]
    with np.errstate(all="ignore"):
        accesses = _Block(kernel, block, used).run()
    return [a._replace(array=kernel.buffers[a.array]) for a in accesses]


def run_all(kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[list[Access]]:
    """Runs all blocks of a kernel, in order."""
    return [run(kernel, arrays, block) for block in range(kernel.grid)]


class _Block:
    """128 threads; each register is an array of one value per thread."""

    def __init__(self, kernel: Kernel, number: int, arrays: Sequence[np.ndarray]):
        self.code, self.labels = kernel.code
        self.arrays = [x.reshape(-1).view(np.uint8) for x in arrays]
        thread = np.arange(THREADS, dtype=np.uint32)
        self.registers = {
            "%tid.x": thread,
            "%ctaid.x": np.full(THREADS, number, np.uint32),
            "%laneid": thread % WARP,
        }
        self.shared = np.zeros(4096, np.uint8)
        self.accesses: list[Access] = []

    def run(self) -> list[Access]:
        place = np.zeros(THREADS, int)  # of the next instruction, by thread
        end = len(self.code)
        while (now := place.min()) < end:
            active = place == now
            guard, opcode, operands = self.code[now]
            if guard:
                holds = self.registers[guard.lstrip("!")]
                active = active & (~holds if guard.startswith("!") else holds)
            place[place == now] += 1
            if opcode.startswith("bra"):
                place[active] = self.labels[operands[0]]
            elif opcode == "ret":
                place[active] = end
            elif active.any():
                self.execute(opcode, operands, active)
        return self.accesses

    def execute(self, opcode: str, operands: tuple[str, ...], active: Lanes) -> None:
        name, *kinds = opcode.replace("::", ".").split(".")
        if name in ("ld", "st"):
            self.move(name == "st", kinds, operands, active)
        elif name == "bar":
            assert active.all(), "a barrier that some threads do not reach"
        elif name == "elect":
            elected, predicate = operands[0].split("|")
            first = self.registers["%laneid"] == 0
            self.write(elected, np.zeros(THREADS, np.uint32), active)
            self.write(predicate, first, active)
        elif name == "mov" and operands[0].startswith("{"):
            self.unpack(operands[0], self.read(operands[1], kinds[0]), active)
        elif name != "fence":
            result = self.compute(name, kinds, operands[1:])
            self.write(operands[0], result, active)

    def compute(self, name: str, kinds: list[str], operands: Sequence[str]) -> Lanes:
        if name == "cvt":
            return _convert(kinds, [self.read(x, kinds[-1]) for x in operands])
        if name == "shfl":
            value, lane = self.read(operands[0], "b32"), self.read(operands[1], "b32")
            own = np.arange(THREADS)
            own_lane, warp = own % WARP, own - own % WARP
            source = own_lane ^ lane if kinds[1] == "bfly" else lane
            return value[warp + source]
        if name == "setp":
            return self.compare(kinds, operands)
        if name == "selp":
            x, y = (self.read(x, kinds[0]) for x in operands[:2])
            return np.where(self.read(operands[2], "pred"), x, y)
        if name == "mul" and kinds[0] == "wide":
            x, y = (self.read(x, kinds[1]) for x in operands)
            wide = {2: np.uint32, 4: np.uint64}[x.dtype.itemsize]
            assert kinds[1].startswith("u"), kinds
            return x.astype(wide) * y.astype(wide)
        if name == "prmt":
            return _permute(*(self.read(x, "b32") for x in operands))
        if kinds[-1].endswith("x2"):
            item = DTYPES[kinds[-1][:-2]]
            both = f"b{16 * item.itemsize}"
            pairs = [self.read(x, both)[:, None].view(item) for x in operands]
            return OPERATIONS[name](*pairs).view(DTYPES[both]).reshape(-1)
        if kinds[-2:-1] == ["f32"]:  # of a half, or two, and a float32
            *halves, last = operands
            values = [self.read(x, kinds[-1]).astype(np.float32) for x in halves]
            return OPERATIONS[name](*values, self.read(last, "f32"))
        return OPERATIONS[name](*(self.read(x, kinds[-1]) for x in operands))

    def compare(self, kinds: list[str], operands: Sequence[str]) -> Lanes:
        x, y = (self.read(x, kinds[-1]) for x in operands[:2])
        result = COMPARISONS[kinds[0]](x, y)
        if kinds[1:-1]:
            join = {"or": np.logical_or, "and": np.logical_and}[kinds[1]]
            result = join(result, self.read(operands[2], "pred"))
        return result

    def read(self, operand: str, kind: str) -> Lanes:
        """A register, number or address, as `kind`: "f32", "u64", "b16", ..."""
        dtype = DTYPES[kind]
        if operand.startswith("{"):
            names = _names(operand)
            part = f"b{8 * dtype.itemsize // len(names)}"
            parts = [self.read(x, part) for x in names]
            value = np.stack(parts, 1).view(f"u{dtype.itemsize}").reshape(-1)
        elif operand.startswith("0f"):
            value = np.full(THREADS, int(operand[2:], 16), np.uint32)
        elif re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)U?", operand):
            value = np.full(THREADS, int(operand.rstrip("U"), 0)).astype(dtype)
        elif operand.startswith("__dynamic_shmem"):
            value = np.zeros(THREADS, np.uint64)
        else:
            value = self.registers[operand.removeprefix("!")]
            value = ~value if operand.startswith("!") else value
        if value.dtype.itemsize != dtype.itemsize:  # cvt reads the low bits
            value = value.astype(f"u{dtype.itemsize}")
        return value if value.dtype == dtype else value.view(dtype)

    def write(self, register: str, value: np.ndarray, active: Lanes) -> None:
        if register == "_":
            return
        if value.dtype != bool:
            value = value.view(f"u{value.dtype.itemsize}")
        if not active.all():
            old = self.registers.get(register, np.zeros_like(value))
            value = np.where(active, value, old)
        self.registers[register] = value

    def unpack(self, operand: str, value: np.ndarray, active: Lanes) -> None:
        names = _names(operand)
        parts = value[:, None].view(f"u{value.dtype.itemsize // len(names)}")
        for name, part in zip(names, parts.T, strict=True):
            self.write(name, part.copy(), active)

    def move(
        self, is_write: bool, kinds: list[str], operands: Sequence[str], active: Lanes
    ) -> None:
        """ld and st."""
        if kinds[0] == "param":
            number = int(operands[1].strip("[]").rpartition("_")[2])
            value = np.full(THREADS, (number + 1) << SPACE, np.uint64)
            return self.write(operands[0], value, active)
        value, address = operands[::-1] if is_write else operands
        names, item = _names(value), DTYPES[kinds[-1]].itemsize
        width = item * len(names)
        base, _, shift = address.strip("[]").partition("+")
        places = self.read(base, "u64")[active].astype(np.int64) + int(shift or 0)
        memory, offsets = self.shared, places
        if kinds[0] == "global":
            (number,) = set((places >> SPACE) - 1)
            memory, offsets = self.arrays[number], places & ((1 << SPACE) - 1)
            self.accesses.append(Access(int(number), width, is_write, offsets))
        assert (offsets % width == 0).all(), "an access that is not aligned"
        inside = (offsets >= 0) & (offsets < memory.size)
        assert inside.all(), "an access past the end"
        index = offsets[:, None] + np.arange(width)
        if is_write:
            columns = [self.read(n, f"b{8 * item}")[active] for n in names]
            assert index.max() < memory.size, "a write past the end"
            memory[index] = np.stack(columns, 1).view(np.uint8)
        else:
            # Vectors may reach past the end, up to where they are aligned: unused.
            read = memory[index.clip(max=memory.size - 1)]
            read = np.where(index < memory.size, read, 255).view(f"u{item}")
            for name, column in zip(names, read.T, strict=True):
                wide = np.zeros(THREADS, column.dtype)
                wide[active] = column
                self.write(name, wide, active)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def _convert(kinds: list[str], values: list[np.ndarray]) -> Lanes:
    """cvt, of two values for a pair of halves."""
    target = kinds[-2]
    if target.endswith("x2"):
        high, low = (x.astype(DTYPES[target[:-2]]).view(np.uint16) for x in values)
        return low.astype(np.uint32) | high.astype(np.uint32) << 16
    return values[0].astype(DTYPES[target])


def _permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> Lanes:
    """prmt: each byte of the result is one of the eight of x and y."""
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    result = np.zeros(THREADS, np.uint32)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        assert (nibble < 8).all()
        chosen = both >> (np.uint64(8) * nibble.astype(np.uint64)) & np.uint64(255)
        result |= chosen.astype(np.uint32) << np.uint32(8 * byte)
    return result


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> Lanes:
    return (x.astype(np.float64) * y + z).astype(np.float32)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda x: x,
    "cvta": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": _fma,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "max": np.maximum,
    "min": np.minimum,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "ne": np.not_equal,
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}
DTYPES = {
    f"{letter}{size}": np.dtype(f"{kind}{size // 8}")
    for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"), ("f", "f"))
    for size in (16, 32, 64)
}
DTYPES |= {"bf16": np.dtype(ml_dtypes.bfloat16), "pred": np.dtype(bool)}
