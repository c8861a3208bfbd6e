"""The documentation runs: each page's Python blocks, in order, in one namespace.

A text block right after a Python block is what that block prints.
"""

import pathlib
import re
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "pallas_kernels" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
FENCED = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\s*^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.standard_promotion  # as in the reader's program
@pytest.mark.parametrize("page", [page for page in PAGES if "```py" in PAGES[page]])
def test_page_runs_and_prints_what_it_shows(page, capsys, monkeypatch, tmp_path):
    blocks = list(FENCED.finditer(PAGES[page]))
    # None in another form, indented or under another name, escapes the pattern.
    assert len(blocks) == PAGES[page].count("```py")

    module = types.ModuleType("documentation")  # flax.linen and pickle look for it
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        line = PAGES[page].count("\n", 0, block.start("code"))
        code = "\n" * line + block["code"]  # a traceback shows the line of the page
        exec(compile(code, ROOT / page, "exec"), module.__dict__)
        printed = capsys.readouterr().out.replace(f"{ROOT}/", "")
        if block["output"] is not None:
            assert printed == block["output"], f"{page}:{line}"


PINNED = sorted(
    {
        (page, file, test)
        for page, text in PAGES.items()
        for file, test in re.findall(r"(test_\w+\.py)::(test_\w+)", text)
    }
)


def test_tests_that_pages_name_exist():
    assert len(PINNED) > 40
    for page, file, test in PINNED:
        source = (ROOT / "tests" / file).read_text()
        assert f"\ndef {test}(" in source, f"{page} names {file}::{test}"
