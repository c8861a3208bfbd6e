"""Where a state lies that is made from params on a mesh, eagerly and under jit."""

import functools

import pytest

from tests import subprocesses
from tests.mesh_states import CASES, PLACES


@functools.cache
def reports():
    return subprocesses.on_devices(4, "tests.mesh_states")


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


@pytest.mark.parametrize("place", PLACES)
def test_nor_is_it_on_axes_of_other_kinds(place):
    assert reports()["compiled"][place] == [1, 1]


FOUR = "a mesh (data: 4) of devices [0, 1, 2, 3]"
TWO = "a mesh (data: 2) of devices [0, 1]"
REFUSED = {
    "params": f"params['a'] on {FOUR}, and params['b'] on {TWO}.",
    "one device": f"params['a'] on {FOUR}, and params['b'] on devices [3].",
    "field": f"params['a'] on {FOUR}, and batch_stats['mean'] on {TWO}.",
    "batch": f"state.step on {FOUR}, and args[0] on {TWO}.",
    "gradients": f"state.step on {FOUR}, and grads['w'] on {TWO}.",
    "new field": f"state.step on {FOUR}, and stats on {TWO}.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_on_different_devices_are_named(name):
    message = reports()["refused"][name]
    assert message.startswith(f"Arrays lie on different devices: {REFUSED[name]} Put ")
