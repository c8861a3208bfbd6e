"""Test that kernels compute the same as XLA, interpreted or compiled on a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.pallas_kernels import kernels
from tests.support import subprocesses
from tests.support.bits import assert_same_bits
from tests.support.extent import slow_except

# A float32 and a half leaf of each kind.
FAST = {name for name in kernels.CASES if name.endswith("f32") or "split" in name}
FAST |= {"adam, copied, f16"}
ON_GPU = jax.default_backend() == "gpu"
KERNELS = pk.Options(backend="mosaic" if ON_GPU else "interpret")
# A block with a remainder, less than a block, and a leaf that XLA steps.
SIZES = [(1024 + 256 + 44, 200, 44)]
SIZES += [kernels.SIZES, (2**20 + 1,)] if ON_GPU else []


def run(name, options, *args):
    return jax.jit(functools.partial(kernels.CASES[name].call, options))(*args)


@pytest.mark.gpu
def test_gpu_run_is_on_a_gpu():
    # If CUDA does not start, JAX falls back to the CPU without an error.
    assert ON_GPU


@pytest.mark.parametrize("name", slow_except(FAST, kernels.CASES))
def test_kernel_computes_what_xla_does(name):
    for sizes in SIZES:
        args = kernels.CASES[name].make(sizes)
        found = run(name, KERNELS, *args)
        expected = run(name, pk.Options(backend="xla"), *args)
        kernels.assert_close(found, expected)
        if name in kernels.NARROW:  # both round by the same random bits
            for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                if x.dtype == jnp.bfloat16:  # other random bits would give 0.67
                    assert (np.asarray(x) == np.asarray(y)).mean() > 0.99


@pytest.mark.parametrize("name", [n for n in kernels.CASES if ", copied, " in n])
def test_a_skip_changes_no_bit(name):
    *args, _ = kernels.CASES[name].make(SIZES[0][:2])
    found = run(name, KERNELS, *args, jnp.bool_(True))
    assert_same_bits(found, (args[0], args[1]))


TARGETS = {"H200": "sm_90a", "B200": "sm_100a"}
SPILLS = re.compile(r"(\d+) bytes (?:stack frame|spill stores|spill loads)")


@pytest.mark.h200
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_keep_all_values_in_registers(target):
    printed = subprocesses.run(
        "tests.pallas_kernels.kernels", target, MOSAIC_GPU_DUMP_PTXAS="1"
    )
    parts = (part.partition("\n") for part in printed.split(kernels.MARK)[1:])
    found = {name: text for name, _, text in parts}
    assert found.keys() >= set(kernels.cases(target))
    for name, text in found.items():
        used = re.findall(r"Used (\d+) registers", text)
        case = kernels.CASES.get(name)
        assert len(used) == (case.kernels if case else 1), name
        assert max(map(int, used)) <= 128, name
        assert not any(map(int, SPILLS.findall(text))), name
        assert set(re.findall(r"for '(sm_\w+)'", text)) == {TARGETS[target]}
