"""What people write, in small: programs whose digits autocast must keep.

Each is a function of arrays, with a maker of its arguments. It names no dtype: in
float64 it is its own exact answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, nn
from jax.experimental.ode import odeint


class Program(NamedTuple):
    """A function, and for each argument a function that draws it."""

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
    """Enters a program. A shape stands for normal numbers, for a weight's if the name
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


def repeat(step, carry, length):
    return lax.scan(lambda c, _: (step(c), None), carry, length=length)[0]


# ---- steps that are small beside what they are added to


@program(x=(4, 8), w=(8, 8))
def euler(x, w):
    return repeat(lambda x: x + 1e-3 * (x @ w), x, 1000)


@program(x=(4, 8), w1=(8, 16), w2=(16, 8))
def runge_kutta(x, w1, w2):
    def f(x):
        return jnp.tanh(x @ w1) @ w2

    def step(x, h=0.01):
        a = f(x)
        b = f(x + h / 2 * a)
        c = f(x + h / 2 * b)
        return x + h / 6 * (a + 2 * b + 2 * c + f(x + h * c))

    return repeat(step, x, 100)


@program(x=(8,), w=(8, 8), t=lambda rng: np.linspace(0, 1, 5, dtype=np.float32))
def ode_solver(x, w, t):
    return odeint(lambda x, t: jnp.tanh(w @ x), x, t, rtol=1e-3, atol=1e-3)


@program(w=(8, 1), x=(16, 8), y=(16, 1))
def maml(w, x, y):
    def loss(w):
        return jnp.mean((x @ w - y) ** 2)

    return loss(w - 0.01 * jax.grad(loss)(w))


@program(ema=(8, 8), w=(8, 8), x=(4, 8))
def ema_of_weights(ema, w, x):
    ema = 0.999 * ema + 0.001 * w
    return ema, (x @ w) * 0.5 + x @ ema


@program(w=(8, 8), x=(16, 8))
def gradient_descent(w, x):
    step = lambda w: w - 1e-3 * (x.T @ jnp.tanh(x @ w)) / 16  # noqa: E731
    return repeat(step, w, 200)


@program(x=(4, 16), w1=(6, 16, 16), w2=(6, 16, 16), g=normal(6, 16, scale=1e-6))
def layer_scale(x, w1, w2, g):
    def layer(x, p):
        return x + p[2] * (nn.gelu(x @ p[0]) @ p[1]), None

    return lax.scan(layer, x, (w1, w2, g))[0]


@program(x=(32,), w=(32, 32))
def heat_equation(x, w):
    def step(u):
        return u + 0.01 * (jnp.roll(u, 1, -1) - 2 * u + jnp.roll(u, -1, -1))

    return repeat(step, jnp.tanh(x @ w), 100)


@program(x=(8, 8), w=(8, 8))
def wave_with_learned_force(x, w):
    def step(c):
        u, v = c
        v = v + 0.01 * (u @ w - u)
        return u + 0.01 * v, v

    return repeat(step, (x, jnp.zeros_like(x)), 100)


# ---- reinforcement learning and sequences


@program(x=(16, 8), w=(8, 4), old=uniform(-2, -0.5, 16), adv=(16,), a=ints(4, 16))
def ppo(x, w, old, adv, a):
    logits = nn.log_softmax(x @ w)
    new = jnp.take_along_axis(logits, a[:, None], 1)[:, 0]
    ratio = jnp.exp(new - old)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * adv, clipped * adv).mean(), ratio


@program(x=(64, 8), w=(8, 1), r=(64,))
def advantages(x, w, r):
    values = (x @ w)[:, 0]

    def step(carry, x):
        later, gae = carry
        reward, value = x
        gae = reward + 0.99 * later - value + 0.99 * 0.95 * gae
        return (value, gae), gae

    zero = jnp.zeros_like(r[0])
    return lax.scan(step, (zero, zero), (r, values), reverse=True)[1]


@program(x=(12, 4, 8), w=(8, 24), u=normal(8, 24, scale=0.3), b=(24,))
def gru(x, w, u, b):
    def step(h, x):
        (a, c, d), (e, f, g) = (jnp.split(y, 3, -1) for y in (x @ w + b, h @ u))
        r, z = nn.sigmoid(a + e), nn.sigmoid(c + f)
        h = (1 - z) * jnp.tanh(d + r * g) + z * h
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)[1]


