"""Fused NovoGrad: moments of normalized gradients, with one norm per leaf.

Based on apex's csrc/multi_tensor_novograd.cu. Ginsburg et al., *Stochastic Gradient
Methods with Layer-wise Adaptive Moments*, 2019, arXiv:1905.11286.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int, PyTree

from jamp.optimizers import _fused as fused
from pallas_kernels import Blocks, Leaves, Numbers, Options, norm


class FusedNovoGradState(NamedTuple):
    """State of `fused_novograd`.

    Attributes:
        count: steps taken, shape (), int32.
        mu: first moments, like the params, in `moment_dtype`.
        nu: the average norm of each leaf's gradient, not squared; shape (), float32.
    """

    count: Int[Array, ""]
    mu: PyTree
    nu: PyTree


def fused_novograd(
    learning_rate: fused.ScalarOrSchedule = 1e-3,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 0.0,
    bias_correction: bool = True,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: Any = 2,
    init_zero: bool = False,
    mask: fused.Mask = None,
    moment_dtype: DTypeLike = "float32",
    backend: str = "xla",
) -> fused.FusedTransformation:
    r"""NovoGrad, as in apex's FusedNovoGrad: one second moment per leaf.

    $$n \leftarrow \sqrt{\beta_2 n^2 + (1 - \beta_2) \|g\|^2}, \quad
      d = \frac{n}{\sqrt{1 - \beta_2^t}} + \epsilon, \quad
      m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
      w \leftarrow w - \eta \Big(\frac{m}{(1 - \beta_1^t) d} + \lambda w\Big)$$

    Args:
        learning_rate, b1, b2, eps, weight_decay: see `fused_adam`.
        mask, moment_dtype, backend: see `fused_adam`.
        bias_correction: whether to correct $m$ and $n$. apex also corrects an $n$ that
            does not start at 0, so the first steps are small.
        reg_inside_moment: whether $m$ averages $g / d + \lambda w$, as in the paper.
        grad_averaging: whether the factor of $g$ in $m$ is $1 - \beta_1$ or 1.
        norm_type: 2 or "inf" (or 0, as in apex, or `jnp.inf`). With "inf", $n$ becomes
            $\beta_2 n + (1 - \beta_2) \max |g|$.
        init_zero: whether $n$ starts at 0 or at the norm of the first gradient.

    Returns:
        A transformation, see `fused_adam`.

    Raises:
        RuntimeError: `norm_type` is another norm.
        TypeError: `norm_type` is an array.
        ValueError: a number is out of range.

    >>> import jax.numpy as jnp, optax
    >>> tx = fused_novograd(0.1, bias_correction=False, grad_averaging=False)
    >>> params = jnp.ones(2)
    >>> updates, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates), state.nu)
    [0.94 0.92] 5.0
    """
    if isinstance(norm_type, jax.Array):
        raise TypeError(
            "fused_novograd: norm_type cannot be an array. With inject_hyperparams "
            'pass static_args="norm_type".'
        )
    if norm_type not in (2, 0, "inf", math.inf):
        raise RuntimeError(
            "FusedNovoGrad only support l2/inf norm now: norm_type is 2 or 'inf', got "
            f"{norm_type!r}."
        )
    rule = FusedNovoGrad(**locals())  # the arguments are its fields
    return fused.FusedTransformation.from_rule(rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedNovoGrad(fused.FusedRule):
    name: ClassVar[str] = "fused_novograd"
    state: ClassVar = FusedNovoGradState
    per_leaf: ClassVar = ("nu",)

    b1: ArrayLike = fused.number(below=1)
    b2: ArrayLike = fused.number(below=1)
    eps: ArrayLike = fused.number()
    reg_inside_moment: bool
    grad_averaging: bool
    norm_type: Any
    init_zero: bool

    def moments(self, params: PyTree) -> tuple[PyTree, ...]:
        norms = jax.tree.map(lambda p: jnp.zeros((), fused.width_of([p])), params)
        return self.zeros(params), norms

    def numbers(
        self, count: fused.Count, leaves: Leaves, options: Options
    ) -> fused.Scalars:
        norms = leaves.moments["nu"]
        old = jnp.zeros(0)
        if norms:
            old = jnp.stack([x.astype(leaves.dtype) for x in norms])
        order = 2 if self.norm_type == 2 else math.inf
        new = norm(leaves.grads, order, per_leaf=True, options=options)
        new = new.astype(leaves.dtype)
        begun = old if self.init_zero else jnp.where(count == 0, new, old)
        if self.norm_type == 2:
            blended = jnp.sqrt(self.b2 * begun**2 + (1 - self.b2) * new**2)
        else:
            blended = self.b2 * begun + (1 - self.b2) * new
        root = jnp.sqrt(jnp.asarray(self.correction(self.b2, count, leaves.dtype)))
        denominators = blended / root + self.eps
        if options.skip is not None:
            blended = jnp.where(options.skip, old, blended)
        return {
            "rate": self.rate(count, leaves.dtype),
            "b1": self.b1,
            "b3": 1 - self.b1 if self.grad_averaging else 1.0,
            "decay": self.weight_decay,
            "c1": self.correction(self.b1, count, leaves.dtype),
            "norm": denominators,
            "nu": blended,
        }

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        if self.reg_inside_moment:
            g = g / s["norm"]
            if decays:
                g = g + s["decay"] * w
        m = s["b1"] * moments["mu"] + s["b3"] * g
        u = m / s["c1"]
        if not self.reg_inside_moment:
            u = u / s["norm"]
            if decays:
                u = u + s["decay"] * w
        return -s["rate"] * u, {"mu": m}
