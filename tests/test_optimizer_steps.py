"""What the benchmarks time is one and the same step, and no straw man."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.optimizer_steps import (
    HALF,
    PARAM_SIZE,
    first_step,
    jamp_fused,
    names,
    optax_chain,
)
from benchmarks.specs import Spec, many_leaves, resnet50, single_leaf
from tests.h200 import compile_step

TREE = Spec("a tree", ((3, 5), (5,), (), (130,)), frozenset({1}))
CONTESTANTS = {
    "chain": optax_chain,
    "jamp": lambda spec: jamp_fused(spec, "xla"),
    "remainder": lambda spec: jamp_fused(spec, "xla", store_remainder=True),
}
pytestmark = pytest.mark.standard_promotion  # optax promotes


def dtype_of(name):
    return jnp.float32 if "fp32" in name else HALF


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_first_step_is_that_of_adamw_and_all_skip_inf(contestant):
    rng, it = np.random.default_rng(0), CONTESTANTS[contestant](TREE)
    shapes = zip(names(TREE), TREE.shapes, strict=True)
    noise = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes}
    params = {name: jnp.asarray(PARAM_SIZE * x) for name, x in noise.items()}
    grads = {name: jnp.asarray(x, dtype_of(name)) for name, x in noise.items()}
    state, step = it.init(params), jax.jit(it.step)
    after = it.params(step(state, grads))
    assert after.keys() == params.keys()
    for name, param in params.items():
        wide = np.asarray(grads[name], np.float32)
        expected = first_step(np.asarray(param), wide)
        assert after[name].dtype == dtype_of(name)
        rounding = 2**-8 if after[name].dtype == HALF else 1e-6
        np.testing.assert_allclose(
            np.asarray(after[name], np.float32), expected, rtol=rounding, atol=1e-8
        )
    last = names(TREE)[-1]
    skipped = step(state, grads | {last: grads[last].at[-1].set(jnp.inf)})
    assert (skipped.step, skipped.skipped_steps) == (0, 1)
    for name, before in it.params(state).items():
        np.testing.assert_array_equal(it.params(skipped)[name], before)


@pytest.mark.h200
@pytest.mark.parametrize(
    "spec",
    [single_leaf(2**20), many_leaves(3), resnet50(blocks=(1,), width=64)],
    ids=lambda spec: spec.name,
)
def test_chain_moves_no_more_than_it_must(spec):
    it = optax_chain(spec)
    shapes = list(zip(names(spec), spec.shapes, strict=True))
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes}
    grads = {n: jax.ShapeDtypeStruct(s, dtype_of(n)) for n, s in shapes}
    state = jax.eval_shape(it.init, params)
    program = compile_step(it.step, state, grads, donate=(0,))
    assert it.bytes_moved <= program.traffic <= 1.001 * it.bytes_moved
    assert all(size <= 4 for size in program.copies)  # of a scalar
