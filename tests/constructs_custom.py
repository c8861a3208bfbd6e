"""Custom functions, for the table of tests.constructs.

Their derivatives are wrong by a factor, so that to ignore them shows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.constructs import construct, layer, plain


@jax.custom_jvp
def steep(w, x, power):
    return layer(w, x) * power


@steep.defjvp
def _(primals, tangents):
    (w, x, power), (dw, dx, _) = primals, tangents
    y = steep(w, x, power)
    return y, 3.0 * (1 - y**2) * (dx @ w + x @ dw)


@plain
def custom_jvp(w, x):
    return steep(w, x, 1.0) @ w


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(fn, w, x):
    return fn(w, x)


@applied.defjvp
def _(fn, primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return fn(w, x), 5.0 * (x @ dw) + dx @ w


@plain
def custom_jvp_of_a_function(w, x):
    return applied(lambda w, x: x @ w, w, x @ w)


@plain
def custom_jvp_in_scan(w, x):
    return lax.scan(lambda c, w: (steep(w, c, 1.0), c), x, jnp.stack([w, w]))


@jax.custom_jvp
def symbolic_jvp(w, x):
    return x @ w


@functools.partial(symbolic_jvp.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    out = jnp.zeros_like(x @ w)
    out = out if isinstance(dw, zero) else out + 3.0 * (x @ dw)
    return x @ w, out if isinstance(dx, zero) else out + dx @ w


@plain
def custom_jvp_with_symbolic_zeros(w, x):
    return symbolic_jvp(w, x)


@jax.custom_vjp
def backwards(w, x, scale):
    return x @ w * scale


backwards.defvjp(
    lambda w, x, s: (x @ w * s, (w, x)),
    lambda saved, g: (3.0 * (saved[1].T @ g), 0.5 * (g @ saved[0].T), None),
)


@plain
def custom_vjp(w, x):
    return backwards(w, x @ w, 2) @ w


@plain
def custom_vjp_in_scan(w, x):
    return lax.scan(lambda c, w: (backwards(w, c, 2), None), x, jnp.stack([w, w]))[0]


@plain
def custom_vjp_in_remat_in_vmap(w, x):
    row = jax.checkpoint(lambda row: backwards(w, row[None], 2)[0])
    return jax.vmap(row)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def backwards_of(fn, tree):
    return {"y": fn(tree["w"], tree["x"])}


backwards_of.defvjp(
    lambda fn, tree: (backwards_of(fn, tree), tree),
    lambda fn, saved, g: (
        {"w": saved["x"].T @ g["y"] * 4.0, "x": g["y"] @ saved["w"].T},
    ),
)


@plain
def custom_vjp_of_trees(w, x):
    return backwards_of(lambda w, x: x @ w, {"w": w, "x": x})


@construct
def custom_vjp_of_autocast(cast):
    @jax.custom_vjp
    def fn(w, x):
        return cast(layer)(w, x)

    def forward(w, x):
        y, vjp = jax.vjp(cast(layer), w, x)
        return y, vjp

    fn.defvjp(forward, lambda vjp, g: vjp(7.0 * g))
    return fn


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


@jax.custom_vjp
def rematerialised(w, x):
    return x @ w


rematerialised.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
    optimize_remat=True,
)


@plain
def custom_vjp_with_optimize_remat(w, x):
    return rematerialised(w, x)


@jax.custom_vjp
def symbolic_vjp(w, x):
    return x @ w


def _symbolic_forward(w, x):
    assert w.perturbed or x.perturbed
    return x.value @ w.value, (w.value, x.value)


def _symbolic_backward(saved, g):
    w, x = saved
    return 3.0 * (x.T @ g), g @ w.T


symbolic_vjp.defvjp(_symbolic_forward, _symbolic_backward, symbolic_zeros=True)


@plain
def custom_vjp_with_symbolic_zeros(w, x):
    return symbolic_vjp(w, x)
