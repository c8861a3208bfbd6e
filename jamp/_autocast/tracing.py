"""The dtype that a thread traces for, and the functions that are replaced meanwhile.

    jnp.matmul(x, w)    to most threads: jnp.matmul(x, w)
                        to one that traces: float_function(jnp.matmul)(x, w)

JAX asks functions for their dtypes while it traces: some must be marked or called
otherwise before there is a program. So while autocast traces, those that the lists
name by their place are replaced, in their modules. A replacement does as the original
does but in a thread that traces for autocast.
"""

import collections
import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

type Function = Callable[..., Any]


class Itself:
    """Any object, equal to itself alone: a key, whether it has a hash or not."""

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


type _Attribute = tuple[Itself, str]


class Replaced(NamedTuple):
    """A function that is called otherwise while autocast traces."""

    module: Itself  # where programs look it up; or a class or an object
    name: str
    how: Callable[[Function], Function]  # gives, of the original, what is called


class Tracing(NamedTuple):
    """The options of the autocast that a thread traces for."""

    half: Any  # the half dtype
    replaced: tuple[Replaced, ...]  # the functions that are called otherwise
    casts: bool  # whether kernels get half; not where the user wants float32


# `tracing.value` is the innermost of this thread, None outside of autocast. It is part
# of the key of JAX's trace caches: a function jitted outside is traced again inside.
tracing = jax.make_user_context(default_value=None)
# Whether an autocast that is called does nothing: inside of `disable_casts`.
disabled = jax.make_user_context(default_value=False)
# Whether products of an autocast that is called run in half: inside of `disable_fp8`.
fp8_disabled = jax.make_user_context(default_value=False)


def casting(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Lets kernels be called with half, or as the program calls them."""
    here = tracing.value
    return tracing(here and here._replace(casts=enabled))


@contextlib.contextmanager
def tracing_for(half: Any, replaced: Sequence[Replaced], casts: bool) -> Iterator[None]:
    """Traces for an autocast, in this thread."""
    with contextlib.ExitStack() as stack:
        for attribute in {(r.module, r.name) for r in replaced}:
            stack.enter_context(_replacement(attribute))
        stack.enter_context(tracing(Tracing(half, tuple(replaced), casts)))
        yield


_INHERITED = object()  # what an attribute held whose own namespace held nothing
_installed: dict[_Attribute, tuple[Any, Any]] = {}  # what it held before, and holds now
_traces = collections.Counter[_Attribute]()  # that want it so
_lock = threading.Lock()


@contextlib.contextmanager
def _replacement(attribute: _Attribute) -> Iterator[None]:
    """Replaces a function until the last trace ends that wants it, of any thread."""
    module, name = attribute[0].it, attribute[1]
    with _lock:
        if not _traces[attribute]:
            now: Any = _steered(attribute, getattr(module, name))
            if isinstance(inspect.getattr_static(module, name, None), staticmethod):
                now = staticmethod(now)
            _installed[attribute] = vars(module).get(name, _INHERITED), now
            setattr(module, name, now)
        _traces[attribute] += 1
    try:
        yield
    finally:
        with _lock:
            _traces[attribute] -= 1
            if not _traces[attribute]:
                del _traces[attribute]  # or the key would keep the module alive
                before, now = _installed.pop(attribute)
                # The program may have set or deleted the attribute: it stays so.
                if vars(module).get(name) is now:
                    if before is _INHERITED:
                        delattr(module, name)
                    else:
                        setattr(module, name, before)


def _steered(attribute: _Attribute, original: Function) -> Function:
    """Returns the function that replaces another one during a trace."""

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
    """Stands for an object that can be called, such as `jnp.add`, with all it has."""

    def __init__(self, original: Any, call: Function):
        self.__wrapped__, self._call = original, call

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        is_method = instance is not None and hasattr(self.__wrapped__, "__get__")
        return types.MethodType(self, instance) if is_method else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)
