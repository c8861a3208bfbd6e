"""`python -m jamp`: what it prints, and what it says of what it cannot do."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp.tools import _doctor
from jamp.tools._command import main
from tests import subprocesses

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def example():
    """What `explain` is pointed at."""
    return (lambda w, x: jnp.exp(x @ w), X, X)


def not_an_example():
    return 3


def test_levels_are_those_of_initialize():
    head, *rows = subprocesses.run("jamp", "levels").splitlines()
    levels = head.split()[1:]
    assert levels == ["O0", "O1", "O2", "O3", "O4", "O5", "O6"] and len(rows) == 7
    words = {"None": "-", "False": "-", "True": "yes", "1.0": "1"}
    for row in rows:
        name, *cells = row.split()
        for level, cell in zip(levels, cells, strict=True):
            value = getattr(jamp.Properties.from_opt_level(level), name)
            value = bool(value) if name == "fp8" else value
            if not isinstance(value, str | float | bool | None):
                value = jnp.dtype(value).name
            assert words.get(str(value), value) == cell, (name, level)


def test_without_a_command_it_prints_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("levels", "doctor", "explain", "cost"))


def test_doctor(capsys, monkeypatch):
    monkeypatch.setattr(_doctor, "_version", lambda name: {"jax": "0.11.0"}.get(name))
    with jax.default_matmul_precision("highest"):
        assert main(["doctor"]) == 0
        # What it warns of is so.
        (product,) = jamp.explain(jnp.matmul)(X, X).operations
        assert product.dtype == "float32"
    printed = capsys.readouterr().out
    for words in (
        "jax 0.11.0\n",
        "(cpu): half is correct here, and no faster",
        "backend 'auto' is 'xla'",
        "! It keeps every product in float32 at O1 and O4.",
        "  flax: needed",
        "  matplotlib: for History.plot",
    ):
        assert words in printed


@pytest.mark.parametrize(
    "platform, capability, says",
    [
        ("gpu", "8.9", "multiplies float16, bfloat16, float8"),
        ("gpu", "6.1", "multiplies no half"),
        ("gpu", "gfx942", "unknown"),
        ("tpu", None, "need no loss scale; float16 is slow"),
    ],
)
def test_what_a_device_multiplies(platform, capability, says):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert _doctor._half(device).endswith(says)


def test_explain(capsys, tmp_path):
    def printed(*arguments):
        assert main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    fn, *args = example()
    of = "tests.tools.test_command:example"
    assert printed(of) == f"{jamp.explain(fn)(*args)}\n"
    assert "(bfloat16)" in printed(of, "--dtype", "bfloat16")
    assert printed(of, "--filter", "products").splitlines()[1].startswith("dot_gen")
    folded = printed(of, "--filter", "products", "--depth", "1").splitlines()
    assert folded[1].startswith("module") and folded[2].endswith("100%")
    assert printed(of, "--markdown").startswith("| line | module |")
    file = tmp_path / "page.html"
    assert printed(of, "--html", str(file)) == f"Wrote {file}.\n"
    assert file.read_text() == jamp.explain(fn)(*args).to_html()


@pytest.mark.parametrize(
    "given, two",
    [
        ("--html {} --filter (", "--html and --filter"),
        ("--html {} --depth 1", "--html and --depth"),
        ("--html {} --markdown", "--html and --markdown"),
        ("--markdown --depth 0", "--markdown and --depth"),
    ],
)
def test_what_a_form_has_no_use_for_is_refused(given, two, capsys, tmp_path):
    file = tmp_path / "page.html"
    of = "tests.tools.test_command:example"
    assert main(["explain", of, *given.format(file).split()]) == 2
    captured = capsys.readouterr()
    assert f"explain: {two} do not go together: omit one." in captured.err
    assert captured.out == "" and not file.exists()


@pytest.mark.parametrize(
    "target, says",
    [
        ("tests.tools.test_command", "expected `module:function`"),
        ("no_module_here:f", "No module named 'no_module_here'"),
        (
            "tests.tools.test_command:nothing",
            "tests.tools.test_command has no 'nothing'",
        ),
        (
            "tests.tools.test_command:not_an_example",
            r"must return `(fn, *args)`, got 3",
        ),
    ],
)
def test_what_it_cannot_explain(target, says, capsys):
    assert main(["explain", target]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""
    assert main(["explain", "tests.tools.test_command:example", "--depth", "0"]) == 2
    assert "`depth` must be at least 1" in capsys.readouterr().err
