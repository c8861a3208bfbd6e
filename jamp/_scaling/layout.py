"""Gradients of convolution kernels, laid out as the params are.

cuDNN writes the gradient of an HWIO kernel as OHWI. XLA then runs the optimizer in that
layout, and transposes the params, masters, moments and half params back: compiled for
an H200, 64 bytes per parameter of an Adam step instead of 32. Transposing the gradient
alone is cheaper, and the finite check fuses into that.

So are those of attention's kernels of three axes, which XLA would rather have the other
way round. A learned position embedding is left alone: its gradient is a sum of
activations, which XLA would lay out as is asked of it, and a ViT's with the batch
innermost, so that a step moves 17 % more bytes. It shows by its first axis, of one.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, PyTree


def row_major_on_cuda(grads: PyTree) -> PyTree:
    """Asks XLA, on NVIDIA GPUs only, for row-major gradients of three axes and more."""

    leaves, structure = jax.tree.flatten(grads)
    indices = [
        i for i, x in enumerate(leaves) if x.ndim > 3 or x.ndim == 3 and x.shape[0] > 1
    ]
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
