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

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    def leaf(x: Array) -> Array:
        if x.ndim < 3 or x.ndim == 3 and x.shape[0] == 1:
            return x
        return jax.lax.platform_dependent(x, cuda=constrain, default=lambda x: x)

    return jax.tree.map(leaf, grads)
