"""Flax Linen under O2, O3 and O5: every module of a half model computes in half.

Flax promotes: one float32 value, such as the output of a BatchNorm kept in float32,
pulls all that follows up to float32. So an interceptor acts at each module, see
`_Patch`.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import PyTree

from jamp._core.dtypes import (
    FLOAT32,
    HALF_DTYPES,
    cast_floats,
    is_castable,
    names_dtype,
)
from jamp._policy.active import cast_inputs, cast_outputs, policy
from jamp._policy.levels import Properties


def is_linen(apply_fn: Callable[..., Any]) -> bool:
    """Whether `apply_fn` is a method of a Linen module, jitted or partial too."""
    inner: Any = apply_fn
    while inner is not None and not inspect.ismethod(inner):
        partial = isinstance(inner, functools.partial)
        inner = getattr(inner, "func" if partial else "__wrapped__", None)
    return isinstance(getattr(inner, "__self__", None), nn.Module)


@contextlib.contextmanager
def linen_in_half(properties: Properties) -> Iterator[None]:
    """Intercepts the methods of all Linen modules, where the level casts models."""
    if not properties.cast_model_type and properties.cast_model_outputs is None:
        yield
        return
    with nn.intercept_methods(_Patch(properties)):
        yield


class _Call(NamedTuple):
    """A method that is running."""

    scope: Any
    active: bool  # whether it belongs to a model that the policy is for


@dataclasses.dataclass
class _Patch:
    """The interceptor: one object per policy entered, so one per thread.

    The outermost call of a model that has leaves of the cast dtype gets its float
    inputs in that dtype, and gives float32 back. (An fp32 teacher in the loss has no
    such leaf.) Inside, under a half dtype, a module

    - that directly owns half leaves gets its float inputs in half;
    - that is kept in float32 gets them in float32, and keeps its float32 output,
      unless it is a BatchNorm: that one gives half back, as cuDNN's does;
    - with half leaves below it and a field `dtype=float32` runs with the half dtype in
      that field; one that is kept, with float32 in it, whatever its parent handed down;
    - that is an RNN cell gives its carry back in the dtypes that it came in.
    """

    properties: Properties
    calls: list[_Call] = dataclasses.field(default_factory=list)

    def __call__(self, next_fun, args, kwargs, context):
        module = context.module
        innermost = policy.value == self.properties
        # nn.scan and nn.RNN pass functions of their own through here, with the carry.
        is_method = hasattr(type(module), context.method_name)
        if not innermost or not is_method or module.scope is None:
            return next_fun(*args, **kwargs)
        if module.is_initializing():
            return next_fun(*args, **kwargs)
        facts = _facts(module, self.properties.cast_model_type)
        if context.method_name == "setup":  # comes before the call that it belongs to
            with _dtype_field(module, self._field_dtype(module, facts)):
                return next_fun(*args, **kwargs)
        outermost = not self.calls
        # A model that a module applies, such as a teacher, decides for itself.
        root = module.scope.parent is None and module.scope.path == ()
        decides = outermost or (root and facts.has_leaves)
        active = facts.has_cast_leaf if decides else self.calls[-1].active
        enters = outermost or self.calls[-1].scope is not module.scope
        self.calls.append(_Call(module.scope, active))
        try:
            if not active:
                return next_fun(*args, **kwargs)
            if outermost:
                args, kwargs = cast_inputs((args, kwargs), self.properties)
            out = self._call(next_fun, args, kwargs, context, facts, enters)
            return cast_outputs(out, self.properties) if outermost else out
        finally:
            self.calls.pop()

    def _call(self, next_fun, args, kwargs, context, facts, enters):
        """A call inside a model. `enters` is False for a module's calls of itself."""
        module, half = context.module, self.properties.half_dtype
        if half is None or not enters:
            return next_fun(*args, **kwargs)
        batchnorm = _is_batchnorm(module)
        dtype = half if facts.owns_half else FLOAT32 if facts.owns else None
        if dtype is not None and not (batchnorm and dtype == FLOAT32):
            args, kwargs = cast_floats((args, kwargs), dtype)
        with _dtype_field(module, self._field_dtype(module, facts)):
            out = next_fun(*args, **kwargs)
        if batchnorm and not facts.owns_half:
            return cast_floats(out, half)
        if isinstance(module, nn.RNNCellBase) and context.method_name == "__call__":
            return _keep_carry_dtypes(out, args, kwargs)
        return out

    def _field_dtype(self, module: nn.Module, facts: "_Facts") -> Any:
        """What the module's field `dtype` reads during the call."""
        field, half = getattr(module, "dtype", None), self.properties.half_dtype
        if half is None or _is_batchnorm(module) and not facts.owns_half:
            return field
        is_float32 = field is not None and names_dtype(field, (FLOAT32,))
        if not facts.has_leaves:
            return half if is_float32 else field
        if facts.has_half:
            # Cells that multiply their children's kernels by themselves, and modules
            # with a kept bias, would promote to float32 where dtype is None.
            promotes = isinstance(module, nn.RNNCellBase) or facts.owns_both
            return half if is_float32 or (promotes and field is None) else field
        if field is not None and names_dtype(field, HALF_DTYPES):
            return FLOAT32
        return field


class _Facts(NamedTuple):
    """What the float leaves that a module is bound to say about it."""

    has_leaves: bool  # it or a module below has some
    has_half: bool
    has_cast_leaf: bool  # some in the dtype of the policy, which may be float32
    owns: bool  # some are its own
    owns_half: bool
    owns_both: bool  # half and float32


def _facts(module: nn.Module, cast_dtype: Any) -> _Facts:
    params = module.variables.get("params", {})
    below = _dtypes(params)
    entries = params.values() if isinstance(params, Mapping) else [params]
    own = _dtypes([entry for entry in entries if not isinstance(entry, Mapping)])
    return _Facts(
        has_leaves=bool(below),
        has_half=not below.isdisjoint(HALF_DTYPES),
        # With cast_model_type=False only outputs are cast: of any model with params.
        has_cast_leaf=cast_dtype in below if cast_dtype else bool(below),
        owns=bool(own),
        owns_half=not own.isdisjoint(HALF_DTYPES),
        owns_both=not own.isdisjoint(HALF_DTYPES) and FLOAT32 in own,
    )


def _dtypes(tree: PyTree) -> set[Any]:
    return {leaf.dtype for leaf in jax.tree.leaves(tree) if is_castable(leaf)}


def _is_batchnorm(module: nn.Module) -> bool:
    stats = module.variables.get("batch_stats", {})
    return isinstance(module, nn.BatchNorm) or {"mean", "var"} <= set(stats)


@contextlib.contextmanager
def _dtype_field(module: nn.Module, dtype: Any) -> Iterator[None]:
    """Lets a bound module, a private clone of the user's, read another `dtype`."""
    before = getattr(module, "dtype", None)
    if dtype is before:
        yield
        return
    object.__setattr__(module, "dtype", dtype)  # modules are frozen
    try:
        yield
    finally:
        object.__setattr__(module, "dtype", before)


def _keep_carry_dtypes(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`(carry, y)` of an RNN cell, for `scan`: the carry as it came in."""
    carry = args[0] if args else kwargs.get("carry")
    same = lambda new, old: new.astype(old.dtype) if is_castable(old) else new  # noqa: E731
    return jax.tree.map(same, out[0], carry), *out[1:]
