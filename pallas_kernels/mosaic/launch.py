"""One Mosaic GPU kernel over many leaves.

A leaf is a dict of columns: flat arrays of equal length, such as a gradient, a weight
and its moments. A grid step finds its leaf, loads one block of each column, calls the
formula in float32, and stores the results in place.

The last block of a leaf also processes the remainder. It reads windows of a multiple of
128 elements. The last window ends at the leaf's end and overlaps the window before. All
loads of a block come before its stores, so both windows compute the same values.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels._compat import call_inlined
from pallas_kernels._rounding import Noise, numbers_of_flat
from pallas_kernels._xla import JOIN, Blocks, Job, Leaf, size_of

WARPGROUP = 128
# Elements of a column in one grid step. Adam needs 72 registers per thread at 1024. A
# job that reads one column and writes none needs more elements to use the bandwidth.
BLOCK = 1024
LONE_BLOCK = 4096
_COLUMNS_PER_LAUNCH = 160  # as pointers: CUDA passes up to 4 KB of arguments
_ARM = 8  # leaves to distinguish within one range of blocks

# The default, warpgroup semantics, compiles in time quadratic in the leaves.
_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

_INT32_LIMIT = 2**31
_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.uint16)


class Work(NamedTuple):
    """The static part of a launch.

    Attributes:
        job: the job.
        names: the names of the scalars. The first may be "skip": unless it is zero, the
            kernel stores nothing.
        tag: the static tag of the leaves.
        interpret: whether to emulate the GPU on the CPU, and detect races.
    """

    job: Job
    names: tuple[str, ...]
    tag: Any
    interpret: bool

    def results(
        self, scalars: Sequence[Any], blocks: Blocks, noise: Noise | None
    ) -> Blocks:
        """Returns the formula's results in the form that is stored."""
        numbers = dict(zip(self.names, scalars, strict=True))
        return call_inlined(self._results, numbers, blocks, noise)

    def _results(self, numbers: Blocks, blocks: Blocks, noise: Noise | None) -> Blocks:
        results = self.job.formula(numbers, self.tag, self.job.read(blocks))
        stored = self.job.stored
        return results if stored is None else stored(self.tag, results, noise)

    def stored_dtypes(self, leaf: Leaf, rounds: bool) -> dict[str, Any]:
        """Returns the dtypes of all results except reductions."""
        scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * len(self.names)
        block = {
            c: jax.ShapeDtypeStruct((WARPGROUP,), x.dtype) for c, x in leaf.items()
        }
        number: Any = jax.ShapeDtypeStruct((WARPGROUP,), jnp.uint32)
        noise = Noise(number, number) if rounds else None
        results = jax.eval_shape(self.results, scalars, block, noise)
        return {c: x.dtype for c, x in results.items() if c not in self.job.reductions}


def fits(leaf: Leaf) -> bool:
    """Returns whether a leaf has an element per thread, and int32 counts them."""
    if not WARPGROUP <= size_of(leaf) < _INT32_LIMIT:
        return False
    return all(x.dtype in _DTYPES for x in leaf.values())


