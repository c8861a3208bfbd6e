"""LARC: a trust ratio per leaf around any optimizer.

Based on apex/parallel/LARC.py. You et al., *Large Batch Training of Convolutional
Networks*, 2017, arXiv:1708.03888.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp._core.dtypes import widen
from jamp._core.groups import check_transformation
from jamp._core.tree import select
from jamp.optimizers import _fused as fused
from pallas_kernels import norm


class LARCState(NamedTuple):
    """State of `larc`.

    Attributes:
        count: steps taken, shape (), int32.
        inner_state: the state of the wrapped transformation.
    """

    count: Int[Array, ""]
    inner_state: Any


def larc(
    inner: optax.GradientTransformation,
    learning_rate: fused.ScalarOrSchedule | None = None,
    *,
    trust_coefficient: ArrayLike = 0.02,
    clip: bool = True,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike | None = None,
    mask: fused.Mask = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adapts the learning rate of each leaf to its norms, around any transformation.

    $$a = \frac{\tau \|w\|}{\|g\| + \lambda \|w\| + \epsilon}, \quad
      g \leftarrow a (g + \lambda w),$$

    where `clip` replaces $a$ by $\min(a / \eta, 1)$. If all weights or all gradients of
    a leaf are 0, its gradient does not change, and it does not decay.

    Args:
        inner: any transformation. If it is fused, `larc` takes over its learning rate,
            weight decay and mask, as apex does.
        learning_rate: $\eta$ of `inner`, or a schedule of the count of steps. Only
            `clip` needs it.
        trust_coefficient: $\tau$.
        clip: whether to clip the rate at $\eta$ instead of scaling it.
        eps: $\epsilon$.
        weight_decay: $\lambda$. `inner` should not decay.
        mask: which leaves decay, see `fused_adam`.

    Returns:
        A transformation whose `update` also has `grad_scale` and `found_inf`.

    Raises:
        TypeError: `inner` is not a transformation.
        ValueError: `clip` has no learning rate, or a number is out of range.

    >>> import jax.numpy as jnp, optax
    >>> from jamp.optimizers import fused_sgd
    >>> tx, params = larc(fused_sgd(0.1)), jnp.array([3.0, 4.0])
    >>> updates, state = tx.update(jnp.array([0.0, 4.0]), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))  # a is 0.02 * 5 / 4 = 0.025
    [3.  3.9]
    """
    check_transformation("larc", inner)
    backend = "xla"
    if isinstance(inner, fused.FusedTransformation):
        rule, backend = inner.rule, inner.rule.backend
        learning_rate = rule.learning_rate if learning_rate is None else learning_rate
        weight_decay = rule.weight_decay if weight_decay is None else weight_decay
        mask = rule.mask if mask is None else mask
        inner = inner.replace(weight_decay=0.0)
    if clip and learning_rate is None:
        raise ValueError(
            "larc clips at the learning rate, which it cannot read from the wrapped "
            "transformation: pass `larc(inner, learning_rate)`, or clip=False."
        )
    rule = _LARC(
        inner=inner,
        learning_rate=learning_rate,
        trust_coefficient=trust_coefficient,
        clip=clip,
        eps=eps,
        weight_decay=0.0 if weight_decay is None else weight_decay,
        mask=mask,
        backend=backend,
    )
    return fused.Transformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LARC(fused.Hyperparameters):
    name: ClassVar[str] = "larc"

    inner: optax.GradientTransformation
    learning_rate: fused.ScalarOrSchedule | None = fused.number(optional=True)
    trust_coefficient: ArrayLike = fused.number()
    clip: bool
    eps: ArrayLike = fused.number()

    def init(self, params: PyTree) -> LARCState:
        """Implements optax's `init`."""
        inner_state = self.inner.init(jax.tree.map(widen, params))
        return LARCState(jnp.zeros((), jnp.int32), inner_state)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        grad_scale: ArrayLike | None = None,
        found_inf: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        """Implements optax's `update`."""
        fused.check_step(self.name, updates, params)
        dtype = fused.width_of(jax.tree.leaves(params))
        options, inner = self.options(grad_scale, found_inf, dtype), self.inner
        grads = jax.tree.map(widen, updates)
        if (unscale := options.unscale) is not None:
            grads = jax.tree.map(lambda g: g * unscale.astype(g.dtype), grads)
        # `inner` gets float32 params, so that its state stays float32.
        params = jax.tree.map(widen, params)
        grads = self._adapted(grads, state.count, params)
        updates, inner_state = optax.with_extra_args_support(inner).update(
            grads, state.inner_state, params, **extra_args
        )
        count = optax.safe_increment(state.count)
        new = state._replace(count=count, inner_state=inner_state)
        if (skip := options.skip) is None:
            return updates, new
        still = jax.tree.map(jnp.zeros_like, updates)
        return select(~skip, updates, still), select(~skip, new, state)

    def _adapted(self, grads: PyTree, count: fused.Count, params: PyTree) -> PyTree:
        """Returns the gradients for `inner`."""
        leaves, structure = jax.tree.flatten(grads)
        weights = structure.flatten_up_to(params)
        g, w = (
            norm(x, per_leaf=True, options=self.options()) for x in (leaves, weights)
        )
        decays = jnp.array(self.decays(structure, weights), bool)
        decay = jnp.where(decays, self.weight_decay, 0)
        ratio = self.trust_coefficient * w / (g + w * decay + self.eps)
        if self.clip:
            eta = self.rate(count, ratio.dtype)
            ratio = jnp.minimum(jnp.where(eta == 0, 1, ratio / eta), 1)
        adapts = (g != 0) & (w != 0)
        ratio, decay = jnp.where(adapts, ratio, 1), jnp.where(adapts, decay, 0)
        each = zip(leaves, weights, ratio, decay, strict=True)
        return structure.unflatten(
            [r.astype(g.dtype) * (g + d.astype(g.dtype) * w) for g, w, r, d in each]
        )
