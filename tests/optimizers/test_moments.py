"""Test moments in bfloat16, which are rounded stochastically."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pallas_kernels as pk
from jamp import optimizers as jo
from tests.devices.eight_devices import LEAVES, SPECS, mesh_of, placed
from tests.optimizers.fused import FIELDS, each_bare, fresh
from tests.oracles import rounding
from tests.support.bits import assert_rounded_alike, assert_same_bits

BF16, F32 = jnp.bfloat16, jnp.float32
# Zeros, exact and inexact bfloat16 numbers, denormals, the largest, inf and NaN.
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0**-133, 1e-40, 1.1754944e-38, 3e38, 3.4e38, -3.4e38]
SPECIAL += [np.inf, -np.inf, np.nan, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 2.0**-149]


@dataclasses.dataclass(frozen=True)
class Copying:
    """A rule whose new moments are the gradient."""

    def formula(self, s, decays, g, w, moments) -> Any:
        return jnp.zeros_like(w), dict.fromkeys(moments, g)


def written(values, count, backend):
    """Returns the values after rounding as first and as second moments."""
    weights = [pk.Weight(x) for x in values]
    old = [jnp.zeros(x.shape, BF16) for x in values]
    leaves = pk.Leaves(weights, values, {"mu": old, "nu": old}, [False] * len(values))
    options = pk.Options(backend=backend)
    return pk.step(Copying(), leaves, {"one": 1.0}, options, count=count)[1]


def values(n, seed=0):
    """Draws numbers of all magnitudes, after the special ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 2.0 ** rng.integers(-120, 120, n)
    x[: len(SPECIAL)] = SPECIAL[:n]
    return np.float32(x)


@pytest.mark.slow
@pytest.mark.parametrize("backend, n", [("xla", 40_000), ("interpret", 4000)])
def test_moments_are_rounded_by_a_hash_of_step_leaf_and_element(backend, n):
    leaves = [values(n), values(n // 4, 1).reshape(10, -1), values(7, 2)]
    for count in (0, 41):
        call = jax.jit(functools.partial(written, backend=backend))
        moments = call([jnp.asarray(x) for x in leaves], jnp.int32(count))
        for place, name in enumerate(("mu", "nu")):
            for k, (x, found) in enumerate(zip(leaves, moments[name], strict=True)):
                random = rounding.random_16(count, k, np.arange(x.size), place)
                expected = rounding.rounded(x, random.reshape(x.shape))
                assert found.dtype == BF16
                np.testing.assert_array_equal(np.asarray(found, np.float64), expected)
                assert (np.signbit(np.asarray(found, F32)) == np.signbit(x)).all()


def test_random_bits_are_uniform_and_independent():
    draws = [
        rounding.random_16(step, leaf, np.arange(2**16), place)
        for step, leaf, place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2))
    ]
    for x in draws:
        counts = np.bincount(x.astype(int) // 256, minlength=256)
        assert ((counts - 256) ** 2 / 256).sum() < 340  # chi^2 test: p = 3e-4
    related = np.corrcoef([x - 32767.5 for x in draws])
    assert abs(related - np.eye(len(draws))).max() < 4 / 256


# Too small for a kernel, so that XLA steps them under `shard_map`.
SMALL = {"both": (16, 20), "combined": (16, 7), "fsdp": (40,), "tensor": (5, 8)}
WHOLE = {name: shape for name, (shape, _) in LEAVES.items()}


@pytest.mark.slow
@pytest.mark.eight_devices
@pytest.mark.parametrize(
    "kind, backend, shapes",
    [
        ("Auto", "xla", WHOLE),
        ("Explicit", "xla", WHOLE),
        ("Explicit", "interpret", SMALL),
    ],
)
def test_the_bits_are_those_of_the_whole_leaf_under_any_sharding(kind, backend, shapes):
    tree = {name: values(np.prod(s), 3).reshape(s) for name, s in shapes.items()}
    wanted = written([jnp.asarray(x) for x in tree.values()], 3, "xla")
    with jax.set_mesh(mesh_of(kind)):
        on_mesh = placed(tree, mesh_of(kind), SPECS)
        call = jax.jit(functools.partial(written, backend=backend))
        assert_same_bits(call([*on_mesh.values()], 3), wanted)


@pytest.mark.slow
@each_bare
def test_only_moments_are_in_moment_dtype(name):
    params = {"w": jnp.ones((3, 50)), "b": jnp.ones(())}
    tx = fresh(name, moment_dtype="bfloat16")
    state = tx.init(params)
    updates, new = jax.jit(tx.update)(params, state, params)
    for kept in (state, new):
        for field in FIELDS[name]:
            is_norm = name == "novograd" and field == "nu"
            for x in jax.tree.leaves(optax.tree.get(kept, field)):
                assert x.dtype == (F32 if is_norm else BF16)
    # The first step reads moments of zero, so its updates equal float32's.
    plain = fresh(name)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    assert_rounded_alike(updates, expected)
    bad = jax.tree.map(lambda x: x + jnp.nan, params)
    _, after = jax.jit(tx.update)(bad, new, params, found_inf=jnp.bool_(True))
    assert_same_bits(after, new)
    assert tx == fresh(name, moment_dtype=BF16) != plain


def test_float64_moments_stay_float64():
    with jax.enable_x64(True):
        params = {"wide": jnp.ones(3, jnp.float64), "w": jnp.ones(3, F32)}
        state: Any = jo.fused_adam(moment_dtype="bfloat16").init(params)
        assert [x.dtype.itemsize for x in jax.tree.leaves(state.mu)] == [2, 8]


def test_zero_gradients_move_nothing_and_second_moments_decay_at_the_right_rate():
    params = jnp.ones(4096)
    tx = jo.fused_adam(1e-3, moment_dtype="bfloat16")
    state: Any = tx.init(params)
    state = state._replace(nu=jnp.ones(4096, BF16))
    step = jax.jit(functools.partial(tx.update, jnp.zeros(4096)))
    for _ in range(400):
        updates, state = step(state, params)
    assert not updates.any() and not state.mu.any()
    wanted = 0.999**400
    assert float(state.nu.astype(F32).mean()) == pytest.approx(wanted, rel=0.03)
    nearest = (jnp.ones(4096, BF16).astype(F32) * 0.999).astype(BF16)
    assert (nearest == 1).all()  # rounding to nearest never decays
