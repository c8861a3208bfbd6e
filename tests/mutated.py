"""Which tests must die of which module's mutants: the fewest that cover it."""

FUSED = "fused_arguments fused_contract fused_optimizers "
FUSED += "-k arguments or every_option or {} and not 55"
AUTOCAST = "autocast/programs autocast/islands"
STEP = "amp_state initialize host"

TESTS = {
    **{
        f"jamp/optimizers/_{name}.py": FUSED.format(name)
        for name in ("adam", "adagrad", "lamb", "novograd", "sgd")
    },
    "jamp/optimizers/_fused.py": "fused_arguments fused_contract larc",
    "jamp/optimizers/_masks.py": "fused_arguments",
    "jamp/optimizers/_larc.py": "larc fused_arguments -k larc",
    "jamp/optimizers/_masters.py": "master_weights store_remainder one_pass "
    "-k not kernels and not interpret",
    "jamp/multi_tensor.py": "multi_tensor",
    "jamp/_state/amp_state.py": STEP,
    "jamp/_state/initialize.py": STEP,
    "jamp/_state/step.py": f"{STEP} several gradients",
    "jamp/_scaling/loss.py": "scaled_grad loss_scale fp16_utils/optimizer",
    "jamp/_scaling/rules.py": "loss_scale",
    "jamp/_scaling/unscaled.py": "gradients habits amp_state",
    "jamp/_scaling/value_and_grad.py": "scaled_grad gradients habits",
    "jamp/_core/names.py": "checkpoint checkpoint_levels",
    "jamp/_core/tree.py": f"{STEP} scaled_grad several faults",
    "jamp/_autocast/control_flow.py": "autocast/custom autocast/loops",
    "jamp/_autocast/derivatives.py": f"{AUTOCAST} autocast/custom",
    "jamp/_autocast/facts.py": f"{AUTOCAST} autocast/accuracy explain forward_programs",
    "jamp/_autocast/frames.py": "jax_internals autocast/nesting",
    "jamp/_autocast/hijax.py": "autocast/upgrades",
    "jamp/_autocast/islands.py": f"{AUTOCAST} autocast/accuracy",
    "jamp/_autocast/marks.py": "autocast/kernels",
    "jamp/_autocast/lists.py": "autocast/lists autocast/control autocast/functions",
    "jamp/_autocast/primitives.py": f"autocast/lists {AUTOCAST}",
    "jamp/_autocast/program.py": "autocast/programs autocast/control autocast/custom",
    "jamp/_autocast/rewrite.py": "autocast/functions autocast/control explain",
    "jamp/_autocast/softmax.py": f"{AUTOCAST} autocast/accuracy autocast/torch",
    "jamp/_autocast/values.py": f"{AUTOCAST} explain autocast/torch autocast/loops",
    "jamp/_autocast/sums.py": "autocast/islands autocast/torch autocast/loops",
    "jamp/nnx/_variables.py": "nnx",
    "pallas_kernels/norms.py": "multi_tensor",
    "pallas_kernels/_run.py": "multi_tensor one_pass launch fused_arguments",
    "pallas_kernels/_xla.py": "multi_tensor one_pass fused_contract",
    "pallas_kernels/_step.py": "one_pass store_remainder fused_optimizers -k not 55",
    "pallas_kernels/mosaic/launch.py": "launch",
}
