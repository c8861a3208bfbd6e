"""Defects that were found: each with how, and the test that sees it.

Those of apex are rows of docs/from_apex.md, which test_deviations.py holds to a test
each; those of jmp, mpx, Flax, keras and optax are in test_peers.py. Here are ours. What
had no test has one below.
"""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

# "random": by random damage; "habit": by running what scripts do; "count": of bytes,
# kernels, traces or seconds; "read": by reading, or history does not say how.
FOUND = """
test_store_remainder.py
test_a_skip_keeps_the_bits_of_whatever_is_in_the_params
    read: a skip rounded masters back into half params that held more
test_both_halves_are_of_one_value_whatever_the_compiler_does
    read: halves of two values beside each other, as a compiler rounds twice
test_loss_scale.py
test_scale_never_reaches_zero
    read: a scale whose reciprocal is not normal
test_damaged_checkpoints.py
test_just_beyond_what_training_comes_to
    random: a scale of 0 or NaN in a checkpoint: NaN params one step later
test_versions_that_are_none
    random: versions of checkpoints that are not numbers
test_checkpoint.py
test_flax_puts_no_leaf_where_another_dtype_or_shape_belongs
    habit: Flax put leaves of other dtypes and shapes into a state
test_gradients.py
test_a_habit_is_the_right_step_or_a_skip
    habit: `tree.map`, `pmean`, `tx.update` of gradients went on without a flag
test_a_gradient_that_only_the_division_makes_inf_is_an_overflow
    read: a gradient that a scale below 1 made inf was stepped
test_habits.py
test_what_raises
    habit: an `opt_state` without masters
test_load_params.py
test_what_is_loaded_stays_in_the_dtypes_of_the_level
    habit: the next step undid `state.replace(params=...)` at O2 and O5
test_nnx_update_with_float32_says_what_to_write
    habit: float32 Variables put into a half NNX model
test_nnx.py
test_an_error_says_what_is_wrong
    read: `jamp.nnx.initialize` dropped unknown keywords that were arrays
test_forward_programs.py
test_nnx_attention_runs_at_o2_on_the_cpu
    habit: `nnx.MultiHeadAttention` raised at O2 on a CPU
test_host.py
test_a_transfer_guard_stops_none_of_our_constants
    habit: constants of ours under `jax.transfer_guard`
test_a_warning_is_of_the_line_that_called
    habit: warnings named a line of jamp
    habit: gradients in half that nobody scaled
test_nested_scaling.py
test_an_overflow_inside_skips_the_step_around_until_both_fit
    read: an overflow inside of a scaled loss left out an inner step
test_several.py
test_check_sees_one_of_two_losses_that_never_fits_their_scale
    read: a clean loss hid one that never fits the scale they share
test_fused_arguments.py
test_a_norm_of_0_clips_nothing_and_a_negative_one_is_an_error
    read: `max_grad_norm=0` under `inject_hyperparams` made gradients zero
test_fused_contract.py
test_float64_leaves_are_stepped_in_float64
    read: float64 params lost digits in float32 masters
test_autocast_custom.py
test_gradients_of_what_closes_over_arrays
    read: gradients under autocast of a `custom_vjp` that closes over an array
test_autocast_programs.py
test_constants_that_half_cannot_hold_keep_their_value
    read: literals that half cannot hold became inf or 0 in calls and loops
test_autocast_control.py
test_a_precision_is_a_wish
    read: `precision='highest'` was lost
test_autocast_functions.py
test_a_solver_multiplies_in_float32_and_its_function_in_half
    read: linear algebra and solvers multiplied in half
test_a_function_of_the_users_is_another_one_of_that_name
    read: a user's function with the name of a listed one ran by its rule
test_autocast_nesting.py
test_the_innermost_policy_wins
    read: an `autocast` inside of `disable_casts` cast
test_a_function_that_is_compiled_is_traced_once
    count: a jitted function was traced for each trace
test_autocast_control.py
test_the_original_is_back_after_the_last_of_two_threads
    read: of two threads that trace, one put functions back for both
test_lean.py
test_tracing_and_lowering_take_little_more_than_half_as_long_again
    count: tracing nested programs took longer and longer
test_autocast_accuracy.py
test_a_sum_over_the_trips_of_a_loop_keeps_its_digits
    read: at O2 and O5 `c + x @ w` in a scan was rounded to half on each trip
test_autocast_islands.py
test_a_gelu_of_one_row_adds_no_bias
    count: `x + 0.04 * x**3` of one row was taken for a product with its bias
test_a_scan_has_no_barriers
    count: an LSTM's islands launched 1.28 times the kernels
test_a_derivative_is_in_half_where_its_function_is
    count: a relu's was in float32, and kept more
test_the_backward_pass_keeps_half_and_gives_the_same
    count: what is kept for the backward pass was float32 in loops
test_a_norm_gives_back_its_inputs_dtype
    count: a norm gave float32 to what came after
test_a_bias_is_part_of_its_product_and_the_loss_in_float32
    count: the bias of logits was added in half, and its sum was a kernel
test_locate.py
test_an_infinity_beside_a_nan_is_not_its_cause
    read: an infinity beside a NaN was taken for its cause
test_faults.py
test_a_program_grows_with_the_leaves_alone
    count: XLA put the check of all gradients into the step of each leaf
test_many_hosts.py
test_a_dead_process_ends_the_others
    read: a dead host left the others waiting
test_found.py
test_a_model_inside_of_a_model_gives_float32
    read: a model that a model applies gave `cast_model_outputs`
"""

TESTS = pathlib.Path(__file__).parents[1]


def test_every_defect_has_a_test():
    source = ""
    for line in FOUND.split("\n")[1:-1]:
        if line.endswith(".py"):
            (file,) = TESTS.glob(f"*/{line}")
            source = file.read_text()
        elif line.startswith("test_"):
            assert f"\ndef {line}(" in source, line
        else:
            assert re.match("    (random|habit|count|read): ", line), line


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x, teacher, params):
        y = teacher.apply({"params": params}, x)
        self.sow("seen", "dtype", y.dtype)
        return nn.Dense(1)(y)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_inside_of_a_model_gives_float32(level):
    x, teacher, model = jnp.ones((1, 2)), nn.Dense(2), Outer()
    inner = teacher.init(jax.random.key(0), x)["params"]
    params = model.init(jax.random.key(0), x, teacher, inner)["params"]
    state = jamp.initialize(
        params,
        optax.sgd(0.1),
        level,
        apply_fn=model.apply,
        cast_model_outputs=jnp.float16,
        verbosity=0,
    )
    variables = {"params": state.params}
    y, seen = state.apply_fn(variables, x, teacher, inner, mutable=["seen"])
    assert (seen["seen"]["dtype"], y.dtype) == ((jnp.float32,), jnp.float16)
