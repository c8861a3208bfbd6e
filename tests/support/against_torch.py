"""Compare the errors of two levels and of torch's rules on random programs of layers.

A program runs at O1 and O2, or at O4 and O5, with the gradients of its params. At O2
and O5, its error may be that of a half model by hand. An error is the median over draws
of data, so that no outlier decides. Every program runs operation by operation. Some
programs are also compiled whole.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jamp
from benchmarks.mechanisms import without
from benchmarks.torch_table import sums_in_float32
from tests.oracles.torch_autocast import by_hand, torch_autocast
from tests.support.interpreter import interpreter
from tests.support.programs import evaluate
from tests.support.random_layers import ACTIVATION, MAKERS, layer_program
from tests.support.small_programs import Program, normal

DRAWS, MORE_DRAWS = 64, 1024  # more draws if the first median exceeds the bound
DECIDING = (DRAWS, True), (MORE_DRAWS, True), (MORE_DRAWS, False)
TIMES, OF_SCALE = 2, 1e-6  # the bound is TIMES * torch's error + OF_SCALE
WHOLE = 101  # compiles every 101st program whole; odd, to reach both dtypes
# Mechanisms that may cost digits, as docs/autocast.md says.
EXCEPTIONS = ("norms", "one cast", "islands")
# Programs that exceed the bound, and why.
EXPLAINED: dict[int, str] = {}
LEVELS = {"float16": ("O1", "O2"), "bfloat16": ("O4", "O5")}
PARAMS = "w w_in w_out w_small kernel table scale bias number".split()
REFUSED = -1.0  # the ratio of a program that JAX refuses
COTANGENT = normal(*ACTIVATION, scale=1 / 64)
TAKEN = Program(lambda: None, MAKERS | {"dy": COTANGENT, "dz": COTANGENT})


def beyond(seeds: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the programs that exceed the bound even without the exceptions.

    A half model computes the factors of the user's own rules in half, as by hand. The
    last run leaves the rules to JAX at O2 and O5.
    """
    ratios = {seed: ratio(seed) for seed in seeds}
    left = [s for s in seeds if not ratios[s] <= 1 and s not in EXPLAINED]
    with contextlib.ExitStack() as stack:
        for name in EXCEPTIONS if left else ():
            stack.enter_context(without(name))
        for draws, own_rules in DECIDING:
            ratios = {seed: ratio(seed, draws, own_rules) for seed in left}
            left = [seed for seed in left if not ratios[seed] <= 1]
    return [(seed, ratios[seed]) for seed in left]


def ratio(seed: int, draws: int = DRAWS, own_rules: bool = True) -> float:
    """Returns a program's worst error divided by its bound, at two levels."""
    half, levels = list(LEVELS.items())[seed % 2]
    fn, args = layer_program(seed), data(draws)
    with jax.enable_x64(True):
        wide = [x if x.dtype == np.int32 else x.astype(float) for x in args]
        try:
            exact = by_operation(with_gradients(fn), wide)
        except Exception:  # JAX refuses some nestings of refs and custom rules
            return REFUSED

    def errors(outs):
        return np.array(list(map(median_error, outs, exact)))

    def compare(run):
        narrowest = levels[1]
        bound, worst = errors(run(with_gradients(torch_autocast(fn, half)), args)), 0.0
        for level in levels:
            of_level = layer_program(seed, own_rules or level != narrowest)
            found = errors(run(with_gradients(of_level, level), args))
            if level == narrowest and over(found, bound, half) > 1:
                model = run(with_gradients(half_model(fn, half)), args)
                bound = np.maximum(bound, errors(model))
            worst = max(worst, over(found, bound, half))
        return worst

    runs = (by_operation, as_one) if seed % WHOLE == 0 else (by_operation,)
    return max(map(compare, runs))


def trace(seed: int) -> None:
    """Traces a program at two levels, and checks the dtypes of its results."""
    args = [x[0] for x in data(1)]
    for level in list(LEVELS.values())[seed % 2]:
        jax.eval_shape(with_gradients(layer_program(seed), level), *args)


