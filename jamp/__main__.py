"""`python -m jamp` prints versions, devices, and settings that make half slow."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import jax

from jamp._core.devices import matmul_dtypes

_PACKAGES = ("jamp-jax", "jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda13-plugin")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64", "CUDA_VISIBLE_DEVICES")


def report() -> Iterator[str]:
    """Yields the lines to print."""
    yield f"Python {platform.python_version()}, {platform.platform()}"
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    yield ", ".join(f"{x} {installed.get(x, 'not installed')}" for x in _PACKAGES)
    devices = jax.devices()
    for kind in dict.fromkeys(d.device_kind for d in devices):
        same = [d for d in devices if d.device_kind == kind]
        yield f"{len(same)} × {kind} ({same[0].platform}): {_half(same[0])}"
    if devices[0].platform == "cpu" and shutil.which("nvidia-smi"):
        yield (
            "! This machine has an NVIDIA driver, but JAX runs on the CPU: "
            "pip install 'jax[cuda13]'."
        )
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision in ("highest", "float32"):
        yield (
            f"! jax_default_matmul_precision={precision} keeps every matmul in float32 "
            "at O1 and O4."
        )
    for name in filter(os.environ.__contains__, _VARIABLES):
        yield f"{name}={os.environ[name]}"


def _half(device: Any) -> str:
    """Describes the half dtypes that the matrix units of a device multiply."""
    if device.platform == "cpu":
        return "half is correct here, and no faster"
    if device.platform == "tpu":
        return "multiplies bfloat16: use O4 or O5; float16 is slow"
    known = matmul_dtypes(device)
    if known is None:
        return "unknown"
    names = ", ".join(known) or "no half"
    return f"compute capability {device.compute_capability}, multiplies {names}"


if __name__ == "__main__":
    print(*report(), sep="\n")
