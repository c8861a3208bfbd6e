"""Fused LAMB, in two stages: the norms of weights and updates, then the step.

Based on apex's csrc/multi_tensor_lamb.cu. You et al., *Large Batch Optimization for
Deep Learning*, 2020, arXiv:1904.00962.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import ArrayLike

from jamp.optimizers import _fused as fused
from jamp.optimizers._adam import FusedAdam
from pallas_kernels import Leaves, Options, step_norms


def fused_lamb(
    learning_rate: fused.ScalarOrSchedule = 1e-3,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    *,
    weight_decay: ArrayLike = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: ArrayLike | None = 1.0,
    use_nvlamb: bool = False,
    mask: fused.Mask = None,
    moment_dtype: DTypeLike = "float32",
    backend: str = "xla",
) -> fused.FusedTransformation:
    r"""LAMB, as in apex's FusedLAMB: a global clip, and a trust ratio for each leaf.

    $$u = \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
      + \lambda w, \quad
      w \leftarrow w - \eta \frac{\|w\|}{\|u\|} u,$$

    with Adam's moments of the clipped gradient. The ratio is 1 where a norm is 0.
    Leaves that do not decay have no trust ratio, unlike in optax.

    Args:
        learning_rate, b1, b2, eps, weight_decay, adam_w_mode: see `fused_adam`.
        bias_correction, max_grad_norm: see `fused_adam`.
        mask, moment_dtype, backend: see `fused_adam`.
        grad_averaging: whether the factor of $g$ in $m$ is $1 - \beta_1$ or 1.
        use_nvlamb: whether leaves that do not decay have a trust ratio too.

    Returns:
        A transformation, see `fused_adam`, which also lists the errors. Its state is a
        `FusedAdamState`.

    >>> import jax.numpy as jnp, optax
    >>> tx, params = fused_lamb(0.1, weight_decay=0.0, use_nvlamb=True), jnp.ones(1) * 5
    >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))  # |w| = 5, |u| = 1
    [4.5]
    """
    rule = FusedLAMB(**locals())  # the arguments are its fields
    return fused.FusedTransformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLAMB(FusedAdam):
    name: ClassVar[str] = "fused_lamb"

    use_nvlamb: bool
    clip_factor = fused.FusedRule.clip_factor  # as in apex's LAMB, even for NaN

    def numbers(
        self, count: fused.Count, leaves: Leaves, options: Options
    ) -> fused.Scalars:
        numbers = super().numbers(count, leaves, options)
        plain = numbers | {"rate": 1.0}
        weight, update = step_norms(self.static, leaves, plain, options)
        adapts = (weight != 0) & (update != 0)  # also if one is NaN, as in apex
        if not self.use_nvlamb:
            decays = jnp.array(leaves.decays, bool)
            adapts &= decays & (jnp.asarray(self.weight_decay) != 0)
        ratio = jnp.where(adapts, weight / update, 1)
        return numbers | {"rate": numbers["rate"] * ratio}
