"""Adagrad with L2 or decoupled weight decay.

After apex's csrc/multi_tensor_adagrad.cu.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from pallas_kernels._step import DEFAULTS, Numbers, Options, Stepped, leaf_decays, step
from pallas_kernels._weights import Weight
from pallas_kernels._xla import Blocks, bind


def adagrad(
    weights: Sequence[Weight],
    grads: Sequence[Array],
    sums: Sequence[Array],
    *,
    learning_rate: ArrayLike,
    eps: ArrayLike,
    weight_decay: ArrayLike = 0.0,
    adagrad_w_mode: bool = False,
    decays: Sequence[bool] | None = None,
    options: Options = DEFAULTS,
) -> Stepped:
    r"""One step of Adagrad over leaves.

    $$h \leftarrow h + g^2, \quad w \leftarrow w - \eta \frac{g}{\sqrt{h} + \epsilon},$$

    with $g + \lambda w$ for $g$, or in W mode $\lambda w$ added to the fraction.

    Args:
        weights: what to step.
        grads: one per weight, of its shape.
        sums: the sums of squares $h$, float32.
        learning_rate: $\eta$.
        eps: $\epsilon$.
        weight_decay: $\lambda$.
        adagrad_w_mode: where the decay goes.
        decays: which leaves decay; None for all.
        options: how to run.

    Returns:
        New weights, and moment "sum_of_squares".
    """
    numbers = {"rate": learning_rate, "eps": eps, "decay": weight_decay}
    return step(
        bind(_formula, adagrad_w_mode),
        weights,
        grads,
        {"sum_of_squares": sums},
        numbers,
        options,
        tags=leaf_decays(weight_decay, decays, len(weights)),
    )


def _formula(
    w_mode: bool, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
) -> tuple[Array, Blocks]:
    if decays and not w_mode:
        g = g + s["decay"] * w
    h = moments["sum_of_squares"] + g * g
    u = g / (jnp.sqrt(h) + s["eps"])
    if decays and w_mode:
        u = u + s["decay"] * w
    return -s["rate"] * u, {"sum_of_squares": h}
