"""The opt levels O0 to O6, and the properties that each of them sets.

Based on apex/amp/frontend.py. O4 and O5 are from ROCm apex; O6 is new here.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Unpack

import numpy as np

from jamp._autocast.transform import Promote
from jamp._core.dtypes import FLOAT32, HALF_DTYPES
from jamp._fp8.options import Fp8
from jamp._policy.options import PARSERS, LevelOptions, check_options

type OptLevel = Literal["O0", "O1", "O2", "O3", "O4", "O5", "O6"]

BRIEFS = {
    "O0": "O0:  Pure FP32 training.\n",
    "O1": "O1:  Insert automatic casts around JAX functions.\n",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic casts around JAX functions.\n",
    "O5": "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n",
    "O6": "O6:  O5 with large matmuls in FP8.\n",
}


class OptLevelError(ValueError, RuntimeError):
    """An unknown opt level, or overrides that make no sense for the level.

    It is also a RuntimeError, because apex raises one here.
    """


@dataclasses.dataclass(frozen=True)
class Properties:
    """The properties of an opt level after overrides. Immutable; hashes by value.

    Attributes:
        enabled: False turns everything off.
        opt_level: "O0" to "O6".
        cast_model_type: dtype of params and inputs; None or False casts nothing.
        patch_functions: whether to autocast functions (apex's patch_torch_functions).
        patch_functions_type: half dtype of autocast, or None.
        keep_batchnorm_fp32: whether affine BatchNorm keeps float32 params.
        master_weights: whether the optimizer steps float32 masters of half params.
        stochastic_rounding: whether to round bfloat16 params without masters
            stochastically after a step.
        reduce_dtype: float32 sums gradients over batch and devices in float32, and
            returns them in float32; None keeps their dtype.
        fp8: a `jamp.Fp8` that selects the matmuls of weights to run in fp8, or None.
        loss_scale: "dynamic", a number, or a rule such as `jamp.DynamicLossScale()`.
            None is `StaticLossScale(1.0, check=True)`.
        cast_model_outputs: dtype of the outputs; None means float32 if the params are
            cast, and no cast otherwise.
        keep_fp32: more leaves to keep in float32: regexes and predicates on the path.
        lists: additions to the lists of autocast, a `jamp.AutocastLists`.
        promote: the dtype for mixed operands, "widest" or "narrowest".

    >>> Properties.from_opt_level("O2", loss_scale="128.0").loss_scale
    128.0
    """

    enabled: bool = True
    opt_level: str = "O0"
    cast_model_type: Any = None
    patch_functions: bool = False
    patch_functions_type: Any = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    stochastic_rounding: bool = False
    reduce_dtype: Any = None
    fp8: Fp8 | None = None
    loss_scale: Any = 1.0
    cast_model_outputs: Any = None
    keep_fp32: tuple[Any, ...] = ()
    lists: Any = None
    promote: Promote = "widest"

    @classmethod
    def from_opt_level(
        cls,
        opt_level: OptLevel = "O1",
        *,
        enabled: bool = True,
        **overrides: Unpack[LevelOptions],
    ) -> "Properties":
        """Applies all overrides that are not None to the defaults of a level.

        Args:
            opt_level: "O0" to "O6".
            enabled: False returns properties that change nothing.
            **overrides: the attributes of `Properties` by name. O1 and O4 refuse
                `cast_model_type`, `keep_batchnorm_fp32` and `master_weights`; the
                others refuse `patch_functions=True`. O0 also refuses `fp8`,
                `reduce_dtype`, `lists` and `promote`. `keep_batchnorm_fp32` and
                `loss_scale` may be strings.

        Returns:
            The properties.

        Raises:
            OptLevelError: the level is unknown, or overrides contradict it. The message
                lists all contradictions.
            TypeError: an override is unknown.

        >>> Properties.from_opt_level("O5").cast_model_type
        dtype(bfloat16)
        """
        check_options("Properties.from_opt_level", overrides, PARSERS)
        if not enabled:
            return DISABLED
        check_level(opt_level)
        values, complaints = {}, []
        given = {k: v for k, v in overrides.items() if v is not None}
        for name, value in given.items():
            try:
                values[name] = PARSERS[name](value)
            except (ValueError, TypeError) as error:
                complaints.append(str(error))
        complaints += _contradictions(opt_level, values)
        properties = dataclasses.replace(LEVELS[opt_level], **values)
        computes_in_half = half_dtype(properties) or properties.patch_functions
        if properties.fp8 and not computes_in_half:
            complaints.append(
                f"fp8 needs matmuls in half, and {opt_level} with these options has "
                "none: leave fp8 out, or choose another level."
            )
        if properties.stochastic_rounding and (
            properties.master_weights or properties.cast_model_type != _BF16
        ):
            complaints.append(
                "stochastic_rounding needs bfloat16 params without masters: write "
                "opt_level='O5', master_weights=False."
            )
        if complaints:
            raise OptLevelError("\n".join(complaints))
        return properties


def half_dtype(properties: Properties) -> Any:
    """Returns the half dtype of the params, or None."""
    dtype = properties.cast_model_type
    return dtype if dtype in HALF_DTYPES else None


def one_line(properties: Properties) -> str:
    """Returns the level, and the dtypes and loss scale after overrides."""
    params = np.dtype(properties.cast_model_type or FLOAT32)
    parts = [f"{params} params"]
    if properties.patch_functions:
        parts.append(f"autocast to {properties.patch_functions_type}")
    if properties.keep_batchnorm_fp32:
        parts.append("float32 BatchNorm")
    if properties.master_weights:
        parts.append("float32 masters")
    if properties.fp8:
        parts.append("fp8 matmuls")
    scale = _loss_scale(properties)
    parts.append(f"{scale} loss scale" if scale == "dynamic" else f"loss scale {scale}")
    return f"jamp {properties.opt_level}: {', '.join(parts)}"


def _loss_scale(properties: Properties) -> str:
    """Returns the loss scale, and whether a fixed one checks the gradients."""
    scale = properties.loss_scale
    if scale is None:
        return "1.0 (checked)"
    return f"{scale} (unchecked)" if isinstance(scale, float) else str(scale)


def describe(properties: Properties) -> list[str]:
    """Formats one line per property, as apex prints them."""
    level = LEVELS.get(properties.opt_level, properties)
    quiet = [str(x) for x in (None, (), False, level.promote)]
    names = [field.name for field in dataclasses.fields(Properties)]
    values = {name: str(getattr(properties, name)) for name in names}
    values["loss_scale"] = _loss_scale(properties)
    return [
        f"{name:<22} : {value}"
        for name, value in values.items()
        if name not in _QUIET or value not in quiet
    ]


_QUIET = ("patch_functions_type", "cast_model_outputs", "keep_fp32", "lists", "promote")
_QUIET += ("stochastic_rounding", "reduce_dtype", "fp8")
_FP16, _BF16 = HALF_DTYPES
DISABLED = Properties(enabled=False, opt_level=None)  # pyright: ignore[reportArgumentType]
_AUTOCAST = Properties(patch_functions=True, loss_scale=None)
_CAST = Properties(
    promote="narrowest",
    cast_model_type=_BF16,
    keep_batchnorm_fp32=True,
    master_weights=True,
    loss_scale=None,
)
_but = dataclasses.replace
_DEFAULTS = {
    "O0": Properties(cast_model_type=FLOAT32, master_weights=False),
    "O1": _but(_AUTOCAST, patch_functions_type=_FP16, loss_scale="dynamic"),
    "O2": _but(_CAST, cast_model_type=_FP16, loss_scale="dynamic"),
    "O3": Properties(
        promote="narrowest",
        cast_model_type=_FP16,
        keep_batchnorm_fp32=False,
        master_weights=False,
    ),
    "O4": _but(_AUTOCAST, patch_functions_type=_BF16),
    "O5": _CAST,
    "O6": _but(_CAST, fp8=Fp8()),
}
LEVELS = {level: _but(x, opt_level=level) for level, x in _DEFAULTS.items()}


def check_level(opt_level: Any) -> None:
    """Raises an OptLevelError unless `opt_level` names a level."""
    if not (isinstance(opt_level, str) and opt_level in LEVELS):
        raise OptLevelError(
            f"Unexpected optimization level {opt_level!r}. Options are "
            f"{', '.join(map(repr, LEVELS))}. Note that in `O0`, `O1`, etc., the "
            "prefix O is the letter O, not the number zero. 'O0' is float32; 'O1' "
            "autocasts to float16 and 'O4' to bfloat16; params with float32 masters "
            "are float16 at 'O2' and bfloat16 at 'O5'; 'O3' is float16 without "
            "masters; 'O6' is 'O5' with fp8 matmuls."
        )


def _contradictions(opt_level: str, values: dict[str, Any]) -> Iterator[str]:
    """Yields apex's complaints about these overrides at this level."""
    if opt_level not in ("O1", "O4"):
        if values.get("patch_functions"):
            yield (
                "Currently, patch_functions=True should only be set by selecting "
                f"opt_level='O1' or 'O4', opt_level was {opt_level!r}."
            )
        for name in ("lists", "promote"):
            if name in values and opt_level == "O0":
                yield f"{name} needs operations in half, and O0 has none: leave it out."
        if "reduce_dtype" in values and opt_level == "O0":
            yield "reduce_dtype needs gradients in half, and O0 has none: leave it out."
        return
    dtype = values.get("cast_model_type")
    if dtype and dtype != FLOAT32:
        yield (
            f"{opt_level} inserts casts around functions rather than model weights, so "
            "with it the model weights themselves should remain FP32. To cast the "
            f"model weights to half, use opt_level='O2', 'O3', 'O5' or "
            f"'O6'. cast_model_type was {dtype}."
        )
    if "keep_batchnorm_fp32" in values:
        yield (
            f"With opt_level {opt_level}, batchnorm functions are automatically run in "
            "FP32, so keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was "
            f"{values['keep_batchnorm_fp32']}."
        )
    if "master_weights" in values:
        yield (
            f"It doesn't make sense to use master_weights with {opt_level}. With "
            f"{opt_level}, your model weights themselves should be FP32. "
            f"master_weights was {values['master_weights']}."
        )
