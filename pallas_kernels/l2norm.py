"""Norms of many arrays at once, and whether any element is not finite.

After apex's csrc/multi_tensor_l2norm_kernel.cu and multi_tensor_scale_kernel.cu.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._run import DEFAULTS, Options, run
from pallas_kernels._xla import Blocks, Job, Numbers


def l2norm(
    leaves: Sequence[Array], *, per_leaf: bool = False, options: Options = DEFAULTS
) -> Float[Array, "..."]:
    r"""$\sqrt{\sum x^2}$ over all leaves, or for each, accumulated in float32.

    Squares of float32 and bfloat16 elements can overflow where these are finite: then
    the norm is infinite.

    Args:
        leaves: arrays of floats; an empty one has norm 0.
        per_leaf: whether to return one norm per leaf.
        options: how to run; `unscale` multiplies what is measured.

    >>> import jax.numpy as jnp
    >>> print(l2norm([jnp.array([3.0]), jnp.array([4.0, 0.0])]))
    5.0
    """
    return _norm("sum", per_leaf, leaves, options)


def max_norm(
    leaves: Sequence[Array], *, per_leaf: bool = False, options: Options = DEFAULTS
) -> Float[Array, "..."]:
    r"""$\max |x|$ over all leaves, or for each. See `l2norm`.

    >>> import jax.numpy as jnp
    >>> print(max_norm([jnp.array([3.0, -5.0]), jnp.zeros(0)], per_leaf=True))
    [5. 0.]
    """
    return _norm("max", per_leaf, leaves, options)


def found_inf(
    leaves: Sequence[Array], *, options: Options = DEFAULTS
) -> Bool[Array, ""]:
    """Whether any element is inf or NaN, once multiplied by `options.unscale`.

    >>> import jax.numpy as jnp
    >>> print(found_inf([jnp.zeros(3), jnp.array([1.0, jnp.nan])]))
    True
    """
    found = run(_FOUND_INF, [{"x": x} for x in leaves], options).reductions
    return found["defects"] != 0


def defects(x: Array) -> Array:
    """0 where finite; NaN, which differs from 0 and stays so in a sum, where not."""
    return x - x


def _norm(how: str, per_leaf: bool, leaves: Sequence[Array], options: Options) -> Array:
    columns = [{"x": x} for x in leaves]
    # The norm is multiplied, not the elements.
    elements = options._replace(unscale=None)
    norm = run(_NORMS[how, per_leaf], columns, elements).reductions["norm"]
    norm = jnp.sqrt(norm) if how == "sum" else norm
    return norm if options.unscale is None else norm * options.unscale


def _squared(numbers: Numbers, tag: None, columns: Blocks) -> Blocks:
    del numbers, tag
    x = columns["x"].astype(jnp.float32)
    return {"norm": x * x}


def _size(numbers: Numbers, tag: None, columns: Blocks) -> Blocks:
    del numbers, tag
    return {"norm": jnp.abs(columns["x"].astype(jnp.float32))}


def _unscaled_defects(numbers: Numbers, tag: None, columns: Blocks) -> Blocks:
    del tag
    x = columns["x"].astype(jnp.float32)
    if "unscale" not in numbers:
        return {"defects": defects(x)}
    # Not the defects of the product: a compiler may contract it with the difference,
    # of which its rounding error is left.
    fits = jnp.abs(x * numbers["unscale"]) < jnp.inf
    return {"defects": jnp.where(fits, 0.0, 1.0)}


_FOUND_INF = Job(_unscaled_defects, reductions={"defects": "sum"}, totals=True)
_NORMS = {
    (how, per_leaf): Job(formula, reductions={"norm": how}, totals=not per_leaf)
    for how, formula in (("sum", _squared), ("max", _size))
    for per_leaf in (True, False)
}
