"""Functions that only run in half: cuDNN's attention, kernels of Pallas and FFI.

    y:f32 = kernel(x:f32)
    x':f16 = convert x; y':f16 = kernel(x'); y:f32 = convert y'

They look at the dtypes of their operands while they are traced. To autocast they are
closed: it calls them with half, and leaves what they do as the program has it.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._autocast import jax_internals
from jamp._autocast.lists import AutocastLists, What
from jamp._autocast.program import KERNEL, Policy
from jamp._autocast.regions import marked_by_place
from jamp._autocast.tracing import Attribute, Itself, Replaced, tracing, tracing_for
from jamp._core.dtypes import FLOAT32
from jamp._core.tree import widen_tree


def half_kernel[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Calls a function with half operands under autocast, for it runs in nothing else.

    Its float32 arrays are cast to the half dtype, and what it gives in half is cast
    back. Inside, nothing is cast, nor in its derivative. Without autocast, and inside
    of `disable_casts` or a `float_function`, it is called as it is.

    Args:
        fn: a function of arrays, in any trees.

    Returns:
        The same function, for autocast to call so.

    >>> import jamp, jax.numpy as jnp
    >>> @jamp.half_kernel
    ... def kernel(x):
    ...     print(x.dtype)
    ...     return x
    >>> print(jamp.autocast(kernel)(jnp.ones(2)).dtype)
    float16
    float32
    """

    @functools.wraps(fn)
    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        return _call(fn, args, kwargs)

    return kernel


def traced_for(policy: Policy, casts: bool = True) -> AbstractContextManager[None]:
    """In what to trace a function: with its marks, and half for kernels if `casts`."""
    replaced = [*_kernels_by_place(policy.lists), *marked_by_place(policy.lists)]
    return tracing_for(policy.dtype, replaced, casts)


def _kernels_by_place(lists: AutocastLists) -> Iterator[Replaced]:
    """The kernels that programs look up: cuDNN's, tokamax's, those of the lists."""
    tokamax = sys.modules.get("tokamax"), "dot_product_attention"
    for module, name in filter(None, (jax_internals.cudnn_attention(), tokamax)):
        if hasattr(module, name):
            yield Replaced(Attribute(Itself(module), name), _attention)
    for (module, name), _ in lists.rules_for(What.KERNEL):
        yield Replaced(Attribute(Itself(module), name), half_kernel)


def _attention(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An attention whose fourth argument is a bias, often a mask of -1e30.

    Beyond half's range that would be -inf, and a row of nothing else nan.
    """

    def kernel(query, key, value, bias=None, *args, **kwargs):
        if _half() is not None and bias is not None and _is_float32(bias):
            bias = jnp.maximum(bias, float(jnp.finfo(_half()).min))
        return _call(fn, (query, key, value, bias, *args), kwargs)

    return kernel


def _half() -> Any:
    """The dtype that kernels are to get; None where they get what they are given."""
    here = tracing.value
    return here.half if here is not None and here.casts else None


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    half = _half()
    leaves, tree = jax.tree.flatten((args, kwargs))
    if half is None or not any(map(_is_float32, leaves)):
        return fn(*args, **kwargs)
    with jax.named_scope(KERNEL):
        leaves = [jnp.asarray(x).astype(half) if _is_float32(x) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return widen_tree(fn(*args, **kwargs))


def _is_float32(x: Any) -> bool:
    # Numbers, NumPy's too, may be a kernel's options.
    return isinstance(x, jax.Array | np.ndarray) and x.dtype == FLOAT32
