"""Compare steps with an oracle's on leaves of all shapes, dtypes and kinds of weights.

One tree has leaves of many shapes and dtypes, because compiling takes the time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Weight
from pallas_kernels.mosaic.launch import BLOCK
from tests.oracles.fused import Result
from tests.support.bits import assert_same_bits
from tests.support.programs import FAST

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32

# Kernels step leaves of at least 128 elements, in blocks.
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


class Kind(NamedTuple):
    """How a leaf stores its weight, and the dtype of its gradients.

    `weights` is "own" for float32, "half" for half, "copied" for float32 with a half
    copy, and "split" for bfloat16 with the other 16 bits of float32.
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
    """Returns four shapes and kinds, which differ at each turn."""
    ks = range(4 * turn, 4 * turn + 4)
    return [(SHAPES[k % len(SHAPES)], KINDS[k % len(KINDS)]) for k in ks]


# NumPy, because JAX would compile each operation for each shape.
def weight(x: np.ndarray, kind: Kind) -> Weight:
    """Returns `x` as a weight of a kind."""
    master = np.asarray(x, np.float32)
    match kind.weights:
        case "own":
            arrays = [master]
        case "half":
            arrays = [master.astype(kind.dtype)]
        case "copied":
            arrays = [master.astype(kind.dtype), master]
        case "split":  # rounds ties away from zero
            bits = master.view(np.uint32)
            high = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
            arrays = [high.view(kind.dtype), np.uint16(bits & np.uint32(0xFFFF))]
        case _:
            raise AssertionError(kind)
    return Weight(*map(jnp.asarray, arrays))


def value(w: Weight) -> np.ndarray:
    """Returns the value of a weight in float64."""
    param = np.asarray(w.master if w.kind == "copied" else w.param)
    if w.kind == "split":
        low = np.asarray(w.master)
        # If the lower half has its first bit set, the upper half was rounded up.
        high = param.view(np.uint16) - (low >> 15)
        bits = (high.astype(np.uint32) << 16) | low
        return bits.view(np.float32).astype(np.float64)
    return param.astype(np.float32).astype(np.float64)


def grouped(leaves: list[Any]) -> dict[str, Any]:
    """Returns the leaves as a tree, so that masks have a structure."""
    half = (len(leaves) + 1) // 2
    return {"a": leaves[:half], "b": tuple(leaves[half:])}


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def weights_of(tree: Any) -> list[Weight]:
    return jax.tree.leaves(tree, is_leaf=is_weight)


def params_of(weights: Any) -> Any:
    """Returns the params that an optimizer steps for a tree of weights."""
    stepped = lambda w: w.master if w.kind == "copied" else w.param  # noqa: E731
    return jax.tree.map(stepped, weights, is_leaf=is_weight)


def assert_rounded(w: Weight) -> None:
    """Checks that a half copy is its master, rounded to nearest even and finite."""
    if w.kind == "copied":
        limit = float(jnp.finfo(w.param.dtype).max)
        expected = np.clip(np.asarray(w.master), -limit, limit).astype(w.param.dtype)
        assert np.asarray(w.param).tobytes() == expected.tobytes()


STEPS = 20
# Steps that overflow include the first: its special rules must apply to the first step
# that is not skipped.
SKIPPED = (0, 1, 7, 19)

# Each of 20 steps may lose one float32 ulp of 1.
TOLERANCE = STEPS * 2.0**-23
# Each step rounds a half param without a master by at most half an ulp.
ROUNDING = {F16: STEPS * 2.0**-11, BF16: STEPS * 2.0**-8}


class Problem(NamedTuple):
    """Initial weights, and the gradients of each step times `grad_scale`."""

    kinds: list[Kind]
    weights: list[Weight]
    grads: list[list[np.ndarray]]
    grad_scale: float | None = None
    skip: list[bool] | None = None


