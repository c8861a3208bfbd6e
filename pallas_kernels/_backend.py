"""Which backend runs the kernels, and why.

Mosaic GPU compiles for NVIDIA's compute capability 9.0 (Hopper) and newer. For an older
one its compiler aborts the process, so the device is asked first, always.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax
from jaxtyping import Array

type Backend = Literal["auto", "xla", "mosaic", "interpret"]

BACKENDS = get_args(Backend.__value__)

# What a device's name says of its compute capability, for programs that are compiled
# for a device that is not here.
_SUPPORTED_KINDS = frozenset(
    "H20 H100 H200 H800 GH200 B100 B200 B300 GB200 GB300".split()
)
_OLDEST = (9, 0)

# Device kinds on which the benchmarks showed Mosaic to be no slower than XLA on every
# tree of benchmarks/specs.py. A kind enters with its results in benchmarks/results.
MEASURED_FASTER: frozenset[str] = frozenset()


class BackendError(RuntimeError):
    """A backend that cannot run on the device."""


def check_backend(backend: str) -> None:
    """Raises for what is not a backend.

    Raises:
        ValueError: it is none of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")


def resolve(backend: str, arrays: Iterable[Array] = ()) -> Backend:
    """The backend that runs: "xla", "mosaic" or "interpret".

    Args:
        backend: one of `BACKENDS`. "auto" is the fastest that was measured on the
            device, and XLA where nothing was.
        arrays: what the kernel is to work on. Their mesh, if they have one, says the
            device; else JAX's default device does.

    Raises:
        ValueError: unknown backend.
        BackendError: "mosaic" on a device that it cannot compile for.

    >>> resolve("auto")
    'xla'
    """
    if backend in ("xla", "interpret"):
        return backend
    if backend == "auto" and not MEASURED_FASTER:
        return "xla"
    check_backend(backend)
    kind, supported = _target(arrays)
    if backend == "mosaic" and not supported:
        raise BackendError(
            f"backend='mosaic' needs an NVIDIA GPU of compute capability 9.0 or newer, "
            f"the device is {kind!r}. Choose backend='auto', which never fails, or "
            "'interpret' to debug on the CPU."
        )
    fast = supported and (backend == "mosaic" or kind in MEASURED_FASTER)
    return "mosaic" if fast else "xla"


def _target(arrays: Iterable[Array]) -> tuple[str, bool]:
    """The kind of the device that the program is for, and whether Mosaic knows it."""
    device = jax.local_devices()[0]
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    told = (getattr(mesh, "abstract_device", None) for mesh in meshes)
    abstract = next(filter(None, told), device)
    if abstract.device_kind == device.device_kind:
        return device.device_kind, _is_supported_device(device)
    return abstract.device_kind, _is_supported_kind(abstract.device_kind)


def _is_supported_device(device: Any) -> bool:
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return False
    try:
        major, minor = str(capability).split(".")
        return (int(major), int(minor)) >= _OLDEST
    except ValueError:  # ROCm names architectures: "gfx942"
        return False


def _is_supported_kind(kind: str) -> bool:
    words = kind.replace("-", " ").split()
    return words[:1] == ["NVIDIA"] and any(w in _SUPPORTED_KINDS for w in words)
