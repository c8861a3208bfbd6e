"""LAMB in two stages: the norms of weights and updates, then the step.

After apex's csrc/multi_tensor_lamb.cu. You et al., *Large Batch Optimization for Deep
Learning*, 2020, arXiv:1904.00962.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from pallas_kernels._step import (
    DEFAULTS,
    Numbers,
    Options,
    Stepped,
    Update,
    leaf_decays,
    measure,
    step,
)
from pallas_kernels._weights import Weight
from pallas_kernels._xla import Blocks, bind


def lamb(
    weights: Sequence[Weight],
    grads: Sequence[Array],
    mu: Sequence[Array],
    nu: Sequence[Array],
    *,
    learning_rate: ArrayLike,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    averaging: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    correction1: ArrayLike = 1.0,
    correction2: ArrayLike = 1.0,
    adam_w_mode: bool = True,
    use_nvlamb: bool = False,
    decays: Sequence[bool] | None = None,
    options: Options = DEFAULTS,
) -> Stepped:
    r"""One step of LAMB over leaves.

    $$m \leftarrow \beta_1 m + \beta_3 g, \quad
      v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
      u = \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda w, \quad
      w \leftarrow w - \eta \frac{\|w\|}{\|u\|} u.$$

    The first stage writes nothing but the norms, and kernels compute $u$ again in the
    second: that moves 2 B per weight more than to store it, and takes no memory. XLA
    keeps $u$, 4 B per weight. The ratio is 1 where a norm is 0, and on leaves that do
    not decay, unless `use_nvlamb`.

    Args:
        weights: what to step.
        grads: one per weight, of its shape, clipped by `options.unscale`.
        mu: first moments, float32.
        nu: second moments, float32.
        learning_rate: $\eta$.
        b1: $\beta_1$.
        b2: $\beta_2$.
        eps: $\epsilon$.
        averaging: $\beta_3$, $1 - \beta_1$ or 1.
        weight_decay: $\lambda$.
        correction1: $c_1$.
        correction2: $c_2$.
        adam_w_mode: whether to decay as above; else $\lambda w$ is added to $g$.
        use_nvlamb: whether leaves that do not decay are scaled by the ratio too.
        decays: which leaves decay; None for all.
        options: how to run.

    Returns:
        New weights, and moments "mu" and "nu".
    """
    numbers = {
        "decay": weight_decay,
        "b1": b1,
        "b3": averaging,
        "b2": b2,
        "a2": 1 - b2,  # of Python's numbers not in float32, where digits cancel
        "eps": eps,
        "c1": correction1,
        "root": 1 / jnp.sqrt(jnp.asarray(correction2, jnp.float32)),
    }
    moments = {"mu": mu, "nu": nu}
    tags = leaf_decays(weight_decay, decays, len(weights))
    formula = bind(_formula, adam_w_mode)
    norms = measure(
        bind(_norms, formula),
        weights,
        grads,
        moments,
        numbers,
        options,
        reductions={"weight": "sum", "update": "sum"},
        tags=tags,
    )
    weight, update = jnp.sqrt(norms["weight"]), jnp.sqrt(norms["update"])
    adapts = (weight != 0) & (update != 0)  # NaN too, as in apex
    if not use_nvlamb:
        adapts &= jnp.array(tags, bool) & (jnp.asarray(weight_decay) != 0)
    rate = jnp.asarray(learning_rate) * jnp.where(adapts, weight / update, 1)
    return step(
        bind(_scaled, formula),
        weights,
        grads,
        moments,
        numbers,
        options,
        per_leaf={"rate": rate},
        tags=tags,
    )


def _formula(
    adam_w_mode: bool, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
) -> tuple[Array, Blocks]:
    """The direction, and the moments."""
    if decays and not adam_w_mode:
        g = g + s["decay"] * w
    m = s["b1"] * moments["mu"] + s["b3"] * g
    v = s["b2"] * moments["nu"] + s["a2"] * (g * g)
    u = (m / s["c1"]) / (jnp.sqrt(v) * s["root"] + s["eps"])
    if decays and adam_w_mode:
        u = u + s["decay"] * w
    return u, {"mu": m, "nu": v}


def _norms(
    formula: Update, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
) -> Blocks:
    u, _ = formula(s, decays, g, w, moments)
    return {"weight": w * w, "update": u * u}


def _scaled(
    formula: Update, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
) -> tuple[Array, Blocks]:
    u, moments = formula(s, decays, g, w, moments)
    return -s["rate"] * u, moments
