"""Gradients of a scaled loss: `scaled_grad`, `scaled_value_and_grad`, `zero_grads`.

After apex/amp/handle.py:scale_loss. The loss is multiplied in float32, so it is never
NaN because it left the range of float16.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._core.devices import check_same_devices, moves_constants
from jamp._core.tree import (
    all_finite,
    differentiable,
    merge,
    select,
    split_overwrite,
    widen_tree,
)
from jamp._policy.forward import under_policy
from jamp._policy.models import forward_policy
from jamp._scaling import mapped_axis, retry
from jamp._scaling.by_hand import HasLossScales, find_loss_scale
from jamp._scaling.layout import row_major_on_cuda
from jamp._scaling.loss import split_aux
from jamp._scaling.scaled_grads import ScaledGrads
from jamp.optimizers._masters import fused_inside

# Whether a scaled loss is traced around this, as part of the key of JAX's caches.
_inside = jax.make_user_context(default_value=False)
_CALL = "jamp.scaled_value_and_grad(loss_fn)(state, ...)"


class GradOptions(TypedDict, total=False):
    """The options of `scaled_value_and_grad` beyond `has_aux`; explained there."""

    loss_id: int
    wrt: Any
    axis_name: Any
    predivide: float | None
    redo_on_overflow: int


@overload
def scaled_value_and_grad[**P](
    loss_fn: Callable[Concatenate[Any, P], Any],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[Array, ScaledGrads]]: ...
@overload
def scaled_value_and_grad[**P, Aux](
    loss_fn: Callable[Concatenate[Any, P], tuple[Any, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[tuple[Array, Aux], ScaledGrads]]: ...
def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Any = None,
    axis_name: Any = None,
    predivide: float | None = None,
    redo_on_overflow: int = 0,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for an AmpState: scales the loss, runs the model in half.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`;
            `loss` is a float scalar, in float32 rather than in half.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, of several: a key, a sequence of keys, or None
            for all. `loss_fn` always gets the params of all groups.
        axis_name: name of a mapped axis (`shard_map`, `pmap`) to average loss and
            gradients over. Gradients are averaged in float32, and `finite` is agreed.
            Under `jit` with sharded arrays leave it out: nothing is needed.
        predivide: what to divide gradients by before they are summed over `axis_name`,
            and the sum by the rest of its size after: the mean of gradients whose sum
            float32 cannot hold. apex's `gradient_predivide_factor`.
        redo_on_overflow: how often to retry a batch at most whose gradients are not
            finite, each time at the next lower loss scale, instead of a skip. It needs
            a dynamic scale; use it under `jit`, with arrays as aux.

    Returns:
        `f(state, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`: the
        loss unscaled in float32, the gradients as `ScaledGrads` in the dtypes of the
        params (float32 with `axis_name`).

    Raises (when called):
        TypeError: `state` is not an AmpState; the loss is not a float scalar.
        IndexError: `loss_id` is out of range.
        ValueError: `wrt` names no group; `axis_name` is not bound; `redo_on_overflow`
            or `predivide` is out of range; arguments are on other devices than the
            state.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"w": jnp.ones(2)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", loss_scale=8, verbosity=0)
    >>> loss_fn = lambda params: 3 * params["w"].sum(dtype="float32")
    >>> loss, grads = scaled_value_and_grad(loss_fn)(state)
    >>> print(grads.tree["w"], grads.unscale()[0]["w"])
    [24. 24.] [3. 3.]
    """

    retry.check_redo(redo_on_overflow)
    if predivide is not None:
        mapped_axis.check_predivide(predivide, axis_name)

    @functools.wraps(loss_fn)
    @moves_constants
    def value_and_grad(state, *args, **kwargs):
        rule, scale_state = find_loss_scale(state, loss_id, _CALL)
        check_same_devices(("state", state), ("args", args), *kwargs.items())
        is_nested = _inside.value
        every = groups.group_keys(state.tx)
        keys = groups.resolve_wrt(wrt, every)
        redo = retry.redoes(rule, redo_on_overflow)
        trained = {k: differentiable(groups.get(state.params, k)) for k in keys}
        if axis_name is not None:
            mapped_axis.check_bound(axis_name)
            trained = mapped_axis.varying(trained, axis_name)

        run_loss = under_policy(loss_fn, state.properties, state.params)

        def scaled_loss(trained, scale_state):
            whole = groups.split(state.params, every)
            whole |= {k: merge(trained[k], whole[k]) for k in keys}
            out = run_loss(groups.pack(whole, state.params), *args, **kwargs)
            loss, aux = split_aux(out, has_aux)
            if redo:
                retry.check_aux_of_redo(aux)
            return rule.scale_loss(loss, scale_state), (loss, aux)

        def attempt(scale_state):
            with forward_policy(state.properties), _inside(True):
                grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(
                    trained, scale_state
                )
            grads = row_major_on_cuda(grads)
            if axis_name is not None:
                grads, loss = mapped_axis.averaged(grads, loss, axis_name, predivide)
            both = {k: split_overwrite(tree) for k, tree in grads.items()}
            grads = {k: tree for k, (tree, _) in both.items()}
            overwrite = {k: new for k, (_, new) in both.items() if new is not None}
            finite = _finite(grads, state.tx) if rule.checks else jnp.asarray(True)
            if axis_name is not None:
                finite = mapped_axis.agreed(finite, scale_state.scale, axis_name)
            if is_nested:
                grads, finite = _known_by_their_values(grads, finite)
            return (loss, aux, grads, overwrite), finite

        if redo:
            out, finite, scale_state = retry.until_finite(
                attempt, rule, scale_state, redo_on_overflow
            )
        else:
            out, finite = attempt(scale_state)
        loss, aux, grads, overwrite = out
        named = tuple(wrt) if isinstance(wrt, list) else wrt
        scaled = ScaledGrads(
            tree=groups.shape_like_wrt(grads, named, state.params),
            scale=rule.current(scale_state),
            finite=finite,
            loss_id=loss_id,
            groups=named,
            scale_state=scale_state if redo else None,
            overwrite=overwrite,
        )
        return ((loss, aux) if has_aux else loss), scaled

    return value_and_grad


