"""apex's two FP16_Optimizers and their scalers, in float64: apex_semantics 7 and 8.2.

`FP16Optimizer` is the one of apex.fp16_utils as its documentation intends it: two
backward passes give the sum of their gradients for half and for float32 parameters
(7.2, where apex scales the latter wrongly). `CutDown` is the one of apex.optimizers.

Imports neither JAX nor the library. A tree is a list of arrays. Gradients are given as
they are, unscaled; `backward` scales them and rounds them to the parameters' dtypes, as
a backward pass does. Scales are rounded to float32.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracles.loss_scale import Rule, State, fp32, init, update
from tests.oracles.steps import Leaves, float64, norm

type Inner = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]


def all_finite(leaves: Leaves) -> bool:
    return all(bool(np.isfinite(np.float64(x)).all()) for x in leaves)


def scaled(grads: Leaves, params: Leaves, scale: float) -> list[np.ndarray]:
    """What a backward pass of `scale` times the loss leaves in the parameters' `.grad`.

    Beyond the range of half it is inf, or NaN where it was NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            (np.float32(g) * np.float32(scale)).astype(p.dtype)
            for g, p in zip(grads, params, strict=True)
        ]


def total_norm(leaves: Leaves, norm_type: float) -> float:
    """torch's clip_grad_norm_: the norm of the norms of the leaves."""
    leaves = [np.abs(x) for x in float64(leaves)]
    if math.isinf(norm_type):
        return float(max(x.max(initial=0.0) for x in leaves))
    powers = sum(float((x**norm_type).sum()) for x in leaves)
    return powers ** (1 / norm_type)


def clip(
    leaves: Leaves, max_norm: float, norm_type: float
) -> tuple[float, list[np.ndarray]]:
    """torch's clip_grad_norm_: the norm before clipping, and clipped gradients."""
    before = total_norm(leaves, norm_type)
    factor = min(1.0, max_norm / (before + 1e-6))
    return before, [x * factor for x in float64(leaves)]


class Momentum:
    """torch.optim.SGD with momentum and without dampening; also optax.sgd's."""

    def __init__(self, learning_rate: float, decay: float) -> None:
        self.learning_rate, self.decay = learning_rate, decay
        self.trace: list[np.ndarray] | None = None

    def __call__(
        self, weights: list[np.ndarray], grads: list[np.ndarray]
    ) -> list[np.ndarray]:
        trace = self.trace or [np.zeros_like(w) for w in weights]
        self.trace = [self.decay * m + g for m, g in zip(trace, grads, strict=True)]
        return [
            w - self.learning_rate * m for w, m in zip(weights, self.trace, strict=True)
        ]


class FP16Optimizer:
    """7.1 and 7.2; `rule` for a dynamic scale, else `static`."""

    def __init__(
        self,
        params: Leaves,
        inner: Inner,
        *,
        rule: Rule | None = None,
        static: float = 1.0,
    ) -> None:
        self.given = list(params)
        self.inner = inner
        self.rule = rule
        self.scaler = init(rule) if rule else State(static, 0, 1, 0)
        self.masters = float64(params)
        self.overflow = False
        self.zero_grad()

    @property
    def scale(self) -> float:
        return self.scaler.scale

    @property
    def params(self) -> list[np.ndarray]:
        """The masters, rounded."""
        return [
            m.astype(np.float32).astype(p.dtype)
            for m, p in zip(self.masters, self.given, strict=True)
        ]

    def zero_grad(self) -> None:
        self.model_grads = [np.zeros(p.shape) for p in self.given]
        self.master_grads = [np.zeros(p.shape) for p in self.given]
        self.overflow = False

    def backward(self, grads: Leaves, update_master_grads: bool = True) -> None:
        new = scaled(grads, self.given, self.scale)
        pairs = zip(self.model_grads, float64(new), strict=True)
        with np.errstate(invalid="ignore"):
            self.model_grads = [a + b for a, b in pairs]
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        if self.rule and not all_finite(self.model_grads):
            self.overflow = True
        pairs = zip(self.master_grads, self.model_grads, strict=True)
        with np.errstate(invalid="ignore"):
            self.master_grads = [a + b / self.scale for a, b in pairs]
        self.model_grads = [np.zeros(p.shape) for p in self.given]
        if self.rule:
            self.scaler = update(self.rule, self.scaler, not self.overflow)
        else:
            self.scaler = dataclasses.replace(
                self.scaler, unskipped=self.scaler.unskipped + 1
            )

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        if self.overflow:
            return -1.0
        before, self.master_grads = clip(self.master_grads, max_norm, norm_type)
        return before

    def step(self) -> None:
        if not self.overflow:
            self.masters = self.inner(self.masters, self.master_grads)


