"""What is wrong with an example's command line is said, and before JAX is imported."""

import runpy
import sys

import pytest

from tests.scripts import EXAMPLES

SCRIPTS = (
    "bert_lamb char_lm dcgan digits distributed fp16_optimizer haiku_or_equinox "
    "imagenet"
).split()
WRONG = {
    "--opt-level O9": "'O9': one of O0, O1, O2, O3, O4, O5",
    "--loss-scale banana": "'banana': a positive number, such as 128, or 'dynamic'",
    "--loss-scale -1": "'-1': a positive number",
    "--loss-scale 0": "'0': a positive number",
    "--init-scale nan": "'nan': a positive number",
    "--epochs 0": "'0': a whole number of at least 1",
    "--batch-size 1.5": "'1.5': a whole number of at least 1",
    "--plot /no/such/a.png": "/no/such cannot be written to",
    "--plot a.txt": "must end in .png, .svg or .pdf",
    "--resume": "--resume needs --checkpoint-dir",
    "--beside 0": "'0': one of O0",
}


@pytest.fixture
def run(monkeypatch, capsys):
    def run(script, flags):
        monkeypatch.syspath_prepend(EXAMPLES)
        for name in ("jax", "flax", "jamp"):  # importing them is an error
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(sys, "argv", [script, *flags.split()])
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        out, err = capsys.readouterr()
        return " ".join((out + err).split())

    return run


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_flag_is_an_error_without_jax(flags, run):
    assert WRONG[flags] in run("digits", flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_defaults_without_jax(script, run):
    assert run(script, "--help").count("(default: ") >= 2
    assert "at least 1" in run(script, "--steps 0")


@pytest.mark.parametrize(
    "path, error",
    [
        (EXAMPLES / "flags.py", SystemExit),
        (EXAMPLES / "../jamp/__init__.py", ImportError),
    ],
)
def test_an_old_python_gets_one_line(path, error, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(error, match=r"^jamp needs Python 3\.12 or newer; this is 3\."):
        runpy.run_path(str(path))
