"""Marks the operations of a function, so that autocast runs them as the user says.

    y = float_function(jnp.matmul)(x, w)     y = dot_general x w    # jamp_float32

A mark is a name scope: it is part of the program, so jit's caches neither lose nor leak
it. Without autocast it does nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

from jamp._autocast.lists import AutocastLists, What
from jamp._autocast.primitives import Rule
from jamp._autocast.program import MARKERS
from jamp._autocast.tracing import Attribute, Itself, Replaced, casting, disabled


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
    >>> x = jnp.full((1, 1), 1.0001)  # rounds to 1 in half
    >>> exact = jamp.float_function(jnp.matmul)
    >>> print(jamp.autocast(jnp.matmul)(x, x), jamp.autocast(exact)(x, x))
    [[1.]] [[1.0002]]
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


def _marked[**P, R](fn: Callable[P, R], rule: Rule) -> Callable[P, R]:
    @functools.wraps(fn)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(MARKERS[rule]), casting(rule is not Rule.FLOAT32):
            return fn(*args, **kwargs)

    return marked


_MARKED = {
    Rule.HALF: half_function,
    Rule.FLOAT32: float_function,
    Rule.PROMOTE: promote_function,
}


def marked_by_place(lists: AutocastLists) -> list[Replaced]:
    """The functions that the lists mark where programs look them up."""
    return [
        Replaced(Attribute(Itself(module), name), _MARKED[rule])
        for (module, name), rule in lists.rules_for(What.ATTRIBUTE)
        if rule is not None
    ]
