"""Autocast of functions that take NNX models, and change what is in them."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jamp._autocast.lists import AutocastLists
from jamp._autocast.program import Scope
from jamp._autocast.transform import Promote, autocast_in as pure_in, scope_of
from jamp.nnx._variables import (
    from_pure,
    shown,
    take_out,
    values_by_path,
    written_back,
)


def autocast[**P, R](
    fn: Callable[P, R],
    dtype: DTypeLike | None = None,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[P, R]:
    """`jamp.autocast` for functions of NNX models.

    The models among the arguments are passed and returned as arrays, so what `fn`
    writes into them (running statistics, counters of keys) is written when it is done.

    Args:
        fn: takes NNX modules, arrays, and whatever else.
        dtype, lists, promote: as of `jamp.autocast`; None is float16.

    Returns:
        A function with the signature of `fn`.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> y = autocast(lambda model, x: model(x))(model, jnp.ones((1, 2)))
    >>> print(y.shape, y.dtype)
    (1, 2) float32
    """
    return autocast_in(scope_of(dtype or "float16", lists, promote), fn)


def autocast_in[**P, R](scope: Scope, fn: Callable[P, R]) -> Callable[P, R]:
    """As `autocast`, in a scope: of a model's half params, `fn` sees float32."""

    half = scope.policy.dtype if scope.policy.of_model else None

    @functools.wraps(fn)
    def autocast_fn(*args, **kwargs):
        nodes, others, put_back = take_out((args, kwargs))
        graphdef, state = nnx.split(nodes)
        written: list[Any] = []

        def pure(values, others):
            there = nnx.merge(graphdef, from_pure(state, shown(state, values, half)))
            before = values_by_path(there)
            args, kwargs = put_back(there, others)
            out = fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            after = values_by_path(there)
            _check_paths(before, after)
            written[:] = [path for path in after if after[path] is not before[path]]
            return out, [after[path] for path in written]

        out, values = pure_in(scope, pure)(nnx.as_pure(state), others)
        # Those alone: a Variable of an outer trace may be read here, but not be set.
        variables = dict(nnx.to_flat_state(state))
        left = {
            path: written_back(variables[path], value)
            for path, value in zip(written, values, strict=True)
        }
        nnx.update(nodes, nnx.from_flat_state(left))
        return out

    return autocast_fn


def _check_paths(before: Any, after: Any) -> None:
    if before.keys() != after.keys():
        names = ["/".join(map(str, path)) for path in before.keys() ^ after.keys()]
        raise ValueError(
            f"The function added or removed Variables, {sorted(names)}. Under autocast "
            "it can only write to those that are there."
        )
