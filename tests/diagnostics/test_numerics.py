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
from tests.oracles import fp8

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
    state = jamp.initialize(params, optax.sgd(1.0), "O0", **options)
    loss = lambda p, x: state.apply_fn({"params": p}, x).mean()  # noqa: E731
    report = numerics(loss, state, x, scale=1.0)
    assert report.tiny == () and "keep_fp32=" not in str(report)
    # What half would lose is there in float32 only.
    wide = report.values["Net/wide", "forward"]
    assert (wide.nonzero, wide.losses["float16"].zero) == (500, 0)
    between = report.values["Net", "forward"]
    assert between.nonzero == between.losses["float16"].zero == 500
    assert between.losses["bfloat16"] == (0, 0, 0)
    assert {phase for _, phase in report.values} == {"forward", "backward"}
    (row,) = (r for r in str(report).splitlines() if r.startswith("Net, forward"))
    assert row.split()[2:5] == ["100", "-", "-"]
    assert len(str(report).splitlines()) == 3 + len(report.values) + 3 + 6 + 1


def test_small_params_in_half_are_named():
    params = {"wide": jnp.ones(1000), "head": {"bias": jnp.ones(3)}}
    state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    loss = lambda p: sum(x.astype("f4").sum() for x in jax.tree.leaves(p))  # noqa: E731
    report = numerics(loss, state, scale=1.0)
    assert report.tiny == ("head/bias",) and "keep_fp32=" in str(report)


def off_by(x, y, *forms):
    """How far a product in fp8 is off, as a part of its norm, in float64."""
    x8, y8 = (fp8.quantized(a, form) for a, form in zip((x, y), forms, strict=True))
    return np.linalg.norm(x8 @ y8 - x @ y) / np.linalg.norm(x @ y)


@pytest.mark.parametrize(
    "level, options, rel",
    [("O0", {}, 1e-3), ("O6", {"fp8": jamp.Fp8(smallest=1)}, 0.1)],
)
def test_what_fp8_loses_of_each_product_also_of_a_scan(level, options, rel):
    rng = np.random.default_rng(0)
    x, ws, head = (rng.normal(size=s) for s in ((16, 32), (2, 32, 32), (32, 8)))
    x[0] *= 1e-6  # below the smallest number beside the others
    cotangent = rng.normal(size=(16, 8))
    params = {"head": head, "ws": ws}

    def loss_fn(params, x, cotangent):
        with jax.named_scope("stack"):
            layer = lambda x, w: (x @ w, None)  # noqa: E731
            x, _ = jax.lax.scan(layer, x, params["ws"])
        with jax.named_scope("head"):
            return (x @ params["head"] * cotangent).sum()

    state = jamp.initialize(
        jax.tree.map(jnp.float32, params), optax.sgd(1.0), level, verbosity=0, **options
    )
    given = jnp.float32(x), jnp.float32(cotangent)
    report = numerics(loss_fn, state, *given, scale=1.0)
    found = {}
    for product in report.products:
        key = product.module, product.phase
        found.setdefault(key, []).append(product.error)
    wide, narrow = fp8.E4M3, fp8.E5M2
    layers = [x, x @ ws[0], x @ ws[0] @ ws[1]]
    back = [cotangent @ head.T @ ws[1].T, cotangent @ head.T]
    pairs = list(zip(layers[:2], ws, back, strict=True))
    forward = [off_by(h, w, wide, wide) for h, w, _ in pairs]
    backward = [off_by(h.T, g, wide, narrow) for h, _, g in pairs]
    backward += [off_by(g, w.T, narrow, wide) for _, w, g in pairs]
    expected = {
        ("stack", "forward"): forward,
        ("stack", "backward"): backward,
        ("head", "forward"): [off_by(layers[2], head, wide, wide)],
        ("head", "backward"): [
            off_by(layers[2].T, cotangent, wide, narrow),
            off_by(cotangent, head.T, narrow, wide),
        ],
    }
    assert found.keys() == expected.keys()
    for key, errors in expected.items():
        assert sorted(found[key]) == pytest.approx(sorted(errors), rel=rel)
        assert 0.01 < max(errors) < 0.12
    first = next(p for p in report.products if p.phase == "forward")
    assert first.underflow == pytest.approx(1 / 16, rel=0.05)
    assert "Of 9 products of matrices in fp8, the worst, in percent:" in str(report)
