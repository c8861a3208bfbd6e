"""Small versions of programs that people write, whose digits autocast must keep.

No program names a dtype, so its float64 run is the exact answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, nn


class Program(NamedTuple):
    """A function of arrays, and for each argument a function that draws it."""

    fn: Callable
    makers: dict[str, Callable[[np.random.Generator], np.ndarray]]

    def args(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [maker(rng) for maker in self.makers.values()]


PROGRAMS: dict[str, Program] = {}


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0):
    return lambda rng: (rng.normal(size=shape) * scale + mean).astype(np.float32)


def uniform(low: float, high: float, *shape: int):
    return lambda rng: rng.uniform(low, high, shape).astype(np.float32)


def ints(high: int, *shape: int):
    return lambda rng: rng.integers(0, high, shape).astype(np.int32)


def program(**makers: Any):
    """Registers a program. A shape draws normal numbers, as for a weight if the name
    begins with w."""

    def maker(name, made):
        if callable(made):
            return made
        scale = made[-2] ** -0.5 if name.startswith("w") and len(made) > 1 else 1.0
        return normal(*made, scale=scale)

    def enter(fn):
        made = {name: maker(name, m) for name, m in makers.items()}
        PROGRAMS[fn.__name__] = Program(fn, made)
        return fn

    return enter


@program(x=(16, 8), w=(8, 1), mean=normal(1, mean=1e5), std=normal(1, mean=1e5))
def denormalized(x, w, mean, std):
    h = x @ w
    return h * std + mean


@program(x=(8, 8), w=(8, 8), i=ints(12, 5))
def filled_take(x, w, i):
    h = jnp.take(x @ w, i, axis=0, mode="fill", fill_value=-1e9)
    return h, nn.softmax(h, axis=0)


@program(x=(16, 8), w=(8, 4), i=ints(30000, 16), v=(30000,))
def ids_among_features(x, w, i, v):
    x = jnp.concatenate([i[:, None].astype(x.dtype), x[:, 1:]], -1)
    ids = x[:, 0].astype(jnp.int32)
    return v[ids] + (x.at[:, 0].set(0.0) @ w)[:, 0], x[:, :4].sum(-1) + (
        x / 1e4 @ w
    ).sum(-1)


@program(x=(8, 16), w=(16, 16), p=lambda rng: np.arange(30000, 30008, dtype="f"))
def rope(x, w, p):
    freq = 1e4 ** (-jnp.arange(8) / 8)
    angle = p[:, None] * freq
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x @ w, 2, -1)
    q = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return q @ q.T


@program(x=normal(2, 6, 6, 4, scale=100), w=normal(3, 3, 4, 8), g=normal(8, mean=1))
def group_norm_after_conv(x, w, g):
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    y = y.reshape(2, 36, 4, 2)
    y = y - y.mean((1, 3), keepdims=True)
    y = y * lax.rsqrt((y**2).mean((1, 3), keepdims=True) + 1e-6)
    return nn.silu(y.reshape(2, 6, 6, 8) * g)


LOSSES = {
    "entropy": lambda z, i: -(nn.softmax(z) * jnp.log(nn.softmax(z) + 1e-9)).sum(-1),
    "contrastive": lambda z, i: optax.softmax_cross_entropy_with_integer_labels(
        (lambda u: u @ u.T / 0.07 - 1e9 * jnp.eye(16))(  # not with itself
            z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        ),
        (jnp.arange(16) + 1) % 16,
    ),
}


def after_a_product(name, loss):
    def fn(x, w, b, i):
        return loss(x @ w + b, i)

    fn.__name__ = f"loss_{name}"
    program(x=(16, 8), w=normal(8, 8, scale=0.7), b=(8,), i=ints(8, 16))(fn)


for name, loss in LOSSES.items():
    after_a_product(name, loss)


@program(x=(2, 12, 8), w=(8, 5), i=lambda rng: rng.integers(1, 5, (2, 4)))
def loss_ctc(x, w, i):
    zeros = jnp.zeros_like(x[..., 0])
    return optax.ctc_loss(x @ w, zeros, i, jnp.zeros_like(x[:, :4, 0]))


@program(x=normal(65536, mean=0.1))
def sum_of_many(x):
    h = x.reshape(256, 256) @ (jnp.eye(256) * 0.5)
    return h.sum(), h.mean(), jnp.mean(h * h), h.var(), h.std(0)


@program(w=(8, 8), v=(8, 1), x=(16, 8))
def gradient_penalty(w, v, x):
    critic = lambda x: (jnp.tanh(x @ w) @ v)[0]  # noqa: E731
    norms = jnp.linalg.norm(jax.vmap(jax.grad(critic))(x), axis=-1)
    return jnp.mean((norms - 1) ** 2), norms


@program(x=(16, 8), w=(8, 8), v=(8, 8))
def ratio(x, w, v):
    return 0.1 * (x @ w) / (0.01 * jnp.abs(x @ v) + 2e-3)
