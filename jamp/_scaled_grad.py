"""Gradients of a scaled loss: `scaled_grad`, `scaled_value_and_grad`, `ScaledGrads`.

After apex/amp/handle.py:scale_loss. The loss is multiplied in float32, so it is never NaN
because it left the range of float16.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp import _groups
from jamp._dtypes import HALF_DTYPES, PrecisionWarning, is_differentiable, widen
from jamp._forward import forward_policy
from jamp._loss_scale import LossScaleRule, LossScaleState, unscale_tree
from jamp._opt_level import Properties
from jamp._tree import (
    all_finite,
    differentiable,
    join_overwrite,
    merge,
    split_overwrite,
)

_NOT_A_TREE = (
    "ScaledGrads are not a tree of gradients: they are scaled, and may be inf. Pass them "
    "whole to `AmpState.apply_gradients(grads=grads)`, or take float32 gradients out with "
    "`tree, finite = grads.unscale()`."
)
_WANTS_A_STATE = (
    "{name} takes the AmpState that `jamp.initialize` returned as its first argument, got "
    "{given}. Write `{name}(loss_fn)(state, batch)`."
)


class HasLossScales(Protocol):
    """What this file needs of an `AmpState`."""

    params: Any
    tx: Any
    loss_scales: Any
    loss_scale_rules: Any
    properties: Any


@flax.struct.dataclass
class ScaledGrads:
    """Gradients of a scaled loss, with what it takes to unscale and check them.

    `a + b` sums micro-batches of one loss in float32 (begin a scan with
    `jamp.zero_grads`); `* k` and `/ k` act on the tree. To clip by hand, keep the flag:

        tree, finite = grads.unscale()
        grads = grads.replace(tree=clip(tree), scale=jnp.float32(1))

    Attributes:
        tree: the raw scaled gradients, in the dtypes of the params. None where a param
            is no float.
        scale: what the loss was multiplied by, shape (), float32.
        finite: whether all raw gradients are finite, shape (), bool; always True where
            the rule does not check.
        loss_id: which loss scale it was.
        groups: the `wrt` that it was taken for; None for all groups.
    """

    tree: Any
    scale: Float[Array, ""]
    finite: Bool[Array, ""]
    loss_id: int = flax.struct.field(pytree_node=False, default=0)
    groups: Any = flax.struct.field(pytree_node=False, default=None)

    def unscale(self) -> tuple[PyTree, Bool[Array, ""]]:
        """The gradients in float32 divided by the scale, and whether they are finite.

        Fp8 values of Flax's `_overwrite_with_gradient` are no gradients: left alone.
        """
        params, overwrite = split_overwrite(self.tree)
        return join_overwrite(unscale_tree(params, self.scale), overwrite), self.finite

    def __add__(self, other: Self) -> Self:
        """Sums two gradients of one loss, in float32, at the scale of the first.

        Raises:
            TypeError: `other` is no ScaledGrads.
            ValueError: it belongs to another loss or other groups.
        """
        if not isinstance(other, ScaledGrads):
            raise TypeError(
                f"ScaledGrads add to ScaledGrads, got {type(other).__name__}. Begin a "
                "sum with `jamp.zero_grads(state)`."
            )
        if (self.loss_id, self.groups) != (other.loss_id, other.groups):
            raise ValueError(
                "ScaledGrads of different losses or groups do not add: loss_id "
                f"{self.loss_id} and {other.loss_id}, groups {self.groups} and "
                f"{other.groups}. Pass both: `apply_gradients(grads=(a, b))`."
            )
        # One, unless the scale moved between the two.
        ratio = self.scale / other.scale
        mine, overwrite = split_overwrite(self.tree)
        theirs, newer = split_overwrite(other.tree)
        total = jax.tree.map(
            lambda a, b: a + b * ratio.astype(b.dtype), _widen(mine), _widen(theirs)
        )
        del overwrite  # the later values replace the earlier ones
        return self.replace(  # pyright: ignore[reportAttributeAccessIssue]
            tree=join_overwrite(total, newer), finite=self.finite & other.finite
        )

    def __mul__(self, factor: Any) -> Self:
        """Multiplies the tree, in float32; the scale stays."""
        return self._map(lambda x: x * factor)

    def __truediv__(self, divisor: Any) -> Self:
        """Divides the tree, in float32; the scale stays."""
        return self._map(lambda x: x / divisor)

    __rmul__ = __mul__

    def _map(self, fn: Callable[[Array], Array]) -> Self:
        params, overwrite = split_overwrite(self.tree)
        tree = join_overwrite(jax.tree.map(fn, _widen(params)), overwrite)
        return self.replace(tree=tree)  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_NOT_A_TREE)

    # Flax's TrainState asks `"..." in grads`; people index. Both would go on silently.
    __getitem__ = __contains__ = __iter__ = __len__ = _refuse


def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Any = None,
    axis_name: Any = None,
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

    Returns:
        `f(state, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`: the loss
        unscaled in float32, the gradients as `ScaledGrads` in the dtypes of the params
        (float32 with `axis_name`).

    Raises (when called):
        TypeError: `state` is no AmpState; the loss is no float scalar.
        IndexError: `loss_id` is out of range.
        ValueError: `wrt` names no group.
        NotImplementedError: the state's level needs autocast.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"w": jnp.ones(2)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", loss_scale=8, verbosity=0)
    >>> loss_fn = lambda params: 3 * params["w"].sum(dtype="float32")
    >>> loss, grads = scaled_value_and_grad(loss_fn)(state)
    >>> print(grads.tree["w"], grads.unscale()[0]["w"])
    [24. 24.] [3. 3.]
    """

    @functools.wraps(loss_fn)
    def value_and_grad(state, *args, **kwargs):
        rule, scale_state = _loss_scale(state, loss_id, "jamp.scaled_value_and_grad")
        every = _groups.group_keys(state.tx)
        keys = _groups.resolve_wrt(wrt, every)
        trained = {k: differentiable(_groups.get(state.params, k)) for k in keys}
        if axis_name is not None:
            trained = jax.tree.map(lambda p: _varying(p, axis_name), trained)

        def scaled_loss(trained):
            whole = {k: _groups.get(state.params, k) for k in every}
            whole |= {k: merge(trained[k], whole[k]) for k in keys}
            out = loss_fn(_groups.pack(whole, state.params), *args, **kwargs)
            loss, aux = _split_aux(out, has_aux)
            return rule.scale_loss(loss, scale_state), (loss, aux)

        with forward_policy(state.properties):
            grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(trained)
        finite = _finite(grads) if rule.checks else jnp.asarray(True)
        if axis_name is not None:
            grads, loss, finite = _averaged(grads, loss, finite, axis_name)
        named = tuple(wrt) if isinstance(wrt, list) else wrt
        scaled = ScaledGrads(
            tree=_groups.shape_like_wrt(grads, named, state.params),
            scale=rule.current(scale_state),
            finite=finite,
            loss_id=loss_id,
            groups=named,
        )
        return ((loss, aux) if has_aux else loss), scaled

    return value_and_grad