def chunks(sizes: Sequence[int], columns: int) -> list[tuple[int, ...]]:
    """Splits leaves into launches by size, so that equal launches compile once."""
    most = max(1, min(64, _COLUMNS_PER_LAUNCH // columns))
    by_size = sorted(range(len(sizes)), key=lambda k: sizes[k])
    launches: list[tuple[int, ...]] = []
    mixed: list[int] = []
    for _, run in itertools.groupby(by_size, key=lambda k: sizes[k]):
        for batch in itertools.batched(run, most):
            if len(batch) == most:
                launches.append(batch)
            else:
                mixed += batch
    return launches + list(itertools.batched(mixed, most))


@functools.partial(jax.jit, static_argnums=(0, 1))
def launch(
    work: Work,
    strides: tuple[tuple[int, ...], ...],
    leaves: Sequence[Leaf],
    scalars: Float[Array, " s"],
    per_leaf: Float[Array, "n p"] | None,
    keys: UInt32[Array, " n"] | None,
) -> tuple[list[Blocks], dict[str, Array]]:
    """Runs `work` in one launch, over leaves of one kind that `fits` accepts.

    For stochastic rounding, each leaf is part of an array with its `strides`. Returns
    the written columns of each leaf, and the reductions.
    """
    job, stored = work.job, work.stored_dtypes(leaves[0], keys is not None)
    written = [c for c in leaves[0] if c in stored or job.copies.get(c) in leaves[0]]
    new = {c: dtype for c, dtype in stored.items() if c not in leaves[0]}
    block = BLOCK if len(leaves[0]) > 1 or stored else LONE_BLOCK
    shapes = [next(iter(leaf.values())).shape for leaf in leaves]
    sizes = [size_of(leaf) for leaf in leaves]
    starts = [0, *itertools.accumulate(max(n // block, 1) for n in sizes)]
    inputs, refs, fresh = [], [], []
    for leaf, n in zip(leaves, sizes, strict=True):
        flat = {c: x.reshape(n) for c, x in leaf.items()}
        refs.append({c: jax.new_ref(flat.pop(c)) for c in written})
        inputs.append(flat)
        fresh.append({c: jax.ShapeDtypeStruct((n,), d) for c, d in new.items()})
    per_block = jax.ShapeDtypeStruct((starts[-1],), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_body, work, shapes, strides, sizes, starts, block),
        out_type=(fresh, dict.fromkeys(job.reductions, per_block)),
        grid=(starts[-1],),
        grid_names=("block",),
        interpret=_INTERPRET if work.interpret else None,
        compiler_params=_PARAMS,
    )
    fresh, partials = kernel(scalars, per_leaf, keys, inputs, refs)
    results = []
    for shape, ref, x in zip(shapes, refs, fresh, strict=True):
        columns = {c: jax.freeze(r) for c, r in ref.items()} | x
        results.append({c: x.reshape(shape) for c, x in columns.items()})
    return results, {
        name: _join_blocks(partials[name], how, None if job.totals else starts)
        for name, how in job.reductions.items()
    }


def _body(
    work: Work,
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    starts: Sequence[int],
    block: int,
    scalars: Any,
    rows: Any,
    keys: Any,
    inputs: Sequence[Any],
    refs: Sequence[Any],
    fresh: Sequence[Any],
    partials: dict[str, Any],
) -> None:
    """Runs one grid step."""
    step = jax.lax.axis_index("block")
    shared = [scalars[j] for j in range(scalars.shape[0])]

    def visit(k: int) -> None:
        row = [] if rows is None else [rows[k, j] for j in range(rows.shape[1])]
        leaf = inputs[k], refs[k], fresh[k]
        key = None if keys is None else keys[k]
        noise = functools.partial(_noise, key, shapes[k], strides[k])
        run = functools.partial(
            _run_block, work, [*shared, *row], noise, leaf, partials, step
        )
        number, last = step - starts[k], starts[k + 1] - starts[k] - 1
        narrow = all(ref.dtype.itemsize == 2 for ref in jax.tree.leaves(leaf))
        vec = 8 if narrow else 4
        index = pl.ds(number * block, block)
        whole = Window(index, number.astype(jnp.uint32) * block, block, vec, 0)
        if sizes[k] % block == 0:
            run([whole])
            return
        if last:
            pl.when(number < last)(lambda: run([whole]))
        ragged = _last_windows(sizes[k], block, vec)
        pl.when(number == last)(lambda: run(ragged))

    def visit_arm(arm: Sequence[int]) -> None:
        for k in arm:
            _when_within(step, starts[k], starts[k + 1], starts)(
                functools.partial(visit, k)
            )

    for arm in itertools.batched(range(len(sizes)), _ARM):
        _when_within(step, starts[arm[0]], starts[arm[-1] + 1], starts)(
            functools.partial(visit_arm, arm)
        )


def _when_within(step: Array, start: int, end: int, starts: Sequence[int]) -> Any:
    """Runs a function where `start <= step < end`."""
    if (start, end) == (starts[0], starts[-1]):
        return lambda function: function()
    return pl.when((step >= start) & (step < end))


class Window(NamedTuple):
    """A part of a leaf: its start, its length, elements per access, elements seen."""

    index: Any
    start: Any
    size: int
    vec: int
    seen: int


def _last_windows(n: int, block: int, vec: int) -> list[Window]:
    """Returns the windows of the last block: a whole block, if any, and the rest."""
    start, end = max(n // block - 1, 0) * block, n // block * block
    windows = [Window(pl.ds(start, block), start, block, vec, 0)] if end else []
    if aligned := (n - end) // WARPGROUP * WARPGROUP:
        vec = next(v for v in (vec, 4, 2, 1) if aligned % (WARPGROUP * v) == 0)
        windows.append(Window(pl.ds(end, aligned), end, aligned, vec, 0))
    if rest := n % WARPGROUP:
        start = n - WARPGROUP
        window = Window(pl.ds(start, WARPGROUP), start, WARPGROUP, 1, WARPGROUP - rest)
        windows.append(window)
    return windows


def _run_block(
    work: Work,
    scalars: list[Any],
    noise: Callable[[Window], Noise | None],
    leaf: tuple[Blocks, Blocks, Blocks],
    partials: dict[str, Any],
    step: Array,
    windows: list[Window],
) -> None:
    """Loads all windows, then computes, then stores."""
    job, (inputs, refs, fresh) = work.job, leaf
    out = refs | fresh
    columns: Any = inputs | refs
    read = {c: r for c, r in columns.items() if job.copies.get(c) not in columns}
    old = [
        {c: plgpu.load(ref.at[w.index], layout=_layout(w)) for c, ref in read.items()}
        for w in windows
    ]
    new = [
        work.results(scalars, blocks, noise(window))
        for blocks, window in zip(old, windows, strict=True)
    ]
    for name, how in job.reductions.items():
        values = [
            _reduce(blocks[name], w, how)
            for blocks, w in zip(new, windows, strict=True)
        ]
        partials[name][step] = functools.reduce(JOIN[how], values)

    def store():
        for blocks, window in zip(new, windows, strict=True):
            results = blocks | job.copied(refs, blocks)
            for c, ref in out.items():
                ref[window.index] = results[c].astype(ref.dtype)

    def store_zeros():
        for blocks, window in zip(new, windows, strict=True):
            for c, ref in fresh.items():
                ref[window.index] = jnp.zeros_like(blocks[c]).astype(ref.dtype)

    if work.names[:1] != ("skip",):
        store()
        return
    pl.when(scalars[0] == 0)(store)
    if fresh:
        pl.when(scalars[0] != 0)(store_zeros)


def _layout(window: Window) -> Any:
    return plgpu.Layout.WG_STRIDED((window.size,), vec_size=window.vec)


def _places(window: Window) -> Array:
    """Returns the indices of a window's elements within the window."""
    layout = _layout(window)
    return plgpu.broadcasted_iota(jnp.int32, (window.size,), 0, layout=layout)


def _noise(
    key: Any, shape: tuple[int, ...], strides: tuple[int, ...], window: Window
) -> Noise | None:
    if key is None:
        return None
    flat = jnp.uint32(window.start) + _places(window).astype(jnp.uint32)
    return Noise(key, numbers_of_flat(flat, shape, strides))


def _reduce(x: Array, window: Window, how: str) -> Array:
    """Reduces the elements of a window that no earlier window covers."""
    if window.seen:
        x = jnp.where(_places(window) >= window.seen, x, 0.0)  # maxima are of |x| >= 0
    return jnp.sum(x) if how == "sum" else jnp.max(x)


def _join_blocks(partials: Array, how: str, starts: Sequence[int] | None) -> Array:
    """Returns one value for each leaf, or one for all leaves without `starts`."""
    if starts is None:
        return partials.sum() if how == "sum" else partials.max()
    counts = [b - a for a, b in itertools.pairwise(starts)]
    if len(set(counts)) == 1:
        table = partials.reshape(len(counts), counts[0])
    else:
        place = jnp.arange(max(counts), dtype=jnp.int32)
        first, count = jnp.array(starts[:-1])[:, None], jnp.array(counts)[:, None]
        table = partials.at[first + place].get(mode="fill", fill_value=0)
        table = jnp.where(place < count, table, 0)
    return table.sum(1) if how == "sum" else table.max(1)