@dataclasses.dataclass
class LossScaler:
    """7.3: a scale that never moves, and finds no overflow."""

    scale: float = 1.0

    def has_overflow(self, grads: Leaves) -> bool:
        del grads
        return False

    def update_scale(self, overflow: bool) -> None:
        del overflow


@dataclasses.dataclass
class DynamicLossScaler:
    """7.4, but elementwise: a sum that overflows is no overflow."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self) -> None:
        self.cur_scale = fp32(self.init_scale)

    def has_overflow(self, grads: Leaves) -> bool:
        return not all_finite(grads)

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(fp32(self.cur_scale / self.scale_factor), 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = fp32(self.cur_scale * self.scale_factor)
        self.cur_iter += 1


@dataclasses.dataclass
class OldAdam:
    """8.1: FusedAdam of 2018, for one group of one flat parameter."""

    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    count: int = 0
    mu: np.ndarray | None = None
    nu: np.ndarray | None = None

    def step(
        self, p: np.ndarray, g: np.ndarray, scale: float, grad_norm: float
    ) -> np.ndarray:
        """One step; `grad_norm` is that of the scaled gradients of this group."""
        divisor = scale
        if self.max_grad_norm > 0:
            excess = (grad_norm / scale + 1e-6) / self.max_grad_norm
            divisor = max(excess, 1.0) * scale
        s = g / divisor
        self.count += 1
        m = np.zeros_like(p) if self.mu is None else self.mu
        v = np.zeros_like(p) if self.nu is None else self.nu
        self.mu = self.b1 * m + (1 - self.b1) * s
        self.nu = self.b2 * v + (1 - self.b2) * s * s
        if self.eps_inside_sqrt:
            denominator = np.sqrt(self.nu + self.eps)
        else:
            denominator = np.sqrt(self.nu) + self.eps
        step_size = self.learning_rate
        if self.bias_correction:
            step_size *= math.sqrt(1 - self.b2**self.count) / (1 - self.b1**self.count)
        return p - step_size * (self.mu / denominator + self.weight_decay * p)


class CutDown:
    """8.2: groups of half parameters, each flattened; norms and clipping per group.

    `messages` has what apex prints.
    """

    def __init__(
        self,
        groups: Sequence[Leaves],
        inners: Sequence[OldAdam],
        *,
        dynamic: bool = False,
        static: float = 1.0,
        verbose: bool = True,
    ) -> None:
        self.given = [list(group) for group in groups]
        self.masters = [_flat(group) for group in self.given]
        self.inners = list(inners)
        self.dynamic, self.verbose = dynamic, verbose
        self.cur_scale = 2.0**16 if dynamic else static
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.messages: list[str] = []
        self.zero_grad()

    @property
    def params(self) -> list[list[np.ndarray]]:
        """The masters, rounded, in the shapes that were given."""
        result = []
        for group, master in zip(self.given, self.masters, strict=True):
            ends = np.cumsum([p.size for p in group])[:-1]
            pieces = np.split(master.astype(np.float32), ends)
            pairs = zip(pieces, group, strict=True)
            result.append([x.reshape(p.shape).astype(p.dtype) for x, p in pairs])
        return result

    def zero_grad(self) -> None:
        self.grads: list[list[np.ndarray]] = [
            [np.zeros_like(p) for p in group] for group in self.given
        ]

    def backward(self, grads: Sequence[Leaves]) -> None:
        """Adds to `.grad`, in half."""
        for i, group in enumerate(self.given):
            new = scaled(grads[i], group, self.cur_scale)
            with np.errstate(over="ignore", invalid="ignore"):
                self.grads[i] = [a + b for a, b in zip(self.grads[i], new, strict=True)]

    def step(self) -> None:
        flat = [_flat(group) for group in self.grads]
        norms = [norm(g) for g in flat]
        overflow = not np.isfinite(norms).all()
        if not overflow:
            for i, inner in enumerate(self.inners):
                self.masters[i] = inner.step(
                    self.masters[i], flat[i], self.cur_scale, float(norms[i])
                )
        self.update_scale(overflow)

    def update_scale(self, overflow: bool) -> None:
        if overflow and (self.verbose or not self.dynamic):
            kind = "dynamic" if self.dynamic else "static"
            self.messages += [
                f"Grad overflow on iteration {self.cur_iter}",
                f"Using {kind} loss scale of {self.cur_scale}",
            ]
        if self.dynamic and overflow:
            self.cur_scale = max(self.cur_scale / 2, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif self.dynamic and (self.cur_iter - self.last_overflow_iter) % 1000 == 0:
            self.cur_scale *= 2
        self.cur_iter += 1


def _flat(leaves: Leaves) -> np.ndarray:
    return np.concatenate([x.ravel() for x in float64(leaves)])
