"""The public functions of JAX, and arguments with which each can be called."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.stats
import numpy as np
import optax
from jax import lax
from jax.scipy import fft, linalg, ndimage, signal, special, stats

SCIPY = (fft, linalg, ndimage, signal, special, stats)
MODULES = (jnp, jnp.linalg, jnp.fft, jax.nn, lax, lax.linalg, jax.image, jax.random)

RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    """Draws from [0.1, 0.9], which most functions accept."""
    return RNG.uniform(0.1, 0.9, shape).astype(np.float32)


NEAR = RNG.uniform(-0.05, 0.05, (4, 4))
# A positive definite matrix.
M = (0.2 + 0.6 * np.eye(4) + (NEAR + NEAR.T) / 2).astype(np.float32)
A, B, C = draw(4, 4), draw(4, 4), draw(4, 4)
V = np.sort(draw(6))
W, U = draw(6), draw(6)
IDS = np.array([2, 0, 1])
IMAGE, KERNEL = draw(2, 3, 5, 5), draw(4, 3, 3, 3)  # NCHW, OIHW
KEY = jax.random.key(0)

# Each function gets the first of these argument lists that it accepts.
TRIED: list[tuple] = [
    *[(M,), (M, A), (M, A, B), (V,), (V, W), (M, 1), (M, 0), (M, (4, 4)), (M, IDS)],
    *[([M, A],), (V, W, U), (M, A, B, C), (M, A, B, A, C), (M, A, B, A, C, B)],
    *[(M, 0, 1), (M, M > 0.3), (M > 0.3, A, B), (M, V[:4]), (V[:4], M), (M, (1, 0))],
    *[(M, (8, 8), "linear"), (M, (2, 8)), (M, 2, A), (M, 0, 2), (M, [V[0]]), (KEY, M)],
    *[(KEY, M, A), (M, (0, 1)), (V, 3), (2, V), (M[None], A[None]), (KEY,)],
    *[(KEY, (3,)), (V[:3], V[3:]), (IDS, V), (V, IDS)],
]
GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
ROWS = np.array([[2], [0]])
SPD = M @ M.T + np.eye(4, dtype=np.float32)
# Functions that need other arguments or their own call.
GIVEN: dict[str, tuple | Callable] = {
    "jnp.einsum": ("ij,kj->ik", M, A),
    "jnp.apply_along_axis": lambda x=M: jnp.apply_along_axis(jnp.cumsum, 0, x),
    "jnp.vectorize": lambda x=M: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x),
    "jnp.polyfit": lambda x=V, y=W: jnp.polyfit(x, y, 2),
    "jnp.roots": lambda x=V: jnp.roots(x, strip_zeros=False),
    "nn.dot_product_attention": (draw(2, 4, 2, 8), draw(2, 4, 2, 8), draw(2, 4, 2, 8)),
    "lax.broadcast_in_dim": (V, (2, 6), (1,)),
    "lax.conv_general_dilated": (IMAGE, KERNEL, (1, 1), "SAME"),
    "lax.conv_general_dilated_patches": (IMAGE, (3, 3), (1, 1), "SAME"),
    "lax.conv_transpose": (draw(2, 5, 3), draw(3, 3, 4), (2,), "SAME"),
    "lax.dot_general": (M, A, (((1,), (0,)), ((), ()))),
    "lax.ragged_dot": (A, draw(2, 4, 3), np.array([1, 3])),
    "lax.dynamic_slice": (M, (1, 0), (2, 2)),
    "lax.dynamic_update_slice": (M, A[:2, :2], (1, 1)),
    "lax.fft": lambda x=M: lax.fft(x, "RFFT", (4,)),
    "lax.gather": (M, ROWS, GATHER, (1, 4)),
    "lax.pad": (M, np.float32(0.5), [(1, 0, 0), (0, 1, 1)]),
    "lax.reduce": lambda x=M: lax.reduce(x, np.float32(0), lax.add, (0,)),
    "lax.reduce_precision": (M, 5, 10),
    "lax.reduce_window": lambda x=M: lax.reduce_window(
        x, -np.inf, lax.max, (2, 2), (1, 1), "SAME"
    ),
    "lax.reshape": (M, (2, 8)),
    "lax.slice": (M, (0, 1), (2, 3)),
    "lax.linalg.ormqr": (M, V[:4], A),
    "lax.linalg.tridiagonal_solve": (V, W + 2, U, draw(6, 2)),
    "scipy.linalg.cho_solve": lambda x=M, y=V[:4]: linalg.cho_solve((x, True), y),
    "scipy.linalg.cholesky": (SPD,),
    "scipy.ndimage.map_coordinates": lambda x=M, y=V, z=W: ndimage.map_coordinates(
        x, [3 * y, 3 * z], 1
    ),
    "losses.softmax_cross_entropy_with_integer_labels": (A, np.array([2, 0, 1, 3])),
}
GIVEN["losses.ctc_loss"] = (
    *(draw(2, 6, 5), np.zeros((2, 6), "f"), np.array([[1, 2], [3, 1]])),
    np.zeros((2, 2), "f"),
)
for name in ("", "_add", "_min", "_max", "_mul", "_sub"):
    GIVEN[f"lax.scatter{name}"] = (M, ROWS, A[:2], SCATTER)

# Functions of tokens, raw bits and block-scaled numbers.
EXCLUDED = {"lax.create_token", "lax.rng_bit_generator", "lax.scaled_dot"}


def functions() -> Iterator[tuple[str, Callable]]:
    """Yields all public functions of the modules, each with a short name."""
    modules = {m.__name__.removeprefix("jax."): m for m in (*MODULES, *SCIPY)}
    inner = vars(stats).items()
    modules |= {
        f"scipy.stats.{name}": m
        for name, m in inner
        if inspect.ismodule(m) and m.__name__.startswith("jax.scipy.stats")
    }
    for where, module in (*modules.items(), ("losses", optax.losses)):
        where = where.replace("numpy", "jnp")
        for name, fn in sorted(vars(module).items()):
            is_function = callable(fn) and not isinstance(fn, type | types.ModuleType)
            if is_function and not name.startswith("_"):
                yield f"{where}.{name}", fn


FUNCTIONS = dict(functions())
NAMES = sorted(FUNCTIONS.keys() - EXCLUDED)


def is_float32(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.float32


@functools.cache
def call_of(name: str) -> tuple[Callable, list] | None:
    """Returns a function of float arrays only and its arguments, or None."""
    given = GIVEN.get(name)
    if callable(given):
        defaults = given.__defaults__ or ()
        return given, list(defaults)
    tried = TRIED if given is None else [given]
    for args in tried:
        leaves, tree = jax.tree.flatten(args)

        def fn(*floats, leaves=leaves, tree=tree):
            left = iter(floats)
            filled = [next(left) if is_float32(x) else x for x in leaves]
            return FUNCTIONS[name](*jax.tree.unflatten(tree, filled))

        floats = [x for x in leaves if is_float32(x)]
        if not floats and not name.startswith("random."):
            continue
        try:
            outs = jax.tree.leaves(jax.eval_shape(fn, *floats))
        except Exception:
            continue
        if outs:
            return fn, floats
    return None
