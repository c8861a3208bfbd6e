"""Test that `import jamp` checks its environment, as pyproject.toml says."""

import re
import tomllib

import pytest

import jamp
from jamp._core import requirements
from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", [(0, 11), (0, 11, 2), (0, 12, 0, 1), None])
def test_a_tested_jax_is_accepted(version):
    assert requirements.jax_problem(version) is None


@pytest.mark.parametrize("version", [(0, 10, 9), (0, 13, 0), (1, 0)])
def test_an_untested_jax_is_refused_and_named(version, monkeypatch):
    monkeypatch.delenv("JAMP_UNTESTED_JAX", raising=False)
    problem = requirements.jax_problem(version)
    assert f"this is JAX {'.'.join(map(str, version))}." in problem
    assert '`pip install "jax>=0.11,<0.13"`' in problem
    monkeypatch.setenv("JAMP_UNTESTED_JAX", "1")
    assert requirements.jax_problem(version) is None


def test_pyproject_has_the_same_bounds_and_no_version_of_its_own():
    bounds = *requirements.OLDEST_JAX, *requirements.FIRST_UNTESTED_JAX
    assert "jax>={}.{},<{}.{}".format(*bounds) in PROJECT["dependencies"]
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert jamp.__version__.count(".") == 2


def test_the_changelog_begins_with_this_version_and_its_date():
    changelog = (ROOT / "docs" / "changelog.md").read_text()
    version, date = re.search(r"^## (\S+), (.+)$", changelog, re.MULTILINE).groups()
    assert version == jamp.__version__
    assert re.fullmatch(r"not released yet|20\d\d-\d\d-\d\d", date)


def test_import_checks_jax_first():
    source = (ROOT / "jamp" / "__init__.py").read_text()
    check = source.index("_requirements.jax_problem()")
    assert source.index("sys.version_info") < check < source.index("jamp._autocast")
