"""Marks the operations of a function, so that autocast runs them as the user says.

A mark is a name scope: it is part of the program, so jit's caches neither lose nor leak
it, and nothing global changes. Without autocast it does nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

from jamp._autocast.lists import Rule
from jamp._autocast.program import MARKERS


def half_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Runs all of a function in half under autocast, whatever the lists say.

    Args:
        fn: a function of arrays.

    Returns:
        The same function, marked.

    >>> import jamp, jax, jax.numpy as jnp
    >>> square = jamp.half_function(lambda x: x * x)
    >>> print(square(jnp.float32(300.0)), jamp.autocast(square)(jnp.float32(300.0)))
    90000.0 inf
    """
    return _marked(fn, Rule.HALF)


def float_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Runs all of a function in float32 under autocast: matmuls too.

    Args:
        fn: a function of arrays.

    Returns:
        The same function, marked.

    >>> import jamp, jax, jax.numpy as jnp
    >>> x = jnp.full((1, 1), 1.0001)  # rounds to 1 in half
    >>> exact = jamp.float_function(jnp.matmul)
    >>> print(jamp.autocast(jnp.matmul)(x, x), jamp.autocast(exact)(x, x))
    [[1.]] [[1.0002]]
    """
    return _marked(fn, Rule.FLOAT32)


def promote_function[**P, R](fn: Callable[P, R]) -> Callable[P, R]:
    """Runs each operation of a function in the widest dtype among its operands.

    Args:
        fn: a function of arrays.

    Returns:
        The same function, marked.
    """
    return _marked(fn, Rule.PROMOTE)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Leaves what is traced inside as the program has it: in float32.

    May be nested, and ends with an exception too.

    >>> import jamp, jax, jax.numpy as jnp
    >>> def f(x):
    ...     with jamp.disable_casts():
    ...         return x @ x
    >>> print(jamp.autocast(f)(jnp.full((1, 1), 1.0001)))
    [[1.0002]]
    """
    with jax.named_scope(MARKERS[Rule.RECORDED]):
        yield


def _marked[**P, R](fn: Callable[P, R], rule: Rule) -> Callable[P, R]:
    @functools.wraps(fn)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(MARKERS[rule]):
            return fn(*args, **kwargs)

    return marked


@contextlib.contextmanager
def registered(patches: tuple[tuple[object, str, Rule], ...]) -> Iterator[None]:
    """Marks functions by their place in a module, while a program is traced.

    Code that looks them up elsewhere meanwhile, in another thread, gets them marked,
    which does nothing to it.
    """
    with contextlib.ExitStack() as stack:
        for module, name, rule in patches:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, _marked(original, rule))
        yield