def scaled_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    loss_id: int = 0,
    wrt: Any = None,
    axis_name: Any = None,
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
    both = scaled_value_and_grad(
        loss_fn, has_aux=has_aux, loss_id=loss_id, wrt=wrt, axis_name=axis_name
    )

    @functools.wraps(loss_fn)
    def grad(state, *args, **kwargs):
        value, grads = both(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


def zero_grads(state: HasLossScales, loss_id: int = 0, wrt: Any = None) -> ScaledGrads:
    """Zeros in float32 to begin a sum of `ScaledGrads`, as the carry of a scan.

    Args:
        state: an AmpState.
        loss_id, wrt: as given to `scaled_grad`.

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
    rule, scale_state = _loss_scale(state, loss_id, "jamp.zero_grads")
    keys = _groups.resolve_wrt(wrt, _groups.group_keys(state.tx))
    named = tuple(wrt) if isinstance(wrt, list) else wrt
    zeros = {}
    for key in keys:
        params, overwrite = split_overwrite(
            differentiable(_groups.get(state.params, key))
        )
        zeros[key] = join_overwrite(
            _widen(jax.tree.map(jnp.zeros_like, params)), overwrite
        )
    return ScaledGrads(
        tree=_groups.shape_like_wrt(zeros, named, state.params),
        scale=rule.current(scale_state),
        finite=jnp.asarray(True),
        loss_id=loss_id,
        groups=named,
    )


def scale_loss(loss: Array, state: HasLossScales, loss_id: int = 0) -> Float[Array, ""]:
    """The loss in float32 times a loss scale, for people who call `jax.grad` themselves.

    Args:
        loss: a float scalar.
        state: an AmpState.
        loss_id: which of the state's loss scales to use.

    Returns:
        The scaled loss, shape (), float32.

    Raises:
        TypeError: the loss is no float scalar.
        IndexError: `loss_id` is out of range.

    >>> import jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(
    ...     jnp.ones(2), optax.sgd(1.0), "O2", loss_scale=4, verbosity=0
    ... )
    >>> loss_fn = lambda w: scale_loss(w.sum(dtype="float32"), state)
    >>> grads = jax.grad(loss_fn)(state.params)
    >>> print(grads, jamp.unscale(grads, state))
    [4. 4.] [1. 1.]
    """
    rule, scale_state = _loss_scale(state, loss_id, "jamp.scale_loss")
    return rule.scale_loss(_checked_loss(loss), scale_state)


def unscale(grads: PyTree, state: HasLossScales, loss_id: int = 0) -> PyTree:
    """Gradients of a loss from `scale_loss`, in float32, divided by the scale.

    Inf stays inf, so `state.apply_gradients(grads=unscale(grads, state))` still sees an
    overflow and skips; clip after the check only, or inside the optimizer.

    Args:
        grads: a tree of gradients.
        state: the AmpState that scaled the loss, before it is updated.
        loss_id: which of the state's loss scales was used.

    Returns:
        The tree in float32.

    Raises:
        TypeError: `grads` are ScaledGrads.
        IndexError: `loss_id` is out of range.
    """
    if isinstance(grads, ScaledGrads):
        raise TypeError(_NOT_A_TREE)
    rule, scale_state = _loss_scale(state, loss_id, "jamp.unscale")
    params, overwrite = split_overwrite(grads)
    return join_overwrite(rule.unscale(params, scale_state), overwrite)


def _loss_scale(
    state: Any, loss_id: int, name: str
) -> tuple[LossScaleRule, LossScaleState]:
    if not isinstance(getattr(state, "properties", None), Properties):
        raise TypeError(_WANTS_A_STATE.format(name=name, given=type(state).__name__))
    count = len(state.loss_scale_rules)
    if isinstance(loss_id, bool) or loss_id not in range(count):
        raise IndexError(
            f"loss_id={loss_id!r} is out of range: the state has {count} loss scale(s). "
            "Pass num_losses to jamp.initialize."
        )
    return state.loss_scale_rules[loss_id], state.loss_scales[loss_id]


def _split_aux(out: Any, has_aux: bool) -> tuple[Array, Any]:
    if not has_aux:
        return _checked_loss(out), None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"With has_aux=True the loss function must return (loss, aux), got {out!r}."
        )
    return _checked_loss(out[0]), out[1]


def _checked_loss(loss: Any) -> Array:
    """The loss in float32, if it is a float scalar."""
    if isinstance(loss, tuple):
        raise TypeError(
            "The loss function returned a tuple: pass has_aux=True for (loss, aux)."
        )
    if not is_differentiable(loss) or jnp.iscomplexobj(loss) or jnp.shape(loss) != ():
        given = (
            f"{jnp.result_type(loss)}{list(jnp.shape(loss))}"
            if hasattr(loss, "dtype")
            else type(loss).__name__
        )
        raise TypeError(
            f"The loss must be a float scalar, got {given}. Reduce it, with `.mean()` "
            "for example."
        )
    loss = jnp.asarray(loss)
    if loss.dtype in HALF_DTYPES:
        warnings.warn(
            f"The loss is {loss.dtype}: its gradient, the loss scale, overflows float16 "
            "above 65504, and the value is rounded. Compute the loss in float32: "
            "`logits.astype(jnp.float32)` before it.",
            PrecisionWarning,
            stacklevel=4,
        )
    return loss.astype(jnp.float32)


def _finite(grads: dict[Any, PyTree]) -> Bool[Array, ""]:
    return all_finite([split_overwrite(tree)[0] for tree in grads.values()])


def _widen(tree: PyTree) -> PyTree:
    return jax.tree.map(widen, tree)


def _varying(x: Array, axis_name: Any) -> Array:
    """Marks a replicated param as varying: JAX would sum its gradients, in half."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    missing = tuple(a for a in axes if a not in jax.typeof(x).vma)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _averaged(grads: Any, loss: Array, finite: Array, axis_name: Any) -> Any:
    grads = jax.tree.map(lambda g: jax.lax.pmean(g, axis_name), _widen(grads))
    agreed = jax.lax.pmin(finite.astype(jnp.int32), axis_name)
    return grads, jax.lax.pmean(loss, axis_name), agreed > 0
