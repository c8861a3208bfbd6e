"""Test that steps move few more bytes than models written in half.

`benchmarks.lean` documents and prints the comparison of 15 architectures, 11 losses and
20 forms of attention and loops. These tests have the bounds. The suite compiles two
models, because each takes 20 seconds. `make budgets` compiles all, and `make tpu`
seventeen for a TPU v5e.
"""

from typing import NamedTuple

import jax
import pytest

from benchmarks import lean, lean_cases, lean_transformers
from tests.support.extent import more

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]


class Bound(NamedTuple):
    """The limits of a step, relative to the step by hand."""

    traffic: float
    temp: float
    kernels: float = 1.05  # plus eight


BOUNDS = {
    "widest": Bound(1.05, 1.05),
    "narrowest": Bound(1.02, 1.02),
    "O2": Bound(1.02, 1.02, 1.02),
    # It checks the gradients, and the model by hand does not (ViT: 334 for 307).
    "O5": Bound(1.02, 1.02, 1.1),
    # Each quantized tensor adds a few kernels. Measured: at most 1.07, 0.98 and 2.10.
    "O6": Bound(1.10, 1.02, 2.2),
    **dict.fromkeys(lean.FUSED, Bound(1.003, 1.003, 1.0)),
}
UNTIED = ("widest", "narrowest", "O5")  # modes of words, losses and forms
# Exceptions with reasons. Comments at the end have the measured values.
EXCEPTIONS = {
    # The class token is float32, so torch's rules make the stream float32.
    ("vit", "widest"): Bound(1.15, 1.15),
    # Its gradients are summed over the steps in float32 (1.042).
    ("lstm", "O2"): Bound(1.02, 1.05),
    # It moves 0.80 of the bytes, but XLA packs its arrays less tightly. The gradient of
    # its embedding sums in float32 (1.066).
    ("gpt2-scan", "O2"): Bound(0.81, 1.07),
    # The kernels are the same, but XLA packs an array of 23 MB elsewhere (1.005).
    ("llama", "fused O2"): Bound(1.003, 1.006),
    # XLA steps ten of its kernels in two fusions each, with copies (1.011 and 1.010).
    ("unet", "fused O1"): Bound(1.012, 1.003, 1.02),
    ("unet", "fused O4"): Bound(1.012, 1.003, 1.02),
    # XLA packs 7 of 1,964 MB elsewhere (1.0037).
    ("resnet50", "fused O4"): Bound(1.003, 1.004),
    # The check adds kernels for 200 small gradients (732 for 653).
    ("efficientnet", "O5"): Bound(1.02, 1.02, 1.12),
    # The hand-written model scatters into float32 logits.
    ("words", "widest"): Bound(0.66, 0.44),  # 0.649 and 0.429
    ("words", "narrowest"): Bound(0.65, 0.44),  # 0.636 and 0.421
    # At O5, the check and the sums of distinct rows add 20 kernels to 50.
    ("words", "O5"): Bound(0.64, 0.39, 1.3),  # 0.629 and 0.376
    ("tied", "widest"): Bound(0.67, 0.39),  # 0.657 and 0.380
    ("tied", "narrowest"): Bound(0.67, 0.39),  # 0.657 and 0.380
    ("tied", "O5"): Bound(0.63, 0.36, 1.3),  # 0.613 and 0.352
    **{
        (n, m): Bound(0.68, 0.46, 1.3 if m == "O5" else 1.05)
        for n in ("words-few", "words-many")
        for m in UNTIED
    },
}
# Loops in the forms that people write, with today's values. By reading, the gradients
# of the weights are summed over the steps in float32, twice the bytes of bfloat16. At
# widest, islands end with the float32 carries, so the loop saves half gates.
LOOPS = {
    "lstm-linen": (Bound(0.79, 0.66), Bound(0.75, 0.81), Bound(0.90, 0.79)),
    "lstm-nnx": (Bound(0.79, 0.64), Bound(0.75, 0.79), Bound(0.90, 0.74)),
    "lstm-scan": (Bound(1.17, 0.81), Bound(1.22, 1.04), Bound(1.23, 1.02)),
    "gru-linen": (Bound(1.17, 0.89), Bound(1.16, 0.94), Bound(1.49, 0.93)),
    "gru-nnx": (Bound(0.83, 0.87), Bound(0.83, 0.89), Bound(1.25, 0.91)),
    "gru-scan": (Bound(1.18, 1.04), Bound(1.21, 1.14), Bound(1.22, 1.15)),
}
EXCEPTIONS |= {
    (name, mode): bound
    for name, bounds in LOOPS.items()
    for mode, bound in zip(UNTIED, bounds, strict=True)
}
EXCEPTIONS |= {
    # The check of the gradients adds 28 kernels to 196.
    (name, "O5"): Bound(1.02, 1.02, 1.17)
    for name in lean_cases.FORMS
    if name not in LOOPS
}
EXCEPTIONS |= {
    # Its rows end with one more term, the sink's, so XLA sums them in more kernels.
    ("attention-sunk", "widest"): Bound(1.07, 1.02),  # 1.063 and 0.863
    ("attention-sunk", "O5"): Bound(1.02, 1.02, 1.22),  # 1.015 and 0.817
}
# Measured: at most 1.000 and 1.000. A kernel more sums the gradient of a bias. At O5,
# the check of the gradients adds at most 1 % to these small programs.
LOSS = dict.fromkeys(UNTIED, Bound(1.001, 1.001, 1.25)) | {
    "O5": Bound(1.011, 1.031, 1.25)
}
# On a TPU v5e.
ON_TPU = {
    "widest": Bound(1.10, 1.10),
    "narrowest": Bound(1.02, 1.02),
    # XLA steps a weight of the model by hand in the kernel of its gradient. The check
    # needs all gradients first, so jamp writes and reads them: BERT moves 0.17 of 5.6
    # GB more.
    "O5": Bound(1.035, 1.02),
}
# At widest, embedding tables or a class token are float32, so torch's rules make the
# stream float32. With a float32 stream by hand, bert-heads moves 1.01 of the bytes. In
# the head of a BERT, a gelu and a norm are one island, whose float32 cotangents are not
# rounded (0.02).
EXCEPTIONS_ON_TPU = {
    ("vit", "widest"): Bound(1.12, 1.12),  # 1.112 and 1.110
    ("vit-matmul", "widest"): Bound(1.22, 1.22),  # 1.208 and 1.203
    ("vit-plain", "widest"): Bound(1.11, 1.26),  # 1.099 and 1.241
    ("gpt2-scan", "widest"): Bound(1.09, 1.13),  # 1.080 and 1.115
    ("gpt2-heads", "widest"): Bound(1.13, 1.13),  # 1.119 and 1.116
    ("llama", "widest"): Bound(1.07, 1.14),  # 1.061 and 1.128
    ("linen", "widest"): Bound(1.21, 1.19),  # 1.196 and 1.173
    ("bert", "widest"): Bound(1.14, 1.10),  # 1.130 and 1.088
    ("bert-heads", "widest"): Bound(1.30, 1.09),  # 1.291 and 1.014
    ("bert-sure", "widest"): Bound(1.14, 1.11),  # 1.133 and 1.097
    # A batch of 64, whose gelus have a barrier, as in ViT (50 MB per block).
    ("bert-short", "widest"): Bound(1.19, 1.22),  # 1.170 and 1.203
    ("bert-short", "narrowest"): Bound(1.02, 1.16),  # 0.874 and 1.149
    # All axes of the gelus have over 32 elements, so they have a barrier, and XLA saves
    # their results (79 MB per block).
    ("vit-plain", "narrowest"): Bound(1.02, 1.09),  # 0.915 and 1.075
    ("vit-matmul", "narrowest"): Bound(1.02, 1.09),  # 0.937 and 1.078
    ("vit-plain", "O5"): Bound(1.02, 1.04),  # 0.961 and 1.027
    ("vit-matmul", "O5"): Bound(1.02, 1.04),  # 0.965 and 1.030
    # The live bytes are 1.02 at the peak. XLA packs them less tightly.
    ("bert-sure", "narrowest"): Bound(1.02, 1.06),  # 1.003 and 1.051
    # The live bytes are fewer (471 for 496 MB at the peak).
    ("gpt2-heads", "O5"): Bound(1.04, 1.14),  # 1.030 and 1.128
    # XLA stores the exponentials of its forward pass in float32. A loop counts once, so
    # the check weighs more than in GPT-2.
    ("gpt2-scan", "narrowest"): Bound(1.03, 1.02),  # 1.022 and 0.964
    ("gpt2-scan", "O5"): Bound(1.16, 1.02),  # 1.147 and 1.004, unchecked 1.042, 1.004
    # The check: XLA keeps half gradients until the end, and fewer activations in VMEM.
    ("mixer", "O5"): Bound(1.22, 1.13),  # 1.209 and 1.123, unchecked 0.989, 1.000
    ("resnet50", "O5"): Bound(1.02, 1.13),  # 1.010 and 1.117, unchecked 1.000, 1.000
    ("linen", "O5"): Bound(1.19, 1.02),  # 1.176 and 0.997, unchecked 1.041, 1.056
}
BERTS = ("bert", "bert-sure", "bert-heads", "bert-short")
WORST = ("gpt2-heads", "gpt2-wide", "vit-matmul", "vit-plain")  # of the variants
TPU_NAMES = ("gpt2", "gpt2-scan", "vit", "convnext", "unet", "llama", "linen")
TPU_NAMES += ("resnet50", "mixer", *WORST, *BERTS)
SAMPLE = [("gpt2", "widest"), ("vit", "O5")]
IN_FP8 = ("gpt2", "gpt2-scan", "llama", "vit", "bert")
ALL = [(name, mode) for name in lean.CASES for mode in lean.MODES if mode != "O6"]
ALL += [(name, "O6") for name in IN_FP8]
ALL += [key for key in EXCEPTIONS if key[0] in lean_cases.VARIANTS]
FORMS = lean_cases.LOSSES | lean_cases.FORMS
ALL += [(name, mode) for name in FORMS for mode in UNTIED]
REST = more("BUDGETS", (case for case in ALL if case not in SAMPLE))


