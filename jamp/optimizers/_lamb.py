"""Fused LAMB."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp.optimizers._fused import FusedRule, FusedTransformation, ScalarOrSchedule
from pallas_kernels import lamb


class FusedLAMBState(NamedTuple):
    """State of `fused_lamb`.

    Attributes:
        count: steps taken, shape (), int32.
        mu: first moments, float32, like the params.
        nu: second moments, float32, like the params.
    """

    count: Int[Array, ""]
    mu: PyTree
    nu: PyTree


def fused_lamb(
    learning_rate: ScalarOrSchedule = 1e-3,
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
    amsgrad: bool = False,
    mask: Any = None,
    backend: str = "auto",
) -> FusedTransformation:
    r"""LAMB as apex's FusedLAMB: a global clip, and a trust ratio for each leaf.

    $$u = \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
      + \lambda w, \quad
      w \leftarrow w - \eta \frac{\|w\|}{\|u\|} u,$$

    with Adam's moments of the clipped gradient. The ratio is 1 where a norm is 0.

    Equals `optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.lamb(...))` if
    all leaves decay, or with `use_nvlamb=True`. Otherwise leaves that do not decay take
    the plain learning rate here, and a trust ratio in optax.

    Args:
        learning_rate: $\eta$, or a schedule of the count of steps.
        b1: $\beta_1$.
        b2: $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        bias_correction: whether to divide by $1 - \beta^t$.
        adam_w_mode: whether to decay as above; else $\lambda w$ is added to $g$.
        grad_averaging: whether $g$ enters $m$ with $1 - \beta_1$; else with 1.
        max_grad_norm: clips the norm of all gradients together; None or 0 for not at
            all.
        use_nvlamb: whether to scale leaves that do not decay by the ratio, too.
        amsgrad: refused, as by apex.
        mask: which leaves decay, see `fused_adam`.
        backend: "auto", "xla", "mosaic" or "interpret".

    Returns:
        A transformation, see `fused_adam`. Unlike apex's, it leaves gradients alone.

    Raises:
        RuntimeError: `amsgrad`.
        ValueError: a number out of range.

    >>> import jax.numpy as jnp, optax
    >>> tx, params = fused_lamb(0.1, weight_decay=0.0, use_nvlamb=True), jnp.ones(1) * 5
    >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))  # |w| = 5, |u| = 1
    [4.5]
    """
    return FusedTransformation.of(FusedLAMB(**locals()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLAMB(FusedRule):
    """The hyperparameters of `fused_lamb`, and its step."""

    name: ClassVar[str] = "fused_lamb"
    state: ClassVar = FusedLAMBState
    below: ClassVar = {"b1": 1, "b2": 1, "eps": math.inf, "max_grad_norm": math.inf}

    b1: Any
    b2: Any
    eps: Any
    bias_correction: bool
    adam_w_mode: bool
    grad_averaging: bool
    max_grad_norm: Any
    use_nvlamb: bool

    def step(self, weights, grads, state, decays, options):
        """Clips, measures, then steps."""
        c1, c2 = self.corrections(state.count)
        return lamb(
            weights,
            grads,
            state.mu,
            state.nu,
            learning_rate=self.rate(state.count),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            averaging=1 - self.b1 if self.grad_averaging else 1.0,
            weight_decay=self.weight_decay,
            correction1=c1,
            correction2=c2,
            adam_w_mode=self.adam_w_mode,
            use_nvlamb=self.use_nvlamb,
            decays=decays,
            options=self.clipped(options, grads),
        )

    def clip_factor(self, norm: Array) -> Array:
        """What gradients of a norm are multiplied by."""
        # A NaN compares false, as in apex.
        return jnp.where(norm > self.max_grad_norm, self.max_grad_norm / norm, 1)
