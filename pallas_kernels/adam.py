"""Adam with decoupled or L2 weight decay, and apex's Adam of 2018.

After apex's csrc/multi_tensor_adam.cu, and fused_adam_cuda_kernel.cu of 2018.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from pallas_kernels._step import DEFAULTS, Numbers, Options, Stepped, leaf_decays, step
from pallas_kernels._weights import Weight
from pallas_kernels._xla import Blocks, bind

type Mode = Literal["decoupled", "l2", "legacy", "legacy_inside_sqrt"]


def adam(
    weights: Sequence[Weight],
    grads: Sequence[Array],
    mu: Sequence[Array],
    nu: Sequence[Array],
    *,
    learning_rate: ArrayLike,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    correction1: ArrayLike = 1.0,
    correction2: ArrayLike = 1.0,
    mode: Mode = "decoupled",
    decays: Sequence[bool] | None = None,
    options: Options = DEFAULTS,
) -> Stepped:
    r"""One step of Adam over leaves.

    With corrections $c_1 = 1 - \beta_1^t$ and $c_2 = 1 - \beta_2^t$,

    $$m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
      v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
      w \leftarrow w - \eta \Big(\frac{m / c_1}{\sqrt{v / c_2} + \epsilon}
      + \lambda w\Big);$$

    in mode "l2" $\lambda w$ is added to $g$ instead. In the legacy modes $\epsilon$ is
    added to $\sqrt{v}$, or under the root, before the correction, and the decay is
    multiplied by $\sqrt{c_2} / c_1$ as the rest is.

    Args:
        weights: what to step.
        grads: one per weight, of its shape.
        mu: first moments, float32.
        nu: second moments, float32.
        learning_rate: $\eta$.
        b1: $\beta_1$.
        b2: $\beta_2$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        correction1: $c_1$.
        correction2: $c_2$.
        mode: where decay and epsilon go.
        decays: which leaves decay; None for all.
        options: how to run.

    Returns:
        New weights, and moments "mu" and "nu".
    """
    rate = jnp.asarray(learning_rate, jnp.float32) / correction1
    root = 1 / jnp.sqrt(jnp.asarray(correction2, jnp.float32))
    if mode.startswith("legacy"):
        rate, root = rate / root, jnp.ones(())
    decay = {"l2": 1.0, "decoupled": learning_rate}.get(mode, rate) * weight_decay
    numbers = {
        "rate": rate,
        "root": root,
        "decay": decay,
        "b1": b1,
        "a1": 1 - b1,  # of Python's numbers not in float32, where digits cancel
        "b2": b2,
        "a2": 1 - b2,
        "eps": eps,
    }
    return step(
        bind(_formula, mode),
        weights,
        grads,
        {"mu": mu, "nu": nu},
        numbers,
        options,
        tags=leaf_decays(weight_decay, decays, len(weights)),
    )


def _formula(
    mode: Mode, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
) -> tuple[Array, Blocks]:
    if decays and mode == "l2":
        g = g + s["decay"] * w
    m = s["b1"] * moments["mu"] + s["a1"] * g
    v = s["b2"] * moments["nu"] + s["a2"] * (g * g)
    if mode == "legacy_inside_sqrt":
        u = s["rate"] * m / jnp.sqrt(v + s["eps"])
    else:
        u = s["rate"] * m / (jnp.sqrt(v) * s["root"] + s["eps"])
    if decays and mode != "l2":
        u = u + s["decay"] * w
    return -u, {"mu": m, "nu": v}
