"""apex's multi_tensor operations over pytrees: scale, axpby, l2norm."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, PyTree

from jamp._core.dtypes import is_castable
from jamp._core.tree import check_like
from pallas_kernels import Blocks, Job, Numbers, Options, defects, norm, run


def scale(
    tree: PyTree,
    factor: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    backend: str = "auto",
) -> tuple[PyTree, Bool[Array, ""]]:
    """Multiplies a tree by a number, and looks for inf and NaN on the way.

    After amp_C.multi_tensor_scale. The product is taken in float32.

    Args:
        tree: arrays of floats.
        factor: shape ().
        dtype: of the result; None for each leaf's own.
        backend: "auto", "xla", "mosaic" or "interpret".

    Returns:
        The new tree; and whether an *input* was inf or NaN, shape (), bool. What
        overflows in the product or in its rounding is not reported, as in apex.

    Raises:
        TypeError: a leaf is not a float array.

    >>> import jax.numpy as jnp
    >>> tree, found_inf = scale({"w": jnp.array([1.0, jnp.inf])}, 0.5)
    >>> print(tree["w"], found_inf)
    [0.5 inf] True
    """
    leaves, structure = _flatten(tree, "tree")
    columns = [{"x": x} for x in leaves]
    tags = [(jnp.dtype(x.dtype if dtype is None else dtype), "x") for x in leaves]
    return _summed(structure, columns, {"x": factor}, tags, backend)


def axpby(
    a: ArrayLike,
    x: PyTree,
    b: ArrayLike,
    y: PyTree,
    *,
    check: str = "both",
    dtype: DTypeLike | None = None,
    backend: str = "auto",
) -> tuple[PyTree, Bool[Array, ""]]:
    """`a * x + b * y` over two trees, and a look for inf and NaN on the way.

    After amp_C.multi_tensor_axpby. The sum is taken in float32.

    Args:
        a: shape ().
        x: arrays of floats.
        b: shape ().
        y: arrays of floats, of the structure and shapes of `x`.
        check: where to look: "x", "y" or "both".
        dtype: of the result; None for that of each leaf of `y`.
        backend: "auto", "xla", "mosaic" or "interpret".

    Returns:
        The new tree; and whether a checked *input* was inf or NaN, shape (), bool.

    Raises:
        TypeError: a leaf is not a float array.
        ValueError: the trees differ, or `check` is none of the three.

    >>> import jax.numpy as jnp
    >>> total, found_inf = axpby(2, {"w": jnp.ones(2)}, 3, {"w": jnp.ones(2)})
    >>> print(total["w"], found_inf)
    [5. 5.] False
    """
    if check not in ("x", "y", "both"):
        raise ValueError(f"check must be 'x', 'y' or 'both', got {check!r}.")
    check_like(y, x, "y", "pass two trees of one structure.")
    xs, structure = _flatten(x, "x")
    ys, _ = _flatten(y, "y")
    columns = [{"x": u, "y": v} for u, v in zip(xs, ys, strict=True)]
    checked = "xy" if check == "both" else check
    tags = [(jnp.dtype(y.dtype if dtype is None else dtype), checked) for y in ys]
    return _summed(structure, columns, {"x": a, "y": b}, tags, backend)


def l2norm(
    tree: PyTree,
    *,
    per_tensor: bool = False,
    scale: ArrayLike | None = None,
    backend: str = "auto",
) -> Any:
    """The Euclidean norm of a tree, accumulated in float32.

    After amp_C.multi_tensor_l2norm and multi_tensor_unscale_l2norm. It is not finite if
    an element is not, or if the squares leave float32's range.

    Args:
        tree: arrays of floats.
        per_tensor: whether to return the norm of each leaf, too.
        scale: what the tree is divided by, as scaled gradients would be; None for 1.
        backend: "auto", "xla", "mosaic" or "interpret".

    Returns:
        The norm, shape (), float32; with `per_tensor` a pair of it and a tree of norms.

    Raises:
        TypeError: a leaf is not a float array.

    >>> import jax.numpy as jnp
    >>> print(l2norm({"w": jnp.array([3.0, 4.0])}, per_tensor=True))
    (Array(5., dtype=float32), {'w': Array(5., dtype=float32)})
    """
    leaves, structure = _flatten(tree, "tree")
    unscale = None if scale is None else 1 / jnp.asarray(scale, jnp.float32)
    options = Options(unscale=unscale, backend=backend)
    if not per_tensor:
        return norm(leaves, options=options)
    norms = norm(leaves, per_leaf=True, options=options)
    return jnp.sqrt(jnp.sum(norms * norms)), structure.unflatten(list(norms))


def _flatten(tree: PyTree, what: str) -> tuple[list[Array], Any]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_castable(leaf):
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is {leaf!r}, expected an array of "
                "float16, bfloat16, float32 or float64."
            )
    leaves, structure = jax.tree.flatten(tree)
    return [jnp.asarray(x) for x in leaves], structure


def _summed(
    structure: Any,
    columns: list[Blocks],
    factors: dict[str, ArrayLike],
    tags: Sequence[tuple[DTypeLike, str]],
    backend: str,
) -> tuple[PyTree, Array]:
    """A tree of sums of columns times factors; whether a checked column is not finite.

    A tag is the dtype of the sum, and the columns to check.
    """
    results = run(_SUM, columns, Options(backend=backend), factors, tags)
    out = [leaf["out"] for leaf in results.leaves.values()]
    return structure.unflatten(out), jnp.any(results.reductions["defects"] != 0)


def _weighted_sum(s: Numbers, tag: tuple[DTypeLike, str], columns: Blocks) -> Blocks:
    dtype, checked = tag
    total = functools.reduce(jnp.add, [s[c] * x for c, x in columns.items()])
    bad = functools.reduce(jnp.add, [defects(columns[c]) for c in checked])
    return {"out": total.astype(dtype), "defects": bad}


_SUM = Job(_weighted_sum, reductions={"defects": "sum"})
