"""Marks in a program that say how its operations run: of the user and of a half model.

    float_function(jnp.matmul)(x, w)    y:f32 = dot_general x w        # jamp_float32
    half_kernel(attention)(q)           p:f16 = ... convert q          # jamp_kernel
    shown_params(p)                     w:f32 = name[name=jamp_half_param] p

Name scopes say how the operations in them run; names of values, what these depend on.
Either is part of the program, so jit's caches neither lose nor leak it. Without
autocast it does nothing.
"""

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.extend.core.primitives import name_p

from jamp._autocast import jax_internals
from jamp._autocast.lists import AutocastLists, What, rules_for
from jamp._autocast.primitives import Rule
from jamp._autocast.tracing import (
    Itself,
    Replaced,
    casting,
    disabled,
    fp8_disabled,
    tracing,
    tracing_for,
)
from jamp._core.dtypes import FLOAT32
from jamp._core.tree import path_string, widen_tree

MARKERS = {
    Rule.HALF: "jamp_half",
    Rule.FLOAT32: "jamp_float32",
    Rule.PROMOTE: "jamp_promote",
    Rule.RECORDED: "jamp_recorded",
}
KERNEL = "jamp_kernel"  # of `half_kernel`: what is inside, autocast leaves alone
NO_FP8 = "jamp_no_fp8"  # of `disable_fp8`


# ---- how a function runs


def half_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: under autocast all of it runs in half, whatever the lists say.

    >>> import jamp, jax, jax.numpy as jnp
    >>> square = jamp.half_function(lambda x: x * x)
    >>> print(square(jnp.float32(300.0)), jamp.autocast(square)(jnp.float32(300.0)))
    90000.0 inf
    """
    return _marked(fn, Rule.HALF)


def float_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: under autocast all of it runs in float32, matmuls too.

    >>> import jamp, jax, jax.numpy as jnp
    >>> x = jnp.full((2, 2), 1.0001)  # rounds to 1 in half
    >>> exact = jamp.float_function(jnp.matmul)
    >>> print(jamp.autocast(jnp.matmul)(x, x)[0], jamp.autocast(exact)(x, x)[0])
    [2. 2.] [2.0004 2.0004]
    """
    return _marked(fn, Rule.FLOAT32)


def promote_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: each operation runs in the widest dtype among its operands."""
    return _marked(fn, Rule.PROMOTE)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Leaves what is traced inside as the program has it: in float32.

    Inside, `autocast` does nothing either. May be nested, and ends with an exception
    too.

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

    A context manager and a decorator. May be nested, and ends with an exception too.

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


# ---- functions that only run in half: cuDNN's attention, kernels of Pallas and FFI


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
    """An attention whose fourth argument is a bias, often a mask of -1e30.

    Beyond half's range that would be -inf, and a row of nothing else nan.
    """

    def kernel(query, key, value, bias: Any = None, *args, **kwargs):
        half = _kernel_dtype()
        if half is not None and _is_float32_array(bias):
            bias = jnp.maximum(bias, float(jnp.finfo(half).min))
        return _call_in_half(fn, (query, key, value, bias, *args), kwargs)

    return kernel


def _kernel_dtype() -> Any:
    """The dtype that kernels are to get; None where they get what they are given."""
    here = tracing.value
    return here.half if here is not None and here.casts else None


def _is_float32_array(x: Any) -> bool:
    # Numbers, NumPy's too, may be a kernel's options.
    return isinstance(x, jax.Array | np.ndarray) and x.dtype == FLOAT32


# ---- functions that are marked, or called with half, where programs look them up


def traced_for(
    half: Any, lists: AutocastLists, casts: bool = True
) -> AbstractContextManager[None]:
    """Traces a function with its marks, and with half for kernels if `casts`."""
    return tracing_for(half, list(_replaced(lists)), casts)


def _replaced(lists: AutocastLists) -> Iterator[Replaced]:
    """The attentions of cuDNN and of tokamax, and what the lists have."""
    tokamax = sys.modules.get("tokamax"), "dot_product_attention"
    for module, name in filter(None, (jax_internals.cudnn_attention(), tokamax)):
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


# ---- a model of half params: its products are cast, and no others


class Source(enum.Flag):
    """The inputs that a value depends on."""

    HALF = enum.auto()  # params in half
    KEPT = enum.auto()  # params that stay float32
    DATA = enum.auto()  # all else that is not known while tracing
    STAYS = enum.auto()  # params that fp8 is to leave as they are


# As `checkpoint_name` gives them: that uses another primitive under `jax_remat3`.
_NAMES = {
    Source.HALF: "jamp_half_param",
    Source.KEPT: "jamp_kept_param",
    Source.DATA: "jamp_model_boundary",
    Source.HALF | Source.STAYS: "jamp_half_param_not_fp8",
    Source.KEPT | Source.STAYS: "jamp_kept_param_not_fp8",
}
_SOURCES = {name: source for source, name in _NAMES.items()}


def marked_source(eqn: jc.JaxprEqn) -> Source | None:
    """The inputs that a mark names for its result; None for any other equation."""
    is_name = eqn.primitive.name == "name"
    return _SOURCES.get(eqn.params["name"]) if is_name else None


def shown_params[T](tree: T, policy: Any) -> T:
    """Params as the user's program sees them under a `Policy`: in float32.

    Those of a half model are marked, and, for the weights of products to be known,
    those under autocast with fp8.
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

    return jax.tree.map_with_path(leaf, tree) if half or fp8 else tree


def at_boundary[T](tree: T) -> T:
    """Marks the float32 arrays of a tree as inputs or outputs of a model."""

    def leaf(x):
        name = _NAMES[Source.DATA]
        return name_p.bind(x, name=name) if _is_float32_array(x) else x

    return jax.tree.map(leaf, tree)
