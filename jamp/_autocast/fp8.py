import jax.numpy as jnp


def dequantized(x, dtype):
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x))
    m = float(jnp.finfo(dtype).max)
    ok = (amax > 0) & jnp.isfinite(amax)
    s = jnp.where(ok, jnp.exp2(jnp.floor(jnp.log2(m / jnp.where(ok, amax, 1)))), 1)
    return (x * s).astype(dtype).astype(jnp.float32) / s
