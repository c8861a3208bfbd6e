"""Test `python -m jamp`, which prints versions, devices and warnings about speed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp import __main__ as doctor
from tests.support import subprocesses


@pytest.mark.slow
def test_the_doctor_prints_a_screen():
    printed = subprocesses.run("jamp")
    assert f"jax {jax.__version__}, " in printed
    assert "(cpu): half is correct here, and no faster" in printed
    assert "JAX_PLATFORMS=cpu" in printed and len(printed.splitlines()) < 12


def test_the_doctor_warns_of_a_precision_that_keeps_matmuls_in_float32():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with jax.default_matmul_precision("highest"):
        printed = "\n".join(doctor.report())
        (product,) = jamp.explain(jnp.matmul)(x, x).operations
    assert "=highest keeps every matmul in float32 at O1 and O4." in printed
    assert product.dtype == "float32"  # the warning is true


@pytest.mark.parametrize(
    "platform, capability, says",
    [
        ("gpu", "8.9", "multiplies float16, bfloat16, float8"),
        ("gpu", "6.1", "multiplies no half"),
        ("gpu", "gfx942", "unknown"),
        ("tpu", None, "use O4 or O5; float16 is slow"),
    ],
)
def test_which_dtypes_a_device_multiplies(platform, capability, says):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert doctor._half(device).endswith(says)
