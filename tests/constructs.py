"""The constructs of JAX through which autocast must reach every matrix product.

Each is a function of (8, 8) weights and inputs. It is made with a transformation to
apply, `autocast` or none, at the place that the construct is about.
"""

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Array


def layer(w: Array, x: Array) -> Array:
    return jnp.tanh(x @ w)


def heads(x: Array) -> Array:
    return x.reshape(1, N, 2, N // 2)


# ---- products


@plain
def matmul(w, x):
    return x @ w


@plain
def einsum(w, x):
    return jnp.einsum("ij,jk->ik", x, w)


@plain
def dot(w, x):
    return jnp.dot(x[0], w[0]) + jnp.vdot(x[1], w[1]) + jnp.inner(x, w)


@plain
def conv(w, x):
    return lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME")


@plain
def conv_of_groups(w, x):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x[None], w[:3, None], (1,), "SAME", (1,), (2,), numbers, feature_group_count=N
    )


@plain
def conv_transpose(w, x):
    return lax.conv_transpose(x[None], w[:4].reshape(2, N, 2), (2,), "SAME")


@plain
def ragged_dot(w, x):
    return lax.ragged_dot(x, jnp.stack([w, 2 * w]), jnp.array([3, 5]))


@plain
def dense_attention(w, x):
    q, k = x @ w, x @ w.T
    scores = jnp.where(jnp.tri(N, dtype=bool), q @ k.T / 3.0, -jnp.inf)
    return jax.nn.softmax(scores) @ x


@plain
def dot_product_attention(w, x):
    q, k, v = heads(x @ w), heads(x @ w.T), heads(x)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@plain
def dot_product_attention_after_norms(w, x):
    q = jax.nn.standardize(heads(x @ w), axis=-1)
    k = jax.nn.standardize(heads(x @ w.T), axis=-1)
    return jax.nn.dot_product_attention(q, k, heads(x))


# ---- control flow


@plain
def jit(w, x):
    return jax.jit(layer)(w, x)


@plain
def nested_jit(w, x):
    inner = jax.jit(layer)
    return jax.jit(lambda x: inner(w, inner(w, x)) @ w)(x)


@construct
def jit_outside(cast):
    return jax.jit(cast(layer))


@plain
def scan(w, x):
    return lax.scan(lambda c, _: (layer(w, c), c @ w), x, length=3)


@plain
def scan_from_a_product(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x @ w, length=2)[0]


@plain
def scan_over_layers(w, x):
    return lax.scan(lambda c, w: (layer(w, c), c.sum()), x, jnp.stack([w, w.T]))


@plain
def scan_backwards_unrolled(w, x):
    body = lambda c, row: (c + row @ w, c)  # noqa: E731
    return lax.scan(body, x[0] @ w, x, reverse=True, unroll=3)


@construct
def scan_of_autocast(cast):
    body = cast(lambda w, c: layer(w, c))
    return lambda w, x: lax.scan(lambda c, _: (body(w, c), None), x, length=2)[0]


@plain
def associative_scan(w, x):
    return lax.associative_scan(jnp.matmul, jnp.stack([w, x, w]))


@plain
def while_loop(w, x):
    def body(carry):
        i, x = carry
        return i + 1, layer(w, x)

    def going(carry):
        i, x = carry
        return (i < 3) & ((x @ w).sum() < 1e6)

    return lax.while_loop(going, body, (0, x))


@plain
def fori_loop(w, x):
    return lax.fori_loop(0, 3, lambda i, c: layer(w, c), x @ w)


@plain
def map_(w, x):
    return lax.map(lambda row: row @ w, x)


@plain
def cond(w, x):
    return lax.cond(x[0, 0] > -9, lambda x: x @ w, lambda x: x * 2, x)


@plain
def cond_of_a_product(w, x):
    y = x @ w
    return lax.cond(y[0, 0] > 99, lambda y: y, lambda y: jnp.exp(-(y**2)) @ w, y)


@plain
def switch(w, x):
    branches = [lambda x: x, lambda x: (x @ w) @ w, lambda x: x + 1.0]
    return lax.switch(jnp.int32(1), branches, x)


