"""The transformers of `benchmarks.lean`, with their real widths and few layers.

Each model has a `dtype`. jamp trains the float32 model, `dtype=None`. With bfloat16, it
is the model by hand, which casts float32 params before use. Norms compute their
statistics, and losses compute everything, in float32. Softmax and gelu run in `dtype`,
which moves the fewest bytes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jax import Array
from jax.typing import DTypeLike

WIDTH, VOCABULARY = 768, 1024
exact_gelu = functools.partial(nn.gelu, approximate=False)


class Attention(nn.Module):
    """Self-attention with one matmul for queries, keys and values, or with three.

    With `fused`, an implementation of `jax.nn.dot_product_attention`, it writes no
    scores and has no dropout.
    """

    heads: int
    causal: bool = False
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    fused: str = ""
    bias: bool = True
    separate: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape
        dense = functools.partial(nn.Dense, use_bias=self.bias, dtype=self.dtype)
        if self.separate:
            qkv = [dense(width, name=name)(x) for name in "qkv"]
        else:
            qkv = jnp.split(dense(3 * width, name="qkv")(x), 3, axis=-1)
        split = (batch, length, self.heads, -1)
        q, k, v = (y.reshape(split) for y in qkv)
        if self.fused:
            options = {"is_causal": self.causal, "implementation": self.fused}
            y = jax.nn.dot_product_attention(q, k, v, **options)
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            if self.causal:
                mask = jnp.tril(jnp.ones((length, length), bool))
                scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
            weights = jax.nn.softmax(scores)
            weights = nn.Dropout(self.dropout, deterministic=False)(weights)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return dense(width, name="out")(y.reshape(x.shape))


class MLP(nn.Module):
    width: int
    act: Callable[[Array], Array] = nn.gelu
    dtype: DTypeLike | None = None
    bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.Dense, use_bias=self.bias, dtype=self.dtype)
        return dense(x.shape[-1])(self.act(dense(self.width)(x)))


class Block(nn.Module):
    """Attention and an MLP with shortcuts, and LayerNorms before or after them."""

    heads: int
    causal: bool = False
    act: Callable[[Array], Array] = nn.gelu
    dtype: DTypeLike | None = None
    fused: str = ""
    bias: bool = True
    separate: bool = False
    post_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array, _: Any = None) -> tuple[Array, None]:
        options = {"dtype": self.dtype, "bias": self.bias}
        attention = {"fused": self.fused, "separate": self.separate} | options
        layers = [
            Attention(self.heads, self.causal, **attention),
            MLP(4 * x.shape[-1], self.act, **options),
        ]
        for layer in layers:
            norm = nn.LayerNorm(dtype=self.dtype)
            y = layer(x if self.post_norm else norm(x))
            x = x + nn.Dropout(self.dropout, deterministic=False)(y)
            x = norm(x) if self.post_norm else x
        return x, None


class GPT2(nn.Module):
    """Tied embeddings, and layers in a Python loop or under scan and remat."""

    depth: int = 4
    width: int = 768
    vocabulary: int = 1024
    scan: bool = False
    dtype: DTypeLike | None = None
    heads: int = 12
    fused: str = ""
    variant: Mapping[str, Any] = FrozenDict()  # more options of the blocks

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        length = tokens.shape[1]
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        places = nn.Embed(length, self.width, dtype=self.dtype, name="places")
        x = embed(tokens) + places(jnp.arange(length))
        args = (self.heads, True, nn.gelu, self.dtype, self.fused)
        block = functools.partial(Block, **self.variant)
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            block = nn.scan(nn.remat(Block), **axes, length=self.depth)
            x, _ = block(*args)(x, None)
        else:
            for _ in range(self.depth):
                x, _ = block(*args)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class ViT(nn.Module):
    """ViT-B/16: a class token, learned positions, exact gelu."""

    depth: int = 4
    width: int = 768
    dtype: DTypeLike | None = None
    heads: int = 12
    by_matmul: bool = False  # whether a matmul embeds the patches
    variant: Mapping[str, Any] = FrozenDict()  # more options of the blocks

    @nn.compact
    def __call__(self, images: Array) -> Array:
        batch, init = len(images), nn.initializers.normal(0.02)
        if self.by_matmul:
            side = images.shape[1] // 16
            patches = images.reshape(batch, side, 16, side, 16, 3).swapaxes(2, 3)
            patches = patches.reshape(batch, side * side, -1)
            x = nn.Dense(self.width, dtype=self.dtype)(patches)
        else:
            x = nn.Conv(self.width, (16, 16), (16, 16), dtype=self.dtype)(images)
            x = x.reshape(batch, -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        token = jnp.broadcast_to(token.astype(x.dtype), (batch, 1, self.width))
        x = jnp.concatenate([token, x], axis=1)
        places = self.param("places", init, (1, *x.shape[1:]))
        x = x + places.astype(x.dtype)
        for _ in range(self.depth):
            options = {"act": exact_gelu, "dtype": self.dtype} | dict(self.variant)
            x, _ = Block(self.heads, **options)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x[:, 0])


class BERT(nn.Module):
    """Norms after the shortcuts, dropout everywhere, a head on tied embeddings."""

    depth: int = 4
    dtype: DTypeLike | None = None
    heads: int = 12
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        drop = functools.partial(nn.Dropout, self.dropout, deterministic=False)
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        places = nn.Embed(512, WIDTH, dtype=self.dtype, name="places")
        x = embed(tokens) + places(jnp.arange(tokens.shape[1]))
        x = drop()(norm()(x))
        for _ in range(self.depth):
            attention = Attention(self.heads, False, self.dropout, self.dtype)
            x = norm()(x + drop()(attention(x)))
            x = norm()(x + drop()(MLP(3072, exact_gelu, self.dtype)(x)))
        x = norm()(exact_gelu(nn.Dense(WIDTH, dtype=self.dtype)(x)))
        bias = self.param("bias", nn.initializers.zeros, (VOCABULARY,))
        logits = embed.attend(x)
        return logits + bias.astype(logits.dtype)


class RMSNorm(nn.Module):
    """Llama's RMSNorm: it computes in float32 and returns the dtype of its input."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
        return y.astype(x.dtype) * scale.astype(x.dtype)


