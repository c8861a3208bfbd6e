"""Marks operations and values of a program, so that `rewrite` knows how they run.

    float_function(jnp.matmul)(x, w)    y:f32 = dot_general x w        # jamp_float32
    half_kernel(attention)(q)           p:f16 = ... convert q          # jamp_kernel
    shown_params(p)                     w:f32 = name[name=jamp_half_param] p

A name scope sets the rule of the operations inside. The name of a value states the
kinds of inputs on which it depends. Both are part of the program, so the caches of
`jit` handle them correctly. Without autocast, they have no effect.
"""

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import name_p

from jamp._autocast import jax_internals
from jamp._autocast.lists import AutocastLists, What, rules_for
from jamp._autocast.primitives import Rule
from jamp._autocast.tracing import (
    Itself,
    Replaced,
    Tracing,
    casting,
    disabled,
    fp8_disabled,
    replacement,
    tracing,
)
from jamp._core.dtypes import FLOAT32
from jamp._core.tree import path_string, widen_tree

MARKERS = {
    Rule.HALF: "jamp_half",
    Rule.FLOAT32: "jamp_float32",
    Rule.PROMOTE: "jamp_promote",
    Rule.RECORDED: "jamp_recorded",
}
KERNEL = "jamp_kernel"  # set by `half_kernel`: autocast casts nothing inside
NO_FP8 = "jamp_no_fp8"  # set by `disable_fp8`


# ---- rules for functions and blocks of code


def half_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: autocast runs all of it in half and ignores the lists.

    >>> import jamp, jax, jax.numpy as jnp
    >>> square = jamp.half_function(lambda x: x * x)
    >>> print(square(jnp.float32(300.0)), jamp.autocast(square)(jnp.float32(300.0)))
    90000.0 inf
    """
    return _marked(fn, Rule.HALF)


def float_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: autocast runs all of it in float32, including matmuls.

    >>> import jamp, jax, jax.numpy as jnp
    >>> x = jnp.full((2, 2), 1.0001)  # rounds to 1 in half
    >>> exact = jamp.float_function(jnp.matmul)
    >>> print(jamp.autocast(jnp.matmul)(x, x)[0], jamp.autocast(exact)(x, x)[0])
    [2. 2.] [2.0004 2.0004]
    """
    return _marked(fn, Rule.FLOAT32)


def promote_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: each operation runs in the widest dtype of its operands."""
    return _marked(fn, Rule.PROMOTE)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Leaves the code inside in the dtypes of the program, usually float32.

    Calls of `autocast` functions inside cast nothing either. It can be nested, and an
    exception also ends it.

    >>> import jamp, jax, jax.numpy as jnp
    >>> def f(x):
    ...     with jamp.disable_casts():
    ...         return x @ x
    >>> print(jamp.autocast(f)(jnp.full((1, 1), 1.0001)))
    [[1.0002]]
    """
    with jax.named_scope(MARKERS[Rule.RECORDED]), casting(False), disabled(True):
        yield


@contextlib.contextmanager
def disable_fp8() -> Iterator[None]:
    """Turns fp8 off for the code inside: its matmuls run in half.

    It is a context manager and a decorator. It can be nested, and an exception also
    ends it.

    >>> import jamp
    >>> @jamp.disable_fp8()
    ... def evaluate(state, x):
    ...     return state.apply_fn(state.params, x)
    """
    with jax.named_scope(NO_FP8), fp8_disabled(True):
        yield


def _marked[**P, R](fn: Callable[P, R], rule: Rule) -> Callable[P, R]:
    @functools.wraps(fn)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(MARKERS[rule]), casting(rule is not Rule.FLOAT32):
            return fn(*args, **kwargs)

    return marked


# ---- functions that require half: cuDNN's attention, Pallas kernels, FFI calls


