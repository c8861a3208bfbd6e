"""One Mosaic GPU kernel over many leaves. The only file that imports Pallas.

A leaf is a dict of columns: flat arrays of equal length, such as a gradient, a weight
and its moments. One launch walks over all leaves that it is given: a grid step finds
the leaf that it falls into, loads one block of each column, calls the formula in
float32, and stores what comes back, in place.

The last block of a leaf takes the remainder too. It reads windows of a multiple of 128
elements, the last of which ends at the leaf's end and overlaps the one before: what is
read twice is computed twice from the same old values, since all loads of a block come
before its stores.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._dtypes import fits_kernel, widen
from pallas_kernels._xla import JOIN

WARPGROUP = 128
# Elements of a column that one grid step works on. Adam takes 72 registers of a thread
# at 1024; what reads one column and writes none needs more for bytes in flight.
BLOCK = 1024
LONE_BLOCK = 4096
_COLUMNS_PER_LAUNCH = 160  # pointers: CUDA passes up to 4 KB of arguments
_ARM = 8  # leaves told apart within one range of blocks

# Warpgroup semantics, the default, takes time quadratic in the leaves of a launch.
_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

INT32_LIMIT = 2**31

type Leaf = Mapping[str, Array]


class Work(NamedTuple):
    """What a kernel does, but for the arrays.

    Attributes:
        formula: `(scalars, blocks) -> blocks`, in float32.
        derive: `blocks -> blocks`: columns that depend on those that were written.
        reductions: which results to reduce over a leaf, and how: "sum" or "max".
        fresh: dtypes of the results that are new arrays; zero where skipped.
        written: the columns that results replace.
        unread: those of them that are not loaded.
        has_skip: whether scalar 0 says, by not being zero, to store nothing.
    """

    formula: Callable[[Any, dict[str, Array]], dict[str, Array]]
    derive: Callable[[dict[str, Array]], dict[str, Array]]
    reductions: Mapping[str, str]
    fresh: Mapping[str, Any]
    written: tuple[str, ...]
    unread: tuple[str, ...]
    has_skip: bool

    def __hash__(self) -> int:
        parts = (self.reductions.items(), self.fresh.items())
        return hash((self.formula, self.derive, *map(tuple, parts), *self[4:]))


def chunks(sizes: Sequence[int], columns: int) -> list[list[int]]:
    """Splits leaves into launches, those of equal sizes together: they compile once."""
    most = max(1, min(64, _COLUMNS_PER_LAUNCH // columns))
    by_size = sorted(range(len(sizes)), key=lambda k: sizes[k])
    launches, mixed = [], []
    for _, run in itertools.groupby(by_size, key=lambda k: sizes[k]):
        for batch in _batched(list(run), most):
            if len(batch) == most:
                launches.append(batch)
            else:
                mixed += batch
    return launches + _batched(mixed, most)


def fits(leaf: Leaf) -> bool:
    """Whether a kernel can take a leaf: at least one element for each thread."""
    n = next(iter(leaf.values())).size
    if n < WARPGROUP or (n >= INT32_LIMIT and n % LONE_BLOCK):
        return False
    return all(fits_kernel(x) for x in leaf.values())


@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(
    work: Work,
    interpret: bool,
    leaves: Sequence[Leaf],
    scalars: Float[Array, " s"],
    per_leaf: Float[Array, "n p"] | None,
) -> tuple[list[dict[str, Array]], dict[str, Float[Array, " n"]]]:
    """Runs `work` over leaves of at least 128 elements, in one launch.

    Args:
        work: what to do.
        interpret: whether to emulate the GPU on the CPU, and look for races.
        leaves: columns of 16 or 32 bits per element, of any shape.
        scalars: handed to the formula by position.
        per_leaf: a row of further scalars per leaf.

    Returns:
        Per leaf the columns that were written; per reduction its value at each leaf.
    """
    names = list(leaves[0])
    sizes = [leaf[names[0]].size for leaf in leaves]
    lone = len(names) == 1 and not (work.written or work.fresh)
    block = LONE_BLOCK if lone else BLOCK
    starts = [0, *itertools.accumulate(max(n // block, 1) for n in sizes)]
    read_only = [c for c in names if c not in work.written]
    in_place = work.written
    refs = [
        {c: jax.new_ref(_flat(leaf[c], block)) for c in in_place} for leaf in leaves
    ]
    inputs = [{c: _flat(leaf[c], block) for c in read_only} for leaf in leaves]
    fresh = [
        {
            c: jax.ShapeDtypeStruct(_flat_shape(n, block), d)
            for c, d in work.fresh.items()
        }
        for n in sizes
    ]
    partials = {
        name: jax.ShapeDtypeStruct((starts[-1],), jnp.float32)
        for name in work.reductions
    }
    body = functools.partial(_body, work, sizes, starts, block)
    kernel = plgpu.kernel(
        body,
        out_type=(fresh, partials),
        grid=(starts[-1],),
        grid_names=("block",),
        interpret=_INTERPRET if interpret else None,
        compiler_params=_PARAMS,
    )
    rows = () if per_leaf is None else (per_leaf,)
    fresh, partials = kernel(scalars, rows, inputs, refs)
    results = []
    for leaf, ref, new in zip(leaves, refs, fresh, strict=True):
        written = {c: jax.freeze(r) for c, r in ref.items()}
        shape = leaf[names[0]].shape
        results.append({c: x.reshape(shape) for c, x in (written | new).items()})
    return results, {
        name: _per_leaf(partials[name], starts, how)
        for name, how in work.reductions.items()
    }


def _body(
    work: Work,
    sizes: Sequence[int],
    starts: Sequence[int],
    block: int,
    scalars: Any,
    rows: Any,
    inputs: Any,
    refs: Any,
    fresh: Any,
    partials: Any,
) -> None:
    """What one grid step does."""
    step = jax.lax.axis_index("block")
    shared = [scalars[j] for j in range(scalars.shape[0])]

    def visit(k: int) -> None:
        columns = inputs[k] | refs[k] | fresh[k]
        row = [rows[0][k, j] for j in range(rows[0].shape[1])] if rows else []
        run = functools.partial(
            _run_block, work, [*shared, *row], columns, partials, step
        )
        number, last = step - starts[k], starts[k + 1] - starts[k] - 1
        vec = 8 if all(columns[c].dtype.itemsize == 2 for c in columns) else 4
        whole = Window(_at(sizes[k], block, number), block, vec, 0)
        if sizes[k] % block == 0:
            run([whole])
            return
        if last:
            pl.when(number < last)(lambda: run([whole]))
        ragged = _last_windows(sizes[k], block, vec)
        pl.when(number == last)(lambda: run(ragged))

    def visit_arm(arm: list[int]) -> None:
        for k in arm:
            _within(step, starts[k], starts[k + 1], starts)(functools.partial(visit, k))

    for arm in _batched(list(range(len(sizes))), _ARM):
        _within(step, starts[arm[0]], starts[arm[-1] + 1], starts)(
            functools.partial(visit_arm, arm)
        )


def _within(step: Any, start: int, end: int, starts: Sequence[int]) -> Any:
    """Runs a function where `start <= step < end`."""
    if (start, end) == (starts[0], starts[-1]):
        return lambda function: function()
    return pl.when((step >= start) & (step < end))


class Window(NamedTuple):
    """Part of a leaf: where, how long, elements per access, and how many were seen."""

    index: Any
    size: int
    vec: int
    seen: int


def _last_windows(n: int, block: int, vec: int) -> list[Window]:
    """What the last block covers: a whole block if there is one, and the remainder."""
    start, end = max(n // block - 1, 0) * block, n // block * block
    windows = [Window(pl.ds(start, block), block, vec, 0)] if end else []
    if aligned := (n - end) // WARPGROUP * WARPGROUP:
        vec = next(v for v in (vec, 4, 2, 1) if aligned % (WARPGROUP * v) == 0)
        windows.append(Window(pl.ds(end, aligned), aligned, vec, 0))
    if rest := n % WARPGROUP:
        window = pl.ds(n - WARPGROUP, WARPGROUP)
        windows.append(Window(window, WARPGROUP, 1, WARPGROUP - rest))
    return windows


def _run_block(
    work: Work,
    scalars: list[Any],
    columns: dict[str, Any],
    partials: dict[str, Any],
    step: Any,
    windows: list[Window],
) -> None:
    """Loads all windows, then computes, then stores."""
    loaded = [c for c in columns if c not in work.unread and c not in work.fresh]
    old = [{c: _load(columns[c], w) for c in loaded} for w in windows]
    new = [work.formula(scalars, blocks) for blocks in old]
    for name, how in work.reductions.items():
        values = [
            _reduce(block[name], w, how) for block, w in zip(new, windows, strict=True)
        ]
        partials[name][step] = functools.reduce(JOIN[how], values)

    def store():
        for blocks, window in zip(new, windows, strict=True):
            results = blocks | work.derive(blocks)
            for c in (*work.written, *work.fresh):
                columns[c][window.index] = results[c].astype(columns[c].dtype)

    def store_zeros():
        for blocks, window in zip(new, windows, strict=True):
            for c in work.fresh:
                zeros = jnp.zeros_like(blocks[c])
                columns[c][window.index] = zeros.astype(columns[c].dtype)

    if not work.has_skip:
        store()
        return
    pl.when(scalars[0] == 0)(store)
    if work.fresh:
        pl.when(scalars[0] != 0)(store_zeros)


def _load(ref: Any, window: Window) -> Array:
    layout = plgpu.Layout.WG_STRIDED((window.size,), vec_size=window.vec)
    block = plgpu.load(ref.at[window.index], layout=layout)
    return widen(block)


def _reduce(x: Array, window: Window, how: str) -> Array:
    """One number for a window, from the elements that no window before it covers."""
    if window.seen:
        layout = plgpu.Layout.WG_STRIDED((window.size,), vec_size=window.vec)
        place = plgpu.broadcasted_iota(jnp.int32, (window.size,), 0, layout=layout)
        x = jnp.where(place >= window.seen, x, 0.0)  # of |x| too: maxima are of those
    return jnp.sum(x) if how == "sum" else jnp.max(x)


def _per_leaf(partials: Array, starts: Sequence[int], how: str) -> Array:
    """One value per leaf from one per block."""
    counts = [b - a for a, b in itertools.pairwise(starts)]
    if len(set(counts)) == 1:
        table = partials.reshape(len(counts), counts[0])
    else:
        place = jnp.arange(max(counts), dtype=jnp.int32)
        first, count = jnp.array(starts[:-1])[:, None], jnp.array(counts)[:, None]
        table = partials.at[first + place].get(mode="fill", fill_value=0)
        table = jnp.where(place < count, table, 0)
    return table.sum(1) if how == "sum" else table.max(1)


def _flat(x: Array, block: int) -> Array:
    return x.reshape(_flat_shape(x.size, block))


def _flat_shape(n: int, block: int) -> tuple[int, ...]:
    """By rows beyond 2^31 elements, where `row * block` would wrap in silence."""
    return (n // block, block) if n >= INT32_LIMIT else (n,)


def _at(n: int, block: int, number: Any) -> Any:
    return number if n >= INT32_LIMIT else pl.ds(number * block, block)


def _batched[T](items: list[T], size: int) -> list[list[T]]:
    return [list(batch) for batch in itertools.batched(items, size)]
