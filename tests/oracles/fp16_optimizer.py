"""apex's scaler and clipping of fp16_utils in NumPy, from apex_semantics 7.

A tree is a list of arrays. Scales are rounded to float32.
"""

import dataclasses

import numpy as np

from tests.oracles.fused import Leaves, float64
from tests.oracles.loss_scale import fp32


def clip(
    leaves: Leaves, max_norm: float, norm_type: float
) -> tuple[float, list[np.ndarray]]:
    """torch's clip_grad_norm_: returns the norm and the clipped gradients."""
    flat = np.concatenate([x.ravel() for x in float64(leaves)])
    before = float(np.linalg.norm(flat, norm_type))
    factor = min(1.0, max_norm / (before + 1e-6))
    return before, [x * factor for x in float64(leaves)]


@dataclasses.dataclass
class DynamicLossScaler:
    """The scaler of 7.4, and of 8.2 with other numbers."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self) -> None:
        self.cur_scale = fp32(self.init_scale)

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(fp32(self.cur_scale / self.scale_factor), 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = fp32(self.cur_scale * self.scale_factor)
        self.cur_iter += 1
