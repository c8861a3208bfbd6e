"""Differences between versions of JAX."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core


def compute_capability(device: Any) -> tuple[int, ...]:
    """Returns the compute capability of an NVIDIA GPU, such as (9, 0), or ()."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    # ROCm names architectures: "gfx942".
    return tuple(map(int, parts)) if all(map(str.isdecimal, parts)) else ()


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the axes of a `shard_map` along which an array or a shape varies."""
    aval = x if hasattr(x, "strip_weak_type") else jax.typeof(x)
    manual = getattr(aval, "mat", None)  # a reference or a token has no such attribute
    return frozenset() if manual is None else frozenset(manual.varying)


def call_inlined[T](fn: Callable[..., T], *args: Any) -> T:
    """Calls `fn` without its `jax.custom_jvp`. Mosaic on JAX 0.11 cannot lower one."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    outs = _eval(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _eval(jaxpr: Any, consts: Sequence[Any], args: Iterable[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda x: x.val if isinstance(x, core.Literal) else values[x]  # noqa: E731
    for eqn in jaxpr.eqns:
        inputs = map(read, eqn.invars)
        if eqn.primitive.name == "custom_jvp_call":
            body = eqn.params["call_jaxpr"]
            outs = _eval(body.jaxpr, body.consts, inputs)
        else:
            outs = eqn.primitive.bind(*inputs, **eqn.params)
        outs = outs if eqn.primitive.multiple_results else [outs]
        values.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))
