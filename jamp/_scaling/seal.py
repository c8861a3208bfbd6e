"""The seal on `ScaledGrads`: one leaf that JAX itself refuses to compute with.

`jax.tree.map(jnp.add, a, b)` would double a scale and add up flags, `optax.global_norm`
would count them, and `lax.pmean` average them, all silently. So everything but the
gradients is stored in a PRNG key of a type of our own, which can be moved, selected,
stacked and donated, and nothing else. Its name is what JAX's error shows.
"""

import functools
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Bool, Float, Key

from jamp._core.compat import name_key_impl
from jamp._core.tree import is_traced
from jamp._scaling.rules import LossScaleState

_TAG = (
    "ScaledGrads: pass them whole, or call .unscale() .map(fn) .global_norm() "
    ".pmean(axis)"
)
# The bits of 1 and of inf: XORed with them, a seal of zeros, as `jnp.zeros_like` makes
# one, says scale 1, finite, and no lower scale; gradients of zero at that are harmless.
_ONE, _INF = np.uint32(0x3F800000), np.uint32(0x7F800000)

_bits = lax.bitcast_convert_type


class Opened(NamedTuple):
    """What a seal holds; explained at `ScaledGrads`."""

    scale: Float[Array, "..."]
    finite: Bool[Array, "..."]
    raw_finite: Bool[Array, "..."]
    scale_state: LossScaleState | None


def _refuse(*_: object) -> NoReturn:
    raise TypeError(f"{_TAG}; they are not a random key.")


def _impl(words: int):
    impl = define_prng_impl(
        key_shape=(words,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"jamp_scaled_grads_{words}",
        tag=_TAG,
    )
    name_key_impl(impl)
    return impl


# Without and with a scale_state.
_IMPLS = {words: _impl(words) for words in (2, 6)}


@functools.partial(jax.jit, inline=True)
def seal(
    scale: Float[Array, "..."],
    finite: Bool[Array, "..."],
    raw_finite: Bool[Array, "..."],
    scale_state: LossScaleState | None,
) -> Key[Array, "..."]:
    """The leaf that holds all of them."""
    bad = (~finite).astype(jnp.uint32) | (~raw_finite).astype(jnp.uint32) << 1
    words = [_bits(scale, jnp.uint32) ^ _ONE, bad]
    if scale_state is not None:
        lowest, *counts = (_bits(x, jnp.uint32) for x in scale_state)
        words += [lowest ^ _INF, *counts]
    words = jnp.stack(jnp.broadcast_arrays(*words), axis=-1)
    return jax.random.wrap_key_data(words, impl=_IMPLS[words.shape[-1]])


def opened(sealed: Any) -> Opened:
    """The inverse of `seal`; of a shape, shapes."""
    if isinstance(sealed, jax.ShapeDtypeStruct):
        return jax.eval_shape(_opened, sealed)
    is_near = is_traced(sealed) or sealed.is_fully_addressable
    if not is_near and sealed.is_fully_replicated:
        # Reading a number must not be a program that all hosts have to run.
        here = jax.random.key_data(sealed).addressable_data(0)
        impl = jax.random.key_impl(sealed)
        sealed = jax.random.wrap_key_data(jnp.asarray(np.asarray(here)), impl=impl)
    return _opened(sealed)


@functools.partial(jax.jit, inline=True)
def _opened(sealed: Key[Array, "..."]) -> Opened:
    data = jax.random.key_data(sealed)
    scale, bad, *rest = (data[..., i] for i in range(data.shape[-1]))
    scale_state = None
    if rest:
        lowest, *counts = rest
        scale_state = LossScaleState(
            _bits(lowest ^ _INF, jnp.float32),
            *(_bits(count, jnp.int32) for count in counts),
        )
    scale = _bits(scale ^ _ONE, jnp.float32)
    return Opened(scale, bad & 1 == 0, bad & 2 == 0, scale_state)