@pytest.mark.h200
@pytest.mark.parametrize("name", more("BUDGETS", ["gpt2"]))
def test_a_check_and_a_dynamic_scale_add_few_bytes_and_kernels(name):
    modes = ("O2", "O5", "unchecked O5")
    scaled, checked, unchecked = (lean.measure(name, mode, True) for mode in modes)
    for found in (scaled.over(unchecked), checked.over(unchecked)):
        assert found.traffic <= 1.03 and found.kernels <= 1.08, found


def assert_lean(name: str, mode: str, bound: Bound, on_tpu: bool = False) -> None:
    by_hand = lean.measure(name, mode, False, on_tpu)
    ours = lean.measure(name, mode, True, on_tpu)
    found = ours.over(by_hand)
    assert found.traffic <= bound.traffic and found.temp <= bound.temp, found
    # A TPU runs one program without kernels.
    assert on_tpu or ours.kernels <= bound.kernels * by_hand.kernels + 8, found


@pytest.mark.h200
@pytest.mark.parametrize(("name", "mode"), SAMPLE + REST)
def test_a_step_is_as_lean_as_by_hand(name, mode):
    usual = (LOSS if name in lean_cases.LOSSES else BOUNDS)[mode]
    assert_lean(name, mode, EXCEPTIONS.get((name, mode), usual))


