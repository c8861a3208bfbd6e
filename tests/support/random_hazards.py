"""Layers for random programs: lookups, loops, clips, rules, jits, refs, FFTs, sorts.

Each has the form of a layer in `random_layers`. The true derivative of each custom rule
is that of its function, so an oracle may differentiate the function instead.
"""

from collections.abc import Callable
from types import SimpleNamespace as Data
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jax import Array, lax, nn

NEAR_1 = 1 - 1e-4  # which is 1 in both half dtypes
type Layer = Callable[[Array, Array, Data], Array]


# ---- loops


def over_time(step: Callable, start: Array, a: Array, **options: Any) -> Array:
    """Scans rows of time. The step returns the next carry and a row."""
    rows = jnp.swapaxes(a, 0, 1)
    return jnp.swapaxes(lax.scan(step, start, rows, **options)[1], 0, 1)


def loop(update: Callable, **options: Any) -> Layer:
    """Returns the carries of a scan that starts at the result of a matmul."""

    def layer(a, c, d):
        def step(h, x):
            h = update(h, x, d)
            return h, h

        return over_time(step, (a @ d.w)[:, 0], c, **options)

    return layer


def leaky(h: Array, x: Array, d: Data) -> Array:
    decay = nn.sigmoid(d.bias)
    return decay * h + (1 - decay) * x


def over_layers(a: Array, c: Array, d: Data) -> Array:
    weights = jnp.stack([d.w, d.w.T])
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), a @ d.w, weights)[0]


def one_by_one(a: Array, c: Array, d: Data) -> Array:
    step = lambda k, h: h.at[:, k].set(jnp.tanh(h[:, k] @ d.w) + c[:, k])  # noqa: E731
    return lax.fori_loop(0, a.shape[1], step, a)


def slices(a: Array, c: Array, d: Data) -> Array:
    def row(a, c, i):
        part = lax.dynamic_slice_in_dim(c, i[0] % 3, 2)
        return lax.dynamic_update_slice_in_dim(a, part, i[1] % 3, 0)

    return jax.vmap(row)(a, c @ d.w, d.i)


def sine(a: Array, c: Array, d: Data) -> Array:
    fn = jax.custom_jvp(jnp.sin)
    fn.defjvp(lambda p, t: (fn(*p), t[0] * jnp.cos(p[0])))
    return fn(jnp.tanh(a) @ d.w)


def swish(a: Array, c: Array, d: Data) -> Array:
    def derivatives(primals, tangents):
        (z, s), (dz, ds) = primals, tangents
        gate = nn.sigmoid(s * z)
        slope = gate * (1 - gate) * z
        return fn(z, s), dz * (gate + s * slope) + ds * z * slope

    fn = jax.custom_jvp(lambda z, s: z * nn.sigmoid(s * z))
    fn.defjvp(derivatives)
    return fn(a @ d.w, d.scale)


def matmul(a: Array, c: Array, d: Data) -> Array:
    def backward(saved, g):
        a, w = saved
        return g @ w.T, jnp.einsum("btd,bte->de", a, g)

    fn = jax.custom_vjp(lambda a, w: a @ w)
    fn.defvjp(lambda a, w: (a @ w, (a, w)), backward)
    return fn(a, d.w) + fn(c, d.w.T)


def norm(a: Array, c: Array, d: Data) -> Array:
    def forward(a):
        mean = a.mean(-1, keepdims=True)
        scale = lax.rsqrt(a.var(-1, keepdims=True) + 0.1)
        y = (a - mean) * scale
        return y, (y, scale)

    def backward(saved, g):
        y, scale = saved
        along = (g * y).mean(-1, keepdims=True)
        return (scale * (g - g.mean(-1, keepdims=True) - y * along),)

    fn = jax.custom_vjp(lambda a: forward(a)[0])
    fn.defvjp(forward, backward)
    return fn(a @ d.w) * d.scale


tanh_layer = jax.jit(lambda a, w: jnp.tanh(a @ w))
two_layers = jax.jit(lambda a, w: tanh_layer(tanh_layer(a, w), w.T))
gelu = jax.jit(nn.gelu)


def closed_jit(a: Array, c: Array, d: Data) -> Array:
    inner = jax.jit(lambda a: a @ d.w + d.bias)
    return jax.jit(lambda a, c: inner(a) * 2 + jax.jit(nn.softmax)(c @ d.w))(a, c)


def ref(a: Array, c: Array, d: Data) -> Array:
    held = jax.new_ref(a @ d.w)
    held[...] = jnp.tanh(held[...]) + c
    held[:, 0] += (c @ d.w)[:, 1]
    return held[...]


def ref_in_scan(a: Array, c: Array, d: Data) -> Array:
    held = jax.new_ref(jnp.zeros_like(c))

    def step(h, k):
        held[:, k] = h @ d.w
        return jnp.tanh(h @ d.w), None

    lax.scan(step, a[:, 0], jnp.arange(a.shape[1]))
    return jax.freeze(held)


def sum_in_ref(a: Array, c: Array, d: Data) -> Array:
    held = jax.new_ref(a @ d.w)

    def step(k, _):
        held[...] += (c @ d.w) / 8

    lax.fori_loop(0, 4, step, None)
    return jax.freeze(held)


def circular(a: Array, c: Array, d: Data) -> Array:
    both = jnp.fft.rfft(a @ d.w, axis=1) * jnp.fft.rfft(jnp.tanh(c), axis=1)
    return jnp.fft.irfft(both, n=a.shape[1], axis=1)


