"""Draw random programs for the fuzz tests: ops and control flow on a pool of values.

All operations are continuous and return values of order 1, so rounding errors stay
small. Integers depend only on integers and must be identical. This file has one
function of each kind; test_sweep covers all functions.
"""

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Step(NamedTuple):
    """One step of a program: an op, two operands by number, and steps inside it."""

    op: str
    left: int
    right: int
    inside: tuple["Step", ...] = ()


def run(steps: tuple[Step, ...], floats: list[Array], ints: list[Array]):
    """Runs a program and returns all values of its two pools."""
    floats, ints = list(floats), list(ints)
    for step in steps:
        a, b = floats[step.left % len(floats)], floats[step.right % len(floats)]
        i = ints[step.right % len(ints)]
        if step.op in ON_INTS:
            ints.append(ON_INTS[step.op](ints[step.left % len(ints)], i))
        elif step.inside:
            body = functools.partial(inside, step.inside, b, ints)
            floats.append((FLOW | DERIVATIVES)[step.op](body, a))
        else:
            operands = (a,) if step.op in UNARY else (a, b if step.op in BINARY else i)
            floats.append((UNARY | BINARY | WITH_INTS)[step.op](*operands))
    return floats, ints


def inside(steps, b, ints, a):
    """Runs the steps on a value, and returns one of the same shape and dtype."""
    last = run(steps, [a, b], ints)[0][-1].astype(a.dtype)
    mixed = jnp.tanh(a @ square(b, a.shape[1]).astype(a.dtype) + last[0, 0])
    if len(steps) % 2:  # some bodies end in a tanh, others in a sum
        return mixed
    return (mixed / 2 + last.mean() / 4 + a / 2).astype(a.dtype)


def square(b, size):
    """Returns a square matrix that depends on `b`."""
    row = fit(jnp.tanh(b), (size,))
    return jnp.outer(row, row) / size


def fit(b, shape):
    return jnp.resize(b, shape)


def pool(a, start, reduce):
    window, strides, padding = (1, 2), (1, 1), [(0, 0), (0, 1)]
    start = a.dtype.type(start)  # JAX recognizes the identity only in a constant
    return lax.reduce_window(a, start, reduce, window, strides, padding)


def conv(a, b):
    kernel = fit(b, (1, 1, 2)).astype(a.dtype) / 2
    return lax.conv_general_dilated(a[:, None], kernel, (1,), "SAME")[:, 0]


def update(a, b):
    return lax.dynamic_update_slice(a, fit(b, (1, a.shape[1])).astype(a.dtype), (0, 0))


UNARY = {
    "sin": jnp.sin,
    "exp": lambda a: jnp.exp(-jnp.abs(a)),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda a: jax.nn.logsumexp(a, axis=1, keepdims=True),
    "standardize": lambda a: jax.nn.standardize(a, epsilon=1.0),
    "mean": lambda a: a.mean(0, keepdims=True),
    "max": lambda a: a.max(1, keepdims=True),
    "norm": lambda a: a / jnp.sqrt((a * a).sum() + 1),
    "cumsum": lambda a: jnp.cumsum(a, 0) / a.shape[0],
    "sort": lambda a: jnp.sort(a, 1),
    "transpose": lambda a: a.T,
    "pad": lambda a: jnp.pad(a, ((0, 1), (1, 0)))[:5, :5],
    "pool": lambda a: pool(a, -jnp.inf, lax.max),
    "where": lambda a: jnp.where(jnp.arange(a.size).reshape(a.shape) % 2 == 0, a, 0),
    "bfloat16": lambda a: a.astype(jnp.bfloat16),
    "float32": lambda a: a.astype(jnp.float32),
    "noise": lambda a: a + jax.random.normal(jax.random.key(3), a.shape, a.dtype) / 4,
    "stop_gradient": lax.stop_gradient,
    "gram": lambda a: jnp.tanh(a @ a.T),
}
BINARY = {
    "add": lambda a, b: (a + fit(b, a.shape)) / 2,
    "multiply": lambda a, b: jnp.tanh(a) * jnp.tanh(fit(b, a.shape)),
    "matmul": lambda a, b: jnp.tanh(a @ fit(b, (a.shape[1], 3))),
    "dot": lambda a, b: jnp.tanh(a.astype(b.dtype) @ square(b, a.shape[1])),
    "conv": conv,
    "concatenate": lambda a, b: jnp.concatenate([a, fit(b, a.shape)])[:5],
    "update": update,
}
WITH_INTS = {
    "gather": lambda a, i: jnp.take(a, i, axis=0, mode="clip"),
    "scatter": lambda a, i: a.at[i[0] % a.shape[0]].add(a[0] / 2),
    "one_hot": lambda a, i: jax.nn.one_hot(i % a.shape[0], a.shape[0]) @ a,
    "from_ints": lambda a, i: (i % 5).astype(a.dtype)[None] / 4,
    "select": lambda a, i: jnp.where(i[0] > 0, a, -a),
}
ON_INTS = {
    "add_ints": lambda i, j: i + j[0],
    "product_of_ints": lambda i, j: jnp.outer(i, j).sum(0)[:3],
    "cumsum_of_ints": lambda i, j: jnp.cumsum(i) % 7,
    "sort_ints": lambda i, j: jnp.argsort(i).astype(jnp.int32) * j[0],
}


