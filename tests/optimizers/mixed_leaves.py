"""Leaves of all shapes, dtypes and kinds of weights at once, for the oracles' tests.

Compiling takes longer than running: one tree of many leaves stands for a product of
shapes and dtypes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Weight
from pallas_kernels.mosaic.launch import BLOCK

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
BACKENDS = ["xla", "interpret"]

# Kernels take leaves of 128 elements and more, by blocks.
SHAPES = [
    (),
    (1,),
    (13,),
    (BLOCK,),
    (BLOCK + 1,),
    (3, 50),
    (0,),
    (127,),
    (128,),
    (129,),
    (2, 0, 3),
]

# Optimizing machine code takes a quarter of a test's time, and gains nothing.
FAST = {"xla_backend_optimization_level": 0}


class Kind(NamedTuple):
    """How a leaf's weights are kept, and the dtype of its gradients.

    `weights`: "own" for float32 alone, "half" for half alone, "copied" for float32 with
    a half copy, "split" for a bfloat16 and the 16 bits that it lacks.
    """

    weights: str
    dtype: Any
    grads: Any


KINDS = [
    Kind("own", F32, F32),
    Kind("copied", F16, F16),
    Kind("split", BF16, BF16),
    Kind("half", F16, F16),
    Kind("copied", BF16, BF16),
    Kind("own", F32, F16),
    Kind("half", BF16, BF16),
    Kind("own", F32, BF16),
    Kind("copied", F16, F32),
    Kind("split", BF16, F32),
]

type Leaves = list[tuple[tuple[int, ...], Kind]]


def four(turn: int) -> Leaves:
    """Shapes and kinds, others at each turn."""
    ks = range(4 * turn, 4 * turn + 4)
    return [(SHAPES[k % len(SHAPES)], KINDS[k % len(KINDS)]) for k in ks]


# In NumPy: an operation on a JAX array is compiled for each shape.
def weight(x: np.ndarray, kind: Kind) -> Weight:
    """`x`, as near as the kind can keep it."""
    master = np.asarray(x, np.float32)
    match kind.weights:
        case "own":
            arrays = [master]
        case "half":
            arrays = [master.astype(kind.dtype)]
        case "copied":
            arrays = [master.astype(kind.dtype), master]
        case "split":  # ties away from zero, and what is left
            bits = master.view(np.uint32)
            high = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
            arrays = [high.view(kind.dtype), np.uint16(bits & np.uint32(0xFFFF))]
        case _:
            raise AssertionError(kind)
    return Weight(*map(jnp.asarray, arrays))


def value(w: Weight) -> np.ndarray:
    """What a weight stands for, in float64."""
    param = np.asarray(w.master if w.kind == "copied" else w.param)
    if w.kind == "split":
        low = np.asarray(w.master)
        # Its upper half went up where the lower half has its first bit.
        high = param.view(np.uint16) - (low >> 15)
        bits = (high.astype(np.uint32) << 16) | low
        return bits.view(np.float32).astype(np.float64)
    return param.astype(np.float32).astype(np.float64)


def grouped(leaves: list[Any]) -> dict[str, Any]:
    """A tree of the leaves, in their order, for masks to have something to be of."""
    half = (len(leaves) + 1) // 2
    return {"a": leaves[:half], "b": tuple(leaves[half:])}


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def weights_of(tree: Any) -> list[Weight]:
    return jax.tree.leaves(tree, is_leaf=is_weight)


def params_of(weights: Any) -> Any:
    """What an optimizer's `init` and `update` take for a tree of weights."""
    stepped = lambda w: w.master if w.kind == "copied" else w.param  # noqa: E731
    return jax.tree.map(stepped, weights, is_leaf=is_weight)


def assert_rounded(w: Weight) -> None:
    """The half copy is its master, rounded to nearest even, and never infinite."""
    if w.kind == "copied":
        limit = float(jnp.finfo(w.param.dtype).max)
        expected = np.clip(np.asarray(w.master), -limit, limit).astype(w.param.dtype)
        assert np.asarray(w.param).tobytes() == expected.tobytes()
