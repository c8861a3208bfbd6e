"""Run a diagnostic tool on a program in each framework, and find marked lines."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jamp
import jamp.nnx
from tests.support.states import SGD

FRAMEWORKS = ("raw", "Linen", "NNX")


class Linen(nn.Module):
    fn: Any
    params: Any

    @nn.compact
    def __call__(self, x):
        return self.fn({k: self.param(k, lambda _, v=v: v) for k, v in self.params}, x)


class NNX(nnx.Module):
    def __init__(self, fn, params):
        self.fn, self.names = nnx.static(fn), nnx.static(tuple(params))
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, x):
        return self.fn({name: getattr(self, name)[...] for name in self.names}, x)


def run(
    tool: Callable, framework: str, level: str, loss: Callable, fn: Callable, *args: Any
) -> Any:
    """Returns what `tool` reports about `loss(fn(params, x))`.

    `args` are the params, the batch, and optionally options of `initialize`.
    """
    params, x, options = (*args, {})[:3]
    params = jax.tree.map(jnp.asarray, params)
    options = {"verbosity": 0} | options
    if framework == "NNX":
        both = jamp.nnx.initialize(NNX(fn, params), SGD, level, **options)
        loss_fn, state = jamp.nnx.pure(lambda model, x: loss(model(x)), *both)
        return tool(loss_fn)(state, x)
    apply_fn = Linen(fn, tuple(params.items())).apply
    if framework == "raw":
        apply_fn = lambda variables, x: fn(variables["params"], x)  # noqa: E731
    state = jamp.initialize(params, SGD, level, apply_fn=apply_fn, **options)
    loss_fn = lambda p, x: (loss(state.apply_fn({"params": p}, x)), "aux")  # noqa: E731
    return tool(loss_fn)(state, x)


def lines_of(fn: Callable) -> list[str]:
    """Returns the lines that end with the comment `here`."""
    lines, first = inspect.getsourcelines(fn)
    file = inspect.getsourcefile(fn)
    return [f"{file}:{first + i}" for i, s in enumerate(lines) if "# here" in s]