def spectrum(a: Array, c: Array, d: Data) -> Array:
    found = jnp.fft.fft2(jnp.tanh(a) @ d.w)
    return jnp.sqrt(found.real**2 + found.imag**2 + 1)


def positive(a: Array, d: Data) -> Array:
    rows = jnp.tanh(a @ d.w)
    return rows @ jnp.swapaxes(rows, 1, 2) / a.shape[-1] + jnp.eye(a.shape[1])


HAZARDS: dict[str, Layer] = {
    # lookups
    "rows": lambda a, c, d: a[:, d.i[0] % 4],
    "filled": lambda a, c, d: jnp.take(a @ d.w, d.i[0], 1, mode="fill", fill_value=0.3),
    "along": lambda a, c, d: jnp.take_along_axis(a @ d.w, (d.i % 4)[..., None], 1),
    "clipped": lambda a, c, d: (a @ d.w).at[:, d.i[1]].get(mode="clip"),
    "reference": lambda a, c, d: a @ d.w + 100 * d.table[d.i][..., :1],
    "tied": lambda a, c, d: nn.softmax(a @ d.table.T) @ d.table + d.table[d.i],
    "set_row": lambda a, c, d: a.at[:, d.i[0, 0] % 4].set((c @ d.w)[:, 0]),
    "multiply_row": lambda a, c, d: a.at[:, 1].multiply(jnp.tanh(c @ d.w)[:, 1]),
    "slices": slices,
    "straight_through": lambda a, c, d: (
        a + lax.stop_gradient(d.table[d.i] - a) + c @ d.w
    ),
    "segment_max": lambda a, c, d: jax.vmap(
        lambda a, i: jax.ops.segment_max(a @ d.w, i, 10)[i]
    )(a, d.i),
    # loops
    "running_sum": loop(lambda h, x, d: h + x / 8),
    "decay": loop(lambda h, x, d: 0.9 * h + x @ d.w, reverse=True),
    "running_max": loop(lambda h, x, d: jnp.maximum(h, x)),
    "log_space": loop(
        lambda h, x, d: nn.logsumexp(h[:, :, None] + d.w, axis=1) + jnp.tanh(x)
    ),
    "leaky": loop(leaky),
    "over_layers": over_layers,
    "one_by_one": one_by_one,
    "counted": lambda a, c, d: lax.fori_loop(
        0, 4, lambda k, h: h + (c @ d.w) / (k + 1), a @ d.w
    ),
    "cummax": lambda a, c, d: lax.cummax(a @ d.w, axis=1) + c,
    "cumlogsumexp": lambda a, c, d: lax.cumlogsumexp(a @ d.w, axis=1),
    # numbers next to 1
    "log_of_rest": lambda a, c, d: (
        -jnp.log1p(-jnp.clip(nn.sigmoid(a @ d.w), max=NEAR_1))
    ),
    "arctanh": lambda a, c, d: jnp.arctanh(jnp.clip(a @ d.w, -NEAR_1, NEAR_1)),
    "minimum": lambda a, c, d: 1 / (1.01 - jnp.minimum(a @ d.w, NEAR_1)),
    "where": lambda a, c, d: jnp.log(1 - jnp.where(c > NEAR_1, NEAR_1, c) + a * 0),
    # custom rules
    "sine": sine,
    "swish": swish,
    "matmul": matmul,
    "norm": norm,
    # jits
    "jits": lambda a, c, d: two_layers(a, d.w) + tanh_layer(c, d.w),
    "jit_gelu": lambda a, c, d: gelu(a @ d.w) @ d.w,
    "closed_jit": closed_jit,
    # refs
    "ref": ref,
    "ref_in_scan": ref_in_scan,
    "sum_in_ref": sum_in_ref,
    # Fourier transforms and sorts
    "circular": circular,
    "spectrum": spectrum,
    "rotated": lambda a, c, d: (
        (lax.complex(a @ d.w, a) * jnp.exp(1j * jnp.tanh(c))).real
    ),
    "by_key": lambda a, c, d: lax.sort((d.exact, a @ d.w), dimension=1)[1],
    "argsort": lambda a, c, d: jnp.take_along_axis(a, jnp.argsort(d.exact, 1), 1) @ d.w,
    "sorted": lambda a, c, d: jnp.sort(a @ d.w, -1) + c,
    "median": lambda a, c, d: jnp.median(a @ d.w, 1, keepdims=True) + c,
    # linear algebra
    "cholesky": lambda a, c, d: jnp.linalg.cholesky(positive(a, d)) @ c,
    "solve": lambda a, c, d: jnp.linalg.solve(positive(a, d), c @ d.w),
    "inverse": lambda a, c, d: jnp.linalg.inv(positive(a, d)) @ c,
    "eigenvalues": lambda a, c, d: jnp.linalg.eigvalsh(positive(a, d))[..., None] * c,
    "log_det": lambda a, c, d: a + jnp.linalg.slogdet(positive(c, d))[1][:, None, None],
    "triangular": lambda a, c, d: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(positive(a, d)), c @ d.w, lower=True
    ),
    "qr": lambda a, c, d: jnp.linalg.qr(positive(a, d))[1] @ c,
    "singular": lambda a, c, d: (
        jnp.linalg.svd(positive(a, d), compute_uv=False)[..., None] + c
    ),
    "exponential": lambda a, c, d: jax.scipy.linalg.expm(positive(a, d) / 2) @ c,
    "length": lambda a, c, d: a + jnp.linalg.norm(c @ d.w, axis=-1, keepdims=True),
}
