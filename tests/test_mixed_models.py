"""Models mixed of float16 and float32 by hand, left as they are at every level.

So are those of apex's own tests of several models: the second weight of each is half.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests import several
from tests.states import like

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
MASTERS = ("O2", "O5")
NAME = "2 models, 2 losses, 1 optimizer"
MIXED = {"cast_model_type": False, "allow_incoming_model_not_fp32": True}


def begin(name, level, shared=False, half=np.float16):
    case = several.CASES[name]
    tree = several.params(case, (np.float32, half))
    return several.begin(case, several.scaling(case, shared), level, tree, **MIXED)


@pytest.mark.parametrize(
    "name, shared, half, levels",
    [
        (NAME, False, np.float16, LEVELS),
        ("3 models, 2 losses, 1 optimizer", True, np.float16, ("O2",)),
        ("2 models, 2 losses, 2 optimizers", True, np.float16, ("O2",)),
        ("3 models, 2 losses, 2 optimizers", False, np.float16, ("O2", "O3")),
        ("3 models, 2 losses, 2 optimizers", False, jnp.bfloat16, ("O5",)),
    ],
)
def test_skipped_steps_are_left_out_of_a_plain_run(name, shared, half, levels):
    for level in levels:
        several.assert_trains(begin(name, level, shared, half), name, shared)


@pytest.mark.parametrize("level", LEVELS)
def test_each_leaf_keeps_its_dtype_and_halves_get_masters_where_there_are_any(level):
    first = begin(NAME, level)
    for state in (first, first.apply_gradients(grads=like(first.params, 1.0))):
        for model in state.params.values():
            assert {k: x.dtype for k, x in model.items()} == {"w0": "f4", "w1": "f2"}
        for model in several.traces(state.opt_state).values():
            assert {x.dtype for x in model.values()} == {np.dtype("f4")}
        for model in state.opt_state.masters.values() if level in MASTERS else ():
            assert isinstance(model["w0"], optax.MaskedNode)  # its own
            assert model["w1"].dtype == jnp.float32


@pytest.mark.parametrize("leaf, overflows", [("w0", False), ("w1", True)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_beyond_half_overflows_in_a_half_leaf_alone(level, leaf, overflows):
    state = begin(NAME, level)

    def loss_fn(p):
        return (p["m0"][leaf].astype(jnp.float32) * 2.0**15).sum()  # at a scale of 4

    after = state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))
    assert bool(after.last_step_skipped) == overflows
    assert tuple(map(float, after.loss_scale)) == (2.0 if overflows else 4.0, 16.0)
    moved = np.float32(after.params["m0"][leaf]) != np.float32(state.params["m0"][leaf])
    assert (moved != overflows).all()


@pytest.mark.parametrize("level", LEVELS)
def test_half_leaves_sum_their_losses_in_fp32_with_and_without_masters(level):
    # apex_semantics 6.4: without masters, apex sums in half.
    tree = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.float32)}
    options = MIXED | {"loss_scale": jamp.DynamicLossScale(4.0), "verbosity": 0}
    tx = optax.sgd(2.0**-11)
    state = jamp.initialize(tree, tx, level, num_losses=2, **options)

    def loss_fn(p, x):
        return sum((w.astype(jnp.float32) * x).sum() for w in p.values())

    rows = enumerate((1.0, 2048.0))
    grads = [jamp.scaled_grad(loss_fn, loss_id=i)(state, x) for i, x in rows]
    after = state.apply_gradients(grads=grads)
    # float16 knows no 2049.
    for leaf in after.params.values():
        assert (np.float32(leaf) == -(2.0**-11)).all()
