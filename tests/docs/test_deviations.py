"""Test deviations from apex, and agreements with it, that no other test covers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from tests.support.states import make, wide

W, X = jnp.full((2, 1), 2.0), jnp.full((4, 2), 2.5)  # x @ w is 10


def run(fn, *args):
    """Returns the primitive and dtype of each operation of `fn` under autocast."""
    return [(op.primitive, op.dtype) for op in jamp.explain(fn)(*args).operations]


# 11. BatchNorm at O1
def test_batchnorm_gives_half_back_and_has_its_statistics_in_float32():
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)

    def fn(w, x):
        y, updates = norm.apply(variables, x @ w, mutable=["batch_stats"])
        return jnp.tanh(y), updates

    operations = run(fn, jnp.eye(2), X)
    (out,) = [dtype for name, dtype in operations if name == "tanh"]
    sums = [dtype for name, dtype in operations if name == "reduce_sum"]
    assert (out, set(sums)) == ("float16", {"float32"})
    assert len(sums) >= 2
    _, updates = jax.eval_shape(jamp.autocast(fn), jnp.eye(2), X)
    assert [x.dtype for x in jax.tree.leaves(updates)] == [jnp.float32] * 2


# 13 and 36. Operations that apex refuses in half: binary cross entropy
def cross_entropy(w, x):
    """Returns the cross entropy at target 0, which is inf if p rounds to 1."""
    return -jnp.log(1 - jax.nn.sigmoid(x @ w)).mean()


def test_binary_cross_entropy_needs_no_switch_and_runs_in_float32():
    product, *rest = run(cross_entropy, W, X)
    assert product == ("dot_general", "float16")
    assert {name for name, _ in rest} >= {"logistic", "sub", "log"}
    assert {dtype for _, dtype in rest} == {"float32"}
    with jamp.disable_casts():
        # With casts disabled, your half operands run as written and can overflow.
        assert cross_entropy(W.astype(jnp.float16), X.astype(jnp.float16)) == jnp.inf
    found = jamp.autocast(cross_entropy)(W, X)
    np.testing.assert_allclose(found, np.log1p(np.exp(10.0)), rtol=1e-3)


# 35. No gradient, and a gradient of zero
def test_a_param_that_no_loss_uses_decays_and_a_group_without_a_loss_does_not():
    def sgd():
        return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))

    nothing = lambda p: 0 * wide(p["w"]).sum()  # noqa: E731
    one = make("O2", {"w": jnp.ones(2), "unused": jnp.ones(2)}, sgd())
    one = one.apply_gradients(grads=jamp.scaled_grad(nothing)(one))
    np.testing.assert_array_equal(one.params["unused"], [0.5, 0.5])

    groups = {"used": {"w": jnp.ones(2)}, "unused": {"w": jnp.ones(2)}}
    two = make("O2", groups, {"used": sgd(), "unused": sgd()})
    grads = jamp.scaled_grad(lambda p: nothing(p["used"]), wrt="used")(two)
    two = two.apply_gradients(grads={"used": grads})
    np.testing.assert_array_equal(two.params["used"]["w"], [0.5, 0.5])
    np.testing.assert_array_equal(two.params["unused"]["w"], [1.0, 1.0])
