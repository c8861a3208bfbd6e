"""Fused SGD: momentum, dampening, Nesterov momentum and weight decay.

Based on apex's csrc/multi_tensor_sgd_kernel.cu.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp.optimizers import _fused as fused
from pallas_kernels import Blocks, Leaves, Numbers, Options


class FusedSGDState(NamedTuple):
    """State of `fused_sgd`.

    Attributes:
        count: steps taken, shape (), int32.
        trace: momentum buffers, like the params, in `moment_dtype`; "8bit" stores an
            `EightBit`; None without momentum.
    """

    count: Int[Array, ""]
    trace: PyTree | None


def fused_sgd(
    learning_rate: fused.ScalarOrSchedule,
    momentum: ArrayLike = 0.0,
    *,
    dampening: ArrayLike = 0.0,
    weight_decay: ArrayLike = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    mask: fused.Mask = None,
    moment_dtype: DTypeLike = "float32",
    backend: str = "xla",
) -> fused.FusedTransformation:
    r"""SGD, as in apex's FusedSGD and in torch.

    $$d = g + \lambda w, \quad b \leftarrow \mu b + (1 - \tau) d, \quad
      w \leftarrow w - \eta b,$$

    where $b = d$ in the first step, and `nesterov` steps by $d + \mu b$.

    Without dampening, it equals `optax.chain(optax.add_decayed_weights(wd),
    optax.sgd(...))`.

    Args:
        learning_rate, weight_decay, mask, moment_dtype, backend: see `fused_adam`.
        momentum: $\mu$; 0 keeps no buffer.
        dampening: $\tau$.
        nesterov: whether to use Nesterov momentum.
        wd_after_momentum: whether to add $\lambda w$ after the momentum instead.

    Returns:
        A transformation, see `fused_adam`.

    Raises:
        ValueError: a number is out of range, or `nesterov` has dampening or no
            momentum.

    >>> import jax.numpy as jnp, optax
    >>> tx, params = fused_sgd(0.25, 0.5, nesterov=True), jnp.ones(2)
    >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))
    [0.625 0.625]
    """
    if nesterov and (
        fused.is_zero(momentum) or (fused.is_number(dampening) and dampening)
    ):
        raise ValueError(
            "fused_sgd: nesterov=True needs a momentum, and dampening=0, got "
            f"{momentum=} and {dampening=}."
        )
    rule = FusedSGD(**locals())  # the arguments are its fields
    return fused.FusedTransformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedSGD(fused.FusedRule):
    name: ClassVar[str] = "fused_sgd"
    state: ClassVar = FusedSGDState
    has_eight_bit: ClassVar = True

    momentum: ArrayLike = fused.number()
    dampening: ArrayLike = fused.number()
    nesterov: bool
    wd_after_momentum: bool

    def moments(self, params: PyTree) -> tuple[PyTree, ...]:
        return (None,) if fused.is_zero(self.momentum) else super().moments(params)

    def numbers(
        self, count: fused.Count, leaves: Leaves, options: Options
    ) -> fused.Scalars:
        if "trace" not in leaves.moments and not fused.is_zero(self.momentum):
            raise ValueError(
                "fused_sgd: the state was made without momentum. Call `init`, or write "
                "`state.load_params(state.params, reset_optimizer=True)`."
            )
        undampened = 1.0
        if not fused.is_zero(self.dampening):
            undampened = jnp.where(count == 0, 1, 1 - self.dampening)
        return {
            "rate": self.rate(count, leaves.dtype),
            "momentum": self.momentum,
            "undampened": undampened,
            "decay": self.weight_decay,
        }

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        if decays and not self.wd_after_momentum:
            g = g + s["decay"] * w
        d, new = g, {}
        if "trace" in moments:
            b = s["momentum"] * moments["trace"] + s["undampened"] * g
            d, new = g + s["momentum"] * b if self.nesterov else b, {"trace": b}
        if decays and self.wd_after_momentum:
            d = d + s["decay"] * w
        return -s["rate"] * d, new
