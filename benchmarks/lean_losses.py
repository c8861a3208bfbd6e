"""The losses of `benchmarks.lean`: functions of float32 logits and labels, by row.

`kl` and `distilled` also take the logits of a teacher, which have no gradient.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from benchmarks.lean_transformers import MLP, VOCABULARY, WIDTH


def integer(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def one_hot(logits: Array, labels: Array) -> Array:
    wanted = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, wanted)


def smoothed(logits: Array, labels: Array) -> Array:
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(logits, wanted)


def smoothed_by_mean(logits: Array, labels: Array) -> Array:
    logp = jax.nn.log_softmax(logits)
    return -0.9 * _of_label(logp, labels) - 0.1 * logp.mean(-1)


def z_loss(logits: Array, labels: Array) -> Array:
    z = jax.nn.logsumexp(logits, -1)
    return z - _of_label(logits, labels) + 1e-4 * z**2


def entropy(logits: Array, _: Array) -> Array:
    logp = jax.nn.log_softmax(logits)
    return -(jnp.exp(logp) * logp).sum(-1)


def with_entropy(logits: Array, labels: Array) -> Array:
    return integer(logits, labels) - 0.01 * entropy(logits, labels)


def focal(logits: Array, labels: Array) -> Array:
    logp = _of_label(jax.nn.log_softmax(logits), labels)
    return -((1 - jnp.exp(logp)) ** 2) * logp


def sigmoid(logits: Array, labels: Array) -> Array:
    wanted = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.sigmoid_binary_cross_entropy(logits, wanted).sum(-1)


def kl(logits: Array, labels: Array, teacher: Array) -> Array:
    return optax.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(teacher))


def distilled(logits: Array, labels: Array, teacher: Array) -> Array:
    soft = kl(logits / 2, labels, teacher / 2)
    return 0.5 * integer(logits, labels) + 0.5 * 4 * soft


def _of_label(x: Array, labels: Array) -> Array:
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


TAUGHT = (kl, distilled)
LOSSES = (integer, one_hot, smoothed, smoothed_by_mean, z_loss, entropy, with_entropy)
LOSSES += (focal, sigmoid, *TAUGHT)


def mean_of(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the mean loss of logits, or of a student's and a teacher's logits."""

    def mean(out: tuple[Array, ...], labels: Array) -> Array:
        logits, *teacher = (x.astype(jnp.float32) for x in out)
        return loss(logits, labels, *teacher).mean()

    return mean


class Head(nn.Module):
    """Logits of given features, or behind an embedding, an MLP and a norm.

    With `taught`, it also returns a teacher's logits.
    """

    classes: int
    taught: bool
    in_model: bool = False
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, ...]:
        dense = functools.partial(nn.Dense, self.classes, self.in_model, self.dtype)
        if self.in_model:
            x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(x)
            x = x + MLP(4 * WIDTH, dtype=self.dtype)(x)
            x = nn.LayerNorm(dtype=self.dtype)(x)
        logits = dense(name="student")(x)
        if not self.taught:
            return (logits,)
        return logits, jax.lax.stop_gradient(dense(name="teacher")(x))