@overload
def scaled_grad[**P](
    loss_fn: Callable[Concatenate[Any, P], Any],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], ScaledGrads]: ...
@overload
def scaled_grad[**P, Aux](
    loss_fn: Callable[Concatenate[Any, P], tuple[Any, Aux]],
    *,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Callable[Concatenate[HasLossScales, P], tuple[ScaledGrads, Aux]]: ...
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
    >>> print(scaled_grad(lambda w: (w**2).sum())(state).tree)
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


@moves_constants
def zero_grads(
    state: HasLossScales,
    loss_id: int = 0,
    wrt: Any = None,
    *,
    redo_on_overflow: int = 0,
) -> ScaledGrads:
    """Zeros in float32 to begin a sum of `ScaledGrads`, as the carry of a scan.

    Args:
        state: an AmpState.
        loss_id, wrt, redo_on_overflow: as given to `scaled_grad`.

    Returns:
        ScaledGrads at the present scale.

    >>> import jax.numpy as jnp, jamp, optax
    >>> tx = optax.sgd(1.0)
    >>> state = jamp.initialize(jnp.ones(2), tx, "O2", loss_scale=128, verbosity=0)
    >>> grads = jamp.scaled_grad(lambda w, x: (w * x).sum(dtype="float32"))
    >>> step = lambda total, x: (total + grads(state, x), None)
    >>> total, _ = jax.lax.scan(step, zero_grads(state), jnp.ones((4, 2), jnp.float16))
    >>> print((total / 4).unscale()[0])
    [1. 1.]
    """
    retry.check_redo(redo_on_overflow)
    rule, scale_state = find_loss_scale(state, loss_id, "jamp.zero_grads(state)")
    named = tuple(wrt) if isinstance(wrt, list) else wrt
    zeros, overwrite = {}, {}
    for k in groups.resolve_wrt(wrt, groups.group_keys(state.tx)):
        tree, new = split_overwrite(differentiable(groups.get(state.params, k)))
        zeros[k] = widen_tree(jax.tree.map(jnp.zeros_like, tree))
        if new is not None:
            overwrite[k] = new
    return ScaledGrads(
        tree=groups.shape_like_wrt(zeros, named, state.params),
        scale=rule.current(scale_state),
        finite=jnp.asarray(True),
        loss_id=loss_id,
        groups=named,
        scale_state=scale_state if retry.redoes(rule, redo_on_overflow) else None,
        overwrite=overwrite,
    )


def _known_by_their_values(
    grads: PyTree, finite: Bool[Array, ""]
) -> tuple[PyTree, Bool[Array, ""]]:
    """Gradients inside of another scaled loss: NaN, all of them, if one overflowed.

    A skip in there would be forgotten with the state that counts it. So the gradients
    around become NaN, their step is the skip, and the scale falls.
    """
    nan = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), grads)
    return select(finite, grads, nan), jnp.asarray(True)


def _finite(grads: dict[Any, PyTree], txs: Any) -> Bool[Array, ""]:
    """Whether all are finite; by the kernels of the optimizer that will step them."""
    flags = []
    for key, tree in grads.items():
        fused = fused_inside(groups.get(txs, key))
        flags.append(fused.all_finite(tree) if fused else all_finite(tree))
    return functools.reduce(jnp.logical_and, flags)
