"""What Mosaic makes of the kernels for an H200 and a B200, and what that computes."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.mosaic import launch as launcher
from tests import subprocesses
from tests.bits import assert_same_bits
from tests.optimizers.mixed_leaves import FAST
from tests.pallas_kernels import emulator, everything, kernels, ptx

pytestmark = pytest.mark.h200

TARGETS = {"H200": "sm_90a", "B200": "sm_100a"}
DUMP = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM")
INTERPRET, XLA = pk.Options(backend="interpret"), pk.Options(backend="xla")
WRITE_ONLY = ("['copy']", "['new']", "['out']", "['update']")
# Bytes per parameter that it moves.
ADAM = {"adam, copied, bf16": 28, "adam, split, bf16": 26}
# With moments, or weights too, that are rounded stochastically.
NARROW = {"narrow adam, split, bf16": 18, "narrow adam, own, bf16": 14}
BYTES = ADAM | NARROW

of_all = pytest.mark.parametrize(
    "target, name", [(t, name) for t in TARGETS for name in kernels.cases(t)]
)
on_both = pytest.mark.parametrize("target", TARGETS)


@functools.cache
def compiled(target: str) -> dict[str, list[ptx.Kernel]]:
    """The kernels of each case."""
    output = subprocesses.run(
        "tests.pallas_kernels.kernels", target, **dict.fromkeys(DUMP, "1")
    )
    parts = (part.partition("\n") for part in output.split(kernels.MARK)[1:])
    return {name: ptx.kernels(text) for name, _, text in parts}


class Launch(NamedTuple):
    """A kernel that was run: its operands and results, and accesses of each block."""

    names: list[str]
    arrays: list[np.ndarray]
    accesses: list[list[emulator.Access]]

    def moved(self) -> Iterator[tuple[str, np.ndarray, int, int]]:
        """Per column of a leaf its name, the array, and elements read and written."""
        for k, (name, x) in enumerate(zip(self.names, self.arrays, strict=True)):
            if x.size in kernels.SIZES:
                mine = [a for block in self.accesses for a in block if a.array == k]
                read = [a.words.size for a in mine if not a.is_write]
                written = [a.words.size for a in mine if a.is_write]
                words = x.itemsize // 2
                yield name, x, sum(read) // words, sum(written) // words


@functools.cache
def args_of(name: str) -> tuple[Any, ...]:
    return kernels.CASES[name].make(kernels.SIZES)


@functools.cache
def by_xla(name: str) -> Any:
    """What the kernels of both targets are compared with."""
    call = functools.partial(kernels.CASES[name].call, XLA)
    return jax.jit(call, compiler_options=FAST)(*args_of(name))


@functools.cache
def run(target: str, name: str, skip: bool = False) -> tuple[Any, Any, list[Launch]]:
    """The args of a case, its results by the compiled kernels, and the launches."""
    case = kernels.CASES[name]
    *args, last = args_of(name)
    args = (*args, jnp.bool_(True) if skip else last)
    left, launches = list(compiled(target)[name]), []

    def kernel(body, out_type, grid, **settings):
        del body, settings
        return lambda *operands: launch(grid, operands, out_type)

    def launch(grid, operands, out_type):
        operands, _ = jax.tree.flatten_with_path(operands)
        outs, tree = jax.tree.flatten_with_path(out_type)
        names = [jax.tree_util.keystr(path) for path, _ in operands + outs]
        arrays = [np.array(x[...]) for _, x in operands]
        arrays += [np.full(x.shape, 99, x.dtype) for _, x in outs]
        used = sum(x.size > 0 for x in arrays)
        (kernel,) = (k for k in left if (k.grid, len(k.buffers)) == (*grid, used))
        left.remove(kernel)
        launches.append(Launch(names, arrays, emulator.run_all(kernel, arrays)))
        for (_, ref), x in zip(operands, arrays, strict=False):
            if isinstance(ref, jax.Ref):
                ref[...] = x
        return jax.tree.unflatten(tree, map(jnp.asarray, arrays[len(operands) :]))

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(launcher.plgpu, "kernel", kernel)
        results = case.call(INTERPRET, *args)
    assert not left, "a kernel was compiled and not launched"
    return args, results, launches


@of_all
def test_kernels_keep_all_values_in_registers(target, name, record_property):
    found = compiled(target)[name]
    assert len(found) == kernels.CASES[name].kernels
    for kernel in found:
        record_property("registers", kernel.registers)
        assert kernel.target == TARGETS[target]
        assert kernel.spilled == 0
        assert kernel.registers <= 128


@of_all
def test_kernels_compute_what_xla_does(target, name):
    args, results, _ = run(target, name)
    kernels.assert_close(results, by_xla(name))
    if name == "everything":  # that the launcher can do
        everything.assert_ran(args[0], results)


@on_both
@pytest.mark.parametrize("name", NARROW)
def test_kernels_round_by_the_bits_that_xla_takes(target, name):
    found, expected = run(target, name)[1], by_xla(name)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if x.dtype == jnp.bfloat16:
            assert (np.asarray(x) == np.asarray(y)).mean() > 0.99  # other bits: 0.67


@of_all
def test_whole_blocks_move_in_wide_accesses(target, name):
    for launch in run(target, name)[2]:
        lone = name.startswith(("l2norm", "max_norm", "found_inf"))
        block = launcher.LONE_BLOCK if lone else launcher.BLOCK
        narrow = [0 for _ in launch.arrays]
        for access in (a for accesses in launch.accesses for a in accesses):
            itemsize = launch.arrays[access.array].itemsize
            if access.width < (16 if itemsize == 4 else 8):
                narrow[access.array] += access.offsets.size * access.width // itemsize
        for x, elements in zip(launch.arrays, narrow, strict=True):
            if x.size in kernels.SIZES:
                remainder = x.size % block
                assert elements <= 2 * (remainder and remainder + launcher.WARPGROUP)


@of_all
def test_kernels_read_and_write_each_column_once(target, name):
    columns = moved = 0
    for launch in run(target, name)[2]:
        for column, x, read, written in launch.moved():
            # The last window of 128 overlaps the one before.
            most = x.size + (127 if x.size % 128 else 0)
            is_read, is_written = x.size <= read <= most, x.size <= written <= most
            assert is_read or read == 0, column
            assert is_written or written == 0, column
            assert is_read or is_written, column
            if column.endswith(WRITE_ONLY):
                assert is_written and not is_read, column
            columns += 1
            moved += (read + written) * x.itemsize * (x.size == 4096)
    assert columns >= len(kernels.SIZES)
    if name in BYTES:
        assert moved == 4096 * BYTES[name]


@on_both
@pytest.mark.parametrize("name", [*BYTES, "everything"])
def test_a_skip_writes_nothing(target, name):
    args, results, launches = run(target, name, skip=True)
    for launch in launches:
        for column, x, _, written in launch.moved():
            assert written == (0 if "'new'" not in column else written)
            assert "'new'" not in column or not x.any()
    if name == "everything":
        everything.assert_skipped(args[0], results)
    else:
        assert_same_bits(args[:2], results)


@on_both
@pytest.mark.parametrize("case", ["found_inf, bf16", "scale, bf16"])
@pytest.mark.parametrize("index", kernels.LARGE)
def test_large_leaves_are_indexed_in_64_bits(target, case, index):
    (kernel,) = compiled(target)[f"{case}, {index}"]
    size = kernels.LARGE[index]
    block = launcher.LONE_BLOCK if "found_inf" in case else launcher.BLOCK
    assert kernel.grid == size // block
    # Numbers, `x`, for `scale` its result, partials. What is not touched takes no room.
    columns = [np.zeros(size, np.uint16) for _ in range(1 + ("scale" in case))]
    arrays = [np.zeros(1, np.float32), *columns, np.zeros(kernel.grid, np.float32)]
    for number in (0, 1, kernel.grid // 2 + 1, kernel.grid - 1):
        end = size if number == kernel.grid - 1 else (number + 1) * block
        accesses = emulator.run(kernel, arrays, number)
        for array in range(1, len(arrays) - 1):
            touched = [a.words for a in accesses if a.array == array]
            assert set(np.concatenate(touched)) == set(range(number * block, end))
