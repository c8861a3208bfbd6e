"""Draw random programs of whole layers, over data that half precision holds badly.

A layer takes two activations and the data, and returns an activation of the same shape.
No layer names a dtype, so its float64 run is the exact answer. A program nests layers
in JAX's constructs.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace as Data
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, nn

from tests.support.constructs import AROUND, repeat
from tests.support.random_hazards import HAZARDS, over_time
from tests.support.random_programs import Step, program
from tests.support.small_programs import ints, normal, uniform

ROWS, TIME, SIZE, WIDE = 3, 4, 8, 16
ACTIVATION = ROWS, TIME, SIZE
CAUSAL = np.tril(np.ones((TIME, TIME), bool))
PERIODS = 50 * 2.0 ** np.arange(SIZE)


def offset(rng: np.random.Generator) -> np.ndarray:
    """Draws small differences around a large mean, like temperatures in kelvin."""
    mean = 10 ** rng.uniform(2, 4) * rng.choice([-1, 1])
    scale = 10 ** rng.uniform(-1, 1)
    return (rng.normal(size=ACTIVATION) * scale + mean).astype(np.float32)


def log_uniform(low: float, high: float, *shape: int):
    """Draws normal numbers times a random power of ten."""

    def maker(rng):
        drawn = rng.normal(size=shape) * 10 ** rng.uniform(low, high)
        return drawn.astype(np.float32)

    return maker


MAKERS = {
    "x": normal(*ACTIVATION),
    "offset": offset,
    "tiny": log_uniform(-6, -3, *ACTIVATION),
    "exact": lambda rng: rng.integers(-4000, 4000, ACTIVATION).astype(np.float32),
    "ids": lambda rng: rng.integers(0, 10**6, (ROWS, TIME, 1)).astype(np.float32),
    "times": lambda rng: np.sort(uniform(0, 1e5, ROWS, TIME, 1)(rng), axis=1),
    "std": lambda rng: np.exp(normal(SIZE)(rng)),
    "mean": normal(SIZE, scale=100.0),
    "scale": normal(SIZE, scale=0.1, mean=1.0),
    "bias": normal(SIZE, scale=0.1),
    "w": normal(SIZE, SIZE, scale=SIZE**-0.5),
    "w_in": normal(SIZE, WIDE, scale=SIZE**-0.5),
    "w_out": normal(WIDE, SIZE, scale=WIDE**-0.5),
    "w_small": log_uniform(-4, -2, SIZE, SIZE),
    "kernel": normal(3, SIZE, SIZE, scale=0.2),
    "table": normal(10, SIZE),
    "number": lambda rng: np.float32(rng.uniform(0.5, 2)),
    "i": ints(10, ROWS, TIME),
}
STARTS = ("x", "offset", "tiny", "exact")


def layer_norm(a: Array) -> Array:
    return (a - a.mean(-1, keepdims=True)) / jnp.sqrt(a.var(-1, keepdims=True) + 1e-5)


def rms_norm(a: Array) -> Array:
    return a * lax.rsqrt(jnp.square(a).mean(-1, keepdims=True) + 1e-6)


def batch_norm(a: Array) -> Array:
    mean = a.mean((0, 1))
    var = jnp.maximum(0, jnp.square(a).mean((0, 1)) - jnp.square(mean))
    return (a - mean) * lax.rsqrt(var + 1e-3)


def unit(a: Array) -> Array:
    return a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)


def scores(a: Array, c: Array, d: Data) -> Array:
    return jnp.einsum("btd,bsd->bts", jnp.tanh(a) @ d.w, jnp.tanh(c) @ d.w) / SIZE**0.5


def masked(scores: Array, fill: float) -> Array:
    return nn.softmax(jnp.where(CAUSAL, scores, fill))


def conv(a: Array, kernel: Array, **options: Any) -> Array:
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        a, kernel, (1,), "SAME", dimension_numbers=names, **options
    )


def pooled(a: Array, start: float, reduce: Callable) -> Array:
    return lax.reduce_window(a, start, reduce, (1, 2, 1), (1, 1, 1), "SAME")


def rnn(a: Array, c: Array, d: Data) -> Array:
    def step(h, x):
        h = jnp.tanh(h @ d.w + x @ d.w + d.bias)
        return h, h

    return over_time(step, jnp.zeros_like(a[:, 0]), a)


def gru(a: Array, c: Array, d: Data) -> Array:
    def step(h, x):
        gate = nn.sigmoid(x @ d.w + h @ d.w)
        h = (1 - gate) * h + gate * jnp.tanh(x @ d.w + d.bias)
        return h, h

    return over_time(step, a[:, 0], a)


def euler(a: Array, c: Array, d: Data) -> Array:
    return lax.fori_loop(0, 8, lambda _, h: h + 1e-3 * (jnp.tanh(h) @ d.w), a)


def linear_recurrence(a: Array, c: Array, d: Data) -> Array:
    def joined(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    return lax.associative_scan(joined, (nn.sigmoid(a @ d.w), c), axis=1)[1]


def custom_jvp(a: Array, c: Array, d: Data) -> Array:
    fn = jax.custom_jvp(lambda a: jnp.log1p(jnp.exp(-jnp.abs(a))) + jnp.maximum(a, 0))
    fn.defjvps(lambda t, y, a: t * nn.sigmoid(a))
    return fn(a @ d.w)


def segment_sum(a: Array, d: Data) -> Array:
    return jax.ops.segment_sum(a.reshape(-1, a.shape[-1]), d.i.ravel(), 10)[d.i]


def update(a: Array, c: Array, d: Data) -> Array:
    first, second = d.i[0, 0] % 2, d.i[0, 1] % 2
    part = lax.dynamic_slice_in_dim(c, first, 2, axis=1) @ d.w
    return lax.dynamic_update_slice_in_dim(a, part, second, axis=1)


def moves(a: Array) -> Array:
    heads = jnp.swapaxes(a.reshape(ROWS, TIME, 2, SIZE // 2), 2, 3)
    return jnp.roll(jnp.flip(heads.reshape(a.shape), 1), 1, 1)


def label_loss(a: Array, d: Data) -> Array:
    labels = (d.i % SIZE)[..., None]
    return -jnp.take_along_axis(nn.log_softmax(a @ d.w), labels, -1)


def clock(a: Array, c: Array, d: Data) -> Array:
    age = d.times - d.times[:, :1]
    return (a @ d.w) * jnp.exp(-age / 1e4) + jnp.sin(d.times / PERIODS.astype(a.dtype))


def time_steps(a: Array, c: Array, d: Data) -> Array:
    steps = jnp.diff(d.times, axis=1, append=d.times[:, -1:] + 1)
    return (jnp.tanh(a) @ d.w) * steps / 1e4


def exact(a: Array, c: Array, d: Data) -> Array:
    number = d.exact + 3 * d.i[..., None]
    return jnp.where(number > 0, a @ d.w, c) + (number % 5) * 0.1


def by_id(a: Array, c: Array, d: Data) -> Array:
    rows = d.table[(d.ids % 10).astype(int)[..., 0]]
    return a @ d.w + rows * jnp.floor(d.ids / 1e5)


def with_ids(a: Array, c: Array, d: Data) -> Array:
    return jnp.concatenate([a[..., 1:] @ d.w[1:, 1:], d.ids], -1)


def outer(a: Array, c: Array, d: Data) -> Array:
    a, c = jnp.tanh(a), jnp.tanh(c)
    pairs = jnp.einsum("btd,bse->btde", a, c).sum(2)
    return pairs + jnp.einsum("btd,bte,de->bt", a, c, d.w)[..., None]


def dropout(a: Array) -> Array:
    # Drawing in float64 would give another mask.
    noise = jax.random.uniform(jax.random.key(3), a.shape, jnp.float32)
    return jnp.where(noise < 0.8, a / 0.8, 0.0)


def variance(a: Array, c: Array, d: Data) -> Array:
    return a * (c @ d.w).var(1, keepdims=True) + (a @ d.w).mean((0, 1))


def log_ratio(a: Array, c: Array, d: Data) -> Array:
    pairs = (nn.log_softmax(jnp.tanh(x) @ d.w) for x in (a, c))
    return jnp.exp(next(pairs) - next(pairs))


def mlp(activation: Callable) -> Callable:
    return lambda a, c, d: activation(a @ d.w_in) @ d.w_out


LAYERS = {
    "affine": lambda a, c, d: a @ d.w + d.bias,
    **{name: mlp(getattr(nn, name)) for name in "gelu silu relu softplus elu".split()},
    "glu": lambda a, c, d: nn.glu(a @ d.w_in),
    "jitted": lambda a, c, d: jax.jit(lambda a: nn.silu(a @ d.w))(a) + c,
    "layer_norm": lambda a, c, d: layer_norm(a) * d.scale + d.bias,
    "rms_norm": lambda a, c, d: rms_norm(a) * d.scale,
    "batch_norm": lambda a, c, d: batch_norm(a @ d.w) * d.scale + d.bias,
    "checkpointed": lambda a, c, d: jax.checkpoint(
        lambda a: nn.gelu(layer_norm(a) @ d.w)
    )(a),
    "residual": lambda a, c, d: a + c @ d.w,
    "attention": lambda a, c, d: masked(scores(a, c, d), -jnp.inf) @ c,
    "attention_1e9": lambda a, c, d: masked(scores(a, c, d), -1e9) @ (c @ d.w),
    "attention_1e30": lambda a, c, d: masked(scores(a, c, d), -1e30) @ (c @ d.w),
    "added_mask": lambda a, c, d: nn.softmax(
        jnp.tanh(a) @ d.w + jnp.where(d.i[..., None] % 2 == 0, 0.0, -1e9) * (c > 0)
    ),
    "conv": lambda a, c, d: conv(a, d.kernel) + d.bias,
    "dilated": lambda a, c, d: conv(a, d.kernel, rhs_dilation=(2,)),
    "depthwise": lambda a, c, d: conv(a, d.kernel[:, :1], feature_group_count=SIZE),
    "embed": lambda a, c, d: a + d.table[d.i],
    "one_hot": lambda a, c, d: a / 2 + nn.one_hot(d.i, 10, dtype=a.dtype) @ d.table,
    "scatter": lambda a, c, d: jnp.zeros_like(a).at[:, d.i[0] % TIME].add(a) + c,
    "segment_sum": lambda a, c, d: segment_sum(a, d) / 3,
    "segment_mean": lambda a, c, d: (
        segment_sum(a, d) / segment_sum(jnp.ones_like(a[..., :1]), d)
    ),
    "sort": lambda a, c, d: jnp.sort(a, axis=1) @ d.w,
    "top": lambda a, c, d: jnp.concatenate([lax.top_k(a @ d.w, 3)[0], c[..., 3:]], -1),
    "cumsum": lambda a, c, d: jnp.cumsum(a, 1),
    "fft": lambda a, c, d: jnp.fft.irfft(jnp.fft.rfft(a @ d.w) / 2),
    "update": update,
    "moves": lambda a, c, d: moves(a) @ d.w,
    "rnn": rnn,
    "gru": gru,
    "euler": euler,
    "linear_recurrence": linear_recurrence,
    "ema": lambda a, c, d: 0.999 * a + 0.001 * (c @ d.w),
    "mapped": lambda a, c, d: jax.vmap(lambda a, c: jnp.tanh(a @ d.w) + c.sum(0))(a, c),
    "softplus_by_rule": custom_jvp,
    "ratio": lambda a, c, d: (a @ d.w) / (jnp.abs(c) + 1e-3),
    "ratio_1e6": lambda a, c, d: (a @ d.w) / (jnp.abs(c) + 1e-6),
    "log_ratio": log_ratio,
    "log": lambda a, c, d: jnp.log(jnp.abs(a @ d.w) + 1),
    "log_1e8": lambda a, c, d: jnp.log(jnp.abs(a @ d.w) + 1e-8),
    "root": lambda a, c, d: jnp.sign(a) * jnp.abs(a) ** 0.5,
    "power": lambda a, c, d: jnp.sign(a) * jnp.abs(a) ** 1.5,
    "square": lambda a, c, d: jnp.square(jnp.tanh(a @ d.w)),
    "to_units": lambda a, c, d: (jnp.tanh(a) @ d.w) * d.std + d.mean,
    "from_units": lambda a, c, d: (a - d.mean) / d.std,
    "with_ids": with_ids,
    "by_id": by_id,
    "clock": clock,
    "time_steps": time_steps,
    "exact": exact,
    "exact_sum": lambda a, c, d: a + d.exact.sum(1, keepdims=True) * 1e-4,
    "number": lambda a, c, d: d.number * (a @ d.w) + d.number * c,
    "tiny": lambda a, c, d: a + (d.tiny @ d.w) * 1e3,
    "small_weight": lambda a, c, d: (a @ d.w_small) @ d.w * 1e2,
    "offset": lambda a, c, d: a + d.offset * 1e-3,
    "norm_of_offset": lambda a, c, d: layer_norm(d.offset) @ d.w + a,
    "centred": lambda a, c, d: (a @ d.w + d.offset) - d.offset.mean(-1, keepdims=True),
    "variance": variance,
    "cosine": lambda a, c, d: a + unit(a @ d.w) * unit(c),
    "logsumexp": lambda a, c, d: a - nn.logsumexp(a @ d.w, -1, keepdims=True),
    "dropout": lambda a, c, d: dropout(a @ d.w),
    "stop_gradient": lambda a, c, d: a @ d.w + lax.stop_gradient(c),
    "max_pool": lambda a, c, d: pooled(a @ d.w, -jnp.inf, lax.max),
    "mean_pool": lambda a, c, d: pooled(c, 0.0, lax.add) / 2,
    "outer": outer,
    "mixed": lambda a, c, d: 0.1 * a + 0.9 * c,
    "product": lambda a, c, d: jnp.tanh(a) * c,
    "clip": lambda a, c, d: jnp.clip(a, -3, 3) + jnp.minimum(c @ d.w, 2.0),
    "three_factors": lambda a, c, d: jnp.einsum("btd,de,bte->btd", a, d.w, jnp.tanh(c)),
    "gram": lambda a, c, d: jnp.einsum("bsd,bte->bte", jnp.tanh(a), c),
    "label_loss": lambda a, c, d: a + label_loss(a, d),
}


def repeated(fn: Callable) -> Callable:
    """Calls a layer in two iterations of a loop, from the result of a matmul."""
    return lambda a, c, *d: repeat(
        lambda h, _: fn(h, c, *d), a @ named(d).w, None, length=2
    )


WRAPPERS = {n: AROUND[n] for n in "jit cond vmap custom_jvp custom_vjp".split()}
WRAPPERS |= {"remat": AROUND["checkpoint"], "scan": repeated}
OPS = (*LAYERS, *HAZARDS, *HAZARDS, *WRAPPERS)


def named(arrays: Sequence[Array]) -> Data:
    return Data(**dict(zip(MAKERS, arrays, strict=True)))


def layer_program(seed: int, own_rules: bool = True) -> Callable[..., list[Array]]:
    """Returns a function from all data to the results of the last two steps.

    Without `own_rules`, JAX differentiates the functions in it that have rules.
    """
    steps, start = program(seed, OPS), STARTS[seed // 2 % len(STARTS)]
    steps = steps if own_rules else without_rules(steps)

    def fn(*arrays):
        data = named(arrays)
        return run(steps, [data.x, getattr(data, start)], arrays)[-2:]

    return fn


def without_rules(steps: Sequence[Step]) -> tuple[Step, ...]:
    plain = {"custom_jvp": "plain", "custom_vjp": "plain"}
    return tuple(
        Step(plain.get(s.op, s.op), s.left, s.right, without_rules(s.inside))
        for s in steps
    )


def run(steps: Sequence[Step], values: list[Array], arrays: Sequence[Array]):
    for step in steps:
        # Most steps use the last value, so that programs are deep.
        a = values[-1] if step.left % 3 else values[step.left % len(values)]
        c = values[step.right % len(values)]
        if step.inside:
            inner = lambda a, c, *d, s=step: run(s.inside, [c, a], d)[-1]  # noqa: E731
            values.append((AROUND | WRAPPERS)[step.op](inner)(a, c, *arrays))
        else:
            values.append((LAYERS | HAZARDS)[step.op](a, c, named(arrays)))
    return values
