"""`numerics` and `recommend_scale`: what narrow formats lose, and which scales do."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from jamp.diagnostics import numerics, recommend_scale
from jamp.diagnostics._numerics import FORMATS, counts_of

pytestmark = pytest.mark.standard_promotion  # as in the reader's program


@pytest.mark.parametrize("name", FORMATS)
def test_counts_are_those_of_a_cast(name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=4000) * 10.0 ** rng.uniform(-12, 8, 4000)
    x[:100] = 0
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        cast = x.astype(FORMATS[name]).astype(np.float64)
    some, normal = x != 0, float(ml_dtypes.finfo(FORMATS[name]).tiny)
    zero, over = some & (cast == 0), ~np.isfinite(cast)
    subnormal = some & (np.abs(x) < normal) & ~zero
    found = counts_of(jnp.asarray(x))
    assert found.nonzero == some.sum() == 3900
    assert found.losses[name] == (zero.sum(), subnormal.sum(), over.sum())
    assert (found + found).losses[name].over == 2 * over.sum()
    assert counts_of(jnp.asarray(x / 8), 8.0) == found


def state_of(level="O2", **options):
    """Its gradients are the batch."""
    params = {"a": jnp.ones(1000), "b": {"w": jnp.ones(1000)}}
    return jamp.initialize(params, optax.sgd(1.0), level, verbosity=0, **options)


def loss_fn(params, x):
    a, b = (p.astype(jnp.float32) for p in jax.tree.leaves(params))
    return (a * x[0] + b * x[1]).sum(), "aux"


# The largest gradient, the smallest, and the scales that are safe: scale * largest is
# at most 65504, and scale * smallest more than half of 2**-24.
@pytest.mark.parametrize(
    "large, small, low, high, recommended",
    [
        (1.0, 1.0, 1, 2**15, 2**12),
        (1.0, 2.0**-30, 2**6, 2**15, 2**12),
        (10.0, 2.0**-35, 2**11, 2**12, 2**11),
        (1e-4, 1e-4, 1, 2**24, 2**21),
    ],
)
def test_safe_scales(large, small, low, high, recommended):
    x = np.full((2, 1000), large, np.float32)
    x[1, ::2] = small
    report = numerics(loss_fn, state_of(), x)
    assert report.safe_scales == (low, high)
    assert report.scale == recommended == recommend_scale(loss_fn, state_of(), x)
    assert f"from {low:g} to {high:g} are safe" in str(report)
    # One half of one leaf: 1 in 4 of the gradients.
    low_report = numerics(loss_fn, state_of("O0"), x, scale=low / 2)
    lost = low_report.gradients["b/w"].losses["float16"].zero
    assert lost == (500 if low > 1 else 0) and low_report.scale == low / 2
    assert low_report.gradients["a"].losses["float16"].zero == 0


def test_no_scale_is_safe():
    x = np.full((2, 1000), 1e6, np.float32)
    assert numerics(loss_fn, state_of(), x).safe_scales is None
    assert "No loss scale up to 2**24 is safe." in str(numerics(loss_fn, state_of(), x))
    with pytest.raises(FloatingPointError, match=r"locate\(loss_fn, state"):
        recommend_scale(loss_fn, state_of(), x)
    with pytest.raises(TypeError, match="jamp.diagnostics.numerics looks at values"):
        jax.jit(lambda x: numerics(loss_fn, state_of(), x))(x)
    with pytest.raises(TypeError, match="jamp.diagnostics.recommend_scale takes"):
        recommend_scale(loss_fn, {}, x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(100, name="wide", use_bias=False)(x)
        return nn.Dense(3, name="head")(x * 1e-9)


def test_values_by_module_and_pass():
    x = jnp.ones((5, 7))
    params = Net().init(jax.random.key(0), x)["params"]
    options = {"apply_fn": Net().apply, "verbosity": 0}
    for level, tiny in (("O2", ("head/bias",)), ("O0", ())):
        state = jamp.initialize(params, optax.sgd(1.0), level, **options)
        loss = lambda p, x, of=state: of.apply_fn({"params": p}, x).mean()  # noqa: E731
        report = numerics(loss, state, x, scale=1.0)
        assert report.tiny == tiny and ("keep_fp32=" in str(report)) == bool(tiny)
    # What half would lose is there in float32 only.
    wide = report.values["Net/wide", "forward"]
    assert (wide.nonzero, wide.losses["float16"].zero) == (500, 0)
    between = report.values["Net", "forward"]
    assert between.nonzero == between.losses["float16"].zero == 500
    assert between.losses["bfloat16"] == (0, 0, 0)
    assert {phase for _, phase in report.values} == {"forward", "backward"}
    (row,) = (r for r in str(report).splitlines() if r.startswith("Net, forward"))
    assert row.split()[2:5] == ["100", "-", "-"]
    assert len(str(report).splitlines()) == 3 + len(report.values) + 3 + 1
