"""Run the Python blocks of each page, in order, and check the reference."""

import re
import runpy
import sys
import types

import numpy as np
import pytest

from tests import surface
from tests.support.pages import PAGES, ROOT

FENCED = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\s*^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


FIRST = "README.md", "docs/quickstart.md"
# Pages of recipes, which people paste one by one: each block runs alone.
ALONE = "docs/recipes.md", "docs/gradients.md", "docs/frameworks.md"
LATER = [page for page in PAGES if "```py" in PAGES[page] and page not in FIRST]
LATER = [pytest.param(page, marks=pytest.mark.slow) for page in LATER]


@pytest.mark.standard_promotion  # as in the reader's program
@pytest.mark.parametrize("page", [*FIRST, *LATER])
def test_page_runs_and_prints_what_it_shows(page, capsys, monkeypatch, tmp_path):
    blocks = list(FENCED.finditer(PAGES[page]))
    # The pattern must find every block, also indented ones.
    assert len(blocks) == PAGES[page].count("```py")

    module = types.ModuleType("documentation")  # flax.linen and pickle look for it
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        module = types.ModuleType("documentation") if page in ALONE else module
        monkeypatch.setitem(sys.modules, module.__name__, module)
        line = PAGES[page].count("\n", 0, block.start("code"))
        code = "\n" * line + block["code"]  # a traceback shows the line of the page
        exec(compile(code, ROOT / page, "exec"), module.__dict__)
        printed = capsys.readouterr().out.replace(f"{ROOT}/", "")
        if block["output"] is not None:
            assert printed == block["output"], f"{page}:{line}"


# The reference has every public name, and the pictures show real runs.

DOCS = ROOT / "docs"
REFERENCE = runpy.run_path(str(DOCS / "reference.py"))


def test_the_reference_has_every_public_name_and_no_other():
    called = [line.partition("(")[0] for line in surface.lines() if "(" in line]
    expected = {name for name in called if name.rpartition(".")[0] not in called}
    listed = {
        f"{module}.{name}"
        for module, purposes in REFERENCE["NAMES"].items()
        for names in purposes.values()
        for name in names.split()
    }
    assert listed == expected, "add the name to NAMES in docs/reference.py"


def test_the_reference_is_current():
    pages = REFERENCE["pages"]()
    assert set(pages) == set((DOCS / "reference").glob("*.md"))
    for path, text in pages.items():
        assert path.read_text() == text, "run `python docs/reference.py`"


NAMED = re.compile(r"(test_\w+\.py)(?:::(test_\w+))?")


def test_the_tests_that_comments_name_exist():
    tests: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests[path.name] = tests.get(path.name, "") + path.read_text()
    texts = PAGES | {"SECURITY.md": (ROOT / "SECURITY.md").read_text()}
    for page, text in texts.items():
        for comment in re.findall(r"<!--(.*?)-->", text, re.DOTALL):
            for file, name in NAMED.findall(comment):
                assert f"def {name}" in tests.get(file, ""), f"{page}: {file}::{name}"


LINK = re.compile(r"\]\((?!http)([^)#]+)")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_outside_of_the_site_lead_somewhere(page):
    links = LINK.findall((ROOT / page).read_text())
    assert links
    for link in links:
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_table_of_other_libraries_is_current():
    """torch and Qwix are only in the environment of `make peers`."""
    pytest.importorskip("jmp")
    from benchmarks import peers

    section = PAGES["docs/results.md"].partition("## Other libraries")[2]
    head, _, *rows = [line for line in section.splitlines() if line[:1] == "|"]
    names = [cell.strip() for cell in head.split("|")]
    shown = {row.split("|")[1].strip(): row.split("|") for row in rows}
    for kind in (peers.Jamp, peers.Jmp, peers.Flax, peers.ByHand):
        peer = kind()
        for row, cell in peers.column(peer).items():
            assert shown[row][names.index(peer.name)].strip() == cell, (row, peer.name)


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("agg")
    return runpy.run_path(str(DOCS / "pictures.py"))


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_one_run_recovers_and_the_other_stays_at_its_first_loss(pictures):
    (losses, scales, skips), (flat, _, _) = pictures["runs"](steps=80)
    assert losses[-1] < losses[0] / 4
    assert skips[:4].all() and not skips[4] and skips[5:].any()
    assert scales[5] < scales[0]
    assert abs(flat / flat[0] - 1).max() < 0.03  # each step has its own data


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_without_masters_training_falls_behind_float32(pictures):
    float32, masters, none = pictures["masters_runs"](steps=80).values()
    np.testing.assert_allclose(masters, float32, atol=0.01)
    start, *ends = (x[-20:].mean() for x in (float32[:20], float32, none))
    assert start - ends[1] < 0.5 * (start - ends[0])
