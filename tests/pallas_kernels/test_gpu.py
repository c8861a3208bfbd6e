"""What only a GPU can tell; `make gpu` runs each in a process of its own."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from tests.bits import assert_same_bits
from tests.pallas_kernels import kernels

REHEARSES = os.environ.get("JAMP_GPU") == "rehearse"
KERNELS = pk.Options(backend="interpret" if REHEARSES else "mosaic")

pytestmark = pytest.mark.gpu


def test_gpu_run_is_on_a_gpu():
    # JAX falls back to the CPU in silence where CUDA does not start.
    assert jax.default_backend() == ("cpu" if REHEARSES else "gpu")


@pytest.mark.parametrize("name", kernels.CASES)
def test_kernel_computes_what_xla_does(name):
    case = kernels.CASES[name]
    for sizes in (kernels.SIZES, (1, 129), (2**20 + 1,))[: 1 if REHEARSES else 3]:
        assert_as_xla(case, case.make(sizes))


@pytest.mark.parametrize("name", [n for n in kernels.CASES if ", copied, " in n])
def test_a_skip_changes_no_bit(name):
    weights, states, *rest, _ = kernels.CASES[name].make(kernels.SIZES)
    call = functools.partial(kernels.CASES[name].call, KERNELS)
    results = jax.jit(call)(weights, states, *rest, jnp.bool_(True))
    assert_same_bits(results, (weights, states))


def assert_as_xla(case, args):
    found, expected = (
        jax.jit(functools.partial(case.call, options))(*args)
        for options in (KERNELS, pk.Options(backend="xla"))
    )
    kernels.assert_close(found, expected)
