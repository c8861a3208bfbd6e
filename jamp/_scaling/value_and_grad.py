"""Gradients of a scaled loss: `scaled_grad`, `scaled_value_and_grad`.

After apex/amp/handle.py:scale_loss. The loss is multiplied in float32, so it is never
NaN because it left the range of float16.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._core.devices import check_same_devices, check_transfers, moves_constants
from jamp._core.groups import Key, Wrt
from jamp._core.show import format_shapes
from jamp._core.tree import (
    differentiable,
    merge,
    split_overwrite,
    unscaled_finite,
    with_trained,
)
from jamp._policy.forward import under_policy
from jamp._scaling import mapped_axis
from jamp._scaling.loss import find_loss_scale, grad_of_product
from jamp._scaling.rules import HasLossScales, current_scale, unscale_tree
from jamp._scaling.twice import run_loss
from jamp._scaling.unscaled import nan_unless

_CALL = "jamp.scaled_value_and_grad(loss_fn)(state, ...)"
_CALLED = (
    "jamp called loss_fn({}). The params of the state come first: after the state, "
    "pass the arguments that follow them."
)
_TRACED = (
    "jamp traces loss_fn, as jax.jit does: in place of `if` and `float`, write "
    "jnp.where, or return the value with has_aux=True."
)


def check_call[**P, T](fn: Callable[P, T]) -> Callable[P, T]:
    """Raises for arguments of the returned function, and for options of JAX."""

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > 1:
            raise TypeError(
                f"{fn.__name__} takes the loss function alone and returns a function. "
                f"Write `{fn.__name__}(loss_fn)(state, *args)`; with NNX "
                f"`jamp.nnx.{fn.__name__}(loss_fn)(model, optimizer, *args)`."
            )
        if "argnums" in kwargs:
            raise TypeError(
                f"{fn.__name__} has no argnums: the first argument of loss_fn is the "
                "params of the state; leave it out. wrt= picks groups. Put everything "
                "that is trained into the params."
            )
        return fn(*args, **kwargs)

    return checked


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
@check_call
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
    their norm. If one of them or the loss is not finite, all of them are NaN, and
    `AmpState.apply_gradients` skips a step whose gradients are not finite.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`;
            `loss` is a float scalar, in float32 rather than in half.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, of several: a key, a sequence of keys, or None
            for all. `loss_fn` always gets the params of all groups.
        axis_name: name of a mapped axis (`shard_map`, `pmap`) to average loss and
            gradients over, in float32. Leave it out under `jit` with sharded arrays.
        predivide: divides gradients before the sum over `axis_name`, which float32 may
            not hold, and the rest of the axis size after it. apex's
            `gradient_predivide_factor`.

    Returns:
        `f(state, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`: the
        loss unscaled in float32; the gradients in float32 (float64 of float64 params),
        in the structure of the params, with None where a param is not a float. With
        `wrt=key` the tree of that group; with several keys the container of all groups,
        None for the others (in a dict, no entry). A static scale does not check: inf
        stays inf.

    Raises:
        ValueError: `predivide` is not a positive number, or without `axis_name`.

    Raises (when called):
        TypeError: `state` is not an AmpState; the loss is not a float scalar.
        IndexError: `loss_id` is out of range.
        ValueError: `wrt` names no group; `axis_name` is not bound; arguments are on
            other devices than the state; `loss_fn` calls `scale_loss` on its loss.

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
    compute = ScaledGrad(loss_fn, has_aux, loss_id, wrt, axis_name, predivide).checked

    @functools.wraps(loss_fn)
    def value_and_grad(state, /, *args, **kwargs):
        value, grads, _ = compute(state, *args, **kwargs)
        return (value if has_aux else value[0]), grads

    return value_and_grad


@dataclasses.dataclass(frozen=True)
class ScaledGrad:
    """The gradient of a scaled loss; see `scaled_value_and_grad`."""

    loss_fn: Callable[..., Any]
    has_aux: bool = False
    loss_id: int = 0
    wrt: Wrt = None
    axis_name: Hashable = None
    predivide: float | None = None

    def __post_init__(self) -> None:
        if self.predivide is not None:
            mapped_axis.check_predivide(self.predivide, self.axis_name)

    @moves_constants
    def checked(
        self, state: HasLossScales, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], PyTree, Bool[Array, ""] | None]:
        """`((loss, aux), grads, finite)`; the flag is None if the rule does not check.

        It says whether the loss and all its gradients are finite.
        """
        check_same_devices(("state", state), ("args", args), *kwargs.items())
        check_transfers((args, kwargs))
        if self.axis_name is not None:
            mapped_axis.check_bound(self.axis_name)
        (loss, aux), grads = self.raw(state, *args, **kwargs)
        if self.axis_name is not None:
            both = grads, loss
            grads, loss = mapped_axis.averaged(both, self.axis_name, self.predivide)
        raw = {k: split_overwrite(tree)[0] for k, tree in grads.items()}
        rule = state.loss_scale_rules[self.loss_id]
        scale = current_scale(rule, state.loss_scales[self.loss_id])
        divided, finite = unscale_tree(raw, scale), None
        if rule.checks:
            # `abs`, `max`, `where` and `clip` select in the backward pass: the
            # gradients of a loss that is NaN can be finite.
            txs = groups.split(state.tx, tuple(raw))
            flags = [unscaled_finite(txs[k], raw[k], divided[k], scale) for k in raw]
            finite = functools.reduce(jnp.logical_and, flags)
            finite &= mapped_axis.alike(lax.is_finite(loss), finite)
            if self.axis_name is not None:
                finite = mapped_axis.agreed(finite, scale, self.axis_name)
        divided = nan_unless(finite, divided, raw, scale, self.loss_id)
        grads = {k: with_trained(grads[k], divided[k]) for k in grads}
        return (loss, aux), groups.pack_wrt(grads, self.wrt, state.params), finite

    def raw(
        self, state: HasLossScales, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], dict[Key, PyTree]]:
        """`((loss, aux), grads)`: by group, times the scale, in the params' dtypes.

        With a `reduce_dtype`, in that. Over `axis_name` params are made to vary, and
        nothing is averaged.
        """
        rule, scale_state = find_loss_scale(state, self.loss_id, _CALL)
        whole = groups.split(state.params, groups.group_keys(state.tx))
        keys = groups.resolve_wrt(self.wrt, tuple(whole))
        trained = {k: differentiable(whole[k]) for k in keys}
        if self.axis_name is None:
            mapped_axis.warn_of_half_sums(trained)
        else:
            trained = mapped_axis.varying(trained, self.axis_name)
        policy = under_policy(run_loss(self.loss_fn), state.properties, state.params)

        def run(trained):
            merged = whole | {k: merge(trained[k], whole[k]) for k in keys}
            params = groups.pack(merged, state.params)
            try:
                return written(params, *args, **kwargs)
            except jax.errors.ConcretizationTypeError as error:
                error.add_note(_TRACED)
                raise
            except (TypeError, IndexError, AttributeError) as error:
                error.add_note(_CALLED.format(format_shapes((params, *args))))
                raise

        with policy as written:
            scale = current_scale(rule, scale_state)
            in_float32 = state.properties.reduce_dtype is not None
            return grad_of_product(run, trained, scale, self.has_aux, in_float32)


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
@check_call
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
    def grad(state, /, *args, **kwargs):
        loss_id = options.get("loss_id", 0)
        find_loss_scale(state, loss_id, "jamp.scaled_grad(loss_fn)(state, ...)")
        value, grads = both(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad
