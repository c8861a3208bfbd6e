"""SGD with momentum, dampening, Nesterov momentum and weight decay.

After apex's csrc/multi_tensor_sgd_kernel.cu.
"""

from collections.abc import Sequence

from jaxtyping import Array, ArrayLike

from pallas_kernels._step import DEFAULTS, Numbers, Options, Stepped, leaf_decays, step
from pallas_kernels._weights import Weight
from pallas_kernels._xla import Blocks, bind


def sgd(
    weights: Sequence[Weight],
    grads: Sequence[Array],
    trace: Sequence[Array] | None,
    *,
    learning_rate: ArrayLike,
    momentum: ArrayLike = 0.0,
    undampened: ArrayLike = 1.0,
    weight_decay: ArrayLike = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    decays: Sequence[bool] | None = None,
    options: Options = DEFAULTS,
) -> Stepped:
    r"""One step of SGD over leaves.

    $$d = g + \lambda w, \quad b \leftarrow \mu b + (1 - \tau) d, \quad
      w \leftarrow w - \eta b,$$

    with Nesterov momentum $d + \mu b$ in place of the last $b$. With
    `wd_after_momentum`, $\lambda w$ is added to that instead.

    Args:
        weights: what to step.
        grads: one per weight, of its shape.
        trace: momentum buffers $b$, float32; None for no momentum.
        learning_rate: $\eta$.
        momentum: $\mu$.
        undampened: $1 - \tau$; 1 on the first step, as in torch.
        weight_decay: $\lambda$.
        nesterov: whether to look ahead.
        wd_after_momentum: where the decay goes.
        decays: which leaves decay; None for all.
        options: how to run.

    Returns:
        New weights, and moment "trace" if there is one.
    """
    numbers = {
        "rate": learning_rate,
        "momentum": momentum,
        "undampened": undampened,
        "decay": weight_decay,
    }
    return step(
        bind(_formula, nesterov, wd_after_momentum),
        weights,
        grads,
        {} if trace is None else {"trace": trace},
        numbers,
        options,
        tags=leaf_decays(weight_decay, decays, len(weights)),
    )


def _formula(
    nesterov: bool,
    wd_after_momentum: bool,
    s: Numbers,
    decays: bool,
    g: Array,
    w: Array,
    moments: Blocks,
) -> tuple[Array, Blocks]:
    if decays and not wd_after_momentum:
        g = g + s["decay"] * w
    d, new = g, {}
    if "trace" in moments:
        b = s["momentum"] * moments["trace"] + s["undampened"] * g
        d, new = g + s["momentum"] * b if nesterov else b, {"trace": b}
    if decays and wd_after_momentum:
        d = d + s["decay"] * w
    return -s["rate"] * d, new