@plain
def remat(w, x):
    return jax.checkpoint(layer)(w, layer(w, x))


@plain
def remat_with_policy(w, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: layer(w, layer(w, x)), policy=policy)(x)


@plain
def remat_with_names(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(
        lambda x: checkpoint_name(layer(w, x), "kept") @ w, policy=policy
    )(x)


@plain
def scan_of_remat(w, x):
    body = jax.checkpoint(lambda c, w: (layer(w, c), None))
    return lax.scan(body, x, jnp.stack([w, w.T]))[0]


@plain
def shard_map(w, x):
    def body(w, x):
        return lax.psum((x @ w).T @ (x @ w), "rows")

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows")), "out_specs": P()}
    return jax.shard_map(body, mesh=mesh, **specs)(w, x)


# ---- transformations


@plain
def vmap_in(w, x):
    return jax.vmap(lambda row: layer(w, row))(x)


@construct
def vmap_out(cast):
    return jax.vmap(cast(layer), (None, 0))


@construct
def jvp_out(cast):
    return lambda w, x: jax.jvp(cast(layer), (w, x), (x, w))


@construct
def linearize_out(cast):
    return lambda w, x: jax.linearize(lambda x: cast(layer)(w, x), x)[1](w)


@plain
def jvp_in(w, x):
    return jax.jvp(lambda x: layer(w, x), (x,), (w,))


@plain
def linearize_in(w, x):
    return jax.linearize(lambda x: layer(w, x), x)[1](w)


@plain
def linear_transpose(w, x):
    return jax.linear_transpose(lambda x: x @ w, x)(x)


@plain
def grad_in(w, x):
    return jax.grad(lambda w: layer(w, x).sum())(w)


@construct
def grad_of_grad(cast):
    inner = jax.grad(lambda w, x: (cast(layer)(w, x) ** 2).sum())
    return lambda w, x: jax.grad(lambda w: (inner(w, x) ** 2).sum())(w)


@plain
def jacobians(w, x):
    return jax.jacfwd(lambda r: layer(w, r))(x[0]), jax.jacrev(layer, 1)(w, x[0])


# ---- calls


@construct
def closed_over(cast):
    return lambda w, x: cast(lambda: layer(w, x))()


@construct
def closed_over_in_part(cast):
    return lambda w, x: cast(lambda x: layer(w, x))(x)


@construct
def kwargs_and_trees(cast):
    def fn(batch, /, *, params, scale: float):
        y = batch[0]["x"] @ params["dense"].kernel * scale
        return {"y": y, "again": (batch[0]["x"], [y])}

    def call(w, x):
        params = {"dense": Dense(w)}
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
        out = cast(lambda w, x: {"y": x @ w, "name": "fn", "none": None, "n": 3})(w, x)
        assert (out["name"], out["none"]) == ("fn", None)
        return out["y"]

    return call


@construct
def integers_first(cast):
    fn = cast(lambda ids, w, x: jnp.take(w, ids, axis=0) @ x)
    return lambda w, x: fn(jnp.array([3, 1, 1]), w, x)


@construct
def none_leaves(cast):
    fn = cast(lambda a, w, b, x: (a, x @ w["w"], b))
    return lambda w, x: fn(None, {"w": w, "bias": None}, (None, None), x)[1]


@construct
def keys(cast):
    def dropout(key, w, x):
        first, second = jax.random.split(key)
        keep = jax.random.bernoulli(first, 0.5, x.shape)
        noise = jax.random.normal(second, x.shape)
        return jnp.where(keep, x @ w, 0.0) @ w + noise

    return lambda w, x: cast(dropout)(jax.random.key(0), w, x)


@construct
def bound_method(cast):
    class Model:
        def __call__(self, w, x):
            return layer(w, x)

    return lambda w, x: cast(Model())(w, x)


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


OPAQUE = {
    "pallas_call": "pallas_call",
    "pure_callback": "pure_callback",
}
FORWARD_ONLY = ("while_loop",)  # JAX has no reverse derivative of it