@program(x=(12, 4, 8), w=(8, 32), u=normal(8, 32, scale=0.3), b=(32,))
def lstm(x, w, u, b):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, -1)
        c = nn.sigmoid(f + 1) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros_like(x[0])
    return lax.scan(step, (zero, zero), x)[1]


@program(x=(64, 8), w=(8, 8), a=uniform(0.9, 0.999, 8))
def state_space(x, w, a):
    u = x @ w
    _, y = lax.scan(lambda h, u: ((a * h + (1 - a) * u), h), jnp.zeros_like(a), u)
    return y


# ---- large numbers and small ones


@program(x=(16, 8), w=(8, 1), mean=normal(1, mean=1e5), std=normal(1, mean=1e5))
def denormalised(x, w, mean, std):
    h = x @ w
    return h * std + mean


@program(x=(16, 8), w=(8, 8))
def thousandfold_clipped(x, w):
    return jnp.clip((x @ w) * 1000.0, 0, 1e6)


@program(x=(16, 8), w=(8, 8))
def over_its_magnitude(x, w):
    h = nn.relu(x @ w)
    return h / jnp.clip(jnp.abs(h), 1e-8)


@program(x=(16, 8), w=(8, 8))
def over_a_norm_with_eps(x, w):
    h = x @ w
    return h / (jnp.sqrt(jnp.sum(h * h, -1, keepdims=True)) + 1e-12)


@program(x=(16, 8), w=(8, 8))
def over_abs_with_eps(x, w):
    h = x @ w
    return h / (jnp.abs(h) + 1e-8), h / jnp.maximum(h**2, 1e-12)


@program(x=(8, 8), w=(8, 8), i=ints(12, 5))
def filled_take(x, w, i):
    h = jnp.take(x @ w, i, axis=0, mode="fill", fill_value=-1e9)
    return nn.softmax(h, axis=0)


@program(x=(8, 16), w=(16, 8), c=uniform(1, 60000, 8))
def counts(x, w, c):
    return (x @ w) * c[:, None] / c.sum(), jnp.log1p(c) + (x @ w)[:, 0]


@program(t=uniform(1.6e9, 1.7e9, 16), w=(4, 8), mean=uniform(1.65e9, 1.65e9 + 1, 1))
def time_features(t, w, mean):
    day = ((t - mean) / 86400.0) % 7.0
    f = jnp.stack([day, day / 7, jnp.sin(day), jnp.cos(day)], -1)
    return f @ w, t


@program(x=(16, 8), w=(8, 4), i=ints(30000, 16), v=(30000,))
def ids_among_features(x, w, i, v):
    x = jnp.concatenate([i[:, None].astype(x.dtype), x[:, 1:]], -1)
    ids = x[:, 0].astype(jnp.int32)
    return v[ids] + (x.at[:, 0].set(0.0) @ w)[:, 0], x[:, :4].sum(-1) + (
        x / 1e4 @ w
    ).sum(-1)


# ---- masks and attention


def heads(x, w, n):
    return (x @ w).reshape(*x.shape[:-1], n, -1)


@program(x=(8, 16), w=(16, 48), bias=lambda rng: np.tril(np.ones((8, 8), "f")))
def attention_additive_1e9(x, w, bias):
    q, k, v = jnp.split(x @ w, 3, -1)
    scores = q @ k.T / 4.0 + (1.0 - bias) * -1e9
    return nn.softmax(scores) @ v


@program(x=(8, 16), w=(16, 48))
def attention_additive_1e30(x, w):
    q, k, v = jnp.split(x @ w, 3, -1)
    mask = jnp.where(jnp.tri(8, dtype=bool), 0.0, -1e30)
    return nn.softmax(q @ k.T * 16**-0.5 + mask) @ v


@program(x=(2, 8, 16), w=(16, 48), wo=(16, 16), b=(16,))
def attention_causal_inf(x, w, wo, b):
    q, k, v = (y.reshape(2, 8, 4, 4) for y in jnp.split(x @ w, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    scores = jnp.where(jnp.tri(8, dtype=bool), scores, -jnp.inf)
    y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
    return x + y.reshape(2, 8, 16) @ wo + b


@program(x=(8, 32), wq=(32, 32), wk=(32, 8), wv=(32, 8))
def attention_grouped(x, wq, wk, wv):
    q, k, v = heads(x, wq, 4), heads(x, wk, 1), heads(x, wv, 1)
    return nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)


@program(x=(8, 16), w=(16, 16), p=lambda rng: np.arange(30000, 30008, dtype="f"))
def rope(x, w, p):
    freq = 1e4 ** (-jnp.arange(8) / 8)
    angle = p[:, None] * freq
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x @ w, 2, -1)
    q = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return q @ q.T


@program(x=(16, 8), w=(8, 8))
def sinusoidal_positions(x, w):
    angle = (jnp.arange(16)[:, None] + 4096) * 1e4 ** (-jnp.arange(4) / 4)
    return (x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)) @ w


@program(x=(16, 8), wr=(8, 4), w=(4, 8, 8))
def mixture_of_experts(x, wr, w):
    gates, which = lax.top_k(nn.softmax(x @ wr), 2)
    gates = gates / gates.sum(-1, keepdims=True)
    weight = (nn.one_hot(which, 4, dtype=x.dtype) * gates[..., None]).sum(1)
    return jnp.einsum("ne,neo->no", weight, jnp.einsum("ni,eio->neo", x, w))


# ---- norms


def standard(x, axis=-1, eps=1e-6):
    mean = x.mean(axis, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(axis, keepdims=True) + eps)


@program(x=(8, 16), g=normal(16, mean=1), b=(16,), w=(16, 8))
def layer_norm_before(x, g, b, w):
    return (standard(x) * g + b) @ w


@program(x=(8, 16), w=(16, 16), c=(16,), g=normal(16, mean=1), b=(16,))
def layer_norm_after(x, w, c, g, b):
    return standard(x @ w + c) * g + b


@program(x=(8, 16), w=(16, 16), g=normal(16, mean=1), v=(16, 8))
def rms_norm_between(x, w, g, v):
    h = x @ w
    return (h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * g) @ v


@program(x=normal(2, 6, 6, 4, scale=100), w=normal(3, 3, 4, 8), g=normal(8, mean=1))
def group_norm_after_conv(x, w, g):
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    y = standard(y.reshape(2, 36, 4, 2), (1, 3)).reshape(2, 6, 6, 8)
    return nn.relu(y * g)


@program(x=(32, 8), w=(8, 8), g=normal(8, mean=1), b=(8,), m=(8,), v=uniform(1, 2, 8))
def batch_norm_with_statistics(x, w, g, b, m, v):
    h = x @ w
    mean, var = h.mean(0), h.var(0)
    y = (h - mean) / jnp.sqrt(var + 1e-5) * g + b
    return nn.relu(y), 0.99 * m + 0.01 * mean, 0.99 * v + 0.01 * var


# ---- losses after a product


