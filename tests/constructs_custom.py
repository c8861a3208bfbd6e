"""Custom functions, for the table of tests.constructs.

Their derivatives are wrong by a factor, so that to ignore them shows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tests.constructs import TABLE, construct, layer, plain, repeat


@jax.custom_jvp
def steep(w, x, power):
    return layer(w, x) * power


@steep.defjvp
def _(primals, tangents):
    (w, x, power), (dw, dx, _) = primals, tangents
    y = steep(w, x, power)
    return y, 3.0 * (1 - y**2) * (dx @ w + x @ dw)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(fn, w, x):
    return fn(w, x)


@applied.defjvp
def _(fn, primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return fn(w, x), 5.0 * (x @ dw) + dx @ w


@jax.custom_jvp
def symbolic_jvp(w, x):
    return x @ w


@functools.partial(symbolic_jvp.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    out = jnp.zeros_like(x @ w)
    out = out if isinstance(dw, SymbolicZero) else out + 3.0 * (x @ dw)
    return x @ w, out if isinstance(dx, SymbolicZero) else out + dx @ w


def custom_vjp(fn, fwd, bwd, **options):
    function = jax.custom_vjp(fn)
    function.defvjp(fwd, bwd, **options)
    return function


backwards = custom_vjp(
    lambda w, x, scale: x @ w * scale,
    lambda w, x, scale: (x @ w * scale, (w, x)),
    lambda saved, g: (3.0 * (saved[1].T @ g), 0.5 * (g @ saved[0].T), None),
)
rematerialised = custom_vjp(
    lambda w, x: x @ w,
    lambda w, x: (x @ w, (w, x)),
    lambda saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
    optimize_remat=True,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def backwards_of(fn, tree):
    return {"y": fn(tree["w"], tree["x"])}


backwards_of.defvjp(
    lambda fn, tree: (backwards_of(fn, tree), tree),
    lambda fn, saved, g: (
        {"w": saved["x"].T @ g["y"] * 4.0, "x": g["y"] @ saved["w"].T},
    ),
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

EXPRESSIONS = {
    "custom_jvp": lambda w, x: steep(w, x, 1.0) @ w,
    "custom_jvp_of_a_function": lambda w, x: applied(lambda w, x: x @ w, w, x @ w),
    "custom_jvp_in_scan": lambda w, x: repeat(
        lambda c, w: steep(w, c, 1.0), x, jnp.stack([w, w])
    ),
    "custom_jvp_with_symbolic_zeros": symbolic_jvp,
    "custom_vjp": lambda w, x: backwards(w, x @ w, 2) @ w,
    "custom_vjp_in_scan": lambda w, x: repeat(
        lambda c, w: backwards(w, c, 2), x, jnp.stack([w, w])
    ),
    "custom_vjp_in_remat_in_vmap": lambda w, x: jax.vmap(
        jax.checkpoint(lambda row: backwards(w, row[None], 2)[0])
    )(x),
    "custom_vjp_of_trees": lambda w, x: backwards_of(
        lambda w, x: x @ w, {"w": w, "x": x}
    ),
    "custom_vjp_with_optimize_remat": rematerialised,
    "custom_vjp_with_symbolic_zeros": symbolic_vjp,
}
TABLE |= {name: lambda cast, fn=fn: cast(fn) for name, fn in EXPRESSIONS.items()}


@construct
def custom_vjp_of_autocast(cast):
    return custom_vjp(
        lambda w, x: cast(layer)(w, x),
        lambda w, x: jax.vjp(cast(layer), w, x),
        lambda vjp, g: vjp(7.0 * g),
    )


@plain
def custom_gradient(w, x):
    @jax.custom_gradient
    def fn(w, x):
        return x @ w, lambda g: (3.0 * (x.T @ g), g @ w.T)

    return fn(w, x @ w)


@plain
def custom_vmap(w, x):
    @jax.custom_batching.custom_vmap
    def fn(w, x):
        return x @ w

    @fn.def_vmap
    def _(size, batched, w, x):
        return 3.0 * jnp.einsum("ij,jk->ik", x, w), True

    return jax.vmap(fn, (None, 0))(w, x)
