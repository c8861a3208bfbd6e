"""Where a state lies that is made from params on a mesh, eagerly and under jit."""

import functools

import pytest

from tests import subprocesses
from tests.mesh_states import CASES


@functools.cache
def reports():
    flags = "--xla_force_host_platform_device_count=4"
    return subprocesses.json_of("tests.mesh_states", XLA_FLAGS=flags)


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_moments_and_masters_lie_like_their_params_and_scalars_everywhere(name):
    report = reports()[name]
    assert report["leaves"] > 9
    assert report["misplaced"] == []
    assert report["after"] == []


@each_case
def test_jit_makes_the_state_that_eager_code_makes(name):
    assert reports()[name]["same"]


@each_case
def test_the_second_step_is_not_compiled_again(name):
    assert reports()[name]["compiled"] == 1
