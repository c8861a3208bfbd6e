"""Gradients of a scaled loss: `scaled_grad`, `scaled_value_and_grad`.

After apex/amp/handle.py:scale_loss. The loss is multiplied in float32, so it is never
NaN because it left the range of float16.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core import groups
from jamp._core.devices import check_same_devices, moves_constants
from jamp._core.groups import Wrt
from jamp._core.tree import (
    all_finite,
    differentiable,
    merge,
    split_overwrite,
    with_trained,
)
from jamp._policy.forward import under_policy
from jamp._policy.models import forward_policy
from jamp._scaling import mapped_axis
from jamp._scaling.by_hand import HasLossScales, current_scale, find_loss_scale
from jamp._scaling.layout import row_major_on_cuda
from jamp._scaling.loss import split_aux
from jamp._scaling.unscaled import unscaled
from jamp.optimizers._masters import fused_inside

_CALL = "jamp.scaled_value_and_grad(loss_fn)(state, ...)"


class GradOptions(TypedDict, total=False):
    """The options of `scaled_value_and_grad` beyond `has_aux`; explained there."""

    loss_id: int
    wrt: Any
    axis_name: Any
    predivide: float | None


@overload
def scaled_value_and_grad[**P](
    loss_fn: Callable[Concatenate[Any, P], Any],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[Array, Any]]: ...
@overload
def scaled_value_and_grad[**P, Aux](
    loss_fn: Callable[Concatenate[Any, P], tuple[Any, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[tuple[Array, Aux], Any]]: ...
def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Wrt = None,
    axis_name: Hashable = None,
    predivide: float | None = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for an AmpState: scales the loss, runs the model in half.

    The gradients are a plain tree, divided by the scale: sum them, clip them, take
    their norm. After an overflow all of them are NaN, and `AmpState.apply_gradients`
    skips a step whose gradients are not finite.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`;
            `loss` is a float scalar, in float32 rather than in half.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, of several: a key, a sequence of keys, or None
            for all. `loss_fn` always gets the params of all groups.
        axis_name: name of a mapped axis (`shard_map`, `pmap`) to average loss and
            gradients over, in float32. Under `jit` with sharded arrays leave it out:
            nothing is needed.
        predivide: what to divide gradients by before they are summed over `axis_name`,
            and the sum by the rest of its size after: the mean of gradients whose sum
            float32 cannot hold. apex's `gradient_predivide_factor`.

    Returns:
        `f(state, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`: the
        loss unscaled in float32; the gradients in float32 (float64 of float64 params),
        in the structure of the params, with None where a param is not a float. With
        `wrt=key` the tree of that group; with several keys the container of all groups,
        None for the others (in a dict, no entry). A static scale does not look for an
        overflow: inf stays inf.

    Raises (when called):
        TypeError: `state` is not an AmpState; the loss is not a float scalar.
        IndexError: `loss_id` is out of range.
        ValueError: `wrt` names no group; `axis_name` is not bound; `predivide` is out
            of range; arguments are on other devices than the state.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"w": jnp.ones(2)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> loss_fn = lambda params, x: (x * params["w"]).sum(dtype="float32")
    >>> loss, grads = scaled_value_and_grad(loss_fn)(state, jnp.float16(0.25))
    >>> print(loss, grads["w"], optax.tree.norm(grads))
    0.5 [0.25 0.25] 0.35355338
    >>> loss, grads = scaled_value_and_grad(loss_fn)(state, jnp.float16(8))
    >>> print(loss, grads["w"])  # 8 * 2**16 overflows float16
    16.0 [nan nan]
    """
    compute = checked_value_and_grad(
        loss_fn,
        has_aux=has_aux,
        loss_id=loss_id,
        wrt=wrt,
        axis_name=axis_name,
        predivide=predivide,
    )

    @functools.wraps(loss_fn)
    def value_and_grad(state, *args, **kwargs):
        value, grads, _ = compute(state, *args, **kwargs)
        return (value if has_aux else value[0]), grads

    return value_and_grad


