"""A network in half, by hand: its params, its inputs, and what stays in float32.

After apex/fp16_utils/fp16util.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jamp._core.dtypes import FLOAT32, cast, cast_floats, is_castable
from jamp._core.tree import path_parts
from jamp._policy.casting import cast_model, keep_rule
from jamp._policy.forward import cast_forward
from jamp._policy.levels import Properties, parse_model_type


@dataclasses.dataclass(frozen=True)
class tofp16:  # noqa: N801, apex's name
    """A layer that casts its float inputs to float16, for `nn.Sequential`.

    >>> print(tofp16()(jnp.ones(2)).dtype)
    float16
    """

    def __call__(self, inputs: Any) -> Any:
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

    def __call__(self, variables: Any, *inputs: Any, **kwargs: Any) -> Any:
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
    dtype = parse_model_type(dtype)
    own = {k: cast(x, dtype) if is_castable(x) else x for k, x in params.items()}
    return own if isinstance(params, dict) else type(params)(own)  # pyright: ignore[reportCallIssue]


def BN_convert_float(params: PyTree, batch_stats: PyTree = None) -> Any:  # noqa: N802
    """Params of BatchNorm in float32, all else as it is.

    Args: see `network_to_half`.

    >>> params = {"bn1": {"scale": jnp.ones(2, jnp.float16)}}
    >>> print(BN_convert_float(params)["bn1"]["scale"].dtype)
    float32
    """
    keep = keep_rule(True, batch_stats, ())

    def leaf(path, x):
        is_kept = is_castable(x) and keep(path_parts(path), x)
        return cast(x, FLOAT32) if is_kept else x

    return jax.tree_util.tree_map_with_path(leaf, params)
