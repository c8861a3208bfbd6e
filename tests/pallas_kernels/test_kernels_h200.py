"""Test that Mosaic compiles every kernel for an H200 and a B200 without spills."""

import re

import pytest

from tests.pallas_kernels import kernels
from tests.support import subprocesses

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
