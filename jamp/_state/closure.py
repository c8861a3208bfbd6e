"""`closure` makes the loss function for optimizers with a line search."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jamp._core import groups
from jamp._core.dtypes import cast, is_differentiable, is_half
from jamp._core.groups import Wrt
from jamp._core.layout import Layout
from jamp._scaling.rules import check_state
from jamp._scaling.value_and_grad import scaled_value_and_grad


def closure(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Wrt = None,
) -> Callable[..., Callable[[PyTree], Float[Array, ""]]]:
    """Returns the loss of a batch as a function of float32 params, for a line search.

    This is torch's closure, for `optax.lbfgs` and other optimizers that evaluate the
    loss more than once per step. They pass masters. The function rounds these to the
    dtypes of the params, and runs the loss under the state's policy. It differentiates
    the *scaled* loss and unscales in float32, so the gradient does not underflow.

    Args:
        loss_fn, has_aux, loss_id: as for `scaled_value_and_grad`. The closure drops
            aux.
        wrt: the key of the group that the optimizer steps, if the state has several.

    Returns:
        `f(state, *args, **kwargs) -> value_fn`, and `value_fn(params) -> loss`, shape
        (), float32. `params` are the floats of the group's params, in float32.

    Raises (when called):
        ValueError: `wrt` does not name one group.
        Other errors: see `scaled_value_and_grad`.

    >>> import jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(jnp.ones(2), optax.lbfgs(), "O1", verbosity=0)
    >>> loss_fn = lambda w, target: ((w - target) ** 2).sum()
    >>> for _ in range(3):
    ...     loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, 4.0)
    ...     value_fn = closure(loss_fn)(state, 4.0)
    ...     args = {"value": loss, "grad": grads, "value_fn": value_fn}
    ...     state = state.apply_gradients(grads=grads, update_args=args)
    >>> print(state.params)
    [4. 4.]
    """
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, loss_id=loss_id, wrt=wrt)

    def bind(state, /, *args, **kwargs):
        check_state(state, "jamp.closure(loss_fn)(state, ...)")
        entries = groups.split(state.params, state.tx)
        keys = tuple(entries)
        if isinstance(wrt, list | tuple) or (wrt is None and keys != (groups.SINGLE,)):
            raise ValueError(
                f"A closure is for the optimizer of one group: pass wrt=key, one of "
                f"{list(keys)}; got wrt={wrt!r}."
            )
        (key,) = groups.resolve_wrt(wrt, keys)

        def value_and_grad(params):
            new = entries | {key: rounded(params, entries[key])}
            packed = groups.pack(new, state.params)
            at: Any = dataclasses.replace(state, params=packed)
            value, grads = both(at, *args, **kwargs)
            loss: Any = value[0] if has_aux else value
            return loss, grads

        return with_gradient(value_and_grad)

    return bind


def with_gradient(
    value_and_grad: Callable[[PyTree], tuple[Float[Array, ""], PyTree]],
) -> Callable[[PyTree], Float[Array, ""]]:
    """Makes a value a function of the params with the given gradient."""

    @jax.custom_vjp
    def value_fn(params):
        return value_and_grad(params)[0]

    def backward(grads, cotangent):
        return (jax.tree.map(lambda g: g * jnp.asarray(cotangent, g.dtype), grads),)

    value_fn.defvjp(value_and_grad, backward)
    return value_fn


def rounded(masters: PyTree, params: PyTree) -> PyTree:
    """Rounds the masters of trained params to the dtypes of `params`."""
    layout, leaves = Layout.of(params)
    wide = filter(is_differentiable, jax.tree.leaves(masters))
    pairs = zip(wide, layout.pick(leaves), strict=True)
    new = [cast(m, p.dtype) if is_half(p) else m for m, p in pairs]
    return layout.structure.unflatten(layout.fill(leaves, new))
