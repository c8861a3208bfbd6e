"""What people write, in small: programs whose digits autocast must keep.

Each is a function of arrays, with a maker of its arguments. It names no dtype: in
float64 it is its own exact answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    return odeint(lambda x, t: jnp.tanh(w @ x), x, t, rtol=0.1, atol=0.1, hmax=0.1)


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
    return h * (h / jnp.clip(jnp.abs(h), 1e-8))


@program(x=(16, 8), w=(8, 8))
def over_a_norm_with_eps(x, w):
    h = x @ w
    return h / (jnp.sqrt(jnp.sum(h * h, -1, keepdims=True)) + 1e-12)


@program(x=(16, 8), w=(8, 8))
def over_abs_with_eps(x, w):
    h = x @ w
    return h * (h / (jnp.abs(h) + 1e-8)), h**3 / jnp.maximum(h**2, 1e-12)


@program(x=(8, 8), w=(8, 8), i=ints(12, 5))
def filled_take(x, w, i):
    h = jnp.take(x @ w, i, axis=0, mode="fill", fill_value=-1e9)
    return h, nn.softmax(h, axis=0)


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