def rotate(x: Array) -> Array:
    """Applies RoPE to an array of shape (batch, length, ..., features)."""
    length, half = x.shape[1], x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates
    shape = (length, *[1] * (x.ndim - 3), half)
    sin, cos = (f(angles).reshape(shape) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return y.astype(x.dtype)


class Llama(nn.Module):
    """RMSNorm, RoPE, grouped queries with scores of five axes, SwiGLU.

    As in Llama's code, its softmax is float32.
    """

    width: int = 2048
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        batch, length = tokens.shape
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype)(tokens)
        mask = jnp.tril(jnp.ones((length, length), bool))
        for _ in range(3):
            y = RMSNorm()(x)
            q = dense(self.width)(y).reshape(batch, length, 4, 4, -1)
            k, v = (
                dense(self.width // 4)(y).reshape(batch, length, 4, -1) for _ in "kv"
            )
            q, k = rotate(q), rotate(k)
            scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / q.shape[-1] ** 0.5
            scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
            weights = jax.nn.softmax(scores).astype(v.dtype)
            y = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
            x = x + dense(self.width)(y.reshape(x.shape))
            y = RMSNorm()(x)
            gated = nn.silu(dense(5632)(y)) * dense(5632)(y)
            x = x + dense(self.width)(gated)
        return dense(VOCABULARY)(RMSNorm()(x))


class Experts(nn.Module):
    """Sends each token to its best two of eight MLPs, up to their capacity."""

    experts: int = 8
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape, width = x.shape, x.shape[-1]
        room = 2 * shape[1] // self.experts
        gates = nn.Dense(self.experts, use_bias=False, name="router")(
            x.astype(jnp.float32)
        )
        best, which = jax.lax.top_k(jax.nn.softmax(gates), 2)
        chosen = jax.nn.one_hot(which, self.experts)  # batch, token, choice, expert
        order = jnp.cumsum(chosen.reshape(shape[0], -1, self.experts), axis=1) - 1
        place = jax.nn.one_hot(order.reshape(chosen.shape).astype(jnp.int32), room)
        send = chosen[..., None] * place  # ..., expert, place
        combine = jnp.einsum("btc,btcep->btep", best, send).astype(x.dtype)
        send = send.sum(2).astype(x.dtype)
        y = jnp.einsum("btep,btd->ebpd", send, x)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, 4 * width))
        down = self.param("down", init, (self.experts, 4 * width, width))
        y = nn.gelu(jnp.einsum("ebpd,edh->ebph", y, up.astype(y.dtype)))
        y = jnp.einsum("ebph,ehd->ebpd", y, down.astype(y.dtype))
        return jnp.einsum("btep,ebpd->btd", combine, y)


class MoE(nn.Module):
    """A transformer with experts instead of MLPs."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = x + Attention(12, True, dtype=self.dtype)(norm()(x))
            x = x + Experts(dtype=self.dtype)(norm()(x))
        return nn.Dense(VOCABULARY, dtype=self.dtype)(norm()(x))


class Words(nn.Module):
    """A small model with logits over many words."""

    vocabulary: int = 50_257
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(self.vocabulary, WIDTH, dtype=self.dtype)(tokens)
        x = x + MLP(4 * WIDTH, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class Tied(nn.Module):
    """An embedding of 50k words, and logits from the same embedding."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        embed = nn.Embed(50_257, WIDTH, dtype=self.dtype)
        return embed.attend(embed(tokens))


class LinenStack(nn.Module):
    """Flax's own attention and LayerNorm."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        attention = functools.partial(
            nn.MultiHeadDotProductAttention, 12, dtype=self.dtype
        )
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(3):
            x = x + attention()(norm()(x), mask=mask)
            x = x + MLP(4 * WIDTH, dtype=self.dtype)(norm()(x))
        return nn.Dense(VOCABULARY, dtype=self.dtype)(norm()(x))
