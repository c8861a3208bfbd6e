"""Helpers for loops with half params and float32 masters, and clipping.

Based on apex/fp16_utils/fp16util.py. Functions take trees where apex takes lists.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, PyTree

from jamp._core.dtypes import FLOAT32, cast, cast_floats, is_castable, widen
from jamp._core.show import short_repr
from jamp._core.tree import check_like, differentiable, mapping_like, widen_tree
from jamp._policy.casting import cast_model, cast_params, keep_rule
from jamp._policy.forward import cast_forward
from jamp._policy.levels import Properties
from jamp._policy.options import parse_model_dtype
from pallas_kernels import norm as norm_of


def tofp16() -> Callable[[PyTree], Any]:
    """Returns a layer for `nn.Sequential` that casts float inputs to float16."""
    return _to_float16


def _to_float16(inputs: PyTree) -> Any:
    return cast_floats(inputs, jnp.float16)


@dataclasses.dataclass(frozen=True)
class FP16Model:
    """Calls `apply_fn(variables, *inputs, **kwargs)` in half."""

    apply_fn: Callable[..., Any]

    def __call__(self, variables: PyTree, *inputs: PyTree, **kwargs: Any) -> Any:
        forward = cast_forward(self.apply_fn, _HALF)
        return forward(variables, *_to_float16(inputs), **kwargs)


_HALF = Properties.from_opt_level("O2", cast_model_outputs=jnp.float16)


def network_to_half(params: PyTree, batch_stats: PyTree = None) -> Any:
    """Casts params to float16, except BatchNorm's, as `jamp.cast_model` does.

    To cast the inputs too, use `FP16Model`, or `tofp16` as the first layer.
    """
    return convert_network(params, jnp.float16, batch_stats)


def convert_network(
    params: PyTree, dtype: DTypeLike, batch_stats: PyTree = None
) -> Any:
    """Casts params to `dtype`, except BatchNorm's, as `jamp.cast_model` does."""
    return cast_model(params, dtype, keep_batchnorm_fp32=True, batch_stats=batch_stats)


def convert_module(params: Mapping[Any, Any], dtype: DTypeLike) -> Any:
    """Casts a module's own params to `dtype`, but not those in its submodules."""
    if not isinstance(params, Mapping):
        raise TypeError(
            "convert_module takes the mapping of a module's params, got "
            f"{short_repr(params)}."
        )
    dtype = parse_model_dtype(dtype)
    own = {k: cast(x, dtype) if is_castable(x) else x for k, x in params.items()}
    return mapping_like(params, own)


def BN_convert_float(params: PyTree, batch_stats: PyTree = None) -> Any:  # noqa: N802
    """Casts only BatchNorm's params to float32."""
    return cast_params(params, None, keep_rule(params, True, batch_stats, ()))


def prep_param_lists(params: PyTree, flat_master: bool = False) -> tuple[PyTree, Any]:
    """Returns the params and a tree of float32 masters, or a list of one flat master.

    Raises:
        TypeError: a leaf is not a float array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_castable(leaf):
            at = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(f"{at} is {leaf!r}, expected an array of floats.")
    masters = jax.tree.map(lambda p: jnp.array(p, FLOAT32, copy=True), params)
    return params, [ravel_pytree(masters)[0]] if flat_master else masters


def model_grads_to_master_grads(
    model_grads: PyTree, master_params: PyTree, flat_master: bool = False
) -> Any:
    """Casts gradients to float32, in the structure that `prep_param_lists` returns.

    It does not unscale them. Without `flat_master`, a gradient may be None.
    """
    if not flat_master:
        return widen_tree(model_grads)
    flat = [ravel_pytree(widen_tree(model_grads))[0]]
    check_like(flat, master_params, "gradients", "none may be missing.")
    return flat


def master_params_to_model_params(
    model_params: PyTree, master_params: PyTree, flat_master: bool = False
) -> PyTree:
    """Rounds the masters of `prep_param_lists` to the dtypes of the params."""
    masters, remedy = master_params, "they must be like the params."
    if flat_master:
        own, unravel = ravel_pytree(widen_tree(model_params))
        check_like(masters, [own], "masters", remedy)
        masters = unravel(masters[0])
    check_like(masters, model_params, "masters", remedy)
    return jax.tree.map(lambda m, p: cast(m, p.dtype), masters, model_params)


def to_python_float(t: ArrayLike) -> float:
    """Returns the number in an array of one element."""
    return np.asarray(t).item()


def clip_grad_norm(
    grads: PyTree, max_norm: ArrayLike, norm_type: float | str = 2
) -> tuple[Float[Array, ""], PyTree]:
    """Returns `(norm, grads)`, with g * min(1, max_norm / (norm + 1e-6)) as in torch.

    The norm covers all leaves together. Its order is `norm_type`; "inf" is the maximum.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type!r}.")
    leaves = jax.tree.leaves(differentiable(grads))
    if order in (2, float("inf")):
        norm = norm_of(leaves, order)
    else:
        norm = jnp.linalg.norm(ravel_pytree(widen_tree(leaves))[0], order)
    factor = jnp.minimum(1.0, jnp.asarray(max_norm, FLOAT32) / (norm + 1e-6))
    return norm, jax.tree.map(lambda g: (widen(g) * factor).astype(g.dtype), grads)
