"""The models of `benchmarks.lean` with their losses, and the shapes of their data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks import (
    lean_forms,
    lean_images,
    lean_losses,
    lean_transformers as lean_text,
)


def cross_entropy(logits: Array, labels: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits.astype(jnp.float32), labels).mean()


def mean_square(got: Array, wanted: Array) -> Array:
    return jnp.square(got.astype(jnp.float32) - wanted).mean()


class Case(NamedTuple):
    """A model and the shapes of its training data."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Array, Array], Array] = cross_entropy


def text(model: nn.Module, batch: int, length: int) -> Case:
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return Case(model, tokens, tokens)


def images(model: nn.Module, batch: int = 64, side: int = 224) -> Case:
    inputs = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    return Case(model, inputs, jax.ShapeDtypeStruct((batch,), jnp.int32))


def diffusion(model: nn.Module, batch: int, side: int) -> Case:
    inputs = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    times = jax.ShapeDtypeStruct((batch,), jnp.float32)
    return Case(model, (inputs, times), inputs, mean_square)


CASES = {
    "gpt2": text(lean_text.GPT2(), 8, 1024),
    "gpt2-scan": text(lean_text.GPT2(depth=8, scan=True), 8, 1024),
    "vit": images(lean_text.ViT()),
    "bert": text(lean_text.BERT(), 16, 512),
    "convnext": images(lean_images.ConvNeXt()),
    "unet": diffusion(lean_images.UNet(), 32, 64),
    "llama": text(lean_text.Llama(), 4, 2048),
    "resnet50": images(lean_images.ResNet50()),
    "mixer": images(lean_images.Mixer()),
    "lstm": text(lean_images.LSTM(), 64, 256),
    "efficientnet": images(lean_images.EfficientNet()),
    "moe": text(lean_text.MoE(), 8, 1024),
    "words": text(lean_text.Words(), 8, 1024),
    "tied": text(lean_text.Tied(), 4, 1024),
    "linen": text(lean_text.LinenStack(), 8, 512),
}
PLAIN = {"bias": False, "separate": True}
# Two layers of other shapes than the models above, against rules that fit only those.
VARIANTS = {
    "gpt2-heads": text(lean_text.GPT2(2, heads=6), 8, 1024),
    "gpt2-wide": text(lean_text.GPT2(2, width=1024, heads=16), 8, 1024),
    "gpt2-plain": text(lean_text.GPT2(2, variant=PLAIN), 8, 1024),
    "gpt2-post": text(lean_text.GPT2(2, variant={"post_norm": True}), 8, 1024),
    "vit-matmul": images(lean_text.ViT(2, by_matmul=True)),
    "vit-narrow": images(lean_text.ViT(2, width=384, heads=6)),
    "vit-plain": images(lean_text.ViT(2, variant=PLAIN)),
    "vit-post": images(lean_text.ViT(2, variant={"post_norm": True})),
    "bert-heads": text(lean_text.BERT(2, heads=8), 16, 512),
    "bert-sure": text(lean_text.BERT(2, dropout=0.0), 16, 512),
    "bert-short": text(lean_text.BERT(2), 64, 128),
    "words-few": text(lean_text.Words(32_000), 8, 1024),
    "words-many": text(lean_text.Words(128_256), 8, 1024),
}


def losses() -> dict[str, Case]:
    """Returns each loss of 4,096 rows, of 8,192 logits alone and 32,000 in a model."""
    rows, labels = (4096, 64), jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    of_rows = jax.ShapeDtypeStruct(rows[:1], jnp.int32)
    found: dict[str, Case] = {}
    for loss in lean_losses.LOSSES:
        name = loss.__name__.replace("_", "-")
        taught, mean = loss in lean_losses.TAUGHT, lean_losses.mean_of(loss)
        head = lean_losses.Head(8192, taught)
        x = jax.ShapeDtypeStruct(rows, jnp.float32)
        found[f"{name}-alone"] = Case(head, x, of_rows, mean)
        model = lean_losses.Head(32_000, taught, in_model=True)
        found[name] = Case(model, labels, labels, mean)
    return found


LOSSES = losses()
FORMS = {
    f"attention-{form}-{mask}": text(lean_forms.Encoder(form, mask == "one"), 16, 512)
    for form in ("linen", "nnx", "where", "product")
    for mask in ("each", "one")
} | {
    f"attention-{form}": text(lean_forms.Encoder(form), 16, 512)
    for form in ("jax", "biased", "capped", "keys", "heads", "sunk")
}
FORMS |= {
    f"{cell}-{form}": text(lean_forms.Recurrent(form, cell == "gru"), 64, 64)
    for form in lean_forms.LOOPS
    for cell in ("lstm", "gru")
}
ALL = CASES | VARIANTS | LOSSES | FORMS
