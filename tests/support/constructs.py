"""JAX's constructs, through which autocast must reach every matmul.

An entry of `TABLE` takes a transformation, such as `autocast`, and applies it at one
place. It returns a function of (8, 8) weights and inputs. An entry of `AROUND` calls a
given function inside a construct.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, PartitionSpec as P

N = 8
TABLE: dict[str, Callable[[Callable], Callable]] = {}


def plain(fn):
    """Registers a function that is transformed as a whole."""
    TABLE[fn.__name__.strip("_")] = lambda cast: cast(fn)
    return fn


def layer(w: Array, x: Array) -> Array:
    return jnp.tanh(x @ w)


def heads(x: Array) -> Array:
    return x.reshape(1, N, 2, N // 2)


def repeat(body, x, over=None, **options):
    """Runs a scan whose body returns only the next carry."""
    step = lambda c, x: (body(c, x), None)  # noqa: E731
    return lax.scan(step, x, over, **options)[0]


def squared(fn):
    return lambda *args: (fn(*args) ** 2).sum()


def custom_vjp(fn, fwd, bwd, nondiff_argnums=(), **options):
    function = jax.custom_vjp(fn, nondiff_argnums=nondiff_argnums)
    function.defvjp(fwd, bwd, **options)
    return function


def first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def zeros_of(fn):
    """Returns a function that returns zeros in the shapes of `fn`'s results."""
    return lambda *args: jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args)
    )


def in_cond(fn):
    return lambda *args: lax.cond(
        jax.tree.leaves(args)[0].ravel()[0] < jnp.inf, fn, zeros_of(fn), *args
    )


def in_custom_jvp(fn):
    function = jax.custom_jvp(fn)
    function.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return function


def in_shard_map(fn):
    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())


# Each calls a function of arrays once.
AROUND = {
    "plain": lambda fn: fn,
    "jit": lambda fn: jax.jit(lambda *args: fn(*args)),
    "checkpoint": jax.checkpoint,
    "vmap": lambda fn: (
        lambda *args: first(jax.vmap(fn)(*jax.tree.map(lambda x: x[None], args)))
    ),
    "scan": lambda fn: (
        lambda *args: first(lax.scan(lambda c, _: (c, fn(*args)), 0, length=1)[1])
    ),
    "cond": in_cond,
    "shard_map": in_shard_map,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": lambda fn: custom_vjp(
        fn, lambda *args: (fn(*args), args), lambda args, g: jax.vjp(fn, *args)[1](g)
    ),
}


EXPRESSIONS = {
    # products
    "matmul": lambda w, x: x @ w,
    "conv": lambda w, x: lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME"),
    "ragged_dot": lambda w, x: lax.ragged_dot(
        x, jnp.stack([w, 2 * w]), jnp.array([3, 5])
    ),
    "dot_product_attention_after_norms": lambda w, x: jax.nn.dot_product_attention(
        *(jax.nn.standardize(heads(x @ v), axis=-1) for v in (w, w.T)), heads(x)
    ),
    # control flow
    "scan": lambda w, x: lax.scan(lambda c, _: (layer(w, c), c @ w), x, length=3),
    "scan_over_layers": lambda w, x: lax.scan(
        lambda c, w: (layer(w, c), c.sum()), x, jnp.stack([w, w.T])
    ),
    "while_loop": lambda w, x: lax.while_loop(
        lambda c: (c[0] < 3) & ((c[1] @ w).sum() < 1e6),
        lambda c: (c[0] + 1, layer(w, c[1])),
        (0, x),
    ),
    "cond": lambda w, x: lax.switch(
        jnp.int32(1), [lambda x: x, lambda x: (x @ w) @ w, lambda x: x + 1.0], x
    ),
    "remat": lambda w, x: jax.checkpoint(layer)(w, layer(w, x)),
    "remat_with_names": lambda w, x: jax.checkpoint(
        lambda x: checkpoint_name(layer(w, x), "kept") @ w,
        policy=jax.checkpoint_policies.save_only_these_names("kept"),
    )(x),
    # transformations
    "grad_in": lambda w, x: jax.grad(lambda w: layer(w, x).sum())(w),
}
TABLE |= {name: lambda cast, fn=fn: cast(fn) for name, fn in EXPRESSIONS.items()}

PLACES = {
    "vmap_out": lambda cast: jax.vmap(cast(layer), (None, 0)),
    "grad_of_grad": lambda cast: (
        lambda w, x: jax.grad(
            lambda w: (jax.grad(squared(cast(layer)))(w, x) ** 2).sum()
        )(w)
    ),
    "custom_vjp_of_autocast": lambda cast: custom_vjp(
        cast(layer),
        lambda w, x: jax.vjp(cast(layer), w, x),
        lambda vjp, g: vjp(7.0 * g),
    ),
    "closed_over": lambda cast: lambda w, x: cast(lambda: layer(w, x))(),
    "integers_first": lambda cast: (
        lambda w, x: cast(lambda i, w, x: w[i] @ x)(jnp.array([3, 1, 1]), w, x)
    ),
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


# ---- custom derivatives, wrong by a factor so that ignoring them shows


@jax.custom_jvp
def steep(w, x, power):
    return layer(w, x) * power


@steep.defjvp
def _(primals, tangents):
    (w, x, power), (dw, dx, _) = primals, tangents
    y = steep(w, x, power)
    return y, 3.0 * (1 - y**2) * (dx @ w + x @ dw)


@jax.custom_jvp
def symbolic_jvp(w, x):
    return x @ w


@functools.partial(symbolic_jvp.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    out = jnp.zeros_like(x @ w)
    out = out if isinstance(dw, SymbolicZero) else out + 3.0 * (x @ dw)
    return x @ w, out if isinstance(dx, SymbolicZero) else out + dx @ w


backwards = custom_vjp(
    lambda w, x, scale: x @ w * scale,
    lambda w, x, scale: (x @ w * scale, (w, x)),
    lambda saved, g: (3.0 * (saved[1].T @ g), 0.5 * (g @ saved[0].T), None),
)


def forward_with_symbolic_zeros(w, x):
    assert w.perturbed or x.perturbed
    return x.value @ w.value, (w.value, x.value)


symbolic_vjp = custom_vjp(
    lambda w, x: x @ w,
    forward_with_symbolic_zeros,
    lambda saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
    symbolic_zeros=True,
)

CUSTOM = {
    "custom_jvp": lambda w, x: steep(w, x, 1.0) @ w,
    "custom_jvp_with_symbolic_zeros": symbolic_jvp,
    "custom_vjp": lambda w, x: backwards(w, x @ w, 2) @ w,
    "custom_vjp_in_remat_in_vmap": lambda w, x: jax.vmap(
        jax.checkpoint(lambda row: backwards(w, row[None], 2)[0])
    )(x),
    "custom_vjp_with_symbolic_zeros": symbolic_vjp,
}
TABLE |= {name: lambda cast, fn=fn: cast(fn) for name, fn in CUSTOM.items()}


@plain
def custom_vmap(w, x):
    @jax.custom_batching.custom_vmap
    def fn(w, x):
        return x @ w

    @fn.def_vmap
    def _(size, batched, w, x):
        return 3.0 * jnp.einsum("ij,jk->ik", x, w), True

    return jax.vmap(fn, (None, 0))(w, x)


FORWARD_ONLY = ("while_loop",)  # JAX cannot differentiate it in reverse