def half_kernel[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that requires half: autocast calls it with half operands.

    Autocast casts float32 arguments to half and half results to float32. It casts
    nothing inside the function or its derivative. Without autocast, and inside
    `disable_casts` or a `float_function`, arguments keep their dtypes.

    Args:
        fn: a function of pytrees of arrays.

    Returns:
        A function like `fn`.

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
        return _call_in_half(fn, args, kwargs)

    return kernel


def _call_in_half(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    half = _kernel_dtype()
    leaves, tree = jax.tree.flatten((args, kwargs))
    if half is None or not any(map(_is_float32_array, leaves)):
        return fn(*args, **kwargs)
    with jax.named_scope(KERNEL):
        leaves = [
            jnp.asarray(x).astype(half) if _is_float32_array(x) else x for x in leaves
        ]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return widen_tree(fn(*args, **kwargs))


def _attention(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks an attention function whose fourth argument is a bias, such as a mask.

    It clips the bias to half's range. A mask of -1e30 would become -inf in half, and a
    fully masked row would become NaN.
    """

    def kernel(query, key, value, bias: Any = None, *args, **kwargs):
        half = _kernel_dtype()
        if half is not None and _is_float32_array(bias):
            bias = jnp.maximum(bias, float(jnp.finfo(half).min))
        return _call_in_half(fn, (query, key, value, bias, *args), kwargs)

    return kernel


def _kernel_dtype() -> Any:
    """Returns the dtype for operands of kernels, or None to leave them unchanged."""
    here = tracing.value
    return here.half if here is not None and here.casts else None


def _is_float32_array(x: Any) -> bool:
    # Scalars, including NumPy scalars, may be options of a kernel.
    return isinstance(x, jax.Array | np.ndarray) and x.dtype == FLOAT32


# ---- functions that autocast replaces in their modules


@contextlib.contextmanager
def traced_for(half: Any, lists: AutocastLists, casts: bool = True) -> Iterator[None]:
    """Replaces functions during a trace. Kernels get half operands if `casts`."""
    replaced = tuple(_replaced(lists))
    with contextlib.ExitStack() as stack:
        for attribute in {(r.module, r.name) for r in replaced}:
            stack.enter_context(replacement(attribute))
        stack.enter_context(tracing(Tracing(half, replaced, casts)))
        yield


def _replaced(lists: AutocastLists) -> Iterator[Replaced]:
    """Yields the attentions of cuDNN and tokamax, and the functions in the lists."""
    tokamax = sys.modules.get("tokamax"), "dot_product_attention"
    for module, name in (jax_internals.cudnn_attention(), tokamax):
        if hasattr(module, name):
            yield Replaced(Itself(module), name, _attention)
    hows = {
        Rule.HALF: half_function,
        Rule.FLOAT32: float_function,
        Rule.PROMOTE: promote_function,
        None: half_kernel,
    }
    for (module, name), rule in [
        *rules_for(lists, What.KERNEL),
        *rules_for(lists, What.ATTRIBUTE),
    ]:
        yield Replaced(Itself(module), name, hows[rule])


# ---- params, and the boundaries of half models


class Source(enum.Flag):
    """The kinds of inputs that a value depends on."""

    HALF = enum.auto()  # half params
    KEPT = enum.auto()  # float32 params
    DATA = enum.auto()  # other inputs of the program
    STAYS = enum.auto()  # params whose matmuls do not run in fp8


# `checkpoint_name` would set the same names, but with another primitive under
# `jax_remat3`.
_NAMES = {
    Source.HALF: "jamp_half_param",
    Source.KEPT: "jamp_kept_param",
    Source.DATA: "jamp_model_boundary",
    Source.HALF | Source.STAYS: "jamp_half_param_not_fp8",
    Source.KEPT | Source.STAYS: "jamp_kept_param_not_fp8",
}
# Maps each mark to the inputs that it states for its result.
SOURCES = {name: source for source, name in _NAMES.items()}


def shown_params[T](tree: T, policy: Any) -> T:
    """Casts half params to float32 for the user's program, and marks all params.

    The marks say which values are weights and biases under a `Policy`.
    """
    half, fp8 = policy.dtype if policy.of_model else None, policy.fp8

    def leaf(path, x):
        dtype = getattr(x, "dtype", None)
        if dtype is None or (dtype != FLOAT32 and (half is None or dtype != half)):
            return x
        source = Source.KEPT if dtype == FLOAT32 else Source.HALF
        if fp8 and fp8.keeps(path_string(path), x):
            source |= Source.STAYS
        return name_p.bind(x.astype(FLOAT32), name=_NAMES[source])

    return jax.tree.map_with_path(leaf, tree)


def at_boundary[T](tree: T) -> T:
    """Marks the float32 arrays of a tree as inputs or outputs of a model."""

    def leaf(x):
        name = _NAMES[Source.DATA]
        return name_p.bind(x, name=name) if _is_float32_array(x) else x

    return jax.tree.map(leaf, tree)