def checked_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Wrt = None,
    axis_name: Hashable = None,
    predivide: float | None = None,
) -> Callable[..., tuple[tuple[Array, Any], PyTree, Bool[Array, ""] | None]]:
    """`((loss, aux), grads, finite)`: the flag is None if the rule does not check."""
    if predivide is not None:
        mapped_axis.check_predivide(predivide, axis_name)

    @moves_constants
    def compute(state, *args, **kwargs):
        check_same_devices(("state", state), ("args", args), *kwargs.items())
        if axis_name is not None:
            mapped_axis.check_bound(axis_name)
        backward = raw_value_and_grad(
            loss_fn, has_aux=has_aux, loss_id=loss_id, wrt=wrt, axis_name=axis_name
        )
        (loss, aux), grads = backward(state, *args, **kwargs)
        if axis_name is not None:
            grads, loss = mapped_axis.averaged(grads, loss, axis_name, predivide)
        rule, scale = state.loss_scale_rules[loss_id], current_scale(state, loss_id)

        def find_finite(raw, divided):
            finite = _finite(raw, divided, scale, state.tx)
            if axis_name is None:
                return finite
            return mapped_axis.agreed(finite, scale, axis_name)

        raw = {k: split_overwrite(tree)[0] for k, tree in grads.items()}
        look = find_finite if rule.checks else None
        divided, finite = unscaled(raw, scale, loss_id, look)
        grads = {k: with_trained(grads[k], divided[k]) for k in grads}
        return (loss, aux), groups.pack_wrt(grads, wrt, state.params), finite

    return compute


def raw_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool,
    loss_id: int = 0,
    wrt: Wrt = None,
    axis_name: Hashable = None,
) -> Callable[..., tuple[tuple[Array, Any], dict[groups.Key, PyTree]]]:
    """`((loss, aux), grads)`: by group, times the scale, in the dtypes of the params.

    Over `axis_name` params are made to vary, and nothing is averaged.
    """

    def compute(state, *args, **kwargs):
        rule, scale_state = find_loss_scale(state, loss_id, _CALL)
        every = groups.group_keys(state.tx)
        keys = groups.resolve_wrt(wrt, every)
        trained = {k: differentiable(groups.get(state.params, k)) for k in keys}
        if axis_name is None:
            mapped_axis.warn_of_half_sums(trained)
        else:
            trained = mapped_axis.varying(trained, axis_name)
        run_loss = under_policy(loss_fn, state.properties, state.params)

        def scaled_loss(trained):
            whole = groups.split(state.params, every)
            whole |= {k: merge(trained[k], whole[k]) for k in keys}
            out = run_loss(groups.pack(whole, state.params), *args, **kwargs)
            loss, aux = split_aux(out, has_aux)
            return rule.scale_loss(loss, scale_state), (loss, aux)

        with forward_policy(state.properties):
            grads, value = jax.grad(scaled_loss, has_aux=True)(trained)
        return value, row_major_on_cuda(grads)

    return compute


@overload
def scaled_grad[**P](
    loss_fn: Callable[Concatenate[Any, P], Any],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], Any]: ...
@overload
def scaled_grad[**P, Aux](
    loss_fn: Callable[Concatenate[Any, P], tuple[Any, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[Any, Aux]]: ...
def scaled_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    **options: Unpack[GradOptions],
) -> Callable[..., Any]:
    """`scaled_value_and_grad` without the value.

    Args, errors: see `scaled_value_and_grad`.

    Returns:
        `f(state, *args, **kwargs) -> grads`, or `(grads, aux)` with `has_aux`.

    >>> import jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O0", verbosity=0)
    >>> print(scaled_grad(lambda w: (w**2).sum())(state))
    [2. 2.]
    """
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    @functools.wraps(loss_fn)
    def grad(state, *args, **kwargs):
        loss_id = options.get("loss_id", 0)
        find_loss_scale(state, loss_id, "jamp.scaled_grad(loss_fn)(state, ...)")
        value, grads = both(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


def _finite(
    raw: dict[groups.Key, PyTree],
    divided: dict[groups.Key, PyTree],
    scale: Float[Array, ""],
    txs: Any,
) -> Bool[Array, ""]:
    """Whether all are finite; by the kernels of the optimizer that will step them."""

    def of_group(key):
        fused = fused_inside(groups.get(txs, key))
        if fused is None:
            return all_finite(divided[key])
        return fused.all_finite(raw[key], scale)

    return functools.reduce(jnp.logical_and, map(of_group, raw))
