"""Test all functions of JAX under autocast: no error, new type or new infinity."""

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.support.extent import more
from tests.support.jax_functions import NAMES, call_of, is_float32
from tests.support.programs import evaluate, products_of

MODES = [(h, p) for h in ("float16", "bfloat16") for p in ("widest", "narrowest")]


def through_a_product(x: Any) -> Any:
    """Returns `x` as the half result of a matmul."""
    numbers = (((x.ndim,), (0,)), ((), ()))
    return lax.dot_general(x[..., None], jnp.ones((1, 1), x.dtype), numbers)[..., 0]


def direct_and_after(fn: Callable, cast: Callable = lambda fn: fn) -> Callable:
    """Calls `fn` on its arguments, and on matmuls' results with the same values."""

    def after(*args):
        return fn(*map(through_a_product, args))

    return lambda *args: (cast(fn)(*args), cast(after)(*args))


def both_passes(fn: Callable, has_gradients: bool) -> Callable:
    """Returns a function that returns the results, and gradients of their sum."""

    def loss(args):
        outs = jax.tree.leaves(fn(*args))
        return sum(x.sum() for x in outs if is_float32(x))

    if not has_gradients:
        return lambda *args: (fn(*args), ())
    return lambda *args: (fn(*args), jax.grad(loss)(list(args)))


def has_gradients(fn: Callable, args: list) -> bool:
    try:
        jax.eval_shape(both_passes(fn, True), *args)
    except Exception:
        return False
    return True


def check(name: str, modes: list = MODES) -> list[str]:
    """Returns sentences about what autocast does wrong with a function."""
    found = call_of(name)
    if found is None:
        return []
    fn, args = found
    twice = direct_and_after(fn)
    gradients = has_gradients(twice, args)
    plain, casts, said = both_passes(twice, gradients), {}, []
    expected = jax.eval_shape(plain, *args)
    for half, promote in modes:
        cast = functools.partial(jamp.autocast, dtype=half, promote=promote)
        cast = both_passes(direct_and_after(fn, cast), gradients)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", jamp.AutocastWarning)
                got = jax.eval_shape(cast, *args)
        except Exception as error:
            said.append(f"{half} {promote}: {type(error).__name__}: {error}"[:300])
            continue
        if str(got) == str(expected):
            casts[half, promote] = cast
        else:
            said.append(f"{half} {promote}: {got}, not {expected}")
    try:
        run = jax.jit(lambda *a: (plain(*a), [f(*a) for f in casts.values()]))
        right, results = evaluate(run, *args)
    except Exception as error:
        return [*said, f"{type(error).__name__}: {error}"[:300]]
    # Without a matmul, nothing may change.
    exact = not products_of(jax.make_jaxpr(fn)(*args).jaxpr)
    for mode, result in zip(casts, results, strict=True):
        said += [f"{' '.join(mode)}: {e}" for e in differences(result, right, exact)]
    return said


def differences(got: Any, right: Any, exact: bool) -> Iterator[str]:
    """Yields sentences about infinities and, without a matmul, about changes."""
    parts = {"direct": lambda r: r[0][0], "after": lambda r: r[0][1]}
    for part, of in (parts | {"gradient": lambda r: r[1]}).items():
        pairs = zip(jax.tree.leaves(of(got)), jax.tree.leaves(of(right)), strict=True)
        for i, (a, b) in enumerate(pairs):
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            a, b = (np.asarray(x, np.complex64) for x in (a, b))
            # The gradient of a matmul's result has the range of half.
            finite = np.abs(b) < (6e4 if part == "gradient" else np.inf)
            if (finite & ~np.isfinite(a)).any():
                yield f"{part} [{i}] is not finite"
            elif part == "direct" and exact:
                if not np.allclose(a, b, 1e-5, 1e-6, equal_nan=True):
                    yield f"{part} [{i}] is off by {np.nanmax(np.abs(a - b)):.1e}"


# JAX and optax promote dtypes. They warn of short inputs and coming removals.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

# CI tests one in 128 functions, and `make sweep` all.
SAMPLE = 128
SAMPLED = [name for name in NAMES if zlib.crc32(name.encode()) % SAMPLE == 32]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_functions(name):
    assert check(name, MODES[1:3]) == []


@pytest.mark.parametrize("name", more("SWEEP", NAMES))
def test_every_function(name):
    assert check(name) == []


@pytest.mark.parametrize("least", more("SWEEP", [750]))
def test_most_functions_are_called(least):
    assert sum(call_of(name) is not None for name in NAMES) > least
