"""For the site: README is its first page, and pages that moved redirect."""

import pathlib
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_README = pathlib.Path(__file__).parents[1] / "README.md"
_ON_SITE = re.compile(r"\]\(docs/(\S+\.(?:md|svg)\S*)\)")
_ELSEWHERE = re.compile(r"\[([^]]+)\]\((?:docs|examples)?/?\w+\.(?:py|md)\)")
_REDIRECT = """\
<!doctype html>
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={to}">
<a href="{to}">This page has moved.</a>
"""


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Adds README as index.md: links lead to the site's pages, or are words."""
    del kwargs
    text = _ELSEWHERE.sub(r"\1", _ON_SITE.sub(r"](./\1)", _README.read_text()))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_post_build(config: MkDocsConfig, **kwargs: Any) -> None:
    """Writes a page for each old address in mkdocs.yml's `extra.moved`."""
    del kwargs
    for old, new in config.extra["moved"].items():
        page, _, anchor = new.partition("#")
        page = "" if page == "index" else f"{page}/"
        to = f"../{page}" + (anchor and f"#{anchor}")
        folder = pathlib.Path(config.site_dir) / old
        folder.mkdir()
        (folder / "index.html").write_text(_REDIRECT.format(to=to))
