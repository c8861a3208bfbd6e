"""Test benchmarks.hlo on modules whose costs are derived by hand."""

import dataclasses

import pytest

from benchmarks.hlo import Cost, Program, aliased_operands, shape_bytes

HEADER = "HloModule m, is_scheduled=true, input_output_alias={ALIAS}, "
HEADER += "entry_computation_layout={()->f32[]}\n"

FUSIONS = """
%body (p: f32[1024]) -> (f32[1024], f32[]) {
  %p.1 = f32[1024]{0} parameter(0)
  %square = f32[1024]{0} multiply(%p.1, %p.1)
  %zero = f32[] constant(0)
  %sum = f32[] reduce(%square, %zero), dimensions={0}, to_apply=%add
  ROOT %both = (f32[1024]{0}, f32[]) tuple(%square, %sum)
}

%third (p: f16[300]) -> f32[100] {
  %p.2 = f16[300]{0} parameter(0)
  %line = f16[3,100]{1,0} bitcast(%p.2)
  %row = f16[1,100]{1,0} slice(%line), slice={[1:2], [0:100]}
  %flat = f16[100]{0} bitcast(%row)
  ROOT %wide = f32[100]{0} convert(%flat)
}

%place (p: f32[1024], u: f32[8], i: s32[]) -> f32[1024] {
  %p.3 = f32[1024]{0} parameter(0)
  %u.3 = f32[8]{0} parameter(1)
  %i.3 = s32[] parameter(2)
  ROOT %updated = f32[1024]{0} dynamic-update-slice(%p.3, %u.3, %i.3)
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum.5 = f32[] add(%x, %y)
}
"""

LOOP = """
%step (t: (s32[], f32[256])) -> (s32[], f32[256]) {
  %t = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %v = f32[256]{0} get-tuple-element(%t), index=1
  %next = f32[256]{0} add(%v, %v)
  ROOT %out = (s32[], f32[256]{0}) tuple(%n, %next)
}

%again (t: (s32[], f32[256])) -> pred[] {
  %t.1 = (s32[], f32[256]{0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%t.1), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%n.1, %five), direction=LT
}
"""


def program(entry: str, alias: str = "") -> Program:
    lines = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    header = HEADER.replace("ALIAS", alias)
    return Program(
        f"{header}{FUSIONS}{LOOP}\nENTRY %main (p: f32[]) -> f32[] {{\n{lines}\n}}\n"
    )


def test_bytes_of_a_shape():
    sizes = {"f32[]": 4, "s4[10]": 5, "pred[7]": 7, "c64[2]": 16, "token[]": 0}
    sizes |= {"bf16[3,5]{1,0:T(8,128)}": 30, "f8e4m3fn[10]": 10}
    sizes["(f32[2,2]{1,0}, /*index=1*/(s32[], u8[0]{0}))"] = 20
    assert {shape: shape_bytes(shape) for shape in sizes} == sizes


WHILE = """
%p = f32[256]{0} parameter(0)
%zero = s32[] constant(0)
%init = (s32[], f32[256]{0}) tuple(%zero, %p)
ROOT %w = (s32[], f32[256]{0}) while(%init), condition=%again, body=%step"""
UPDATE = """%p = f32[1024]{0} parameter(0)
%u = f32[8]{0} parameter(1)
%i = s32[] parameter(2)
"""
# Programs by name, with their kernels and bytes.
COSTS = {
    "a fusion that reads an operand twice and returns a tuple": (
        """
%p = f32[1024]{0} parameter(0)
ROOT %f = (f32[1024]{0}, f32[]) fusion(%p), kind=kInput, calls=%body""",
        *(1, 2 * 4096 + 4),
    ),
    "a fusion that reads a third of its operand": (
        """
%p = f16[300]{0} parameter(0)
ROOT %f = f32[100]{0} fusion(%p), kind=kLoop, calls=%third""",
        *(1, 200 + 400),
    ),
    "an update in place": (
        UPDATE + "ROOT %f = f32[1024]{0} fusion(%p, %u, %i), kind=kLoop, calls=%place",
        *(1, 32 + 4 + 32),
    ),
    "the same, while others run": (
        f"{UPDATE}%s = ((f32[1024]{{0}}), f32[1024]{{0}}) fusion-start(%p, %u, %i), "
        "calls=%place\nROOT %d = f32[1024]{0} fusion-done(%s)",
        *(1, 32 + 4 + 32),
    ),
    # Per iteration, v + v reads v twice and writes it, and the test reads and writes.
    "a loop of five trips": (
        WHILE + ', backend_config={"known_trip_count":{"n":"5"}}',
        *(5 * 2, 5 * (3 * 1024 + 4 + 4 + 1)),
    ),
    "a loop of unknown length": (WHILE, 2, 3 * 1024 + 4 + 4 + 1),
    "a conditional costs its dearest branch": (
        """
%b = pred[] parameter(0)
%p = (s32[], f32[256]{0}) parameter(1)
ROOT %c = pred[] conditional(%b, %p, %p), branch_computations={%step, %again}""",
        *(1 + 1, 1 + 3 * 1024),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost(name):
    entry, *cost = COSTS[name]
    assert program(entry).cost == Cost(*cost)


def test_aliased_and_copied_bytes():
    entry = """
%p = f32[1024]{0} parameter(0)
%q = f16[10]{0} parameter(1)
%r = f32[] parameter(2)
%c = f32[1024]{0} copy(%p)
%s = (f16[10]{0}, f16[10]{0}, u32[]) copy-start(%q)
%d = f16[10]{0} copy-done(%s)
"""
    alias = " {0}: (1, {}, may-alias), {1, 0}: (2, {}, must-alias) "
    assert program(entry, alias).aliased_bytes == 20 + 4
    assert program(entry).aliased_bytes == 0
    assert program(entry).copies == [4096, 20]
    assert program(entry).cost == Cost(2, 2 * 4096 + 2 * 20)


def test_an_operand_written_in_place_and_not_read_counts_once():
    entry = """
%w = f32[1024]{0} parameter(0)
%h = bf16[1024]{0} parameter(1)
%g = bf16[1024]{0} parameter(2)
%k = (bf16[1024]{0}, f32[1024]{0}) custom-call(%g, %w, %h), ALIASES, api_version=X
""".replace("ALIASES", "output_to_operand_aliasing={{0}: (2, {}), {1}: (1, {})}")
    read = program(entry)
    assert read.cost == Cost(1, 2048 + 2 * 4096 + 2 * 2048)
    unread = dataclasses.replace(read, unread=lambda shape: shape.startswith("bf16"))
    assert unread.cost == Cost(1, 2048 + 2 * 4096 + 2048)
    assert aliased_operands(read.entry["k"]) == [2, 1]
