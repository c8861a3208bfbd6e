"""Opt levels O0 to O6, and the properties that each of them sets.

After apex/amp/frontend.py; O4 and O5 are ROCm apex's bfloat16 levels, O6 is ours.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Unpack

import jax.numpy as jnp

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
    "O6": "O6:  O5 with large products in FP8.\n",
}


class OptLevelError(ValueError, RuntimeError):
    """An unknown opt level, or overrides that make no sense for the level.

    A RuntimeError as well, which is what apex raises here.
    """


@dataclasses.dataclass(frozen=True)
class Properties:
    """The properties of an opt level after overrides. Immutable; hashes by value.

    Attributes:
        enabled: False turns everything off.
        opt_level: "O0" to "O6".
        cast_model_type: dtype of params and inputs; None or False casts nothing.
        patch_functions: whether functions are autocast (apex's patch_torch_functions).
        patch_functions_type: half dtype of autocast; None where there is none.
        keep_batchnorm_fp32: whether affine BatchNorm keeps float32 params.
        master_weights: whether the optimizer steps float32 copies of half params.
        stochastic_rounding: whether bfloat16 params without masters are rounded
            stochastically after a step.
        reduce_dtype: float32 for gradients that are summed, over batch and devices, in
            float32, and stay so; None for the dtype that they have.
        fp8: a `jamp.Fp8` where large products of weights run in fp8, else None.
        loss_scale: "dynamic", a number, or a rule such as `jamp.DynamicLossScale()`.
        cast_model_outputs: dtype of the model's outputs; None is float32 where the
            model is cast, and otherwise leaves them alone.
        keep_fp32: more leaves to keep in float32: regexes and predicates on the path.
        lists: additions to autocast's table, a `jamp.AutocastLists`.
        promote: what autocast does with mixed operands, "widest" or "narrowest".

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
        """Takes a level's defaults and applies every override that is not None.

        Args:
            opt_level: "O0" to "O6".
            enabled: False returns properties that change nothing.
            **overrides: the attributes of `Properties` by name. O1 and O4 refuse
                `cast_model_type`, `keep_batchnorm_fp32` and `master_weights`; the
                others refuse `patch_functions=True`. O0 also refuses `fp8`,
                `reduce_dtype`, `lists` and `promote`. Booleans of
                `keep_batchnorm_fp32` and numbers of `loss_scale` may be strings.

        Returns:
            The properties.

        Raises:
            OptLevelError: the level is unknown, or overrides contradict it; one message
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
        if properties.fp8 and not computes_in_half(properties):
            complaints.append(
                f"fp8 is for products that run in half; here, at {opt_level}, none do."
            )
        if properties.stochastic_rounding and (
            properties.master_weights or properties.cast_model_type != _BF16
        ):
            complaints.append(
                "stochastic_rounding is for bfloat16 params without masters: write "
                "opt_level='O5', master_weights=False."
            )
        if complaints:
            raise OptLevelError("\n".join(complaints))
        return properties


def half_dtype(properties: Properties) -> Any:
    """The half dtype of the model's params, or None."""
    dtype = properties.cast_model_type
    return dtype if dtype in HALF_DTYPES else None


def computes_in_half(properties: Properties) -> bool:
    """Whether matmuls run in half: in a half model, or under autocast."""
    return half_dtype(properties) is not None or properties.patch_functions


def output_dtype(properties: Properties) -> Any:
    """The dtype of the model's outputs, or None if they are left alone."""
    if properties.cast_model_outputs is not None:
        return properties.cast_model_outputs
    return FLOAT32 if properties.cast_model_type else None


def describe(properties: Properties) -> list[str]:
    """One line per property, as apex prints them."""
    level = LEVELS.get(properties.opt_level, properties)
    # With types, because NumPy takes None for float64.
    quiet = [(type(x), x) for x in (None, (), False, level.promote)]
    names = [x.name for x in dataclasses.fields(Properties)]
    values = {name: getattr(properties, name) for name in names}
    return [
        f"{name:<22} : {value}"
        for name, value in values.items()
        if name not in _QUIET or (type(value), value) not in quiet
    ]


_QUIET = ("patch_functions_type", "cast_model_outputs", "keep_fp32", "lists", "promote")
_QUIET += ("stochastic_rounding", "reduce_dtype", "fp8")
_FP16, _BF16 = HALF_DTYPES
DISABLED = Properties(enabled=False, opt_level=None)  # pyright: ignore[reportArgumentType]
_AUTOCAST = Properties(patch_functions=True)
_CAST = Properties(
    promote="narrowest",
    cast_model_type=_BF16,
    keep_batchnorm_fp32=True,
    master_weights=True,
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


_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_DTYPE_LEVELS = {
    "float32": "float32 is 'O0'.",
    "float16": "float16 is 'O1' (autocast) or 'O2' (float16 params, masters).",
    "bfloat16": "bfloat16 is 'O4' (autocast) or 'O5' (bfloat16 params, masters).",
    "float8_e4m3fn": "fp8 is 'O6'.",
}


def check_level(opt_level: Any) -> None:
    """Raises an OptLevelError unless `opt_level` names a level."""
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return
    text = str(opt_level)
    name = f"O{text[-1:]}"
    if name in LEVELS and text in (name.lower(), f"0{name[1]}", name[1]):
        remedy = f"Did you mean {name!r}? The prefix is the letter O."
    else:
        try:
            dtype = str(jnp.dtype(_DTYPE_NAMES.get(text, opt_level)))
        except (TypeError, ValueError):
            dtype = ""
        remedy = _DTYPE_LEVELS.get(
            dtype,
            "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the "
            "number zero.",
        )
    raise OptLevelError(
        f"Unexpected optimization level {opt_level!r}. Options are "
        f"{', '.join(map(repr, LEVELS))}. {remedy}"
    )


def _contradictions(opt_level: str, values: dict[str, Any]) -> Iterator[str]:
    """What apex's checks say of these overrides at this level."""
    if opt_level not in ("O1", "O4"):
        if values.get("patch_functions"):
            yield (
                "Currently, patch_functions=True should only be set by selecting "
                f"opt_level='O1' or 'O4', opt_level was {opt_level!r}."
            )
        for name in ("lists", "promote"):
            if name in values and opt_level == "O0":
                yield f"{name} says what runs in half, and at O0 nothing does."
        if "reduce_dtype" in values and opt_level == "O0":
            yield "reduce_dtype is for gradients in half, and at O0 there are none."
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
