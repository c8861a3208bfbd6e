"""Traces the loss and the gradients of a step as one program."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast.traced import traced
from jamp._core import groups
from jamp._core.groups import Wrt
from jamp._core.tree import is_traced, path_string
from jamp._policy.levels import Properties, half_dtype
from jamp._scaling.loss import find_loss_scale
from jamp._scaling.rules import DynamicLossScale, check_state, current_scale
from jamp._scaling.value_and_grad import ScaledGrad
from jamp._state.amp_state import AmpState

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


class Step(NamedTuple):
    """A program that returns the loss and the scaled gradients."""

    program: jc.Jaxpr
    inputs: list[tuple[Any, str]]  # with the paths of the arguments
    paths: list[str]  # the paths of the gradients
    scale: float = 1.0  # the state's loss scale
    scale_path: str = ""  # the input with the loss scale

    def inputs_at(self, scale: float) -> list[tuple[Any, str]]:
        """Returns the inputs with another loss scale."""
        scaled = {self.scale_path: jnp.asarray(scale, jnp.float32)}
        return [(scaled.get(path, x), path) for x, path in self.inputs]


def function_first[**P, T](fn: Callable[P, T]) -> Callable[P, T]:
    """Raises if `fn(loss_fn, **options)` also gets arguments of the loss."""

    name = fn.__name__

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        # `explain` takes a dtype and `compare` a level.
        rest = [x for x in args[1:] if not isinstance(x, str | type | np.dtype)]
        if rest or not all(map(callable, args[:1])):
            given = ", ".join(type(x).__name__ for x in args)
            raise TypeError(
                f"jamp.diagnostics.{name} takes a function and options, got ({given}). "
                f"Write {_call_of(name)}."
            )
        if "has_aux" in kwargs:
            raise TypeError(
                f"jamp.diagnostics.{name} has no has_aux: it recognizes a loss "
                f"function that returns (loss, aux). Write {_call_of(name)}."
            )
        return fn(*args, **kwargs)

    return checked


def _call_of(name: str) -> str:
    level = ', "O0"' if name == "compare" else ""
    return f"{name}(loss_fn{level})(state, *args)"


def trace_step(
    loss_fn: Callable[..., Any],
    state: AmpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_id: int = 0,
    wrt: Wrt = None,
) -> Step:
    """Traces a step. Arguments may be shapes. Python numbers become constants."""

    def with_aux(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out), None

    step = ScaledGrad(with_aux, has_aux=True, loss_id=loss_id, wrt=wrt).raw

    def run(state, given):
        (loss, _), grads, layouts = step(state, *given["args"], **given["kwargs"])
        trees = {key: layouts[key].structure.unflatten(x) for key, x in grads.items()}
        return loss, groups.pack_wrt(trees, wrt, state.params)

    every = state, {"args": args, "kwargs": kwargs}
    found = traced(run, every, lambda x: isinstance(x, _ARRAYS))
    inputs = [
        (x, path_string(path[1:]))
        for path, x in jax.tree.leaves_with_path(every)
        if isinstance(x, _ARRAYS)
    ]
    _, outs = found.rebuild(found.jaxpr.outvars)
    paths = [path_string(path) for path, _ in jax.tree.leaves_with_path(outs)]
    return Step(found.jaxpr, inputs, paths)


def trace_scaled_step(
    name: str,
    loss_fn: Callable[..., Any],
    state: AmpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_id: int,
    wrt: Wrt,
) -> Step:
    """Traces a step on values, with the loss scale as an input at every level."""
    call = f"jamp.diagnostics.{_call_of(name)}"
    check_state(state, call)
    rule, before = find_loss_scale(state, loss_id)
    leaves = jax.tree.leaves((state, args, kwargs))
    if any(is_traced(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            f"{call} reads values, and got traced arrays or shapes: call it outside of "
            "jit, with the state and the batch of the step."
        )
    rules = list(state.loss_scale_rules)
    rules[loss_id] = DynamicLossScale()  # a static scale is a constant of the program
    dynamic = state.replace(loss_scale_rules=tuple(rules))
    step = trace_step(loss_fn, dynamic, args, kwargs, loss_id, wrt)
    with jax.transfer_guard("allow"):
        scale = float(current_scale(rule, before))
    return step._replace(scale=scale, scale_path=f"loss_scales/{loss_id}/scale")


def matmul_dtype(properties: Properties) -> Any:
    """Returns the half dtype of a level's matmuls, or None for float32."""
    autocast = properties.patch_functions_type if properties.patch_functions else None
    return half_dtype(properties) or autocast
