"""Norms of many arrays at once, and whether any element is not finite.

After apex's csrc/multi_tensor_l2norm_kernel.cu and multi_tensor_scale_kernel.cu.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._run import DEFAULTS, Options, run
from pallas_kernels._xla import Blocks, Job, Numbers


class Norms(NamedTuple):
    """What one reading of many arrays tells.

    Attributes:
        norm: the norm, shape (), float32; per leaf shape (n,).
        found_inf: whether an element is inf or NaN, shape (), bool; per leaf (n,).
    """

    norm: Float[Array, "..."]
    found_inf: Bool[Array, "..."]


def l2norm(
    leaves: Sequence[Array], *, per_leaf: bool = False, options: Options = DEFAULTS
) -> Norms:
    r"""$\sqrt{\sum x^2}$ over all leaves, or for each, accumulated in float32.

    Squares of float32 and bfloat16 elements can overflow where these are finite: then
    the norm is infinite, and `found_inf` false.

    Args:
        leaves: arrays of floats; an empty one has norm 0.
        per_leaf: whether to return one norm per leaf.
        options: how to run; `unscale` multiplies what is measured.

    >>> import jax.numpy as jnp
    >>> norms = l2norm([jnp.array([3.0]), jnp.array([4.0, 0.0])])
    >>> print(norms.norm, norms.found_inf)
    5.0 False
    """
    return _norms("sum", per_leaf, leaves, options)


def max_norm(
    leaves: Sequence[Array], *, per_leaf: bool = False, options: Options = DEFAULTS
) -> Norms:
    r"""$\max |x|$ over all leaves, or for each. See `l2norm`.

    >>> import jax.numpy as jnp
    >>> print(max_norm([jnp.array([3.0, -5.0]), jnp.zeros(0)], per_leaf=True).norm)
    [5. 0.]
    """
    return _norms("max", per_leaf, leaves, options)


def found_inf(
    leaves: Sequence[Array], *, options: Options = DEFAULTS
) -> Bool[Array, ""]:
    """Whether any element is inf or NaN, once multiplied by `options.unscale`.

    >>> import jax.numpy as jnp
    >>> print(found_inf([jnp.zeros(3), jnp.array([1.0, jnp.nan])]))
    True
    """
    job = Job(_unscaled_defects, reductions={"defects": "sum"}, totals=True)
    found = run(job, [{"x": x} for x in leaves], options).reductions
    return found["defects"] != 0


def defects(x: Array) -> Array:
    """0 where finite; NaN, which differs from 0 and stays so in a sum, where not."""
    return x - x


def _norms(
    how: Literal["sum", "max"],
    per_leaf: bool,
    leaves: Sequence[Array],
    options: Options,
) -> Norms:
    found = run(
        Job(
            _measured,
            reductions={"norm": how, "defects": "sum"},
            totals=not per_leaf,
        ),
        [{"x": x} for x in leaves],
        options._replace(unscale=None),  # the norms are multiplied, not the elements
        tags=[how] * len(leaves),
    ).reductions
    norm = jnp.sqrt(found["norm"]) if how == "sum" else found["norm"]
    norm = norm if options.unscale is None else norm * options.unscale
    return Norms(norm, found["defects"] != 0)


def _measured(numbers: Numbers, how: str, columns: Blocks) -> Blocks:
    del numbers
    x = columns["x"].astype(jnp.float32)
    return {"norm": x * x if how == "sum" else jnp.abs(x), "defects": defects(x)}


def _unscaled_defects(numbers: Numbers, tag: None, columns: Blocks) -> Blocks:
    del tag
    x = columns["x"].astype(jnp.float32)
    if "unscale" not in numbers:
        return {"defects": defects(x)}
    # Not the defects of the product: a compiler may contract it with the difference,
    # of which its rounding error is left.
    fits = jnp.abs(x * numbers["unscale"]) < jnp.inf
    return {"defects": jnp.where(fits, 0.0, 1.0)}
