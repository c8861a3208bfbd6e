"""The layout of gradients on NVIDIA GPUs, which optimizer kernels inherit."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, PyTree


def row_major_on_cuda(grads: PyTree) -> PyTree:
    """Asks XLA, on NVIDIA GPUs only, for row-major gradients of rank 3 and more.

    cuDNN writes the gradient of an HWIO kernel as OHWI. XLA then runs the optimizer in
    that layout, and transposes params, masters and moments back, so an Adam step on an
    H200 moves 64 bytes per parameter instead of 32. Transposing only the gradient is
    cheaper. The same happens to attention's kernels of rank 3. For a matrix, even with
    a leading axis of size 1, XLA may choose the layout.
    """
    leaves, structure = jax.tree.flatten(grads)
    indices = [i for i, x in enumerate(leaves) if x.ndim - (x.shape[:1] == (1,)) >= 3]
    chosen = [leaves[i] for i in indices]
    if chosen:
        chosen = jax.lax.platform_dependent(
            chosen, cuda=_row_major, default=lambda x: x
        )
    for i, x in zip(indices, chosen, strict=True):
        leaves[i] = x
    return structure.unflatten(leaves)


def _row_major(leaves: list[Array]) -> list[Array]:
    layouts = [Layout(major_to_minor=tuple(range(x.ndim))) for x in leaves]
    return list(map(with_layout_constraint, leaves, layouts))
