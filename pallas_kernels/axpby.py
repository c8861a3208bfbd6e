"""Weighted sums of pairs of arrays, and a look for inf and NaN on the way.

After apex's csrc/multi_tensor_axpby_kernel.cu.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from pallas_kernels._run import run
from pallas_kernels._step import DEFAULTS, Numbers, Options
from pallas_kernels._xla import Blocks, Job, bind
from pallas_kernels.l2norm import defects
from pallas_kernels.scale import Checked, checked

type Check = Literal["x", "y", "both"]


def axpby(
    a: ArrayLike,
    x: Sequence[Array],
    b: ArrayLike,
    y: Sequence[Array],
    dtypes: Sequence[Any],
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
        Job(bind(_formula, check), reductions={"defects": "sum"}),
        [{"x": u, "y": v} for u, v in zip(x, y, strict=True)],
        scalars={"a": a, "b": b},
        tags=[jnp.dtype(dtype) for dtype in dtypes],
        backend=options.backend,
        shardings=options.shardings,
    )
    return checked(results)


def _formula(check: Check, s: Numbers, dtype: Any, columns: Blocks) -> Blocks:
    x, y = columns["x"], columns["y"]
    bad = {"x": defects(x), "y": defects(y), "both": defects(x) + defects(y)}
    return {"out": (s["a"] * x + s["b"] * y).astype(dtype), "defects": bad[check]}
