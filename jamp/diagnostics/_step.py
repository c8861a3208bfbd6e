"""A step as a program: the loss and the gradients of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._core import groups
from jamp._core.groups import Wrt
from jamp._core.tree import is_traced, path_string
from jamp._scaling.rules import DynamicLossScale, current_scale
from jamp._scaling.value_and_grad import ScaledGrad
from jamp._state.amp_state import AmpState


class Step(NamedTuple):
    """A program that gives the loss and the gradients."""

    program: jc.Jaxpr
    values: list[tuple[Any, str]]  # what it takes, and the paths of that
    paths: list[str]  # of the gradients
    scale_path: str = ""  # of the loss scale; "" if that is a constant of the program
    scale: float = 1.0  # the one of the state

    def values_at(self, scale: float) -> list[tuple[Any, str]]:
        """What the program takes, at a scale."""
        given = {self.scale_path: jnp.asarray(scale, jnp.float32)}
        return [(given.get(path, x), path) for x, path in self.values]


def traced(
    name: str,
    loss_fn: Callable[..., Any],
    state: AmpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_id: int = 0,
    wrt: Wrt = None,
) -> Step:
    """The step of a loss function, for the function of `jamp.diagnostics` of a name.

    Shapes do for arrays. Paths are those in the state, or in the arguments. Python's
    numbers are not traced, as they are not in a step's code.
    """
    _check_state(name, state)
    given = state, {"args": args, "kwargs": kwargs}
    step = ScaledGrad(with_aux(loss_fn), has_aux=True, loss_id=loss_id, wrt=wrt).raw
    named, structure = jax.tree.flatten_with_path(given)
    leaves = [x for _, x in named]
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    places = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]
    paths: list[str] = []

    def flat(*arrays):
        found = dict(zip(places, arrays, strict=True))
        filled = [found.get(i, x) for i, x in enumerate(leaves)]
        state, given = jax.tree.unflatten(structure, filled)
        (loss, _), grads = step(state, *given["args"], **given["kwargs"])
        packed = groups.pack_wrt(grads, wrt, state.params)
        of_grads = jax.tree.leaves_with_path(packed)
        paths[:] = [path_string(path) for path, _ in of_grads]
        return [loss, *(x for _, x in of_grads)]

    program = jax.make_jaxpr(flat)(*(leaves[i] for i in places))
    values = [(leaves[i], path_string(named[i][0][1:])) for i in places]
    return Step(program, values, paths)


def scaled_step(
    name: str,
    loss_fn: Callable[..., Any],
    state: AmpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_id: int = 0,
    wrt: Wrt = None,
) -> Step:
    """`traced`, of values, with the loss scale among what it takes, at any level."""
    _check_state(name, state)
    if any(map(is_traced, jax.tree.leaves((state, args, kwargs)))):
        raise TypeError(
            f"jamp.diagnostics.{name} looks at values, and got traced arrays: call it "
            "outside of jit, with the state and the batch that the step was given."
        )
    rule, before = state.loss_scale_rules[loss_id], state.loss_scales[loss_id]
    rules = list(state.loss_scale_rules)
    rules[loss_id] = DynamicLossScale()  # a static scale is a constant of the program
    state = state.replace(loss_scale_rules=tuple(rules))
    path, scale = f"loss_scales/{loss_id}/scale", float(current_scale(rule, before))
    step = traced(name, loss_fn, state, args, kwargs, loss_id, wrt)
    return step._replace(scale_path=path, scale=scale)


def _check_state(name: str, state: object) -> None:
    """Raises unless it is an AmpState."""
    if not isinstance(state, AmpState):
        raise TypeError(
            f"jamp.diagnostics.{name} takes `(loss_fn, state, *args)` with the "
            f"AmpState of jamp.initialize, got {type(state).__name__}. For NNX, use "
            f"jamp.nnx.{name}(loss_fn, model, optimizer, *args)."
        )


def with_aux(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that gives `(loss, None)`, whether it has an aux or not."""

    def both(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out), None

    return both
