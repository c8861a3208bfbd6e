"""Gradients of convolution kernels, laid out as the params are.

cuDNN writes the gradient of an HWIO kernel as OHWI. XLA then runs the optimizer in that
layout, and transposes the params, masters, moments and half params back: compiled for
an H200, 64 bytes per parameter of an Adam step instead of 32. Transposing the gradient
alone is cheaper, and the finite check fuses into that.

Of four axes and more: those are kernels of convolutions. The gradient of a position
embedding or of an attention kernel has three, and XLA carries what is asked of it back
to the activations: a ViT's then lie with the batch innermost, and its step moves 17 %
more bytes.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, PyTree


def row_major_on_cuda(grads: PyTree) -> PyTree:
    """Asks XLA, on NVIDIA GPUs only, for row-major gradients of four axes and more."""

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    def leaf(x: Array) -> Array:
        if x.ndim < 4:
            return x
        return jax.lax.platform_dependent(x, cuda=constrain, default=lambda x: x)

    return jax.tree.map(leaf, grads)
