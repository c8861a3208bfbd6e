"""Weighted sums of pairs of arrays, and a look for inf and NaN on the way.

After apex's csrc/multi_tensor_axpby_kernel.cu.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike

from pallas_kernels._run import DEFAULTS, Options, run
from pallas_kernels._xla import Blocks, Job, Numbers
from pallas_kernels.l2norm import defects
from pallas_kernels.scale import Checked, checked

type Check = Literal["x", "y", "both"]


def axpby(
    a: ArrayLike,
    x: Sequence[Array],
    b: ArrayLike,
    y: Sequence[Array],
    dtypes: Sequence[DTypeLike],
    *,
    check: Check = "both",
    options: Options = DEFAULTS,
) -> Checked:
    """`a * x + b * y`, in float32, rounded to `dtypes`.

    Args:
        a: shape ().
        x: arrays of floats.
        b: shape ().
        y: arrays of floats, of the shapes of `x`.
        dtypes: one per leaf, of the result.
        check: where to look for inf and NaN.
        options: how to run.

    >>> import jax.numpy as jnp
    >>> sums, found_inf = axpby(2, [jnp.ones(2)], 3, [jnp.ones(2)], [jnp.float32])
    >>> print(sums[0], found_inf)
    [5. 5.] False
    """
    results = run(
        Job(_formula, reductions={"defects": "sum"}),
        [{"x": u, "y": v} for u, v in zip(x, y, strict=True)],
        options,
        scalars={"a": a, "b": b},
        tags=[(jnp.dtype(dtype), check) for dtype in dtypes],
    )
    return checked(results)


def _formula(s: Numbers, tag: tuple[DTypeLike, Check], columns: Blocks) -> Blocks:
    (dtype, check), x, y = tag, columns["x"], columns["y"]
    bad = {"x": defects(x), "y": defects(y), "both": defects(x) + defects(y)}
    return {"out": (s["a"] * x + s["b"] * y).astype(dtype), "defects": bad[check]}
