"""The constructs of JAX through which autocast must reach every matrix product.

Each is a function of (8, 8) weights and inputs. It is made with a transformation to
apply, `autocast` or none, at the place that the construct is about.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

N = 8
TABLE: dict[str, Callable[[Callable], Callable]] = {}


def construct(make):
    """Enters a construct that says itself where the transformation goes."""
    TABLE[make.__name__.strip("_")] = make
    return make


def plain(fn):
    """Enters a function of weights and inputs that is transformed as a whole."""
    TABLE[fn.__name__.strip("_")] = lambda cast: cast(fn)
    return fn


def layer(w: Array, x: Array) -> Array:
    return jnp.tanh(x @ w)


def heads(x: Array) -> Array:
    return x.reshape(1, N, 2, N // 2)


def repeat(body, x, over=None, **options):
    """A scan whose body gives the next carry, and nothing else."""
    step = lambda c, x: (body(c, x), None)  # noqa: E731
    return lax.scan(step, x, over, **options)[0]


EXPRESSIONS = {
    # products
    "matmul": lambda w, x: x @ w,
    "dot": lambda w, x: (
        jnp.dot(x[0], w[0]) + jnp.vdot(x[1], w[1]) + jnp.einsum("ij,kj->ik", x, w)
    ),
    "conv": lambda w, x: lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME"),
    "conv_transpose": lambda w, x: lax.conv_transpose(
        x[None], w[:4].reshape(2, N, 2), (2,), "SAME"
    ),
    "ragged_dot": lambda w, x: lax.ragged_dot(
        x, jnp.stack([w, 2 * w]), jnp.array([3, 5])
    ),
    "dot_product_attention_after_norms": lambda w, x: jax.nn.dot_product_attention(
        *(jax.nn.standardize(heads(x @ v), axis=-1) for v in (w, w.T)), heads(x)
    ),
    # control flow
    "scan": lambda w, x: lax.scan(lambda c, _: (layer(w, c), c @ w), x, length=3),
    "scan_from_a_product": lambda w, x: repeat(
        lambda c, _: jnp.tanh(c @ w), x @ w, length=2
    ),
    "scan_over_layers": lambda w, x: lax.scan(
        lambda c, w: (layer(w, c), c.sum()), x, jnp.stack([w, w.T])
    ),
    "scan_backwards_unrolled": lambda w, x: lax.scan(
        lambda c, row: (c + row @ w, c), x[0] @ w, x, reverse=True, unroll=3
    ),
    "while_loop": lambda w, x: lax.while_loop(
        lambda c: (c[0] < 3) & ((c[1] @ w).sum() < 1e6),
        lambda c: (c[0] + 1, layer(w, c[1])),
        (0, x),
    ),
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda i, c: layer(w, c), x @ w),
    "map": lambda w, x: lax.map(lambda row: row @ w, x),
    "cond": lambda w, x: lax.cond(x[0, 0] > -9, lambda x: x @ w, lambda x: x * 2, x),
    "cond_of_a_product": lambda w, x: (
        lambda y: lax.cond(y[0, 0] > 99, lambda: y, lambda: jnp.exp(-(y**2)) @ w)
    )(x @ w),
    "switch": lambda w, x: lax.switch(
        jnp.int32(1), [lambda x: x, lambda x: (x @ w) @ w, lambda x: x + 1.0], x
    ),
    "remat": lambda w, x: jax.checkpoint(layer)(w, layer(w, x)),
    "remat_with_names": lambda w, x: jax.checkpoint(
        lambda x: checkpoint_name(layer(w, x), "kept") @ w,
        policy=jax.checkpoint_policies.save_only_these_names("kept"),
    )(x),
    "scan_of_remat": lambda w, x: repeat(
        jax.checkpoint(lambda c, w: layer(w, c)), x, jnp.stack([w, w.T])
    ),
    # transformations
    "vmap_in": lambda w, x: jax.vmap(lambda row: layer(w, row))(x),
    "jvp_in": lambda w, x: jax.jvp(lambda x: layer(w, x), (x,), (w,)),
    "linearize_in": lambda w, x: jax.linearize(lambda x: layer(w, x), x)[1](w),
    "grad_in": lambda w, x: jax.grad(lambda w: layer(w, x).sum())(w),
}
TABLE |= {name: lambda cast, fn=fn: cast(fn) for name, fn in EXPRESSIONS.items()}

PLACES = {
    "jit_outside": lambda cast: jax.jit(cast(layer)),
    "scan_of_autocast": lambda cast: (
        lambda w, x: repeat(lambda c, _: cast(layer)(w, c), x, length=2)
    ),
    "vmap_out": lambda cast: jax.vmap(cast(layer), (None, 0)),
    "jvp_out": lambda cast: lambda w, x: jax.jvp(cast(layer), (w, x), (x, w)),
    "linearize_out": lambda cast: (
        lambda w, x: jax.linearize(lambda x: cast(layer)(w, x), x)[1](w)
    ),
    "closed_over": lambda cast: lambda w, x: cast(lambda: layer(w, x))(),
    "closed_over_in_part": lambda cast: lambda w, x: cast(lambda x: layer(w, x))(x),
    "integers_first": lambda cast: (
        lambda w, x: cast(lambda i, w, x: w[i] @ x)(jnp.array([3, 1, 1]), w, x)
    ),
    "object_without_a_name": lambda cast: cast(functools.partial(layer)),
}
TABLE |= PLACES


@plain
def nested_jit(w, x):
    inner = jax.jit(layer)
    return jax.jit(lambda x: inner(w, inner(w, x)) @ w)(x)


@plain
def shard_map(w, x):
    def body(w, x):
        return lax.psum((x @ w).T @ (x @ w), "rows")

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows")), "out_specs": P()}
    return jax.shard_map(body, mesh=mesh, **specs)(w, x)


@construct
def grad_of_grad(cast):
    inner = jax.grad(lambda w, x: (cast(layer)(w, x) ** 2).sum())
    return lambda w, x: jax.grad(lambda w: (inner(w, x) ** 2).sum())(w)


# ---- calls


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Array


@construct
def kwargs_and_trees(cast):
    def fn(batch, /, *, params, scale: float):
        y = batch[0]["x"] @ params["dense"].kernel * scale
        return {"y": y, "again": (batch[0]["x"], [y])}

    def call(w, x):
        params = {"dense": Dense(w), "bias": None}
        return cast(fn)(({"x": x}, None), params=params, scale=2.0)

    return call


@construct
def static_arguments(cast):
    def fn(w, x, mode, transpose=False):
        assert isinstance(transpose, bool)
        y = x @ (w.T if transpose else w)
        return jnp.tanh(y) if mode == "tanh" else y

    return lambda w, x: cast(fn)(w, cast(fn)(w, x, "tanh"), "none", transpose=True)


@construct
def non_array_outputs(cast):
    def call(w, x):
        fn = cast(lambda w, x: {"y": x @ w, "name": "fn", "none": None, "n": 3})
        out = fn(w, x)
        assert (out["name"], out["none"]) == ("fn", None)
        return out["y"]

    return call


@construct
def keys(cast):
    def dropout(key, w, x):
        first, second = jax.random.split(key)
        keep = jax.random.bernoulli(first, 0.5, x.shape)
        noise = jax.random.normal(second, x.shape)
        return jnp.where(keep, x @ w, 0.0) @ w + noise

    return lambda w, x: cast(dropout)(jax.random.key(0), w, x)


# ---- what cannot be looked into: products around it are in half all the same


@plain
def pallas_call(w, x):
    def kernel(x, out):
        out[...] = x[...] * 2.0

    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    doubled = jax.jit(pl.pallas_call(kernel, shape, interpret=True))
    return layer(w, lax.stop_gradient(doubled(lax.stop_gradient(x @ w))) + x)


@plain
def pure_callback(w, x):
    def host(x):
        assert x.dtype == np.float32
        return 2 * np.asarray(x)

    y = lax.stop_gradient(x @ w)
    y = jax.pure_callback(host, y, y, vmap_method="sequential")
    return layer(w, y + x)


OPAQUE = {name: name for name in ("pallas_call", "pure_callback")}
FORWARD_ONLY = ("while_loop",)  # JAX has no reverse derivative of it
