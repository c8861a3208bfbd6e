"""Two small models that the tests train.

Without a `dtype`, a model is float32, as jamp expects. With a `dtype`, it is in mixed
precision as written by hand.
"""

from collections.abc import Sequence

import flax.linen as nn
from jax import Array
from jax.typing import DTypeLike


class ConvBlock(nn.Module):
    """Convolution, BatchNorm and relu, with a shortcut if the shapes match."""

    features: int
    stride: int = 1
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False, dtype=self.dtype)(x)
        y = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(y)
        return nn.relu(x + y if x.shape == y.shape else y)


class CNN(nn.Module):
    """Stages of `depth` ConvBlocks. All stages but the first halve the image."""

    features: Sequence[int] = (8, 16)
    depth: int = 2
    classes: int = 10
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array, *, train: bool = True) -> Array:
        for stage, features in enumerate(self.features):
            for block in range(self.depth):
                stride = 2 if stage > 0 and block == 0 else 1
                x = ConvBlock(features, stride, self.dtype)(x, train=train)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


class TransformerBlock(nn.Module):
    """Attention and a two-layer MLP, each after a LayerNorm and with a shortcut."""

    heads: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x += nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Transformer(nn.Module):
    """A causal language model on integer tokens."""

    vocabulary: int = 64
    width: int = 32
    heads: int = 4
    depth: int = 2
    length: int = 16
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        shape = self.length, self.width
        places = self.param("places", nn.initializers.normal(0.02), shape)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        x += places[: tokens.shape[1]].astype(x.dtype)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = TransformerBlock(self.heads, self.dtype)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)
