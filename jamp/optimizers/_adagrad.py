"""Fused Adagrad, with L2 or decoupled weight decay.

Based on apex's csrc/multi_tensor_adagrad.cu.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp.optimizers import _fused as fused
from pallas_kernels import Blocks, Leaves, Numbers, Options


class FusedAdagradState(NamedTuple):
    """State of `fused_adagrad`.

    Attributes:
        count: steps taken, shape (), int32.
        sum_of_squares: sums over all past gradients, like the params, in
            `moment_dtype`.
    """

    count: Int[Array, ""]
    sum_of_squares: PyTree


def fused_adagrad(
    learning_rate: fused.ScalarOrSchedule = 1e-2,
    eps: ArrayLike = 1e-10,
    *,
    weight_decay: ArrayLike = 0.0,
    adagrad_w_mode: bool = False,
    mask: fused.Mask = None,
    moment_dtype: DTypeLike = "float32",
    backend: str = "xla",
) -> fused.FusedTransformation:
    r"""Adagrad, as in apex's FusedAdagrad.

    $$h \leftarrow h + g^2, \quad w \leftarrow w - \eta \frac{g}{\sqrt{h} + \epsilon}$$

    optax adds epsilon under the root.

    Args:
        learning_rate, eps, mask, moment_dtype, backend: see `fused_adam`.
        weight_decay: $\lambda$; $\lambda w$ is added to $g$.
        adagrad_w_mode: whether to add $\lambda w$ to the fraction instead.

    Returns:
        A transformation, see `fused_adam`, which also lists the errors.

    >>> import jax.numpy as jnp, optax
    >>> tx, params = fused_adagrad(0.1), jnp.ones(2)
    >>> updates, state = tx.update(jnp.array([4.0, -9.0]), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))
    [0.9 1.1]
    """
    rule = FusedAdagrad(**locals())  # the arguments are its fields
    return fused.FusedTransformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAdagrad(fused.FusedRule):
    name: ClassVar[str] = "fused_adagrad"
    state: ClassVar = FusedAdagradState

    eps: ArrayLike = fused.number()
    adagrad_w_mode: bool

    def numbers(
        self, count: fused.Count, leaves: Leaves, options: Options
    ) -> fused.Scalars:
        del options
        rate = self.rate(count, leaves.dtype)
        return {"rate": rate, "eps": self.eps, "decay": self.weight_decay}

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        if decays and not self.adagrad_w_mode:
            g = g + s["decay"] * w
        h = moments["sum_of_squares"] + g * g
        u = g / (jnp.sqrt(h) + s["eps"])
        if decays and self.adagrad_w_mode:
            u = u + s["decay"] * w
        return -s["rate"] * u, {"sum_of_squares": h}
