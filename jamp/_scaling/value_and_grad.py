"""Gradients of a scaled loss: `scaled_grad` and `scaled_value_and_grad`.

Based on apex/amp/handle.py:scale_loss. The scaled loss is float32, so it does not
overflow.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._core.groups import Key, Wrt
from jamp._core.layout import Layout
from jamp._core.show import format_shapes
from jamp._core.transformation import Transformation
from jamp._core.tree import all_finite, widen_tree
from jamp._policy.forward import under_policy
from jamp._scaling import mapped_axis
from jamp._scaling.loss import find_loss_scale, grad_of_product
from jamp._scaling.rules import HasLossScales, check_state, current_scale, unscale_tree
from jamp._scaling.unscaled import nan_unless
from pallas_kernels import computed_once

_CALL = "jamp.scaled_value_and_grad(loss_fn)(state, ...)"
_CALLED = (
    "jamp called loss_fn({}). The first argument of loss_fn is the params of the "
    "state. Pass the other arguments after the state."
)
_TRACED = (
    "jamp traces loss_fn, as jax.jit does. Replace `if` with jnp.where, and return "
    "values with has_aux=True instead of calling `float`."
)


def check_call[**P, T](fn: Callable[P, T]) -> Callable[P, T]:
    """Raises if a caller passes the arguments of the loss, or `argnums` as in JAX."""

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > 1:
            raise TypeError(
                f"{fn.__name__} takes only the loss function, and returns a function. "
                f"Write `{fn.__name__}(loss_fn)(state, *args)`; with NNX "
                f"`jamp.nnx.{fn.__name__}(loss_fn)(model, optimizer, *args)`."
            )
        if "argnums" in kwargs:
            raise TypeError(
                f"{fn.__name__} has no argnums: it differentiates the first argument "
                "of loss_fn, the params of the state. Put everything that is trained "
                "into the params; wrt= picks groups."
            )
        return fn(*args, **kwargs)

    return checked


class GradOptions(TypedDict, total=False):
    """The options of `scaled_value_and_grad` except `has_aux`."""

    loss_id: int
    wrt: Any
    axis_name: Any


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
) -> Callable[..., Any]:
    """`jax.value_and_grad` for an AmpState: scales the loss, runs the model in half.

    The gradients are a plain tree, divided by the scale. You may sum or clip them, or
    take their norm. If a gradient or the loss is not finite, all gradients are NaN, and
    `AmpState.apply_gradients` skips the step. With a number as `loss_scale`, gradients
    are not checked.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
            `loss` is a float scalar, preferably in float32.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate: a key, a sequence of keys, or None for all.
            `loss_fn` always gets the params of all groups.
        axis_name: the name of a mapped axis (`shard_map`, `pmap`). The loss and the
            gradients are averaged over it in float32. Under `jit` with sharded arrays,
            leave it out.

    Returns:
        `f(state, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. The
        loss is unscaled, in float32. The gradients have the structure of the params,
        with None for non-float leaves; they are float32, or float64 for float64 params.
        With `wrt=key` they are the tree of that group; with several keys, the container
        of all groups, with None or no entry for the others.

    Raises (when called):
        TypeError: `state` is not an AmpState; the loss is not a float scalar.
        IndexError: `loss_id` is out of range.
        ValueError: `wrt` names no group; `axis_name` is not bound.

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
    compute = ScaledGrad(loss_fn, has_aux, loss_id, wrt, axis_name).checked

    @functools.wraps(loss_fn)
    def value_and_grad(state, /, *args, **kwargs):
        value, grads, _ = compute(state, *args, **kwargs)
        return (value if has_aux else value[0]), grads

    return value_and_grad


@dataclasses.dataclass(frozen=True)
class ScaledGrad:
    """Computes gradients of a scaled loss; see `scaled_value_and_grad`."""

    loss_fn: Callable[..., Any]
    has_aux: bool = False
    loss_id: int = 0
    wrt: Wrt = None
    axis_name: Hashable = None

    def checked(
        self, state: HasLossScales, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], PyTree, Bool[Array, ""] | None]:
        """Returns `((loss, aux), grads, finite)` with unscaled gradients.

        `finite` is whether the loss and all gradients are finite, or None if the rule
        does not check.
        """
        if self.axis_name is not None:
            mapped_axis.check_bound(self.axis_name)
        (loss, aux), grads, layouts = self.raw(state, *args, **kwargs)
        if self.axis_name is not None:
            wide = widen_tree((list(grads.values()), loss))
            averaged, loss = lax.pmean(wide, self.axis_name)
            grads = dict(zip(grads, averaged, strict=True))
        rule = state.loss_scale_rules[self.loss_id]
        scale = current_scale(rule, state.loss_scales[self.loss_id])
        own = {key: layouts[key].pick(leaves) for key, leaves in grads.items()}
        divided = {key: unscale_tree(leaves, scale) for key, leaves in own.items()}
        finite = None
        if rule.check:
            # The gradients of a NaN loss can be finite, because `abs`, `max`, `where`
            # and `clip` select in the backward pass.
            each = []
            txs = groups.split(state.tx, state.tx)
            for key, leaves in own.items():
                # A fused optimizer checks many small leaves in one kernel.
                tx = txs[key]
                check = tx.all_finite if isinstance(tx, Transformation) else None
                each.append(check(leaves, scale) if check else all_finite(divided[key]))
            finite = functools.reduce(jnp.logical_and, each)
            finite &= mapped_axis.alike(lax.is_finite(loss), finite)
            finite = computed_once(finite)  # a CPU would repeat it in each leaf's step
            if self.axis_name is not None:
                finite = mapped_axis.agreed(finite, scale, self.axis_name)
        every, raw = [[x for xs in y.values() for x in xs] for y in (divided, own)]
        unscaled = iter(nan_unless(finite, every, raw, scale, self.loss_id))
        trees = {
            key: layout.structure.unflatten(layout.fill(grads[key], unscaled))
            for key, layout in layouts.items()
        }
        return (loss, aux), groups.pack_wrt(trees, self.wrt, state.params), finite

    def raw(
        self, state: HasLossScales, /, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Array, Any], dict[Key, list[Array]], dict[Key, Layout]]:
        """Returns `((loss, aux), grads, layouts)` with scaled gradients by group.

        The gradients are all leaves of a group, with None for fixed ones. They have the
        dtypes of the params, or `reduce_dtype`, and are not averaged over `axis_name`.
        """
        check_state(state, _CALL)
        rule, scale_state = find_loss_scale(state, self.loss_id)
        whole = groups.split(state.params, state.tx)
        named = groups.resolve_wrt(self.wrt, tuple(whole))
        found = {key: Layout.of(whole[key]) for key in whole if key in named}
        layouts = {key: layout for key, (layout, _) in found.items()}
        floats = [layout.without_fixed(x) for layout, x in found.values()]
        if self.axis_name is None:
            trained = {key: whole[key] for key in found}
            mapped_axis.warn_of_half_sums(groups.pack(trained, state.params))
        else:
            floats = mapped_axis.varying(floats, self.axis_name)
        policy = under_policy(self.loss_fn, state.properties, state.params)

        def run(floats):
            new = dict(whole)
            for (key, (layout, old)), leaves in zip(found.items(), floats, strict=True):
                fixed = layout.pick(old, "fixed")
                every = layout.fill(leaves, fixed, "fixed")
                new[key] = layout.structure.unflatten(every)
            params = groups.pack(new, state.params)
            try:
                return written(params, *args, **kwargs)
            except jax.errors.ConcretizationTypeError as error:
                error.add_note(_TRACED)
                raise
            except TypeError as error:
                if not _accepts(self.loss_fn, params, *args, **kwargs):
                    error.add_note(_CALLED.format(format_shapes((params, *args))))
                raise

        with policy as written:
            scale = current_scale(rule, scale_state)
            in_float32 = state.properties.reduce_dtype is not None
            value, grads = grad_of_product(run, floats, scale, self.has_aux, in_float32)
            return value, dict(zip(found, grads, strict=True)), layouts


def _accepts(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Returns whether a function takes these arguments, or has no signature."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


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
    """Like `scaled_value_and_grad`, but returns `grads`, or `(grads, aux)`.

    See `scaled_value_and_grad` for the arguments and errors.

    >>> import jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O0", verbosity=0)
    >>> print(scaled_grad(lambda w: (w**2).sum())(state))
    [2. 2.]
    """
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    @functools.wraps(loss_fn)
    def grad(state, /, *args, **kwargs):
        check_state(state, "jamp.scaled_grad(loss_fn)(state, ...)")
        value, grads = both(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad
