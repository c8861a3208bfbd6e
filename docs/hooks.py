"""Adds pages from outside docs/ to the site, and redirects of moved pages."""

import pathlib
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ROOT = pathlib.Path(__file__).parents[1]
_OUTSIDE = {  # pages in the folder of their subject
    "index.md": "README.md",
    "deviations.md": "tests/docs/deviations.md",
    "examples.md": "examples/README.md",
    "results_in_full.md": "benchmarks/results/README.md",
}
_TO_DOCS = re.compile(r"\]\((?:\.\./)*docs/(\S+\.(?:md|svg)\S*)\)")
_ELSEWHERE = re.compile(r"\[([^]]+)\]\((?:docs|examples)?/?\w+\.(?:py|md)\)")
_REDIRECT = """\
<!doctype html>
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={to}">
<a href="{to}">This page has moved.</a>
"""


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Adds the pages from outside; links to files without a page become plain text."""
    del kwargs
    for page, path in _OUTSIDE.items():
        text = _TO_DOCS.sub(r"](./\1)", (_ROOT / path).read_text())
        for other, file in _OUTSIDE.items():
            text = text.replace(f"]({file}", f"](./{other}")
        text = _ELSEWHERE.sub(r"\1", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Points links from docs/ at the added pages."""
    del kwargs
    for page, path in _OUTSIDE.items():
        markdown = markdown.replace(f"](../{path}", f"]({page}")
    return markdown


def on_post_build(config: MkDocsConfig, **kwargs: Any) -> None:
    """Writes a page for each old address in mkdocs.yml's `extra.moved`."""
    del kwargs
    for old, new in config.extra["moved"].items():
        page, _, anchor = new.partition("#")
        page = "" if page == "index" else f"{page}/"
        to = f"../{page}" + (anchor and f"#{anchor}")
        folder = pathlib.Path(config.site_dir) / old
        folder.mkdir(exist_ok=True)
        (folder / "index.html").write_text(_REDIRECT.format(to=to))
