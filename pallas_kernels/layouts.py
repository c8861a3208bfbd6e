"""The layout of gradients on NVIDIA GPUs, which optimizer kernels inherit."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree


def row_major_on_cuda(grads: PyTree) -> PyTree:
    """Asks XLA, on NVIDIA GPUs only, for row-major gradients of rank 3 and more.

    cuDNN writes the gradient of an HWIO kernel as OHWI. XLA then runs the optimizer in
    that layout, and transposes params, masters and moments back, so an Adam step on an
    H200 moves 64 bytes per parameter instead of 32. Transposing only the gradient is
    cheaper. The same happens to attention's kernels of rank 3. For a matrix, even with
    a leading axis of size 1, XLA may choose the layout, and so it may in an export.
    """
    leaves, structure = jax.tree.flatten(grads)
    indices = [i for i, x in enumerate(leaves) if x.ndim - (x.shape[:1] == (1,)) >= 3]
    for i in indices:
        leaves[i] = _row_major.bind(leaves[i])
    return structure.unflatten(leaves)


def _constrained(x: Array) -> Array:
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    return with_layout_constraint(x, layout)


def _lower_on_cuda(ctx: Any, x: Any) -> Any:
    # `jax.export` serializes no constraints of layouts, because XLA may change them.
    exports = ctx.module_context.lowering_parameters.for_export
    return [x] if exports else _lower_constrained(ctx, x)


# This is a primitive because `jax.lax.platform_dependent` would also lower the
# constraint in an export.
_row_major = Primitive("jamp_row_major")
_row_major.def_impl(jax.jit(lambda x: _row_major.bind(x)))
_row_major.def_abstract_eval(lambda x: x)
ad.deflinear2(_row_major, lambda cotangent, _: [cotangent])
batching.defvectorized(_row_major)
_lower_constrained = mlir.lower_fun(_constrained, multiple_results=False)
mlir.register_lowering(_row_major, lambda _, x: [x])
mlir.register_lowering(_row_major, _lower_on_cuda, platform="cuda")
