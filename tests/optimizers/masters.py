"""What `jamp.master_weights` must do around and inside of any transformation.

Under nothing but `optax.apply_updates`: `params == cast(masters)` after every step, and
the masters, however they are kept, are what the transformation makes of float32 params.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jamp
from pallas_kernels import join, split
from tests.bits import assert_same_bits
from tests.optimizers.fused import assert_close

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RATES = [1e-4, 1e-2, 1.0]
STEPS = 12
SPOILT = 5


def tree(a: Any = F16, b: Any = BF16) -> Any:
    """Both halves at once, which saves compiling twice, and leaves that stay fp32."""
    rng = np.random.default_rng(0)

    def leaf(shape, dtype):
        return jnp.asarray(rng.normal(size=shape), F32).astype(dtype)

    return {
        "dense": {"kernel": leaf((5, 3), a), "bias": leaf((3,), b)},
        "list": [leaf((), a), leaf((7,), b)],
        "norm": {"scale": leaf((3,), F32), "bias": leaf((), F32)},
    }


def gradients(params: Any, dtype: Any = None, spoil: float | None = None) -> Any:
    """STEPS gradients along axis 0, in the dtypes of `params` or in `dtype`."""
    rng = np.random.default_rng(1)

    def leaf(p):
        g = rng.normal(size=(STEPS, *p.shape))
        if spoil is not None and p.size > 7:
            g[SPOILT, 0, 0] = spoil
        return jnp.asarray(g, F32).astype(p.dtype if dtype is None else dtype)

    return jax.tree.map(leaf, params)


def is_hole(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def stored(state: Any) -> dict[str, Any]:
    """By path, what is kept beside a param; fp32 params have nothing."""
    # A wrapper around a part of the params has one hole for all of the rest.
    trees = [by_path(x) for _, x in optax.tree.get_all_with_path(state, "masters")]
    found = functools.reduce(operator.or_, trees)
    assert found and len(found) == sum(map(len, trees))
    return found


def assert_invariant(params: Any, state: Any) -> dict[str, Any]:
    """Each half leaf is its master, rounded and finite. Returns all masters by path."""
    masters = stored(state)
    for path, p in by_path(params).items():
        assert (path in masters) == (p.dtype != F32), path
        master = masters.setdefault(path, p)
        assert master.dtype == F32, path
        largest = float(jnp.finfo(p.dtype).max)
        rounded = np.clip(np.asarray(master), -largest, largest).astype(p.dtype)
        rounded = p if p.dtype == F32 else rounded
        assert np.asarray(p).tobytes() == np.asarray(rounded).tobytes(), path
    return masters


def assert_split(params: Any, state: Any) -> dict[str, Any]:
    """Beside bfloat16 params are 16 bits of their masters, which this returns."""
    lows, masters = stored(state), by_path(params)
    for path, p in by_path(params).items():
        assert (path in lows) == (p.dtype == BF16), path
        if path in lows:
            assert lows[path].dtype == jnp.uint16, path
            masters[path] = join(p, lows[path])
            assert_same_bits(p, split(masters[path])[0])
    return masters


def alone(keep, tx):
    """No wrapper around the one that keeps masters."""
    return keep(tx)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(inside, outside, rate, trees, grads):
    """All steps in one scan: per tree, params and state before and after each."""
    keep = jamp.master_weights
    txs = [outside(keep, inside(rate))]
    txs += [outside(functools.partial(keep, store_remainder=True), inside(rate))]
    txs += [inside(rate)] if outside is alone else []
    ways = list(zip(txs, trees, grads, strict=False))

    def step(carry, grads):
        new = []
        for tx, (params, state), g in zip(txs, carry, grads, strict=True):
            updates, state = tx.update(g, state, params)
            new.append((optax.apply_updates(params, updates), state))
        return new, new

    start = [(p, tx.init(p)) for tx, p, _ in ways]
    _, after = lax.scan(step, start, [g for *_, g in ways])
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, after)


def assert_it_holds(inside, outside=alone, dtype=None, spoil=None, halves=(F16, BF16)):
    """For `inside`, from a learning rate to what steps the masters.

    `outside` makes of what keeps masters, and a transformation, another one; `dtype` is
    that of gradients, None for each param's; `spoil` is put into one gradient. Beside
    bfloat16 `halves` remainders are kept, in the same tree with float32 for float16,
    which may round in another way.
    """
    params = tree(*halves)
    trees = [params, as_float32(params, F16), as_float32(params, F16, BF16)]
    grads = gradients(params, dtype, spoil)
    grads = [grads, as_float32(grads, F16), as_float32(grads, F16, BF16)]
    for rate in RATES:
        first, halved, *plain = run(inside, outside, F32(rate), trees, grads)
        masters = assert_invariant(*first)
        others = [by_path(params) for params, _ in plain] + [assert_split(*halved)]
        if halves == (BF16, BF16):
            assert_same_bits(others[-1], masters)
        for other in others:
            assert_close(other, masters, 1e-5, 1e-5 * rate)
        for x in map(np.float32, jax.tree.leaves(first[0])):
            assert np.isfinite(x).all()
            # At 1e-4 most steps round to nothing; at 1 none does.
            assert rate < 1.0 or (x != x[0]).any(0).all()


def as_float32(tree: Any, *dtypes: Any) -> Any:
    """The leaves of these dtypes widened."""
    return jax.tree.map(lambda x: x.astype(F32) if x.dtype in dtypes else x, tree)
