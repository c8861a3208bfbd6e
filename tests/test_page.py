"""`Explanation.to_html`: what is in the page, and what it does in a browser."""

import html
import html.parser
import os
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.test_explain import ROWS, STACK

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


class Parser(html.parser.HTMLParser):
    """The text of a page, its links, and the places that they can go to."""

    def __init__(self, page):
        super().__init__()
        self.links, self.ids, self.open, self.text = [], [], [], ""
        self.classes = {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs["href"]] if "href" in attrs else []
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.classes[attrs.get("id")] = attrs.get("class")
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_holds_all_and_asks_for_nothing():
    page = EXPLANATION.to_html()
    parsed = Parser(page)
    assert parsed.open == [] and len(set(parsed.ids)) == len(parsed.ids)
    assert not re.search(r"(src|href)=\"?(http|//)|@import|url\(", page)
    places = [link[1:] for link in parsed.links if not link.startswith("#q=")]
    assert places and set(places) <= set(parsed.ids)
    matter = [op for op in EXPLANATION.operations if op.matters]
    assert sum(i.startswith("op") for i in parsed.ids) == len(matter) == 5
    assert "first<&" in parsed.text and EXPLANATION.title in parsed.text
    # A product in half and an exponential in float32, on one line of this file; twice.
    lines = [i for i in parsed.ids if parsed.classes[i] == "both" and "line" in i]
    assert lines == ["line0", "line1"]
    assert '"line0" class="both"><i><a href="#q=tests/test_page.py:' in page
    assert "x = jnp.exp(x @ w)" in parsed.text


def test_bytes_are_those_of_operands_and_results():
    found = [(op.primitive, op.bytes) for op in EXPLANATION.operations if op.matters]
    # 64 numbers: in half, 2 bytes each, in float32, 4; of the sum, one comes out.
    half, wide = ("dot_general", 3 * 64 * 2), 2 * 64 * 4
    assert found == [half, ("exp", wide), half, ("tanh", wide), ("reduce_sum", 260)]


def in_chromium(page, folder, hash="", script=""):
    """The page as it is after its scripts have run."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1400,1000", f"file://{file}#{hash}"]
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
    dom = in_chromium(page, tmp_path, f"q=tests/test_page.py:{FIRST + 2}")
    assert "2 of 5 operations" in dom
    dom = in_chromium(page, tmp_path, "op1")
    assert re.search(r'<tr id="op1"[^>]* class="here"', dom)
    assert 'title="Their results leave float16' in dom  # shown where one looks
    assert re.search(r'<span id="line0" class="both here"', dom)
    click = 'search.value = "tanh"; search.dispatchEvent(new Event("input"));'
    assert "1 of 5 operations" in in_chromium(page, tmp_path, script=click)


@in_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits(width, tmp_path):
    variables = jax.eval_shape(STACK.init, jax.random.key(0), ROWS)
    page = html.escape(jamp.explain(STACK.apply)(variables, ROWS).to_html())
    # In a frame: a window of Chromium is at least 500 pixels wide.
    frame = f'<iframe width={width} height=900 frameborder=0 srcdoc="{page}"></iframe>'
    script = """
    const frame = document.querySelector("iframe");
    frame.onload = () => {
      const inside = frame.contentDocument, wide = frame.contentWindow.innerWidth;
      const all = [...inside.querySelectorAll("header, nav, .list, td, summary, pre")];
      const over = all.filter(e => e.getBoundingClientRect().right > wide + 1);
      const fits = inside.documentElement.scrollWidth <= wide;
      document.body.dataset.fits = [wide, over.length, fits].join(" ");
    };
    """
    dom = in_chromium(f"<body>{frame}</body>", tmp_path, script=script)
    assert f'data-fits="{width} 0 true"' in dom, re.search('data-fits="[^"]*"', dom)
