"""Save the conditions of a run in the JSON of `pytest benchmarks`."""

import datetime
import importlib.metadata
import os
import subprocess
import sys

import pytest

# Before JAX is imported: torch needs half of the GPU's memory in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax

_PACKAGES = ("jamp", "jax", "jaxlib", "optax", "torch", "numpy")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    """Drops the name of the machine and the long list of CPU features."""
    del config
    machine_info.pop("node", None)
    cpu = machine_info.get("cpu", {})
    machine_info["cpu"] = {k: cpu.get(k) for k in ("brand_raw", "count")}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Adds the conditions of the times, and drops 10,000 shapes."""
    del benchmarks
    for result in output_json["benchmarks"]:
        result["params"] = None
    args = " ".join(map(str, config.invocation_params.args))
    output_json["conditions"] = {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m pytest {args}",
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "driver": _driver(),
        "python": sys.version.partition(" ")[0],
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_"))
        },
    }


def _version(package):
    if package == "jamp":  # may run from the clone
        import jamp

        return jamp.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver():
    if jax.default_backend() != "gpu":
        return None
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return printed.stdout.split()[0]
