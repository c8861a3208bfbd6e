"""The trees that are timed and counted have the sizes of the real models."""

import pytest

from benchmarks import specs

# Totals as published with the models; leaves as their PyTorch checkpoints have them.
MODELS = {
    "resnet50": (161, 25_557_032),
    "bert_large": (398, 336_226_108),  # transformers' BertForPreTraining
    "gpt2_xl": (580, 1_557_611_200),
    "llama_8b_shard": (291, 8_030_261_248 // 8),
    "many_leaves": (300, 150 * (768 + 768 * 768)),
    "tiny_leaves": (10_000, 1_600_113),
    "single_leaf": (1, 2**29),
}


@pytest.mark.parametrize("model", MODELS)
def test_spec_has_the_size_of_its_model(model):
    spec = getattr(specs, model)()
    assert (len(spec.shapes), spec.total) == MODELS[model]


def test_only_batchnorm_stays_in_float32():
    spec = specs.resnet50()
    assert spec.total_fp32 == 53_120
    kept = [spec.shapes[leaf] for leaf in sorted(spec.fp32)]
    kernels = [shape for shape in spec.shapes if len(shape) == 4]
    assert kept == [(kernel[-1],) for kernel in kernels for _ in range(2)]
    models = (specs.bert_large(), specs.gpt2_xl(), specs.llama_8b_shard())
    assert not any(model.fp32 for model in models)