def custom_jvp(body, a):
    fn = jax.custom_jvp(lambda a: jnp.tanh(a @ square(a, a.shape[1])))
    fn.defjvp(lambda p, t: (fn(*p), 2 * (t[0] @ square(p[0], p[0].shape[1]))))
    return fn(body(a))


def custom_vjp(body, a):
    fn = jax.custom_vjp(lambda a: jnp.tanh(a @ square(a, a.shape[1])))
    fn.defvjp(lambda a: (fn(a), a), lambda a, g: (g @ square(a, a.shape[1]),))
    return fn(body(a))


def closed_vjp(body, a):
    """Closes both passes over an array. JAX raises if a branch creates it."""
    scale = np.linspace(0.5, 1, a.shape[1]).astype(a.dtype)
    fn = jax.custom_vjp(lambda a: jnp.tanh(a @ square(scale, a.shape[1])))
    fn.defvjp(lambda a: (fn(a), a), lambda a, g: (g * jnp.cos(a) * scale,))
    return fn(body(a))


def slope(body, a):
    """Takes a gradient, so that the program's own derivatives are second order."""
    return jnp.tanh(jax.grad(lambda a: body(a).astype(jnp.float32).sum())(a))


def linear(body, a):
    y, jvp = jax.linearize(body, a)
    (x,) = jax.linear_transpose(jvp, a)(y)
    return jnp.tanh(x)


def named_axis(body, a):
    def row(x):
        return body(x[None])[0] - lax.pmean(x, "rows")

    return jax.vmap(row, axis_name="rows")(a)


def scan(body, a):
    def step(c, x):
        return body(c), (x + c.mean()).astype(x.dtype)

    carry, rows = lax.scan(step, a, a)
    return carry + rows


FLOW = {
    "jit": lambda body, a: jax.jit(body)(a),
    "remat": lambda body, a: jax.checkpoint(body)(a),
    "scan": scan,
    "while": lambda body, a: lax.stop_gradient(
        lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, a))[1]
    ),
    "fori": lambda body, a: lax.fori_loop(0, 2, lambda i, c: body(c), a),
    "cond": lambda body, a: lax.cond(a.shape[0] > 1, body, lambda a: a, a),
    "cond_else": lambda body, a: lax.cond(
        jnp.arange(2)[0] > 0, jnp.zeros_like, body, a
    ),
    "switch": lambda body, a: lax.switch(
        jnp.int32(a.shape[1] % 3), [body, lambda a: a, jnp.ones_like], a
    ),
    "map": lambda body, a: lax.map(lambda row: body(row[None])[0], a),
    "vmap": lambda body, a: jax.vmap(lambda row: body(row[None])[0])(a),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "closed_vjp": closed_vjp,
    "reverse": lambda body, a: lax.scan(
        lambda c, x: (body(c), x * c.mean().astype(x.dtype)), a, a, reverse=True
    )[1],
    "dots_saved": lambda body, a: jax.checkpoint(
        body, policy=jax.checkpoint_policies.dots_saveable
    )(a),
    "cond_of_rows": lambda body, a: jax.vmap(
        lambda row, i: lax.cond(i > 0, lambda r: body(r[None])[0], jnp.sin, row)
    )(a, jnp.arange(a.shape[0])),
    "named_axis": named_axis,
}
# These contain no kinks, because the derivative of a kink is not continuous.
DERIVATIVES = {
    "jvp": lambda body, a: jnp.tanh(jax.jvp(body, (a,), (a,))[1]),
    "grad": slope,
    "linear": linear,
}
KINKS = {"relu", "max", "sort", "pool", "bfloat16", "noise", "select", "where", "while"}


SIMPLE = (*UNARY, *BINARY, *WITH_INTS, *ON_INTS)
ALL = (*SIMPLE, *FLOW, *DERIVATIVES)

# Each operation once, on the result of a matmul.
EVERY = (Step("gram", 0, 0), *(Step(op, 2, 1) for op in SIMPLE))


def program(
    seed: int, ops: Sequence[str] = ALL, most: int = 3, depth: int = 2
) -> tuple[Step, ...]:
    """Draws a program of at most `most` steps, nested at most `depth` levels."""
    rng = random.Random(seed)
    return _steps(rng, ops, rng.randint(2, most), depth)


def is_smooth(steps: Sequence[Step]) -> bool:
    """Returns whether no step has a kink, so that rounding changes gradients little."""
    return all(s.op not in KINKS and is_smooth(s.inside) for s in steps)


def _steps(rng, ops, count, depth):
    return tuple(_step(rng, ops, depth) for _ in range(count))


def _step(rng, ops, depth):
    holding = [op for op in ops if op in FLOW or op in DERIVATIVES]
    nested = depth and holding and rng.random() < 0.4
    op = rng.choice(holding if nested else [op for op in ops if op not in holding])
    left, right = rng.randrange(10), rng.randrange(10)
    if not nested:
        return Step(op, left, right)
    if op in DERIVATIVES:
        ops = [op for op in ops if op not in KINKS]
    return Step(op, left, right, _steps(rng, ops, rng.randint(1, 2), depth - 1))
