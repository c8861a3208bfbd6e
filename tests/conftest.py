"""Set up all tests: eight CPUs, strict dtype promotion, reasons for skips."""

import gc
import importlib.util
import os
import platform
import tempfile

# Before JAX is imported; otherwise its CUDA plugin looks for a GPU, cuDNN and cuPTI.
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if "JAMP_GPU" in os.environ else "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests spend most of their time compiling. This flag disables LLVM's optimizations;
    # XLA still fuses and rounds the same. Child processes inherit it.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # XLA orders sums by the processor's widest instructions. Without this limit, the
    # last digits differ between machines. Child processes inherit it.
    flags = os.environ.get("XLA_FLAGS", "")
    if platform.machine() in ("x86_64", "AMD64") and "xla_cpu_max_isa" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX2".strip()

import hypothesis
import jax
import pytest

from tests.support import compilers as compilers

# Compiling exceeds any deadline, and CI needs the same examples in each run.
hypothesis.settings.register_profile("jamp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jamp")

ON_GPU = os.environ["JAX_PLATFORMS"] != "cpu"
CUDA_COMPILER = importlib.util.find_spec("jax_cuda13_plugin")

# Tests, workers and child processes compile the same small programs. JAX does not lock
# its cache: a process that reads a partial file warns and compiles.
MADE = None
if not ON_GPU:
    jax.config.update("jax_num_cpu_devices", 8)  # most programs use one
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        MADE = tempfile.TemporaryDirectory(prefix="jamp-compiled-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = MADE.name
    for name, value in {
        "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_unconfigure():
    if MADE:
        MADE.cleanup()


def pytest_ignore_collect(collection_path):
    """Collects no doctests from helpers and scripts."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith("test_"):
        return True


def pytest_collection_modifyitems(items):
    for item in items:
        assert " at 0x" not in item.nodeid, "workers must agree on the ids of tests"
        if item.get_closest_marker("gpu") and "JAMP_GPU" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu"))
        if item.get_closest_marker("eight_devices") and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs eight CPU devices"))
        if item.get_closest_marker("h200") and not CUDA_COMPILER:
            reason = "needs XLA's compiler for GPUs: make .venv/h200"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter, config):
    if "not slow" in (expression := config.option.markexpr):
        terminalreporter.write_line(
            f"`-m '{expression}'` left tests out: pages, examples, devices, cases that "
            "compile for long, and programs for an absent GPU. `make test-all` runs "
            "every test, `make test-rest` only these."
        )


def pytest_collection_finish():
    """Collects garbage rarely: it took 7 % of the tracing time and freed little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def dtype_promotion(request):
    """Requires explicit casts, except where optax promotes half params."""
    standard = request.node.get_closest_marker("standard_promotion")
    with jax.numpy_dtype_promotion("standard" if standard else "strict"):
        yield
