"""Scales many arrays at once, and looks for inf and NaN on the way.

After apex's csrc/multi_tensor_scale_kernel.cu.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool

from pallas_kernels._run import DEFAULTS, Options, Results, run
from pallas_kernels._xla import Blocks, Job, Numbers
from pallas_kernels.l2norm import defects


class Checked(NamedTuple):
    """New arrays, and whether an input held inf or NaN.

    Attributes:
        leaves: one per input.
        found_inf: shape (), bool.
    """

    leaves: list[Array]
    found_inf: Bool[Array, ""]


def scale(
    leaves: Sequence[Array],
    factor: ArrayLike,
    dtypes: Sequence[DTypeLike],
    *,
    options: Options = DEFAULTS,
) -> Checked:
    """`factor * x`, in float32, rounded to `dtypes`.

    An element that overflows in the product or in its rounding is not reported: as in
    apex, inputs are.

    Args:
        leaves: arrays of floats.
        factor: shape ().
        dtypes: one per leaf, of the result.
        options: how to run.

    >>> import jax.numpy as jnp
    >>> halves, found_inf = scale([jnp.array([1.0, 6.0])], 0.5, [jnp.float16])
    >>> print(halves[0], found_inf)
    [0.5 3. ] False
    """
    results = run(
        Job(_formula, reductions={"defects": "sum"}),
        [{"x": x} for x in leaves],
        options,
        scalars={"factor": factor},
        tags=[jnp.dtype(dtype) for dtype in dtypes],
    )
    return checked(results)


def checked(results: Results) -> Checked:
    """The new arrays "out", and the flag from "defects"."""
    found_inf = jnp.any(results.reductions["defects"] != 0)
    return Checked([leaf["out"] for leaf in results.leaves], found_inf)


def _formula(numbers: Numbers, dtype: DTypeLike, columns: Blocks) -> Blocks:
    x = columns["x"]
    return {"out": (numbers["factor"] * x).astype(dtype), "defects": defects(x)}
