"""Compare the error of autocast with the error of torch's rules on a table of programs.

The error of a result or a gradient is its distance from float64, relative to the norm
of the float64 value, over all seeds. A single run depends on chance, so there are many
seeds and a tolerance of 1.1.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

import jamp
from tests.oracles.torch_autocast import torch_autocast
from tests.support.small_programs import Program

HALVES = ("float16", "bfloat16")
SEEDS = 256  # fewer for large programs
# XLA may drop different roundings on each backend. Here it drops none.
STRICTLY = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


class Row(NamedTuple):
    """The errors of one program in one dtype, by result, then by argument."""

    name: str
    half: str
    jamp: list[float]
    torch: list[float]

    def is_fine(self, times: float = 1.1) -> bool:
        """Returns whether all errors are within `times` torch's errors."""
        pairs = zip(self.jamp, self.torch, strict=True)
        return all(got < np.inf and got <= times * least + 1e-6 for got, least in pairs)


def drawn(seed: Any, outs: list) -> list:
    """Returns float32 cotangents: cosines, which compile fast."""

    def cosines(i, y):
        places = jnp.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape)
        return jnp.cos((seed + np.float32(i + 1)) * places) / 64

    return [
        cosines(i, y) if y.ndim else jnp.ones_like(y, np.float32)
        for i, y in enumerate(outs)
    ]


def both_passes(fn: Callable, cotangents: Callable = drawn) -> Callable:
    """Returns a function of arguments and a seed: float results and gradients."""

    def run(args, seed):
        def of_floats(*floats):
            rest = iter(floats)
            outs = fn(*[next(rest) if is_float(x) else x for x in args])
            return [y for y in jax.tree.leaves(outs) if is_float(y)]

        outs, pull = jax.vjp(of_floats, *filter(is_float, args))
        pairs = zip(cotangents(seed, outs), outs, strict=True)
        return outs, list(pull([c.astype(y.dtype) for c, y in pairs]))

    return run


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """Accumulates half matmuls in float32, as a GPU does and a CPU may not."""
    rules, primitive = mlir._platform_specific_lowerings["cpu"], lax.dot_general_p
    original = rules[primitive]

    def rule(ctx, *operands, **params):
        out = ctx.avals_out[0].dtype

        def wide(*xs):
            params["preferred_element_type"] = jnp.dtype(jnp.float32)
            xs = [x.astype(jnp.float32) for x in xs]
            return primitive.bind(*xs, **params).astype(out)

        if out.name in HALVES:
            return mlir.lower_fun(wide, multiple_results=False)(ctx, *operands)
        return original.rule(ctx, *operands, **params)

    rules[primitive] = dataclasses.replace(original, rule=rule)
    try:
        yield
    finally:
        rules[primitive] = original


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def runs(fn: Callable, program: Program, dtype: Any = np.float32) -> list:
    """Returns float64 values of each result and gradient for all seeds."""
    size = sum(x.size for x in program.args(0))
    drawn = [program.args(seed) for seed in range(min(SEEDS, 2**21 // size))]
    drawn = [[x.astype(dtype) if is_float(x) else x for x in xs] for xs in drawn]
    with sums_in_float32():
        lowered = jax.jit(both_passes(fn)).lower(drawn[0], np.float32(0))
        compiled = lowered.compile(STRICTLY)
    found = [compiled(xs, np.float32(i)) for i, xs in enumerate(drawn)]
    by_leaf = zip(*map(jax.tree.leaves, found), strict=True)
    return [np.stack(leaves).astype(np.float64) for leaves in by_leaf]


def error(got: np.ndarray, exact: np.ndarray) -> float:
    assert np.isfinite(exact).all(), "the program itself is not finite"
    if not np.isfinite(got).all():
        return np.inf
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(got - exact) / (norm if norm > 1e-30 else 1))


def measure(name: str, program: Program, *halves: str) -> list[Row]:
    """Returns the errors of autocast and torch's rules against float64."""
    with jax.enable_x64(True):
        exact = runs(program.fn, program, np.float64)
    rows = []
    for half in halves:
        casts = jamp.autocast(program.fn, half), torch_autocast(program.fn, half)
        found = (runs(cast, program) for cast in casts)
        rows.append(Row(name, half, *(list(map(error, got, exact)) for got in found)))
    return rows
