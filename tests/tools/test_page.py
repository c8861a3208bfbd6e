"""`Explanation.to_html`: what is in the page, and what it does in a browser."""

import json
import os
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import jamp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: sh .ci/install_browser"
)
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def layers(w, x):
    with jax.named_scope("first<&"):
        x = jnp.exp(x @ w)
    with jax.named_scope("second"):
        return jnp.tanh(x @ w).sum()


EXPLANATION = jamp.explain(layers)(X, X)
FIRST = layers.__code__.co_firstlineno


def test_the_page_holds_all_and_asks_for_nothing():
    page = EXPLANATION.to_html()
    ids, links = (re.findall(rf'{name}="([^"]*)"', page) for name in (" id", "href"))
    assert len(set(ids)) == len(ids)
    assert not re.search(r"(src|href)=\"?(http|//)|@import|url\(", page)
    places = [link[1:] for link in links if not link.startswith("#q=")]
    assert places and set(places) <= set(ids)
    matter = [op for op in EXPLANATION.operations if op.matters]
    assert sum(i.startswith("op") for i in ids) == len(matter) == 5
    rows = re.findall(r'<tr id="(op\d)"', page)
    first, second, *_ = [matter[int(row[2:])].primitive for row in rows]
    assert first == second == "dot_general"
    assert "first&lt;&amp;" in page and "first<&" not in page
    # A product in half and an exponential in float32, on one line of this file; twice.
    assert re.findall(r'"(line\d)" class="both"', page) == ["line0", "line1"]
    assert '"line0" class="both"><i><a href="#q=tests/tools/test_page.py:' in page
    assert "x = jnp.exp(x @ w)" in page


def test_bytes_are_those_of_operands_and_results():
    found = [(op.primitive, op.bytes) for op in EXPLANATION.operations if op.matters]
    # 64 numbers: in half, 2 bytes each, in float32, 4; of the sum, one comes out.
    half, wide = ("dot_general", 3 * 64 * 2), 2 * 64 * 4
    assert found == [half, ("exp", wide), half, ("tanh", wide), ("reduce_sum", 260)]


def in_chromium(page, folder, hash="", script="", width=1400):
    """The page as it is after its scripts have run."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--window-size={width},1000", f"file://{file}#{hash}"]
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, timeout=120, env=env)
    return done.stdout.decode()


@in_browser
def test_search_and_links(tmp_path):
    page = EXPLANATION.to_html()
    dom = in_chromium(page, tmp_path, "q=float32%20second")
    assert "2 of 5 operations" in dom
    rows = re.findall(r'<tr id="(op\d)"[^>]*?( hidden="")?>', dom)
    assert [name for name, hidden in rows if not hidden] == ["op3", "op4"]
    dom = in_chromium(page, tmp_path, f"q=tests/tools/test_page.py:{FIRST + 2}")
    assert "2 of 5 operations" in dom
    dom = in_chromium(page, tmp_path, "op1")
    assert re.search(r'<tr id="op1"[^>]* class="here"', dom)
    assert 'title="Their results leave float16' in dom  # shown where one looks
    assert re.search(r'<span id="line0" class="both here"', dom)
    click = 'search.value = "tanh"; search.dispatchEvent(new Event("input"));'
    assert "1 of 5 operations" in in_chromium(page, tmp_path, script=click)


@in_browser
def test_on_a_small_screen_rows_line_up(tmp_path):
    # Chromium's window is no narrower than 500 px; the page can be.
    script = """
      document.documentElement.style.width = "400px";
      const corner = cell => Math.round(cell.getBoundingClientRect().left);
      const columns = rows.map(row => [0, 1, 5].map(i => corner(row.cells[i])));
      document.title = JSON.stringify([document.body.scrollWidth, columns]);
    """
    dom = in_chromium(EXPLANATION.to_html(), tmp_path, script=script, width=500)
    (title,) = re.findall("<title>(.*?)</title>", dom)
    width, columns = json.loads(title)
    assert width == 400
    assert len(columns) == 5 and all(row == columns[0] for row in columns)
