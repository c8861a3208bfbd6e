"""A network in half, by hand: its params and inputs, masters beside them, clipping.

After apex/fp16_utils/fp16util.py. Lists of apex are trees here; a list is a tree, too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, PyTree

from jamp._core.dtypes import FLOAT32, cast, cast_floats, is_castable, widen
from jamp._core.tree import check_like, differentiable, mapping_like
from jamp._policy.casting import cast_model, cast_params, keep_rule
from jamp._policy.forward import cast_forward
from jamp._policy.levels import Properties
from jamp._policy.options import parse_model_dtype


@dataclasses.dataclass(frozen=True)
class tofp16:  # noqa: N801, apex's name
    """A layer that casts its float inputs to float16, for `nn.Sequential`.

    >>> print(tofp16()(jnp.ones(2)).dtype)
    float16
    """

    def __call__(self, inputs: PyTree) -> Any:
        return cast_floats(inputs, jnp.float16)


@dataclasses.dataclass(frozen=True)
class FP16Model:
    """A forward function whose positional inputs and outputs are float16.

    Its params are for `network_to_half`. It runs in half throughout, also behind a
    BatchNorm in float32.

    Attributes:
        apply_fn: `(variables, *inputs, **kwargs) -> outputs`, such as `model.apply`.

    >>> forward = FP16Model(lambda w, x: x * w)
    >>> print(forward(jnp.ones(2, jnp.float16), jnp.ones(2)).dtype)
    float16
    """

    apply_fn: Callable[..., Any]

    def __call__(self, variables: PyTree, *inputs: PyTree, **kwargs: Any) -> Any:
        inputs = cast_floats(inputs, jnp.float16)
        return cast_forward(self.apply_fn, _HALF)(variables, *inputs, **kwargs)


_HALF = Properties.from_opt_level("O2", cast_model_outputs=jnp.float16)


def network_to_half(params: PyTree, batch_stats: PyTree = None) -> Any:
    """Params in float16, but for those of BatchNorm.

    Args:
        params: a tree; or Flax variables, whose `batch_stats` stay in float32.
        batch_stats: the running statistics, which tell what is a BatchNorm; without
            them names do, see `jamp.cast_model`.

    Returns:
        The tree in other dtypes. apex's network casts its inputs too: that is
        `FP16Model`, or `tofp16` as the first layer.

    >>> params = {"bn1": {"scale": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 2))}}
    >>> print(jax.tree.map(lambda x: x.dtype.name, network_to_half(params)))
    {'bn1': {'scale': 'float32'}, 'head': {'kernel': 'float16'}}
    """
    return convert_network(params, jnp.float16, batch_stats)


def convert_network(
    params: PyTree, dtype: DTypeLike, batch_stats: PyTree = None
) -> Any:
    """Params in `dtype`, but for those of BatchNorm.

    Args, errors: see `network_to_half` and `jamp.cast_model`.
    """
    return cast_model(params, dtype, keep_batchnorm_fp32=True, batch_stats=batch_stats)


def convert_module(params: PyTree, dtype: DTypeLike) -> Any:
    """A module's own params in `dtype`, not those of the modules inside it.

    Args:
        params: the module's mapping of params.
        dtype: float16, bfloat16 or float32.

    Raises:
        TypeError: `params` is not a mapping.
        ValueError: `dtype` is none of these.

    >>> params = {"scale": jnp.ones(2), "inner": {"kernel": jnp.ones(2)}}
    >>> half = convert_module(params, jnp.float16)
    >>> print(half["scale"].dtype, half["inner"]["kernel"].dtype)
    float16 float32
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            "convert_module takes the mapping of a module's params, got "
            f"{type(params).__name__}."
        )
    dtype = parse_model_dtype(dtype)
    own = {k: cast(x, dtype) if is_castable(x) else x for k, x in params.items()}
    return mapping_like(params, own)


def BN_convert_float(params: PyTree, batch_stats: PyTree = None) -> Any:  # noqa: N802
    """Params of BatchNorm in float32, all else as it is.

    Args: see `network_to_half`.

    >>> params = {"bn1": {"scale": jnp.ones(2, jnp.float16)}}
    >>> print(BN_convert_float(params)["bn1"]["scale"].dtype)
    float32
    """
    return cast_params(params, None, keep_rule(params, True, batch_stats, ()))


