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

# `make test` omits these files and tests, which compile for long or check the docs.
SLOW = """
autocast/test_ablations
autocast/test_accuracy
autocast/test_explicit_mesh
autocast/test_fp8::test_gradients_of_weights_stay_half_or_are_reduced_in_float32
autocast/test_fp8::test_under_vmap_the_batch_has_one_scale
autocast/test_fp8::test_wherever_products_run_in_half
autocast/test_fuzz
autocast/test_heads::test_a_loss_inside_a_shard_map_scatters_nothing
autocast/test_heads::test_labels_out_of_bounds_are_as_in_jax
autocast/test_islands::test_a_summed_gradient_for_each_example_and_eagerly
autocast/test_large_logits
autocast/test_libraries
autocast/test_loops::test_derivatives
autocast/test_multiplications::test_an_inner_product_is_a_sum_in_float32
autocast/test_nesting::test_a_loss_may_be_checkpointed_inside_and_outside
autocast/test_sweep
autocast/test_torch::test_no_less_accurate_than_torch[loss_ctc-bfloat16]
autocast/test_upgrades
autocast/test_work
checkpoint/test_resume
core/test_properties
devices/test_many_devices
devices/test_many_hosts
devices/test_placement
devices/test_reduce_dtype
devices/test_sync_batchnorm
diagnostics/test_compare::test_a_model_of_many_constructs
diagnostics/test_compare::test_an_intact_gpt2_at_o4_has_the_error_of_one_by_hand
diagnostics/test_compare::test_an_intact_gpt2_has_no_flag
diagnostics/test_compare::test_models_of_other_libraries_have_modules_and_no_flag
diagnostics/test_doctor::test_the_doctor_prints_a_screen
diagnostics/test_locate::test_locate_looks_inside_loops_and_calls
diagnostics/test_locate::test_shard_map_is_one_operation_and_vmap_looks_inside
docs/test_distributed
nnx/test_nnx::test_autocast_keeps_the_models_writes_and_leaks_nothing
optimizers/test_fused_contract::test_float64_leaves_are_stepped_in_float64
optimizers/test_fused_contract::test_injected_hyperparameters_and_a_schedule
optimizers/test_fused_contract::test_under_vmap_with_a_learning_rate_each
optimizers/test_moments::test_moments_are_rounded_by_a_hash_of_step_leaf_and_element
optimizers/test_moments::test_only_moments_are_in_moment_dtype
optimizers/test_moments::test_the_bits_are_those_of_the_whole_leaf_under_any_sharding
optimizers/test_norms
optimizers/test_one_pass
optimizers/test_stochastic_rounding::test_checkpoints_pass_between_levels_with_masters_and_without
optimizers/test_stochastic_rounding::test_equal_groups_and_equal_leaves_are_rounded_independently
optimizers/test_stochastic_rounding::test_params_are_rounded_by_a_hash_of_step_leaf_and_element
pallas_kernels/test_launch
policy/test_by_hand
policy/test_forward_linen
policy/test_forward_policy::test_a_float32_teacher_stays_float32
policy/test_forward_programs
project/test_import::test_a_step_loads_neither_pallas_nor_unused_packages
project/test_lean
scaling/test_gradients::test_results_do_not_depend_on_the_table
scaling/test_gradients::test_the_table_keeps_no_array_alive
scaling/test_nested_scaling::test_the_second_derivative_is_right_at_every_level
scaling/test_overflowed_loss::test_one_overflowed_loss_on_a_mapped_axis_skips_all
state/test_add_params::test_new_params_start_as_if_their_gradients_had_been_zero
state/test_closure::test_lbfgs_reaches_the_minimum
state/test_faults
state/test_soak
""".split()

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
        file = f"{item.path.parent.name}/{item.path.stem}"
        test = f"{file}::{item.name}"
        if not {file, test.partition("[")[0], test}.isdisjoint(SLOW):
            item.add_marker(pytest.mark.slow)
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
