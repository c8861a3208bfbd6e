"""Test `recommend_scale` against scales derived by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp.diagnostics import recommend_scale
from tests.support.states import make

pytestmark = pytest.mark.standard_promotion  # as in the reader's program


TWO = {"a": jnp.ones(1000), "b": {"w": jnp.ones(1000)}}
SQUARE = {"w": jnp.ones((8, 8))}


def loss_fn(params, scale):
    """Returns a loss whose gradient is `scale`, also the name of an option."""
    a, b = (p.astype(jnp.float32) for p in jax.tree.leaves(params))
    return (a * scale[0] + b * scale[1]).sum(), "aux"


# The largest gradient g, the smallest, and the scale. The scale is 2**(p - 3) for the
# largest p with g * 2**p <= 65504, or 2**p if the smallest gradient would underflow.
@pytest.mark.parametrize(
    "large, small, expected",
    [
        (1.0, 2.0**-30, 2**12),
        (10.0, 2.0**-35, 2**11),
        (1e-4, 1e-4, 2**21),
        (65504.0, 65504.0, 1),
    ],
)
def test_scales_by_hand(large, small, expected):
    x = np.full((2, 1000), large, np.float32)
    x[1, ::2] = small
    assert recommend_scale(loss_fn)(make("O2", TWO), scale=x) == expected


def matmul_loss(params, x):
    return (x @ params["w"]).astype(jnp.float32).sum()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5", "O6"])
def test_each_level_is_judged_by_its_half_dtype(level):
    x = np.full((8, 8), 100, np.float32)
    state = make(level, SQUARE)
    # Each gradient is a sum of eight hundreds: 800 * 2**6 < 65504 < 800 * 2**7.
    expected = 1 if level in ("O4", "O5", "O6") else 2**3
    assert recommend_scale(matmul_loss)(state, x) == expected
    # float16 overflows in the forward pass, and no scale changes that.
    huge = x * np.float32(600)
    if expected > 1:
        with pytest.raises(FloatingPointError, match="forward pass .* in float16.*loc"):
            recommend_scale(matmul_loss)(state, huge)
    else:
        assert recommend_scale(matmul_loss)(state, huge) == 1


HIDING = {
    "clip": lambda params, x: jnp.clip(x @ params["w"], -1, 1).astype("float32").sum(),
    "inverse": lambda params, x: (1 / (x @ params["w"])).astype("float32").sum(),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_loss_does_not_hide_an_overflow(name):
    hidden, state = HIDING[name], make("O2", SQUARE)
    x = np.full((8, 8), 100, np.float32)
    assert recommend_scale(hidden)(state, x) >= 1
    huge = x * np.float32(600)  # 8 * 60,000 > 65504
    assert recommend_scale(hidden)(make("O5", SQUARE), huge) == 1
    line = hidden.__code__.co_firstlineno
    message = f"overflows in float16 at any loss scale: a matmul at {__file__}:{line}"
    with pytest.raises(FloatingPointError, match=message):
        recommend_scale(hidden)(state, huge)


def test_a_pole_is_not_an_overflow():
    def loss_fn(params, x):
        h = x @ params["w"]
        return jnp.where(h == 0, 0, 1 / h).astype(jnp.float32).sum()

    state = make("O2", SQUARE)
    x = np.ones((8, 8), np.float32) * (np.arange(8)[:, None] > 0)
    with pytest.raises(FloatingPointError, match="A gradient is not finite"):
        recommend_scale(loss_fn)(state, x)  # 0 * inf, in the derivative


def test_states_and_calls_without_an_answer_are_errors():
    x = np.full((2, 1000), 1e6, np.float32)
    with pytest.raises(FloatingPointError, match="A gradient is not finite in float16"):
        recommend_scale(loss_fn)(make("O2", TWO), x)
    for state in (make("O0", TWO), make("O1", TWO, patch_functions=False)):
        with pytest.raises(ValueError, match="does not compute in half: initialize"):
            recommend_scale(loss_fn)(state, x)
    with pytest.raises(TypeError, match=r"recommend_scale\(loss_fn\)\(state, \*args\)"):
        jax.jit(lambda x: recommend_scale(loss_fn)(make("O2", TWO), x))(x)
    with pytest.raises(TypeError, match="AmpState .* got dict"):
        recommend_scale(loss_fn)({}, x)
    with pytest.raises(TypeError, match=r"got \(function, State\). Write recommend"):
        recommend_scale(loss_fn, make("O2", TWO))