@pytest.mark.parametrize("mode", more("TPU", ON_TPU))
@pytest.mark.parametrize("name", TPU_NAMES)
def test_a_step_is_as_lean_on_a_tpu(name, mode):
    bound = EXCEPTIONS_ON_TPU.get((name, mode), ON_TPU[mode])
    assert_lean(name, mode, bound, on_tpu=True)


# Tracing and lowering, measured in Python calls, whose number does not vary.
def calls(case: lean_cases.Case, mode: str) -> int:
    """Counts the calls that trace and lower a step."""

    def lower():
        step, state = lean.program(case, mode, ours=True)
        args = state, (case.inputs, case.targets), key
        return lean.count_calls(lambda: jax.jit(step).trace(*args).lower())

    key = jax.eval_shape(jax.random.key, 0)
    lower()  # JAX caches traces of its own functions
    return lower()


TRACED = ["gpt2", "gpt2-scan", *more("BUDGETS", ["resnet50"])]


@pytest.mark.parametrize("mode", ["widest", "narrowest"])
@pytest.mark.parametrize("name", TRACED)
def test_tracing_and_lowering_take_little_longer(name, mode):
    ratio = calls(lean.CASES[name], mode) / calls(lean.CASES[name], "plain")
    bound = 1.45 if name == "gpt2-scan" else 1.35
    assert ratio <= bound, ratio  # gpt2: 1.23 and 1.24, gpt2-scan: 1.31 and 1.36


@pytest.mark.slow
def test_tracing_many_layers_takes_little_longer():
    """JAX differentiates equal equations once, as in the program without autocast."""
    deep = lean_cases.text(lean_transformers.GPT2(depth=96), 1, 8)
    assert calls(deep, "widest") <= 1.3 * calls(deep, "plain")
