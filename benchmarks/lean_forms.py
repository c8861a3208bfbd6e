"""Attention and recurrent layers of `benchmarks.lean`, in the forms that people write.

`Encoder` is a BERT with attention of Flax Linen, of NNX, of `jax.nn` or by hand. Its
dropout is a `where` or a product, with a mask for each head or one for all. Its scores
may have the bias of T5, the cap of Gemma or the sink of gpt-oss.
`Recurrent` has LSTMs and GRUs of Linen, of NNX and by hand.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from benchmarks.lean_transformers import MLP, VOCABULARY, WIDTH, exact_gelu

HEADS, RATE = 12, 0.1


def by_where(weights: Array, keep: Array) -> Array:
    return jnp.where(keep, weights / (1 - RATE), 0)


def by_product(weights: Array, keep: Array) -> Array:
    return weights * (keep.astype(weights.dtype) / (1 - RATE))


def plain(module: nn.Module, scores: Array) -> Array:
    return jax.nn.softmax(scores)


def biased(module: nn.Module, scores: Array) -> Array:
    """Adds a learned bias for each head and distance, as T5 does."""
    places = jnp.arange(scores.shape[-1])
    distances = jnp.clip(places - places[:, None], -16, 15) + 16
    table = module.param("bias", nn.initializers.normal(), (32, HEADS))
    bias = table[distances].transpose(2, 0, 1)[None].astype(scores.dtype)
    return jax.nn.softmax(scores + bias)


def capped(module: nn.Module, scores: Array) -> Array:
    return jax.nn.softmax(50 * jnp.tanh(scores / 50))


def sunk(module: nn.Module, scores: Array) -> Array:
    """Gives each head a learned score of attending to nothing."""
    sink = module.param("sink", nn.initializers.zeros, (HEADS, 1, 1))
    sink = sink.astype(scores.dtype)
    most = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    weights = jnp.exp(scores - most)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - most))


def scaled(module: nn.Module, scores: Array, of_keys: bool) -> Array:
    """Multiplies the weights by a learned scale for each key, or for each head."""
    shape = scores.shape[-1:] if of_keys else (HEADS, 1, 1)
    scale = module.param("scale", nn.initializers.ones, shape)
    return jax.nn.softmax(scores) * scale.astype(scores.dtype)


class Written(nn.Module):
    """Self-attention by hand, or by `jax.nn` without a `drop`."""

    drop: Callable[[Array, Array], Array] | None
    one_mask: bool
    dtype: DTypeLike | None = None
    weigh: Callable[[nn.Module, Array], Array] = plain

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.DenseGeneral, dtype=self.dtype)
        split = (HEADS, x.shape[-1] // HEADS)
        q, k, v = (dense(split, name=name)(x) for name in "qkv")
        if self.drop is None:
            y = jax.nn.dot_product_attention(q, k, v, implementation="xla")
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q / split[1] ** 0.5, k)
            weights = self.weigh(self, scores)
            shape = (1, 1, *weights.shape[2:]) if self.one_mask else weights.shape
            keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - RATE, shape)
            y = jnp.einsum("bhqk,bkhd->bqhd", self.drop(weights, keep), v)
        return dense(x.shape[-1], (-2, -1), name="out")(y)


def linen(one_mask: bool, dtype: DTypeLike | None) -> nn.Module:
    return nn.MultiHeadDotProductAttention(
        HEADS,
        dtype=dtype,
        dropout_rate=RATE,
        broadcast_dropout=one_mask,
        deterministic=False,
    )


def of_nnx(one_mask: bool, dtype: DTypeLike | None) -> nn.Module:
    options = {"dropout_rate": RATE, "broadcast_dropout": one_mask, "decode": False}
    options |= {"deterministic": False, "dtype": dtype}
    return nnx.bridge.ToLinen(nnx.MultiHeadAttention, (HEADS, WIDTH), options)


FORMS = {
    "linen": linen,
    "nnx": of_nnx,
    "where": functools.partial(Written, by_where),
    "product": functools.partial(Written, by_product),
    "jax": functools.partial(Written, None),
    "biased": functools.partial(Written, by_where, weigh=biased),
    "capped": functools.partial(Written, by_where, weigh=capped),
    "keys": functools.partial(
        Written, by_where, weigh=functools.partial(scaled, of_keys=True)
    ),
    "heads": functools.partial(
        Written, by_where, weigh=functools.partial(scaled, of_keys=False)
    ),
    "sunk": functools.partial(Written, by_where, weigh=sunk),
}


class Encoder(nn.Module):
    """A BERT of one form of attention, with a separate head."""

    form: str
    one_mask: bool = False
    depth: int = 2
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        drop = functools.partial(nn.Dropout, RATE, deterministic=False)
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=self.dtype)
        x = embed(VOCABULARY)(tokens)
        x = x + embed(512, name="places")(jnp.arange(tokens.shape[1]))
        x = drop()(norm()(x))
        for _ in range(self.depth):
            attend = FORMS[self.form](self.one_mask, self.dtype)
            x = norm()(x + drop()(attend(x)))
            x = norm()(x + drop()(MLP(4 * WIDTH, exact_gelu, self.dtype)(x)))
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)


class Scanned(nn.Module):
    """An LSTM or a GRU by `jax.lax.scan`, with one matmul per step for all gates."""

    gated: bool
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width = x.shape[-1]
        gates = 3 if self.gated else 4
        init = nn.initializers.lecun_normal()
        w = self.param("w", init, (width, gates * width)).astype(x.dtype)
        inside = nn.Dense(gates * width, dtype=self.dtype)(x).swapaxes(0, 1)

        def lstm(carry, z):
            c, h = carry
            i, f, o, g = jnp.split(z + h @ w, 4, axis=-1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            h = nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        def gru(h, z):
            (r, u, n), (a, b, m) = (jnp.split(y, 3, axis=-1) for y in (z, h @ w))
            n = jnp.tanh(n + nn.sigmoid(r + a) * m)
            u = nn.sigmoid(u + b)
            h = u * h + (1 - u) * n
            return h, h

        zeros = jnp.zeros((len(x), width), x.dtype)
        step, begin = (gru, zeros) if self.gated else (lstm, (zeros, zeros))
        return jax.lax.scan(step, begin, inside)[1].swapaxes(0, 1)


def scanned_by_linen(gated: bool, dtype: DTypeLike | None) -> nn.Module:
    cell = nn.GRUCell if gated else nn.OptimizedLSTMCell
    return nn.RNN(cell(STATES, dtype=dtype))


def scanned_by_nnx(gated: bool, dtype: DTypeLike | None) -> nn.Module:
    cell = nnx.GRUCell if gated else nnx.OptimizedLSTMCell

    def rnn(*, rngs: nnx.Rngs) -> nnx.RNN:
        return nnx.RNN(cell(STATES, STATES, dtype=dtype, rngs=rngs))

    return nnx.bridge.ToLinen(rnn)


STATES = 1024
LOOPS = {"linen": scanned_by_linen, "nnx": scanned_by_nnx, "scan": Scanned}


class Recurrent(nn.Module):
    """Two LSTM or GRU layers over words, in one form."""

    form: str
    gated: bool  # whether the layers are GRUs
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(VOCABULARY, STATES, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = LOOPS[self.form](self.gated, self.dtype)(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)
