"""Norms of many arrays at once, and a check for elements that are not finite.

Based on apex's csrc/multi_tensor_l2norm_kernel.cu and multi_tensor_scale_kernel.cu.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._run import DEFAULTS, Options, run
from pallas_kernels._xla import Blocks, Job, Numbers, widen


def norm(
    leaves: Sequence[Array],
    order: float = 2,
    *,
    per_leaf: bool = False,
    options: Options = DEFAULTS,
) -> Float[Array, "..."]:
    r"""Returns $\sqrt{\sum x^2}$ or $\max |x|$ of all leaves or of each.

    It is float32, or float64 if a leaf is. Squares of finite float32 and bfloat16
    elements can overflow. Then the norm is infinite.

    Args:
        leaves: arrays of floats. An empty array has norm 0.
        order: 2, or `math.inf` for the maximum.
        per_leaf: whether to return one norm per leaf.
        options: see `Options`. `unscale` multiplies the elements.

    >>> import jax.numpy as jnp
    >>> leaves = [jnp.array([3.0]), jnp.array([-4.0, 0.0]), jnp.zeros(0)]
    >>> print(norm(leaves), norm(leaves, jnp.inf, per_leaf=True))
    5.0 [3. 4. 0.]
    """
    columns, tags = [{"x": x} for x in leaves], [order] * len(leaves)
    plain = options._replace(unscale=None)  # multiply the norm instead of the elements
    _, found = run(_NORMS[order, per_leaf], columns, plain, tags=tags)
    norms = jnp.sqrt(found["norm"]) if order == 2 else found["norm"]
    return (
        norms
        if options.unscale is None
        else norms * options.unscale.astype(norms.dtype)
    )


def found_inf(
    leaves: Sequence[Array], *, options: Options = DEFAULTS
) -> Bool[Array, ""]:
    """Returns whether any element times `options.unscale` is inf or NaN.

    >>> import jax.numpy as jnp
    >>> print(found_inf([jnp.zeros(3), jnp.array([1.0, jnp.nan])]))
    True
    """
    _, found = run(_FOUND_INF, [{"x": x} for x in leaves], options)
    return ~jnp.isfinite(found["defects"])


def _measured(numbers: Numbers, order: float, columns: Blocks) -> Blocks:
    del numbers
    x = widen(columns["x"])
    return {"norm": x * x if order == 2 else jnp.abs(x)}


def _unscaled_defects(numbers: Numbers, tag: None, columns: Blocks) -> Blocks:
    del tag
    x = columns["x"]
    x = x * numbers["unscale"].astype(x.dtype) if "unscale" in numbers else x
    # This is 0 for a finite x, and otherwise NaN, which a sum keeps. If a compiler
    # contracts the product and the difference, a rounding error or an infinity remains.
    # XLA would not fuse comparisons into the sum of eight leaves.
    return {"defects": (x - x).astype(jnp.float32)}


_FOUND_INF = Job(_unscaled_defects, reductions={"defects": "sum"}, totals=True)
_NORMS = {
    (order, per_leaf): Job(_measured, reductions={"norm": how}, totals=not per_leaf)
    for order, how in ((2, "sum"), (math.inf, "max"))
    for per_leaf in (True, False)
}
