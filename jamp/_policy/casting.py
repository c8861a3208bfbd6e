"""Casts a model's params to one dtype, except the leaves that stay in float32.

Based on apex/fp16_utils/fp16util.py:convert_network.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax.training.train_state import TrainState
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jamp._core.dtypes import FLOAT32, cast, is_castable
from jamp._core.path_rules import check_rules, matches, parse_rules
from jamp._core.show import kind
from jamp._core.tree import (
    is_overwritten,
    map_in_one_program,
    path_parts,
    path_string,
)
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._policy.levels import Properties, half_dtype
from jamp._policy.options import parse_model_dtype

# Names of BatchNorm modules, used without batch_stats: BatchNorm_3, bn1, batch_norm.
_BATCHNORM = re.compile(r"BatchNorm|(^|_)(batch_?norm|bn)(?=$|_|\d)")

type Keep = Callable[[tuple[str, ...], Any], bool]


def cast_model(
    tree: PyTree,
    dtype: DTypeLike,
    *,
    keep_batchnorm_fp32: bool = False,
    batch_stats: PyTree = None,
    keep_fp32: Any = None,
) -> Any:
    """Casts the floats of a model, as `initialize` does at the levels that cast.

    A module is a BatchNorm if it is an `equinox.nn.BatchNorm`, or if `batch_stats` has
    its mean and variance with the names of Flax or Haiku. Without `batch_stats`, its
    name decides (`BatchNorm_0`, `bn1`, `batch_norm`). Running statistics become
    float32. Integers, bools, PRNG keys and complex numbers keep their dtype.

    Args:
        tree: params, or Flax variables `{"params": ..., "batch_stats": ...}`.
        dtype: float16, bfloat16 or float32.
        keep_batchnorm_fp32: whether BatchNorm keeps its params in float32.
        batch_stats: the running statistics, if `tree` has only params.
        keep_fp32: a regex searched in the path ("Dense_0/kernel"), a predicate
            `(path, leaf) -> bool`, or a list of them.

    Returns:
        The tree with the new dtypes. It does not copy leaves that do not change.

    Raises:
        ValueError: `dtype` is not one of the three, or a regex matches no leaf.
        TypeError: `keep_fp32` has the wrong type, or `tree` is a state.

    >>> import jax.numpy as jnp
    >>> params = {"bn1": {"scale": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 2))}}
    >>> half = cast_model(params, jnp.float16, keep_batchnorm_fp32=True)
    >>> print(half["bn1"]["scale"].dtype, half["head"]["kernel"].dtype)
    float32 float16
    """
    if isinstance(tree, TrainState):
        raise TypeError(
            "jamp.cast_model(tree, dtype) takes params or variables, got "
            f"{kind(tree)}: pass state.params. It would cast moments and scales too."
        )
    keep_fp32 = () if keep_fp32 is None else parse_rules("keep_fp32", keep_fp32)
    dtype = parse_model_dtype(dtype)
    is_variables = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)
    if is_variables:
        batch_stats = tree.get("batch_stats", batch_stats)
    params = tree["params"] if is_variables else tree
    keep = keep_rule(params, keep_batchnorm_fp32, batch_stats, keep_fp32)
    check_rules("keep_fp32", keep_fp32, params)

    def keep_variables(parts, leaf):
        collection, *rest = parts
        if collection == "params":
            return keep(tuple(rest), leaf)
        return collection == "batch_stats"

    return cast_params(tree, dtype, keep_variables if is_variables else keep)


def cast_to_level(params: PyTree, properties: Properties, batch_stats: PyTree) -> Any:
    """Casts params to the dtypes of their opt level; `batch_stats` may be None."""
    dtype, given = properties.cast_model_type, properties.keep_fp32
    if not dtype:
        return params
    keep = keep_rule(params, properties.keep_batchnorm_fp32, batch_stats, given)
    return cast_params(params, dtype, keep)


def warn_without_batchnorm(
    params: PyTree, properties: Properties, batch_stats: PyTree
) -> None:
    """Warns if `keep_batchnorm_fp32=True` keeps nothing in float32."""
    if not (half_dtype(properties) and properties.keep_batchnorm_fp32):
        return
    keep = keep_rule(params, True, batch_stats, ())
    paths = jax.tree_util.tree_leaves_with_path(params)
    if not any(keep(path_parts(path), x) for path, x in paths):
        warn(
            "keep_batchnorm_fp32=True has no effect: jamp recognizes no BatchNorm in "
            "the params. Pass batch_stats=, which makes the recognition exact, or name "
            "the leaves with keep_fp32=.",
            UnusedOptionWarning,
        )


def keep_rule(
    params: PyTree,
    keep_batchnorm_fp32: bool | None,
    batch_stats: PyTree,
    keep_fp32: Collection[Any],
) -> Keep:
    """Returns a predicate `(parts, leaf) -> bool` for leaves that stay in float32."""
    is_batchnorm = functools.cache(_batchnorm_test(params, batch_stats))

    def keep(parts, leaf):
        kept = keep_batchnorm_fp32 and is_batchnorm(parts[:-1])
        return kept or matches(keep_fp32, "/".join(parts), leaf)

    return keep


def cast_params(tree: PyTree, dtype: DTypeLike | None, keep: Keep) -> Any:
    """Casts float leaves to `dtype` unless it is None, and kept ones to float32.

    Flax's fp8 scales have their own collection. They are not weights, and keep their
    dtype.
    """

    def wanted(path, x):
        parts = path_parts(path)
        if not is_castable(x) or is_overwritten(parts):
            return None
        to = FLOAT32 if keep(parts, x) else dtype
        return None if x.dtype == to else to

    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [x for _, x in paths]
    dtypes = [wanted(path, x) for path, x in paths]
    return structure.unflatten(map_in_one_program(cast, leaves, dtypes))


def _batchnorm_test(
    params: PyTree, batch_stats: PyTree
) -> Callable[[tuple[str, ...]], bool]:
    """Returns a predicate for the paths of modules that are a BatchNorm."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_equinox_batchnorm)
    found = {path_parts(path) for path, x in nodes if _is_equinox_batchnorm(x)}
    paths = jax.tree_util.tree_leaves_with_path(batch_stats)
    names = {f"/{path_string(path)}" for path, _ in paths}
    exact: set[str] = set()
    for mean, var in _STATISTICS:
        modules = {name.removesuffix(mean) for name in names if name.endswith(mean)}
        exact |= {module for module in modules if module + var in names}

    def is_batchnorm(module):
        if found and any(module[:i] in found for i in range(len(module) + 1)):
            return True
        if batch_stats is None:
            own = module[-1].split("/")[-1] if module else ""
            return bool(_BATCHNORM.search(own))
        # Flax params may have an outer key "params", which statistics never have.
        return "".join(f"/{x}" for x in module if x != "params") in exact

    return is_batchnorm


# The names of the mean and the variance in Flax and in Haiku.
_STATISTICS = (("/mean", "/var"), ("/~/mean_ema/average", "/~/var_ema/average"))


def _is_equinox_batchnorm(x: object) -> bool:
    cls = type(x)
    return cls.__name__ == "BatchNorm" and cls.__module__.startswith("equinox.")
