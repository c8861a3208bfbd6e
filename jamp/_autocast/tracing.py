"""Stores the options of a thread's autocast, and replaces functions while it traces.

    jnp.matmul(x, w)    in most threads: jnp.matmul(x, w)
                        in a tracing thread: float_function(jnp.matmul)(x, w)

Some functions must be marked, or called with half operands, before JAX traces them. So
while autocast traces, it replaces the functions in the lists in their modules. In
threads without autocast, a replacement calls the original.
"""

import collections
import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

type Function = Callable[..., Any]


class Itself:
    """A key for any object, hashable or not, that compares by identity."""

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


type _Attribute = tuple[Itself, str]


class Replaced(NamedTuple):
    """A function that autocast replaces while it traces."""

    module: Itself  # the module, class or object where programs look it up
    name: str
    how: Callable[[Function], Function]  # maps the original to its replacement


class Tracing(NamedTuple):
    """The options of the autocast for which a thread traces."""

    half: Any  # the half dtype
    replaced: tuple[Replaced, ...]  # the functions that autocast replaces
    casts: bool  # whether kernels get half operands


# `tracing.value` belongs to the thread's innermost autocast; it is None outside. It is
# part of the key of JAX's trace caches, so JAX traces a jitted function again inside.
tracing = jax.make_user_context(default_value=None)
# Whether calls of autocast do nothing, as inside `disable_casts`.
disabled = jax.make_user_context(default_value=False)
# Whether matmuls do not run in fp8, as inside `disable_fp8`.
fp8_disabled = jax.make_user_context(default_value=False)


def casting(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Sets whether kernels get half operands or the operands of the program."""
    here = tracing.value
    return tracing(here and here._replace(casts=enabled))


_INHERITED = object()  # marks an attribute that the object inherits
_installed: dict[_Attribute, tuple[Any, Any]] = {}  # values before and during traces
_traces = collections.Counter[_Attribute]()  # the traces that replace it
_lock = threading.Lock()


@contextlib.contextmanager
def replacement(attribute: _Attribute) -> Iterator[None]:
    """Replaces a function until no trace of any thread needs its replacement."""
    module, name = attribute[0].it, attribute[1]
    with _lock:
        if not _traces[attribute]:
            static = inspect.getattr_static(module, name, None)
            if isinstance(static, classmethod) and isinstance(module, type):
                now: Any = classmethod(_steered(attribute, static.__func__))
            else:
                now = _steered(attribute, getattr(module, name))
                now = staticmethod(now) if isinstance(static, staticmethod) else now
            _installed[attribute] = vars(module).get(name, _INHERITED), now
            setattr(module, name, now)
        _traces[attribute] += 1
    try:
        yield
    finally:
        with _lock:
            _traces[attribute] -= 1
            if not _traces[attribute]:
                del _traces[attribute]  # a zero would keep the module alive
                before, now = _installed.pop(attribute)
                # If the program set or deleted the attribute, leave it as it is.
                if vars(module).get(name) is now:
                    if before is _INHERITED:
                        delattr(module, name)
                    else:
                        setattr(module, name, before)


def _steered(attribute: _Attribute, original: Function) -> Function:
    """Returns the function that replaces `original` during a trace."""

    def call(*args, **kwargs):
        here = tracing.value
        replaced = here.replaced if here else ()
        hows = [r.how for r in replaced if (r.module, r.name) == attribute]
        # The last rule in the lists decides.
        return (hows[-1](original) if hows else original)(*args, **kwargs)

    if inspect.isfunction(original):
        return functools.wraps(original)(call)
    return _Callable(original, call)


class _Callable:
    """Replaces a callable object, such as `jnp.add`, and forwards its attributes."""

    def __init__(self, original: Any, call: Function):
        self.__wrapped__, self._call = original, call

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        is_method = instance is not None and hasattr(self.__wrapped__, "__get__")
        return types.MethodType(self, instance) if is_method else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)
