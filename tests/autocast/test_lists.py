"""Test that autocast's lists are complete, consistent and documented."""

import pathlib
import runpy
from collections import Counter

from jax.extend.core import Primitive, primitives

from jamp._autocast.control_flow import RULES
from jamp._autocast.lists import (
    FUNCTION_ROWS,
    LIBRARY_ROWS,
    SOLVER_ROWS,
    AutocastLists,
    rule_of,
)
from jamp._autocast.primitives import ROWS, Rule

DOCS = pathlib.Path(__file__).parents[2] / "docs"
page = runpy.run_path(str(DOCS / "autocast_lists.py"))["page"]
PUBLIC = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
LISTED = [name for row in ROWS for name in row.primitives]

# Exists only while JAX linearizes.
INTERNAL = {"custom_lin"}


def test_the_page_is_the_generated_one():
    command = "python docs/autocast_lists.py > docs/autocast_lists.md"
    assert (DOCS / "autocast_lists.md").read_text() == page(), command
    for name in RULES:
        assert f"`{name}`" in page().rpartition("## What holds programs")[2]


def test_every_primitive_of_jax_is_known():
    assert len(PUBLIC) > 150
    assert PUBLIC - set(LISTED) - RULES.keys() == INTERNAL


def test_nothing_is_in_two_rows():
    functions = [f"jit {name}" for row in FUNCTION_ROWS for name in row.primitives]
    libraries = [n for row in (*LIBRARY_ROWS, *SOLVER_ROWS) for n in row.primitives]
    names = Counter([*LISTED, *RULES, *functions, *libraries])
    assert [name for name, count in names.items() if count > 1] == []


# apex/amp/lists by JAX's names. docs/autocast.md says where jamp differs.
APEX = {
    Rule.HALF: "dot_general conv_general_dilated",
    Rule.FLOAT32: "acos asin cosh erf_inv exp expm1 log log2 rsqrt sinh tan pow "
    "cumprod cumsum reduce_prod reduce_sum",
    Rule.PROMOTE: "add sub div mul eq ge gt le lt ne",
    Rule.MOVE: "concatenate",
}


def test_rules_are_those_of_apex():
    for rule, names in APEX.items():
        for name in names.split():
            assert rule_of(AutocastLists(), name) is rule, name
