"""What is installed, where JAX runs, and what stands in the way of half being fast."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import jax

from jamp._core.devices import multiplied_by
from pallas_kernels._run import MEASURED_FASTER, resolve

_NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "jaxtyping")
# And what for.
_PACKAGES = dict.fromkeys(_NEEDED, "needed") | {
    "jax-cuda13-plugin": "JAX on NVIDIA GPUs: pip install 'jax[cuda13]'",
    "matplotlib": "for History.plot",
    "orbax-checkpoint": "checkpoints by Orbax",
}
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64", "CUDA_VISIBLE_DEVICES")


def report() -> str:
    """All of it, in a screen."""
    parts = {
        "versions": _versions(),
        "devices": _devices(),
        "fused optimizers": _backend(),
        "settings": _settings(),
        "missing": _missing(),
    }
    lines = []
    for title, rows in parts.items():
        lines += [title, *(f"  {row}" for row in list(rows) or ["nothing"])]
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.platform()}"
    found = {name: _version(name) for name in ("jamp-jax", *_PACKAGES)}
    yield ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[str]:
    devices = jax.devices()
    kinds = dict.fromkeys((d.platform, d.device_kind) for d in devices)
    for platform_name, kind in kinds:
        same = [d for d in devices if d.device_kind == kind]
        yield f"{len(same)} × {kind} ({platform_name}): {_half(same[0])}"
    if devices[0].platform == "cpu" and shutil.which("nvidia-smi"):
        yield "! There is an NVIDIA driver here, but JAX runs on the CPU."


def _half(device: Any) -> str:
    """Which half dtypes its matrix units multiply, as far as one can tell."""
    if device.platform == "cpu":
        return "half is correct here, and no faster"
    if device.platform == "tpu":
        return "multiplies bfloat16: O4 and O5 need no loss scale; float16 is slow"
    known = multiplied_by(device)
    if known is None:
        return "unknown"
    names = ", ".join(known) or "no half"
    return f"compute capability {device.compute_capability}, multiplies {names}"


def _backend() -> Iterator[str]:
    devices = ", ".join(sorted(MEASURED_FASTER))
    yield f"backend 'auto' is {resolve('auto')!r}; 'mosaic' was faster on {devices}"


def _settings() -> Iterator[str]:
    yield f"jax_enable_x64 {jax.config.jax_enable_x64}"  # pyright: ignore[reportAttributeAccessIssue]
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    yield f"jax_default_matmul_precision {precision}"
    if precision in ("highest", "float32"):
        yield "! It keeps every product in float32 at O1 and O4."
    for name in _VARIABLES:
        if name in os.environ:
            yield f"{name}={os.environ[name]}"


def _missing() -> Iterator[str]:
    for name, what in _PACKAGES.items():
        if not _version(name):
            yield f"{name}: {what}"