def problem(
    leaves: Leaves,
    grad_scale: float | None = None,
    skips: tuple[int, ...] = (),
    steps: int = STEPS,
) -> Problem:
    """Draws weights and gradients, which at odd steps are too small to be clipped.

    The second of eleven leaves never has a gradient, and the third starts at zero.
    """
    rng = np.random.default_rng(len(leaves))
    weights = [
        weight(np.where(k % 11 == 2, 0, rng.normal(size=shape)), kind)
        for k, (shape, kind) in enumerate(leaves)
    ]
    grads = []
    for t in range(steps):
        size = (0.1 if t % 2 else 1.0) * (1.0 if grad_scale is None else grad_scale)
        now = []
        for k, (shape, kind) in enumerate(leaves):
            g = rng.normal(size=shape) * size * (k % 11 != 1)
            now.append(np.asarray(g, np.float32).astype(kind.grads))
        if t in skips:
            now = [np.full_like(g, np.nan if t % 2 else np.inf) for g in now]
        grads.append(now)
    skip = [t in skips for t in range(steps)] if skips else None
    return Problem([kind for _, kind in leaves], weights, grads, grad_scale, skip)


compiled = functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)


@compiled
def init(tx, params):
    """Initializes in one program instead of one per array."""
    return tx.init(params)


@compiled
def apply(tx, grads, state, weights, found_inf=None, **kwargs):
    grads, structure = jax.tree.flatten(grads)
    weights = structure.flatten_up_to(weights)
    how = {"skip": found_inf, **kwargs}
    weights, state = tx.rule.apply(structure, grads, state, weights, **how)
    return structure.unflatten(weights), state


@compiled
def update(tx, grads, state, weights, **kwargs):
    """Steps by optax's contract: adds float32 updates to the params."""
    params = params_of(weights)
    updates, state = tx.update(grads, state, params, **kwargs)

    def add(p, u):
        assert (u.dtype, u.shape) == (F32, p.shape)
        return Weight((p.astype(F32) + u).astype(p.dtype))

    return jax.tree.map(add, params, updates), state


def assert_close(
    weights: Any, state: Any, want: Result, kinds: list[Kind], tolerance: float
) -> None:
    found = weights_of(weights)
    assert set(state._fields) == set(want.state)
    assert state.count == want.state["count"]
    trees = {"params": ([value(w) for w in found], want.params)}
    for name, expected in want.state.items():
        got = getattr(state, name)
        if expected is None:
            assert got is None
        elif name not in ("count", "inner_state"):  # LARC's params check its inner one
            trees[name] = jax.tree.leaves(got), expected
            assert all(x.dtype == F32 for x in trees[name][0])
    for name, (got, expected) in trees.items():
        for k, (x, y, kind) in enumerate(zip(got, expected, kinds, strict=True)):
            half = kind.weights == "half"
            limit = tolerance + (ROUNDING[kind.dtype] if half else 0)
            where = f"{name} {k} {kind}"
            np.testing.assert_allclose(x, y, limit, limit, err_msg=where)
    for w in found:
        assert_rounded(w)


def check(
    tx: Any, oracle: Any, given: Problem, step: Any = apply, tolerance=TOLERANCE
) -> None:
    """Checks that each step matches the oracle, and that a skip keeps every bit."""
    weights = grouped(given.weights)
    state = init(tx, params_of(weights))
    scale, skip = given.grad_scale, given.skip or [False] * len(given.grads)
    kwargs: dict[str, Any] = {} if scale is None else {"grad_scale": jnp.float32(scale)}
    start = [value(w) for w in given.weights]
    with np.errstate(invalid="ignore"):
        steps = oracle(start, given.grads, grad_scale=scale or 1.0, skip=skip)
        results = list(steps)
    for grads, skips, want in zip(given.grads, skip, results, strict=True):
        if given.skip:
            kwargs["found_inf"] = np.array(skips)
        before = weights, state
        weights, state = step(tx, grouped(grads), state, weights, **kwargs)
        if skips:
            assert_same_bits((weights, state), before)
        assert_close(weights, state, want, given.kinds, tolerance)