def over(found: np.ndarray, bound: np.ndarray, half: str) -> float:
    """Returns the largest error divided by its bound."""
    # If torch's rules overflow float16, any result passes. In bfloat16 they divide by
    # zero, because they round a number next to 1.
    passes = np.isinf(bound) & (np.isfinite(found) | (half == "float16"))
    return float(np.where(passes, 0, found / (TIMES * bound + OF_SCALE)).max())


def by_operation(fn: Callable, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns, for each result and gradient, one row of values per draw.

    Compiling whole programs would take nearly all the time. JAX compiles an operation
    once for all programs of a process. It takes `DRAWS` draws at a time, because XLA
    needs minutes for a convolution of 1,024 kernels.
    """
    parts = [[x[i : i + DRAWS] for x in args] for i in range(0, len(args[0]), DRAWS)]
    with sums_in_float32():
        run = interpreter(jax.vmap(fn), *parts[0])
        outs = [[rows(x, len(part[0])) for x in run(*part)] for part in parts]
    return list(map(np.concatenate, zip(*outs, strict=True)))


def as_one(fn: Callable, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the same rows from one program, which XLA fuses."""
    with sums_in_float32():
        outs = evaluate(jax.vmap(fn), *args)
    return [rows(x, len(args[0])) for x in jax.tree.leaves(outs)]


def half_model(fn: Callable, half: str) -> Callable:
    """Returns `fn` with half params and float32 data, by hand in half."""

    def rounded(*arrays):
        pairs = zip(MAKERS, arrays, strict=True)
        return fn(
            *(x.astype(half).astype(x.dtype) if k in PARAMS else x for k, x in pairs)
        )

    return by_hand(rounded, half)


def with_gradients(fn: Callable, level: str | None = None) -> Callable:
    """Returns a function of all data: the results, and the gradients of the params.

    It checks that all are float32, or float64 without a level.
    """
    state = None if level is None else state_at(level)

    def loss_fn(params, rest, *cotangents):
        outs = fn(*((params | rest)[name] for name in MAKERS))
        pairs = zip(outs, cotangents, strict=True)
        return sum((y * dy).sum() for y, dy in pairs), outs

    def run(*args):
        rest = dict(zip(TAKEN.makers, args, strict=True))
        params = {name: rest.pop(name) for name in PARAMS}
        cotangents = rest.pop("dy"), rest.pop("dz")
        dtype, gradient, given = params["w"].dtype, jax.value_and_grad, params
        if state is not None:
            like = lambda x, param: x.astype(param.dtype)  # noqa: E731
            given = state.replace(params=jax.tree.map(like, params, state.params))
            gradient = jamp.scaled_value_and_grad
        (_, outs), grads = gradient(loss_fn, has_aux=True)(given, rest, *cotangents)
        assert {x.dtype for x in jax.tree.leaves((outs, grads))} == {dtype}
        return outs, grads

    return run


@functools.cache
def state_at(level: str) -> jamp.AmpState:
    params = {name: MAKERS[name](np.random.default_rng(0)) for name in PARAMS}
    return jamp.initialize(params, optax.sgd(1.0), level, loss_scale=1.0, verbosity=0)


@functools.cache
def data(draws: int) -> list[np.ndarray]:
    """Returns the data of all programs and two cotangents, stacked over draws."""
    drawn = zip(*map(TAKEN.args, range(draws)), strict=True)
    return list(map(np.stack, drawn))


def rows(x: Any, draws: int) -> np.ndarray:
    return np.asarray(x, float).reshape(draws, -1)


def median_error(got: np.ndarray, exact: np.ndarray) -> float:
    norms, errors = (np.linalg.norm(x, axis=1) for x in (exact, got - exact))
    errors = errors / np.where(norms > 1e-9, norms, 1)
    return float(np.median(np.where(np.isfinite(errors), errors, np.inf)))
