"""The site: its reference has every public name, and its pictures show what runs."""

import importlib
import pathlib
import re
import runpy

import numpy as np
import pytest

from tests import surface

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMED = {
    name
    for page in DOCS.glob("reference*.md")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
}


def test_the_reference_has_every_public_name_and_no_other():
    called = [line.partition("(")[0] for line in surface.lines() if "(" in line]
    expected = {name for name in called if name.rpartition(".")[0] not in called}
    assert NAMED == expected, "write `::: NAME` on a page docs/reference*.md"
    for name in NAMED:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert re.search(rf": {page.name}$", navigation, re.MULTILINE), page.name


LINK = re.compile(r"\]\((?!http)([^)#]+)")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_outside_of_the_site_lead_somewhere(page):
    links = LINK.findall((ROOT / page).read_text())
    assert links
    for link in links:
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore::jamp.PrecisionWarning")
def test_the_page_shows_what_the_cases_give():
    pytest.importorskip("jmp")  # which a lent machine may not have
    peers = importlib.import_module("benchmarks.peers")
    page = (DOCS / "peers.md").read_text()
    for name, row in peers.table().items():
        assert f"| {name} | {' | '.join(row.values())} |" in page, name


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("agg")
    return runpy.run_path(str(DOCS / "pictures.py"))


@pytest.mark.standard_promotion
def test_one_run_recovers_and_the_other_stays_at_its_first_loss(pictures):
    (losses, scales, skips), (flat, _, _) = pictures["runs"]()
    assert losses[-1] < losses[0] / 4
    assert skips[:4].all() and not skips[4] and skips[5:].any()
    assert scales[5] < scales[0]
    assert abs(flat / flat[0] - 1).max() < 0.03  # each step has data of its own


@pytest.mark.standard_promotion
def test_without_masters_training_falls_behind_float32(pictures):
    float32, masters, none = pictures["masters_runs"](steps=150).values()
    np.testing.assert_allclose(masters, float32, atol=0.01)
    start, *ends = (x[-20:].mean() for x in (float32[:20], float32, none))
    assert start - ends[1] < 0.5 * (start - ends[0])
