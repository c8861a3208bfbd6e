"""Test that averages and target networks move at every level, or warn.

After n steps with weight s, the average of a constant has moved 1 - (1 - s)^n of the
way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits
from tests.support.states import SGD, make, params

STEP, STEPS = 1e-3, 3000
START = {"w": jnp.linspace(0.5, 2.0, 16), "b": jnp.full(3, -0.75)}
END = jax.tree.map(lambda x: 1.25 * x, START)


def share(average):
    """Returns how far an average has moved from START to END."""
    ratios = [(np.float64(average[k]) / START[k] - 1) / 0.25 for k in START]
    return np.concatenate([np.ravel(r) for r in ratios])


MOVED = 1 - (1 - STEP) ** STEPS


@pytest.mark.parametrize(
    "kind, level", [("tree", "O2"), ("tree", "O3"), ("state", "O0"), ("state", "O5")]
)
def test_an_average_moves_at_every_level(kind, level):
    state = make(level, END)
    old = make(level, START) if kind == "state" else START

    def body(old, _):
        return jamp.incremental_update(state, old, STEP), None

    after, _ = jax.jit(lambda old: jax.lax.scan(body, old, None, STEPS))(old)
    average = jamp.master_params(after) if kind == "state" else after
    # 3,000 float32 roundings need this tolerance, and at O3 the rounding of END.
    np.testing.assert_allclose(share(average), MOVED, 2e-3 if level == "O3" else 5e-4)
    if kind == "state":
        assert after.params["w"].dtype == state.params["w"].dtype
        cast = jax.tree.map(lambda m, p: m.astype(p.dtype), average, after.params)
        assert_same_bits(after.params, cast)


def test_halves_would_not():
    """An average of half params stops moving."""
    for level, most in (("O2", 0.2), ("O5", 0.01)):
        state, target = make(level, END), make(level, START)

        def body(target, _, new=state.params):
            moved = optax.incremental_update(new, target.params, STEP)
            return target.replace(params=moved), None

        run = jax.jit(lambda target, body=body: jax.lax.scan(body, target, None, STEPS))
        after, _ = run(target)
        assert share(jamp.master_params(after)).mean() < most


def test_a_skip_keeps_the_average():
    state = make("O2", ema=params())
    bad = jax.tree.map(lambda x: jnp.full_like(x, np.inf), jamp.master_params(state))
    good = jax.tree.map(jnp.ones_like, bad)
    for grads, moves in ((bad, False), (good, True)):
        after = state.apply_gradients(grads=grads)
        ema = jamp.incremental_update(after, state.ema, 0.5)
        if not moves:
            assert_same_bits(ema, state.ema)
        else:
            middle = (jamp.master_params(after)["w"] + state.ema["w"]) / 2
            np.testing.assert_allclose(ema["w"], middle, 1e-6)


def test_averages_of_groups_skip_separately():
    trees = {"a": params(), "b": params() | {"seen": jnp.int32(3)}}
    state = make("O2", trees, {"a": SGD, "b": SGD})
    skipped = {"a": jnp.bool_(True), "b": jnp.bool_(False)}
    zeros = jax.tree.map(jnp.zeros_like, trees)
    ema = jamp.incremental_update(state.replace(last_step_skipped=skipped), zeros, 1.0)
    assert_same_bits(ema["a"], zeros["a"])
    assert_same_bits(ema["b"], jamp.master_params(state)["b"])


WRONG = {
    r"old\['b'\] is float16": (lambda s: s.params, "O2"),
    r"old\['b'\] is bfloat16": (lambda s: make("O5", START, None), "O5"),
    "old.* is float16.*set_to_zero": (lambda s: s, "O3"),
    r"new have an unexpected leaf.*'b'.*start": (lambda s: {"w": s.params["w"]}, "O0"),
}


@pytest.mark.parametrize("words", WRONG)
def test_averages_in_half_are_an_error(words):
    old, level = WRONG[words]
    state = make(level, START)
    with pytest.raises(ValueError, match=words):
        jamp.incremental_update(state, old(state), 0.5)


FIELDS = {
    "initialize": lambda s: make("O2", START, ema=s.params),
    "replace": lambda s: s.replace(ema=s.params),
    "apply_gradients": lambda s: s.apply_gradients(grads=START, ema=s.params),
}


@pytest.mark.parametrize("how", FIELDS)
def test_a_half_average_in_a_field_warns(how):
    state = make("O2", START, ema=START)
    words = "field ema has the .*float16.*master_par"
    with pytest.warns(jamp.PrecisionWarning, match=words):
        FIELDS[how](state)