def prep_param_lists(params: PyTree, flat_master: bool = False) -> tuple[PyTree, Any]:
    """The params of a model, and float32 masters of them.

    Args:
        params: a tree of floats.
        flat_master: whether to make one vector of the masters.

    Returns:
        `(model_params, master_params)`: the params as they are, and a tree like them in
        float32; or with `flat_master` a list of one vector, leaf after leaf.

    Raises:
        TypeError: a leaf is not a float array.
        ValueError: `flat_master` with params of several dtypes.

    >>> params = {"b": jnp.ones(2, jnp.float16), "w": jnp.ones((2, 2), jnp.float16)}
    >>> _, masters = prep_param_lists(params, flat_master=True)
    >>> print(masters)
    [Array([1., 1., 1., 1., 1., 1.], dtype=float32)]
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_castable(leaf):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {leaf!r}, expected an array of "
                "floats."
            )
    if not flat_master:
        copies = jax.tree.map(lambda p: jnp.array(p, FLOAT32, copy=True), params)
        return params, copies
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if len(dtypes) > 1:
        raise ValueError(
            "Error in prep_param_lists: the model holds parameters of different types, "
            f"{sorted(dtypes)}. Use flat_master=False, or FP16_Optimizer."
        )
    return params, [_flat(params)[0]]


def model_grads_to_master_grads(
    model_grads: PyTree, master_params: PyTree, flat_master: bool = False
) -> Any:
    """The gradients of a model as gradients of its masters: a cast, no unscaling.

    Args:
        model_grads: a tree like the model's params; None where there is no gradient.
        master_params: what `prep_param_lists` made.
        flat_master: as given to it.

    Returns:
        Gradients like `master_params`, in float32.

    Raises:
        ValueError: shapes differ; or with `flat_master` a gradient is missing.
    """
    if flat_master:
        flat, _ = _flat(model_grads)
        if flat.shape != master_params[0].shape:
            raise ValueError(
                f"The gradients have {flat.size} elements, the masters "
                f"{master_params[0].size}: with flat_master no gradient may be missing."
            )
        return [flat]
    is_none = lambda x: x is None  # noqa: E731

    def leaf(grad, master):
        if grad is not None and grad.shape != master.shape:
            raise ValueError(
                f"A gradient has shape {grad.shape}, its master {master.shape}."
            )
        return None if grad is None else jnp.asarray(grad).astype(FLOAT32)

    return jax.tree.map(leaf, model_grads, master_params, is_leaf=is_none)


def master_params_to_model_params(
    model_params: PyTree, master_params: PyTree, flat_master: bool = False
) -> PyTree:
    """Masters rounded to the dtypes of the model's params.

    Args:
        model_params: say the dtypes, and with `flat_master` the shapes.
        master_params: a tree like them; or with `flat_master` a list of one vector.
        flat_master: as given to `prep_param_lists`.

    Returns:
        A tree like `model_params`.

    Raises:
        ValueError: shapes differ.

    >>> model_params, masters = prep_param_lists(jnp.ones(2, jnp.float16))
    >>> print(master_params_to_model_params(model_params, masters + 1))
    [2. 2.]
    """
    if flat_master:
        own, unflat = _flat(model_params)
        if master_params[0].size != own.size:
            raise ValueError(
                f"The flat master has {master_params[0].size} elements, the params "
                f"{own.size}."
            )
        master_params = unflat(master_params[0])
    check_like(master_params, model_params, "masters", "they must be like the params.")
    return jax.tree.map(lambda m, p: cast(m, p.dtype), master_params, model_params)


def to_python_float(t: ArrayLike) -> float:
    """The number in an array of one element.

    >>> to_python_float(jnp.ones(1))
    1.0
    """
    if jnp.size(t) != 1:
        raise ValueError(
            f"to_python_float takes one number, got {jnp.size(t)} of them."
        )
    return jnp.reshape(jnp.asarray(t), ()).item()


def clip_grad_norm(
    grads: PyTree, max_norm: ArrayLike, norm_type: float | str = 2
) -> tuple[Float[Array, ""], PyTree]:
    r"""Scales gradients down to a norm, as torch's `clip_grad_norm_` does.

    $$g \leftarrow g \, \min\Big(1, \frac{\mathrm{max\_norm}}
      {\lVert g \rVert + 10^{-6}}\Big)$$

    Args:
        grads: a tree.
        max_norm: the largest norm, of all leaves together.
        norm_type: the p of the norm; "inf" for the largest element.

    Returns:
        `(norm, grads)`: the norm before, shape (), float32; and the gradients.

    Raises:
        ValueError: `norm_type` is not positive.

    >>> norm, grads = clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
    >>> print(norm, [f"{g:.3f}" for g in grads["w"]])
    5.0 ['0.600', '0.800']
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type!r}.")
    leaves = [jnp.abs(widen(g)) for g in jax.tree.leaves(differentiable(grads))]
    if not leaves:
        norm = jnp.zeros((), FLOAT32)
    elif order == float("inf"):
        norm = jnp.max(jnp.stack([jnp.max(g, initial=0.0) for g in leaves]))
        # XLA's maximum on a CPU loses NaN; a sum of |g| does not.
        norm = jnp.where(jnp.isnan(sum(map(jnp.sum, leaves))), jnp.nan, norm)
    else:
        norm = sum(jnp.sum(g**order) for g in leaves) ** (1 / order)
    factor = jnp.minimum(1.0, jnp.asarray(max_norm, FLOAT32) / (norm + 1e-6))
    clipped = jax.tree.map(lambda g: (widen(g) * factor).astype(g.dtype), grads)
    return norm, clipped


def _flat(tree: PyTree) -> tuple[Float[Array, " n"], Callable[[Array], PyTree]]:
    """A tree as one float32 vector, and the function back."""
    return ravel_pytree(jax.tree.map(lambda x: x.astype(FLOAT32), tree))
