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
from jamp._scaling.rules import DynamicLossScale
from jamp._scaling.value_and_grad import ScaledGrad
from jamp._state.amp_state import AmpState

type StepFn = Callable[[AmpState, dict[str, Any]], tuple[Any, Any]]


class Step(NamedTuple):
    """A program that gives the loss and the gradients.

    Attributes:
        program: what it is.
        values: what it takes, and the paths of that.
        paths: of the gradients.
        scale_path: that of the loss scale among what it takes; "" if that is constant.
        scale: the one of the state.
    """

    program: jc.Jaxpr
    values: list[tuple[Any, str]]
    paths: list[str]
    scale_path: str = ""
    scale: float = 1.0

    def values_at(self, scale: float) -> list[tuple[Any, str]]:
        """What the program takes, at a scale."""
        given = {self.scale_path: jnp.asarray(scale, jnp.float32)}
        return [(given.get(path, x), path) for x, path in self.values]


def step_fn(loss_fn: Callable[..., Any], loss_id: int = 0, wrt: Wrt = None) -> StepFn:
    """`(state, {"args":, "kwargs":}) -> (loss, gradients times the scale)`."""

    def both(state, arguments):
        options = {"loss_id": loss_id, "wrt": wrt}
        fn = ScaledGrad(with_aux(loss_fn), has_aux=True, **options).raw
        (loss, _), grads = fn(state, *arguments["args"], **arguments["kwargs"])
        return loss, groups.pack_wrt(grads, wrt, state.params)

    return both


def check_state(state: object, call: str) -> None:
    """Raises a TypeError unless it is an AmpState."""
    if not isinstance(state, AmpState):
        raise TypeError(
            f"jamp.diagnostics.{call} takes `(loss_fn, state, *args)` with the "
            f"AmpState of jamp.initialize, got {type(state).__name__}. For NNX, use "
            f"jamp.nnx.{call}(loss_fn, model, optimizer, *args)."
        )


def scaled_step(
    fn: StepFn, state: AmpState, arguments: dict[str, Any], loss_id: int, call: str
) -> Step:
    """The program of a step, with the loss scale among what it takes, at any level.

    Raises:
        TypeError: something is traced.
    """
    if any(map(is_traced, jax.tree.leaves((state, arguments)))):
        raise TypeError(
            f"jamp.diagnostics.{call} looks at values, and got traced arrays: call it "
            "outside of jit, with the state and the batch that the step was given."
        )
    rule, before = state.loss_scale_rules[loss_id], state.loss_scales[loss_id]
    rules = list(state.loss_scale_rules)
    rules[loss_id] = DynamicLossScale()  # a static scale is a constant of the program
    step = traced(fn, (state.replace(loss_scale_rules=tuple(rules)), arguments))
    path, scale = f"loss_scales/{loss_id}/scale", float(rule.current(before))
    return step._replace(scale_path=path, scale=scale)


def with_aux(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that gives `(loss, None)`, whether it has an aux or not."""

    def both(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out), None

    return both


def traced(fn: Callable[..., tuple[Any, Any]], arguments: tuple[Any, ...]) -> Step:
    """The program of `fn(*arguments) -> (loss, gradients)`; shapes do for arrays.

    Paths of arguments are those inside of each. Python's numbers are not traced, as
    they are not in a step's code.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [x for _, x in named]
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    places = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]
    paths: list[str] = []

    def flat(*arrays):
        found = dict(zip(places, arrays, strict=True))
        filled = [found.get(i, x) for i, x in enumerate(leaves)]
        loss, grads = fn(*jax.tree.unflatten(structure, filled))
        named = jax.tree_util.tree_leaves_with_path(grads)
        paths[:] = [path_string(path) for path, _ in named]
        return [loss, *(x for _, x in named)]

    program = jax.make_jaxpr(flat)(*(leaves[i] for i in places))
    values = [(leaves[i], path_string(named[i][0][1:])) for i in places]
    return Step(program, values, paths)
