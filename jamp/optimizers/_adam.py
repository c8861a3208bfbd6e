"""Fused Adam, AdamW, and the FusedAdam of 2018.

Based on apex's csrc/multi_tensor_adam.cu, and on fused_adam_cuda_kernel.cu of 2018.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp.optimizers import _codes as codes, _fused as fused
from pallas_kernels import Blocks, Leaves, Numbers, Options, Weight


class FusedAdamState(NamedTuple):
    r"""State of `fused_adam`.

    Attributes:
        count: steps taken, shape (), int32.
        mu: first moments, like the params, in `moment_dtype`. "8bit" stores
            $8 m / \sqrt{v}$ as float8_e4m3fn.
        nu: second moments, like the params, in `moment_dtype`. "8bit" stores an
            `EightBit`.
    """

    count: Int[Array, ""]
    mu: PyTree
    nu: PyTree


def fused_adam(
    learning_rate: fused.ScalarOrSchedule = 1e-3,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    max_grad_norm: ArrayLike | None = None,
    legacy: bool = False,
    eps_inside_sqrt: bool = False,
    mask: fused.Mask = None,
    moment_dtype: DTypeLike = "float32",
    backend: str = "xla",
) -> fused.FusedTransformation:
    r"""Adam and AdamW, as in apex's FusedAdam, in one pass over each leaf.

    $$m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
      v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
      w \leftarrow w - \eta \Big(\frac{m / (1 - \beta_1^t)}
      {\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda w\Big)$$

    It equals `optax.adamw`, and with `adam_w_mode=False`
    `optax.chain(optax.add_decayed_weights(wd), optax.adam(...))`. `max_grad_norm`
    equals `optax.clip_by_global_norm`.

    Args:
        learning_rate: $\eta$, or a schedule of the count of steps.
        b1, b2, eps, weight_decay: $\beta_1$, $\beta_2$, $\epsilon$, $\lambda$.
        adam_w_mode: whether to decay as above. If False, $\lambda w$ is added to $g$.
        bias_correction: whether to divide by $1 - \beta^t$.
        max_grad_norm: clips the norm of all gradients; None or 0 clips nothing.
        legacy: selects apex's FusedAdam before August 2019. It adds epsilon before the
            bias correction, which also multiplies the decay, and clips by dividing by
            (norm + 1e-6) / max_grad_norm.
        eps_inside_sqrt: with `legacy`, adds epsilon under the root.
        mask: which leaves decay: a tree of bools, a prefix of the params' tree or a
            function of the params.
        moment_dtype: "bfloat16" and "8bit" store moments rounded stochastically; for
            "8bit", see `eight_bit`.
        backend: "xla", "mosaic" or "interpret".

    Returns:
        A transformation whose `update` has two more arguments: it divides gradients by
        `grad_scale`, and skips the step if `found_inf` is true.

    Raises:
        ValueError: a number is out of range, or options exclude each other.

    >>> import jax.numpy as jnp, optax
    >>> tx = fused_adam(0.1, weight_decay=0.1)
    >>> params = jnp.ones(2)
    >>> updates, state = tx.update(
    ...     jnp.array([64.0, -64.0]), tx.init(params), params, grad_scale=64.0
    ... )
    >>> print(optax.apply_updates(params, updates))
    [0.89 1.09]
    """
    if eps_inside_sqrt and not legacy:
        raise ValueError("fused_adam: eps_inside_sqrt=True needs legacy=True.")
    if legacy and not adam_w_mode:
        raise ValueError(
            "fused_adam: legacy=True has one kind of decay. Leave adam_w_mode out."
        )
    rule = FusedAdam(**locals())  # the arguments are its fields
    return fused.FusedTransformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAdam(fused.FusedRule):
    name: ClassVar[str] = "fused_adam"
    state: ClassVar = FusedAdamState
    has_eight_bit: ClassVar = True

    b1: ArrayLike = fused.number(below=1)
    b2: ArrayLike = fused.number(below=1)
    eps: ArrayLike = fused.number()
    adam_w_mode: bool
    grad_averaging: bool = True
    legacy: bool = False
    eps_inside_sqrt: bool = False

    def numbers(
        self, count: fused.Count, leaves: Leaves, options: Options
    ) -> fused.Scalars:
        del options
        dtype = leaves.dtype
        rate, c1 = self.rate(count, dtype), self.correction(self.b1, count, dtype)
        root: ArrayLike = 1 / jnp.sqrt(self.correction(self.b2, count, dtype))
        if self.legacy:  # the factor of the root also multiplies epsilon and the decay
            rate, c1, root = rate / (c1 * root), 1.0, 1.0
        return {
            "rate": rate,
            "c1": c1,
            "root": root,
            "decay": self.weight_decay,
            "b1": self.b1,
            # Python subtracts in float64. In float32, digits would cancel.
            "a1": 1 - self.b1 if self.grad_averaging else 1.0,
            "b2": self.b2,
            "a2": 1 - self.b2,
            "eps": self.eps,
        }

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        if decays and not self.adam_w_mode:
            g = g + s["decay"] * w
        m = s["b1"] * moments["mu"] + s["a1"] * g
        v = s["b2"] * moments["nu"] + s["a2"] * (g * g)
        if self.eps_inside_sqrt:
            u = m / jnp.sqrt(v + s["eps"])
        else:
            u = (m / s["c1"]) / (jnp.sqrt(v) * s["root"] + s["eps"])
        if decays and self.adam_w_mode:
            u = u + s["decay"] * w
        return -s["rate"] * u, {"mu": m, "nu": v}

    def most_second(
        self, s: Numbers, decays: bool, g: Array, weight: Weight, v: Array
    ) -> Array:
        if decays and not self.adam_w_mode:
            g = g + s["decay"] * codes.largest(weight.value)
        return s["b2"] * v + s["a2"] * (g * g)

    def clip_factor(self, norm: Array, most: ArrayLike) -> Array:
        if not self.legacy:
            return jnp.minimum(1, most / norm)
        excess = (norm + 1e-6) / most
        return jnp.where(excess > 1, 1 / excess, 1)
