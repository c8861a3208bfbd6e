"""The arguments that apex's `FP16_Optimizer` takes for its loss scale, as a rule."""

import warnings
from collections.abc import Mapping
from typing import Any

from jamp._core.warnings import UnusedOptionWarning
from jamp._scaling.rules import DynamicLossScale, StaticLossScale

_ARGS = {
    "init_scale": "init_scale",
    "scale_factor": "factor",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}


def rule_from_args(
    static: float, dynamic: bool, dynamic_args: Mapping[str, Any] | None
) -> DynamicLossScale | StaticLossScale:
    """The rule for arguments in apex's words."""
    if not dynamic:
        if dynamic_args is not None:
            _warn_unused("dynamic_loss_args", "dynamic_loss_scale=True")
        return StaticLossScale(static)
    if static != 1.0:
        _warn_unused("static_loss_scale", "dynamic_loss_scale=False")
    unknown = sorted(set(dynamic_args or {}) - set(_ARGS))
    if unknown:
        raise TypeError(
            f"dynamic_loss_args has no {unknown[0]!r}; its keys are {list(_ARGS)}."
        )
    return DynamicLossScale(**{_ARGS[k]: v for k, v in (dynamic_args or {}).items()})


def _warn_unused(name: str, needs: str) -> None:
    warnings.warn(
        f"{name} has no effect: it needs {needs}.", UnusedOptionWarning, stacklevel=4
    )
