"""NovoGrad: moments of normalised gradients, with one norm per leaf.

After apex's csrc/multi_tensor_novograd.cu. Ginsburg et al., *Stochastic Gradient
Methods with Layer-wise Adaptive Moments*, 2019, arXiv:1905.11286.
"""

from collections.abc import Sequence

from jaxtyping import Array, ArrayLike, Float

from pallas_kernels._step import DEFAULTS, Numbers, Options, Stepped, leaf_decays, step
from pallas_kernels._weights import Weight
from pallas_kernels._xla import Blocks, bind


def novograd(
    weights: Sequence[Weight],
    grads: Sequence[Array],
    mu: Sequence[Array],
    *,
    norms: Float[Array, " n"],
    learning_rate: ArrayLike,
    b1: ArrayLike,
    averaging: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    correction1: ArrayLike = 1.0,
    reg_inside_moment: bool = False,
    decays: Sequence[bool] | None = None,
    options: Options = DEFAULTS,
) -> Stepped:
    r"""The elementwise stage of NovoGrad, over leaves.

    With the denominator $d$ of each leaf,

    $$m \leftarrow \beta_1 m + \beta_3 g, \quad
      w \leftarrow w - \eta \Big(\frac{m}{c_1 d} + \lambda w\Big),$$

    or, with the decay inside of the moment,

    $$m \leftarrow \beta_1 m + \beta_3 (g / d + \lambda w), \quad
      w \leftarrow w - \eta \, m / c_1.$$

    Args:
        weights: what to step.
        grads: one per weight, of its shape.
        mu: first moments, float32.
        norms: the denominators $d$, one per leaf.
        learning_rate: $\eta$.
        b1: $\beta_1$.
        averaging: $\beta_3$, $1 - \beta_1$ or 1.
        weight_decay: $\lambda$.
        correction1: $c_1$.
        reg_inside_moment: where the decay goes.
        decays: which leaves decay; None for all.
        options: how to run.

    Returns:
        New weights, and moment "mu".
    """
    numbers = {
        "rate": learning_rate,
        "b1": b1,
        "b3": averaging,
        "decay": weight_decay,
        "c1": correction1,
    }
    return step(
        bind(_formula, reg_inside_moment),
        weights,
        grads,
        {"mu": mu},
        numbers,
        options,
        per_leaf={"norm": norms},
        tags=leaf_decays(weight_decay, decays, len(weights)),
    )


def _formula(
    reg_inside_moment: bool,
    s: Numbers,
    decays: bool,
    g: Array,
    w: Array,
    moments: Blocks,
) -> tuple[Array, Blocks]:
    if reg_inside_moment:
        g = g / s["norm"]
        if decays:
            g = g + s["decay"] * w
    m = s["b1"] * moments["mu"] + s["b3"] * g
    u = m / s["c1"]
    if not reg_inside_moment:
        u = u / s["norm"]
        if decays:
            u = u + s["decay"] * w
    return -s["rate"] * u, {"mu": m}