LOSSES = {
    "softmax_ce": optax.softmax_cross_entropy_with_integer_labels,
    "ce_by_hand": lambda z, i: (
        jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1))
        - jnp.take_along_axis(z - z.max(-1, keepdims=True), i[:, None], -1)[:, 0]
    ),
    "label_smoothing": lambda z, i: optax.softmax_cross_entropy(
        z, optax.smooth_labels(nn.one_hot(i, 8, dtype=z.dtype), 0.1)
    ),
    "sigmoid_ce": lambda z, i: optax.sigmoid_binary_cross_entropy(
        z, nn.one_hot(i, 8, dtype=z.dtype)
    ),
    "focal": lambda z, i: optax.sigmoid_focal_loss(z, nn.one_hot(i, 8, dtype=z.dtype)),
    "focal_by_hand": lambda z, i: (lambda p: -((1 - p) ** 2) * jnp.log(p + 1e-8))(
        jnp.take_along_axis(nn.softmax(z), i[:, None], -1)
    ),
    "huber": lambda z, i: optax.huber_loss(z, 3 * nn.one_hot(i, 8, dtype=z.dtype)),
    "cosine": lambda z, i: optax.cosine_distance(
        z, jnp.sin(i[:, None] + jnp.arange(8.0)), epsilon=1e-8
    ),
    "kl": lambda z, i: optax.kl_divergence(
        nn.log_softmax(z), nn.softmax(jnp.sin(i[:, None] + jnp.arange(8.0)))
    ),
    "hinge": lambda z, i: optax.hinge_loss(z, 2 * nn.one_hot(i, 8, dtype=z.dtype) - 1),
    "l2": lambda z, i: optax.l2_loss(z, jnp.sin(i[:, None] + jnp.arange(8.0))),
    "log_cosh": lambda z, i: optax.log_cosh(z, jnp.sin(i[:, None] + jnp.arange(8.0))),
    "poisson": lambda z, i: jnp.exp(z) - i[:, None] * z,
    "entropy": lambda z, i: -(nn.softmax(z) * jnp.log(nn.softmax(z) + 1e-9)).sum(-1),
    "mean_of_squares": lambda z, i: jnp.mean((z - i[:, None]) ** 2),
    "contrastive": lambda z, i: optax.softmax_cross_entropy_with_integer_labels(
        (lambda u: u @ u.T / 0.07)(z / jnp.linalg.norm(z, axis=-1, keepdims=True))
        - 1e9 * jnp.eye(len(z)),
        i,  # not with itself
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


@program(w=(8, 8), v=(8, 8), x=(16, 8))
def weight_decay_in_the_loss(w, v, x):
    h = nn.relu(x @ w) @ v
    return jnp.mean(h**2) + 1e-4 * (jnp.sum(w**2) + jnp.sum(jnp.square(v)))


# ---- probability


@program(x=(16, 8), w=(8, 8), noise=(16, 4), v=(4, 8))
def vae(x, w, noise, v):
    mean, log_var = jnp.split(x @ w, 2, -1)
    z = mean + jnp.exp(0.5 * log_var) * noise
    kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
    return kl.mean() + jnp.mean(jnp.sum((nn.sigmoid(z @ v) - x) ** 2, -1))


@program(x=(16, 8), w=(8, 12), y=(16,))
def mixture_density(x, w, y):
    logits, mean, log_std = jnp.split(x @ w, 3, -1)
    error = (y[:, None] - mean) * jnp.exp(-log_std)
    parts = nn.log_softmax(logits) - 0.5 * error**2 - log_std
    return -nn.logsumexp(parts, -1)


@program(x=(16, 8), w=(8, 8), y=(16, 4))
def gaussian_likelihood(x, w, y):
    mean, raw = jnp.split(x @ w, 2, -1)
    std = nn.softplus(raw) + 1e-6
    return (((y - mean) / std) ** 2 / 2 + jnp.log(std)).sum(-1)


@program(x=(16, 8), w=normal(4, 4, 8, scale=0.3))
def normalising_flow(x, w):
    def layer(carry, w):
        x, log_det = carry
        a, b = jnp.split(x, 2, -1)
        s, t = jnp.split(a @ w, 2, -1)
        s = jnp.tanh(s)
        return (jnp.concatenate([b * jnp.exp(s) + t, a], -1), log_det + s.sum(-1)), None

    (z, log_det), _ = lax.scan(layer, (x, jnp.zeros_like(x[:, 0])), w)
    return 0.5 * (z**2).sum(-1) - log_det


@program(m=(4,), y=(20, 2), f=normal(4, 4, scale=0.3), h=(2, 4))
def kalman(m, y, f, h):
    def step(c, y):
        m, p = c
        m, p = f @ m, f @ p @ f.T + 0.1 * jnp.eye(4)
        gain = jnp.linalg.solve(h @ p @ h.T + jnp.eye(2), h @ p).T
        return (m + gain @ (y - h @ m), p - gain @ h @ p), m

    return lax.scan(step, (m, jnp.eye(4)), y)[1]


# ---- sums and moves


@program(x=normal(65536, mean=0.1))
def sum_of_many(x):
    h = x.reshape(256, 256) @ (jnp.eye(256) * 0.5)
    return h.sum(), h.mean(), jnp.mean(h * h), h.var(), h.std(0)


@program(x=uniform(0, 1, 1024, 4), w=(4, 4))
def running_sums(x, w):
    h = x @ w
    return jnp.cumsum(h, 0), jnp.cumsum(jnp.abs(h), 0) / (1 + jnp.arange(1024.0))[
        :, None
    ]


@program(x=(256, 8), w=(8, 8), i=ints(6, 256))
def segment_means(x, w, i):
    total = jax.ops.segment_sum(x @ w, i, 6)
    count = jax.ops.segment_sum(jnp.ones_like(x[:, 0]), i, 6)
    return total / jnp.maximum(count, 1.0)[:, None]


@program(x=(256, 8), w=(8, 8), i=ints(6, 256), table=(6, 8))
def scatter_and_gather(x, w, i, table):
    h = x @ w
    added = table.at[i].add(0.01 * h)
    return added, added[i] * h, table.at[i[0]].set(h[0])


@program(e=normal(50, 16, scale=0.02), w=(16, 8), p=(8, 16), i=ints(50, 8))
def embeddings(e, w, p, i):
    x = e[i] * 4.0 + 0.02 * p
    return x @ w, x @ e.T


@program(x=(12, 4), y=(10, 4))
def distances(x, y):
    square = (x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * x @ y.T
    return square, jnp.exp(-square / 2)


@program(w=(16, 16), v=(16,))
def power_iteration(w, v):
    def step(v):
        v = w.T @ (w @ v)
        return v / jnp.linalg.norm(v)

    v = repeat(step, v, 20)
    return v @ w @ w.T @ v


@program(x=(8, 4), y=(6, 4))
def sinkhorn(x, y):
    cost = -x @ y.T / 2.0

    def step(c):
        f, g = c
        f = -nn.logsumexp(g - cost, 1) - jnp.log(8.0)
        return f, -nn.logsumexp(f[:, None] - cost, 0) - jnp.log(6.0)

    f, g = repeat(step, (jnp.zeros(8), jnp.zeros(6)), 30)
    return jnp.exp(f[:, None] + g - cost)


@program(w=(8, 8), b=(8,))
def newton(w, b):
    a = w @ w.T + 4 * jnp.eye(8)
    inverse = repeat(lambda x: x @ (2 * jnp.eye(8) - a @ x), jnp.eye(8) / 12, 12)
    return inverse @ b


@program(x=(16, 8), w=(8, 8))
def sorted_quantiles(x, w):
    h = x @ w
    return jnp.sort(h, 0), jnp.quantile(h, 0.3, axis=0), jnp.median(h)


@program(x=uniform(0, 1, 32), y=(50,), w=(50, 50))
def interpolated(x, y, w):
    return jnp.interp(x, jnp.linspace(0, 1, 50), y @ w)


@program(x=(4, 32), w=(32, 32), g=(17,))
def fourier_filter(x, w, g):
    return jnp.fft.irfft(jnp.fft.rfft(x @ w) * g, 32)


@program(c=(6,), x=uniform(-1.5, 1.5, 16), w=(16, 16))
def polynomial(c, x, w):
    return jnp.polyval(c, x @ w / 2), jnp.polyval(c, x)


@program(w=(8, 8), v=(8, 1), x=(16, 8))
def gradient_penalty(w, v, x):
    critic = lambda x: (jnp.tanh(x @ w) @ v)[0]  # noqa: E731
    norms = jnp.linalg.norm(jax.vmap(jax.grad(critic))(x), axis=-1)
    return jnp.mean((norms - 1) ** 2), norms


@program(x=(8, 16), w1=(12, 16, 32), w2=(12, 32, 16), b=normal(12, 32, scale=0.1))
def residual_stream(x, w1, w2, b):
    for a, c, d in zip(w1, w2, b, strict=True):
        x = x + nn.relu(standard(x) @ a + d) @ c
    return x


@program(x=(8, 16), w=(16, 64), v=(64, 16), keep=lambda rng: rng.random((8, 64)) < 0.9)
def dropout(x, w, v, keep):
    return jnp.where(keep, nn.silu(x @ w) / 0.9, 0.0) @ v + x


@program(x=(8, 16), w=(16, 16), m=lambda rng: (rng.random((8, 1)) < 0.7).astype("f"))
def masked_mean(x, w, m):
    return ((x @ w) * m).sum(0) / jnp.maximum(m.sum(), 1e-6), x * m


@program(x=(8, 16), w=(16, 16), v=(16, 16), b=(16,))
def gated(x, w, v, b):
    return nn.sigmoid(x @ w + b) * (x @ v), nn.glu(x @ w), x * nn.sigmoid(x @ w)


@program(x=(8, 64), w=(64, 32), step=uniform(0.01, 0.02, 1))
def quantised(x, w, step):
    h = x @ w
    rounded = h + lax.stop_gradient(jnp.round(h / step) * step - h)
    return rounded @ w.T


@program(x=(16, 8), w=(8, 8), u=(8,))
def spectral_norm(x, w, u):
    v = w @ u
    v = v / (jnp.linalg.norm(v) + 1e-12)
    u = w.T @ v
    u = u / (jnp.linalg.norm(u) + 1e-12)
    sigma = lax.stop_gradient(v) @ w @ lax.stop_gradient(u)
    return x @ (w / sigma)


@program(x=(16, 4), w=(1, 4, 8), y=(16, 8))
def diffusion_schedule(x, w, y):
    beta = jnp.linspace(1e-4, 0.02, 1000)
    alpha = jnp.cumprod(1 - beta)[jnp.arange(16) * 60][:, None]
    noisy = jnp.sqrt(alpha) * y + jnp.sqrt(1 - alpha) * (x @ w[0])
    return noisy, alpha / (1 - alpha) * (noisy - y)
