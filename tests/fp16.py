"""Small states of fp16_utils.FP16_Optimizer, gradients for them, and how to step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jamp.fp16_utils import FP16_Optimizer
from tests.bits import assert_same_bits
from tests.oracles import fp16_optimizer as oracle
from tests.oracles.loss_scale import Rule

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
REFUSED = (TypeError, ValueError)
RULE = Rule(window=4)
EAGER_OR_JIT = pytest.mark.parametrize("where", ["eager", "jit"])
WHERE = pytest.mark.parametrize("where", ["eager", "jit", "scan"])


def params(dtype=F16):
    """A matrix and a vector in half, and a scalar in float32."""
    return {
        "dense": {
            "kernel": jnp.asarray([[1.0, -2.0], [0.5, 0.25], [3.0, -1.5]], dtype),
            "bias": jnp.asarray([0.125, 0.25], dtype),
        },
        "norm": jnp.asarray(3.0, F32),
    }


def dot(p, x):
    """A loss whose gradient is `x`, in the dtypes of the params."""
    products = jax.tree.map(lambda p, x: (p.astype(F32) * x).sum(), p, x)
    return sum(jax.tree.leaves(products))


def like(value):
    return jax.tree.map(lambda p: jnp.full(p.shape, value, F32), params())


def only(name, value):
    """Zero gradients, but for one leaf."""
    return like(0.0) | {name: jnp.full(params()[name].shape, value, F32)}


def data(steps, overflows=(), seed=0):
    """Gradients that half holds at a scale of 2**18; not so at `overflows`."""
    rng = np.random.default_rng(seed)
    bad = (like(np.inf), only("norm", np.nan), like(1e38))

    def one(i):
        if i in overflows:
            return bad[sorted(overflows).index(i) % len(bad)]
        return jax.tree.map(
            lambda p: jnp.asarray(rng.normal(size=p.shape) * 2.0**-9, F32), params()
        )

    return [one(i) for i in range(steps)]


def make(tx=None, *, window=4, dynamic=True, **kwargs):
    kwargs.setdefault("verbose", False)
    if dynamic:
        kwargs.setdefault("dynamic_loss_args", {"scale_window": window})
    tx = optax.sgd(0.5, momentum=0.5) if tx is None else tx
    return FP16_Optimizer(tx, dynamic_loss_scale=dynamic, **kwargs)


def step_of(optimizer):
    """backward, step and zero_grad; also the state before the gradients went."""

    def step(state, x):
        _, state = optimizer.backward(state, dot, x)
        state = optimizer.step(state)
        seen = (
            state.params,
            optimizer.master_params(state),
            state.loss_scaler,
            state.overflow,
        )
        return optimizer.zero_grad(state), seen

    return step


def run(step, state, xs, where="jit"):
    """The last state, and what was seen after each step."""
    if where == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *xs)
        state, seen = jax.jit(lambda s, x: lax.scan(step, s, x))(state, stacked)
        return state, [jax.tree.map(lambda x, i=i: x[i], seen) for i in range(len(xs))]
    step = jax.jit(step) if where == "jit" else step
    seen = []
    for x in xs:
        state, now = step(state, x)
        seen.append(now)
    return state, seen


def assert_near(tree, leaves, rtol=2e-6, atol=2e-6):
    for got, wanted in zip(jax.tree.leaves(tree), leaves, strict=True):
        assert got.dtype == F32
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def assert_rounded(half, masters):
    """The params are the masters, rounded."""
    expected = jax.tree.map(lambda p, m: np.asarray(m).astype(p.dtype), half, masters)
    assert_same_bits(half, jax.tree.map(jnp.asarray, expected))


def model_of(tree=None, *, static=None, rule=RULE):
    inner = oracle.Momentum(0.5, 0.5)
    leaves = jax.tree.leaves(params() if tree is None else tree)
    leaves = [np.asarray(x) for x in leaves]
    if static is not None:
        return oracle.FP16Optimizer(leaves, inner, static=static)
    return oracle.FP16Optimizer(leaves, inner, rule=rule)


def leaves_of(x):
    return [np.asarray(x) for x in jax.tree.leaves(x)]


def assert_state(state, model):
    """Gradients, flag, scale and counter are those of the oracle."""
    np.testing.assert_equal(float(state.loss_scale), model.scale)
    assert int(state.loss_scaler.unskipped) == model.scaler.unskipped
    assert bool(state.overflow) == model.overflow
    assert_near(state.master_grads, model.master_grads, rtol=1e-6, atol=0)
