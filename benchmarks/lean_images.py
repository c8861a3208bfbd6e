"""The architectures of `benchmarks.lean` other than transformers.

`benchmarks.lean_transformers` has the transformers.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from benchmarks.lean_transformers import MLP, VOCABULARY, Attention, exact_gelu


class ConvNeXt(nn.Module):
    """ConvNeXt-T: depthwise convolutions, LayerNorm, exact gelu, scaled layers."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        for stage, depth in enumerate((1, 1, 2, 1)):
            features, stride = 96 << stage, 2 if stage else 4
            x = norm()(x) if stage else x
            x = conv(features, (stride, stride), (stride, stride))(x)
            x = x if stage else norm()(x)
            for block in range(depth):
                y = conv(features, (7, 7), feature_group_count=features)(x)
                y = MLP(4 * features, exact_gelu, self.dtype)(norm()(y))
                name, init = f"scale_{stage}_{block}", nn.initializers.constant(1e-6)
                x = x + y * self.param(name, init, (features,)).astype(y.dtype)
        x = norm()(x.mean((1, 2)))
        return nn.Dense(1000, dtype=self.dtype)(x)


class ResBlock(nn.Module):
    """A block of the U-Net: two convolutions, with the time between them."""

    features: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array, time: Array) -> Array:
        conv = functools.partial(nn.Conv, self.features, dtype=self.dtype)
        norm = functools.partial(nn.GroupNorm, 32, dtype=self.dtype)
        y = conv((3, 3))(nn.swish(norm()(x)))
        y = y + nn.Dense(self.features, dtype=self.dtype)(nn.swish(time))[:, None, None]
        y = conv((3, 3))(nn.swish(norm()(y)))
        return y + (x if x.shape == y.shape else conv((1, 1))(x))


class UNet(nn.Module):
    """A diffusion U-Net: ResBlocks, attention on small images, concatenations."""

    width: int = 128
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, inputs: tuple[Array, Array]) -> Array:
        x, steps = inputs
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        rates = jnp.exp(-9.2 * jnp.arange(self.width // 2) / (self.width // 2))
        angles = steps[:, None] * rates
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        time = dense(4 * self.width)(nn.swish(dense(4 * self.width)(time)))

        def block(x, features, attend):
            x = ResBlock(features, self.dtype)(x, time)
            if attend:
                y = nn.GroupNorm(32, dtype=self.dtype)(x)
                y = y.reshape(len(y), -1, features)
                x = x + Attention(8, dtype=self.dtype)(y).reshape(x.shape)
            return x

        x = conv(self.width, (3, 3))(x)
        kept = []
        for level, multiple in enumerate((1, 2, 2)):
            x = block(x, multiple * self.width, attend=level == 2)
            kept.append(x)
            if level < 2:
                x = conv(x.shape[-1], (3, 3), (2, 2))(x)
        x = block(x, 2 * self.width, attend=True)
        for level, multiple in reversed(list(enumerate((1, 2, 2)))):
            x = jnp.concatenate([x, kept.pop()], axis=-1)
            x = block(x, multiple * self.width, attend=level == 2)
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = conv(x.shape[-1], (3, 3))(x)
        x = nn.swish(nn.GroupNorm(32, dtype=self.dtype)(x))
        return conv(3, (3, 3))(x)


class Bottleneck(nn.Module):
    """Three convolutions with BatchNorm, and a shortcut."""

    features: int
    stride: int = 1
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, False, dtype=self.dtype)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, depth in enumerate((2, 2, 2, 2)):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                x = Bottleneck(64 << stage, stride, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


class Mixer(nn.Module):
    """MLP-Mixer B/16."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = nn.Conv(768, (16, 16), (16, 16), dtype=self.dtype)(x)
        x = x.reshape(len(x), -1, 768)
        for _ in range(4):
            y = MLP(384, dtype=self.dtype)(norm()(x).swapaxes(1, 2))
            x = x + y.swapaxes(1, 2)
            x = x + MLP(3072, dtype=self.dtype)(norm()(x))
        return nn.Dense(1000, dtype=self.dtype)(norm()(x).mean(1))


class LSTM(nn.Module):
    """An LSTM with two layers over words."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(VOCABULARY, 1024, dtype=self.dtype)(tokens)
        for _ in range(2):
            cell = nn.OptimizedLSTMCell(
                1024, dtype=self.dtype, carry_init=zeros_in(self.dtype)
            )
            x = nn.RNN(cell)(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)


def zeros_in(dtype: DTypeLike | None):
    """Returns an initializer of carries in the dtype of the cell."""
    return lambda key, shape, _=None: jnp.zeros(shape, dtype or jnp.float32)


class MBConv(nn.Module):
    """Inverted bottleneck: depthwise convolution, squeeze and excite."""

    features: int
    stride: int = 1
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, False, dtype=self.dtype)
        wide, strides = 6 * x.shape[-1], (self.stride, self.stride)
        y = nn.swish(norm()(conv(wide, (1, 1))(x)))
        y = nn.swish(norm()(conv(wide, (3, 3), strides, feature_group_count=wide)(y)))
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        squeezed = nn.swish(dense(x.shape[-1] // 4)(y.mean((1, 2))))
        y = y * nn.sigmoid(dense(wide)(squeezed))[:, None, None]
        y = norm()(conv(self.features, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(32, (3, 3), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.swish(nn.BatchNorm(False, dtype=self.dtype)(x))
        for features in (24, 40, 80, 112):
            x = MBConv(features, 2, self.dtype)(x)
            x = MBConv(features, 1, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))
