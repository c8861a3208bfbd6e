"""More of `autocast_programs`: norms, losses, probability, sums, layers."""

import jax
import jax.numpy as jnp
import optax
from jax import lax, nn

from tests.autocast_programs import ints, normal, program, repeat, uniform

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
    return nn.silu(y * g)


@program(x=(32, 8), w=(8, 8), g=normal(8, mean=1), b=(8,), m=(8,), v=uniform(1, 2, 8))
def batch_norm_with_statistics(x, w, g, b, m, v):
    h = x @ w
    mean, var = h.mean(0), h.var(0)
    y = (h - mean) / jnp.sqrt(var + 1e-5) * g + b
    return nn.silu(y), 0.99 * m + 0.01 * mean, 0.99 * v + 0.01 * var


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
    "squared_hinge": lambda z, i: jnp.square(
        optax.hinge_loss(z, 2 * nn.one_hot(i, 8, dtype=z.dtype) - 1)
    ),
    "l2": lambda z, i: optax.l2_loss(z, jnp.sin(i[:, None] + jnp.arange(8.0))),
    "log_cosh": lambda z, i: optax.log_cosh(z, jnp.sin(i[:, None] + jnp.arange(8.0))),
    "poisson": lambda z, i: jnp.exp(z) - i[:, None] * z,
    "entropy": lambda z, i: -(nn.softmax(z) * jnp.log(nn.softmax(z) + 1e-9)).sum(-1),
    "mean_of_squares": lambda z, i: jnp.mean((z - i[:, None]) ** 2),
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


@program(w=(8, 8), v=(8, 8), x=(16, 8))
def weight_decay_in_the_loss(w, v, x):
    h = nn.gelu(x @ w) @ v
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


@program(w=(16, 16), v=uniform(0.5, 1.5, 16))
def power_iteration(w, v):
    w = 0.3 * w + 0.2 * jnp.ones((16, 16))  # with one large singular value

    def step(v):
        v = w.T @ (w @ v)
        return v / jnp.linalg.norm(v)

    v = repeat(step, v, 2)
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
    return jnp.sort(h, 0), jnp.quantile(h, 0.3, axis=0), jnp.median(h, 0)


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
        x = x + nn.silu(standard(x) @ a + d) @ c
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


@program(x=(8, 64), w=(64, 32), size=uniform(0.001, 0.002, 1))
def quantised_weights(x, w, size):
    rounded = w + lax.stop_gradient(jnp.round(w / size) * size - w)
    return x @ rounded, rounded


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
