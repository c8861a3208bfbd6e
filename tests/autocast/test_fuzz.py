"""Random programs: autocast raises on none, keeps types, integers and gradients.

And digits: programs of whole layers are held to the errors of torch's rules.

`make fuzz` runs 10,000 of both, from the seed JAMP_FUZZ on. A seed of the former that
found a defect is in data/fuzz_seeds.txt from then on, and CI replays it.
"""

import contextlib
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from benchmarks.mechanisms import without
from benchmarks.torch_table import HALVES, both_passes, sums_in_float32
from tests.autocast.random_layers import LAYERS, layer_program
from tests.autocast.random_programs import EVERY, is_smooth, program, run
from tests.oracles.torch_autocast import torch_autocast
from tests.programs import evaluate, interpret

ERROR = {"float16": 0.01, "bfloat16": 0.08}  # of values of a few units
LINES = (pathlib.Path(__file__).parents[1] / "data" / "fuzz_seeds.txt").read_text()
FOUND = [int(line.split()[0]) for line in LINES.splitlines() if line[0] != "#"]
SAMPLE, CHUNK, CHUNKS = 12, 100, 100

pytestmark = pytest.mark.standard_promotion


def case(seed):
    """Floats, a half dtype and a mode."""
    rng, normal = random.Random(f"case {seed}"), np.random.default_rng(seed).normal
    dtypes = ["float32", "float32", "float32", "bfloat16", "float16"]
    shapes = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    floats = [jnp.asarray(normal(size=shape), rng.choice(dtypes)) for shape in shapes]
    return floats, rng.choice(list(ERROR)), rng.choice(["widest", "narrowest"])


def check(steps, floats, half, promote):
    """Holds the cast program to the plain one; None where JAX refuses that."""

    def fn(floats):
        return run(steps, floats, [jnp.array([2, 0, 3]), jnp.array([1])])

    def with_grads(fn):
        """The gradients of all floats, and all values."""

        def loss(floats):
            values = fn(floats)
            wide = (y.astype(jnp.float32) for y in values[0])
            return sum(jnp.sin(y).sum() for y in wide), values

        return jax.grad(loss, has_aux=True)

    def close(got, expected, is_grad):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        exact = jnp.issubdtype(got.dtype, jnp.integer)
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        rtol = atol = 0 if exact else ERROR[half]
        if is_grad:
            assert np.isfinite(got).all()
            rtol, atol = 0, atol * (1 + np.abs(expected).max())
        if not is_grad or is_smooth(steps):
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)

    plain, cast = with_grads(fn), with_grads(jamp.autocast(fn, half, promote=promote))
    try:
        results = evaluate(lambda floats: (plain(floats), cast(floats)), floats)
    except Exception:
        if raises(plain, floats):
            return None
        raise
    (grads, values), (got_grads, got_values) = results
    jax.tree.map(lambda *x: close(*x, is_grad=False), got_values, values)
    jax.tree.map(lambda *x: close(*x, is_grad=True), got_grads, grads)
    return True


def raises(fn, *args):
    try:
        evaluate(fn, *args)
    except Exception:
        return True
    return False


def test_every_operation():
    floats = [jnp.asarray(np.random.default_rng(2).normal(size=(4, 4)), jnp.float32)]
    assert check(EVERY, 2 * floats, "float16", "widest")


@pytest.mark.parametrize("seed", [*FOUND, *range(SAMPLE)])
def test_random_programs(seed):
    check(program(seed), *case(seed))


def many(check, chunk):
    """Checks the seeds of a chunk; returns the results of those that do not fail."""
    start = int(os.environ["JAMP_FUZZ"]) + chunk * CHUNK
    jax.clear_caches()
    found, failed = [], []
    for seed in range(start, start + CHUNK):
        try:
            found.append(check(seed))
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            failed.append(seed)
    assert failed == []
    return found


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_random_programs(chunk):
    found = many(lambda seed: check(program(seed), *case(seed)), chunk)
    assert found.count(None) < CHUNK / 10


# ---- whole layers, by torch's rules and by ours


DRAWS = 64  # of data: in one, torch's error may be small by luck
# What may cost digits, by the names of mechanisms: docs/autocast.md has them.
EXCEPTIONS = ("norms", "one cast")


def values_and_gradients(fn, program, dtype="float32"):
    """For each result and each gradient a row of its values in each draw of data."""
    args = [
        np.stack(draws) for draws in zip(*map(program.args, range(DRAWS)), strict=True)
    ]
    args = [x if x.dtype == np.int32 else x.astype(dtype) for x in args]
    keys = jax.random.split(jax.random.key(0), DRAWS)
    with sums_in_float32():
        found = interpret(jax.vmap(both_passes(fn)), args, keys)
    return [np.asarray(x, float).reshape(DRAWS, -1) for x in jax.tree.leaves(found)]


def median_error(got, exact):
    """The median over the draws, so that neither luck nor a pole decides."""
    norms, errors = (np.linalg.norm(x, axis=1) for x in (exact, got - exact))
    errors = errors / np.where(norms > 1e-9, norms, 1)
    return np.median(np.where(np.isfinite(errors), errors, np.inf))


def check_layers(seed):
    """Holds a program to 2 x torch's error, if need be without the exceptions."""
    steps = program(seed, tuple(LAYERS), most=6, depth=0)
    layers, half = layer_program(seed, steps), HALVES[seed % 2]
    with jax.enable_x64(True):
        exact = values_and_gradients(layers.fn, layers, "float64")

    def errors(cast):
        found = values_and_gradients(cast(layers.fn, half), layers)
        return np.array(list(map(median_error, found, exact)))

    bounds = 2 * errors(torch_autocast) + 1e-6
    if (errors(jamp.autocast) <= bounds).all():
        return
    with contextlib.ExitStack() as stack:
        for name in EXCEPTIONS:
            stack.enter_context(without(name))
        assert (errors(jamp.autocast) <= bounds).all(), [step.op for step in steps]


@pytest.mark.parametrize("seed", range(2))
def test_layers_are_as_accurate_as_by_torchs_rules(seed):
    check_layers(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_programs_of_layers(chunk):
    many(check_layers, chunk)
