"""Autocast across two CPU devices; run by test_autocast_nesting.py in a process.

Also records the warnings of opaque calls, which come once per process.
Prints one line of JSON.
"""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback, pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp
from tests.programs import products, walk

MESH = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
W, X = (jnp.asarray(m, jnp.float32) for m in RNG.normal(size=(2, 8, 8)))


def mapped(fn, check_vma):
    specs = {"in_specs": (P(), P("rows")), "out_specs": P()}
    return jax.shard_map(fn, mesh=MESH, check_vma=check_vma, **specs)


def loss(w, x):
    y = jnp.tanh(x @ w / 3)
    return lax.pmean((y * y).mean(), "rows")


def dtypes(fn, *args):
    found = {d for p in products(fn, *args) for d in (p.lhs, p.rhs)}
    return sorted(found)


def distance(got, expected):
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def sharded(where, check_vma):
    if where == "inside":
        fn = jamp.autocast(mapped(loss, check_vma))
        total = jamp.autocast(mapped(large, check_vma))
    else:
        fn = mapped(jamp.autocast(loss), check_vma)
        total = mapped(jamp.autocast(large), check_vma)
    plain = mapped(loss, check_vma)
    grad = jax.value_and_grad(fn, (0, 1))
    got, expected = (
        jax.jit(grad)(W, X),
        jax.jit(jax.value_and_grad(plain, (0, 1)))(W, X),
    )
    leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    return {
        "products": {"forward": dtypes(fn, W, X), "grad": dtypes(grad, W, X)},
        "dtypes": [str(x.dtype) for x in leaves[0]],
        "errors": [distance(a, b) for a, b in zip(*leaves, strict=True)],
        "psum": float(jax.jit(total)(W, X)),
    }


def large(w, x):
    del w
    y = jnp.full_like(x, 100.0) @ jnp.full((8, 1), 50.0)
    return lax.psum(y[0, 0], "rows")


def under_jit():
    x = jax.device_put(X, NamedSharding(MESH, P("rows", None)))
    fn = jamp.autocast(lambda w, x: jnp.tanh(x @ w))
    got = jax.jit(fn)(W, x)
    return {
        "products": dtypes(fn, W, x),
        "sharding": list(got.sharding.spec) + [None] * (2 - len(got.sharding.spec)),
        "error": distance(got, jnp.tanh(X @ W)),
    }


def opaque():
    def kernel(x, out):
        out[...] = x[...]

    def host(x):
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct(X.shape, jnp.float32)

    def fn(x):
        y = pl.pallas_call(kernel, shape, interpret=True)(x @ W)
        y = jax.pure_callback(host, shape, y @ W)
        return io_callback(host, shape, y @ W)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = [jax.make_jaxpr(jamp.autocast(fn))(X) for _ in range(2)]
    found = [re.search(r"'(\w+)'", str(w.message)) for w in caught]
    names = sorted(m.group(1) for m in found if m)
    inputs = {
        e.primitive.name: sorted({str(v.aval.dtype) for v in e.invars})
        for e in walk(traced[0].jaxpr)
        if e.primitive.name in names
    }
    return {"warnings": names, "opaque_inputs": inputs}


def main():
    out = opaque() | {"jit": under_jit()}
    for where in ("inside", "outside"):
        for check_vma in (True, False):
            out[f"{where}/{check_vma}"] = sharded(where, check_vma)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
