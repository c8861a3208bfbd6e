"""Opt levels O0 to O6, and the properties that each of them sets.

After apex/amp/frontend.py; O4 and O5 are ROCm apex's bfloat16 levels, O6 is ours.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from jamp._autocast.fp8 import Fp8
from jamp._autocast.lists import AutocastLists
from jamp._autocast.transform import Promote
from jamp._core.dtypes import CASTABLE_DTYPES, FLOAT32, HALF_DTYPES, MODEL_DTYPES
from jamp._core.path_rules import PathRule, parse_rules

type KeepFp32 = PathRule | tuple[PathRule, ...]
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
    """What an opt level means, after the user's overrides. Immutable; hashes by value.

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
        cast_model_type: DTypeLike | Literal[False] | None = None,
        patch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        stochastic_rounding: bool | None = None,
        reduce_dtype: DTypeLike | None = None,
        fp8: bool | Fp8 | None = None,
        loss_scale: Any = None,
        cast_model_outputs: DTypeLike | None = None,
        keep_fp32: KeepFp32 | list[Any] | None = None,
        lists: Any = None,
        promote: Promote | None = None,
    ) -> "Properties":
        """Takes a level's defaults and applies every override that is not None.

        Args:
            opt_level: "O0" to "O6".
            enabled: see the attributes of `Properties`, also for what follows.
            cast_model_type: False to cast nothing; not for O1 and O4.
            patch_functions: True only at O1 and O4.
            keep_batchnorm_fp32: also as the string "True" or "False".
            master_weights: not for O1 and O4.
            stochastic_rounding: with bfloat16 params and without masters.
            loss_scale: a number also as a string ("128.0").
            cast_model_outputs: at any level.
            keep_fp32: one regex or predicate `(path, leaf) -> bool`, or several;
                paths are written "Dense_0/kernel".
            fp8: True for `jamp.Fp8()`, False for none; not True for O0.
            reduce_dtype, lists, promote: not for O0.

        Returns:
            The properties.

        Raises:
            OptLevelError: the level is unknown, or overrides contradict it; all
                contradictions are in the one message.

        >>> Properties.from_opt_level("O5").cast_model_type
        dtype(bfloat16)
        """
        given = locals()
        overrides = {k: given[k] for k in _PARSERS if given[k] is not None}
        if not enabled:
            return DISABLED
        if not isinstance(opt_level, str) or opt_level not in LEVELS:
            raise OptLevelError(
                f"Unexpected optimization level {opt_level!r}. Options are "
                f"{', '.join(map(repr, LEVELS))}. Note that in `O0`, `O1`, etc., the "
                "prefix O is the letter O, not the number zero."
            )
        values, complaints = {}, []
        for name, value in overrides.items():
            try:
                values[name] = _PARSERS[name](value)
            except (ValueError, TypeError) as error:
                complaints.append(str(error))
        complaints += _contradictions(opt_level, values)
        properties = dataclasses.replace(LEVELS[opt_level], **values)
        if properties.fp8 and not properties.computes_in_half:
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

    @property
    def half_dtype(self) -> Any:
        """The half dtype that the model is cast to, or None."""
        return self.cast_model_type if self.cast_model_type in HALF_DTYPES else None

    @property
    def computes_in_half(self) -> bool:
        """Whether products run in half: of a half model, or under autocast."""
        return self.half_dtype is not None or self.patch_functions

    @property
    def output_dtype(self) -> Any:
        """The dtype of the model's outputs, or None where they are left alone."""
        if self.cast_model_outputs is not None:
            return self.cast_model_outputs
        return FLOAT32 if self.cast_model_type else None

    def describe(self) -> list[str]:
        """One line per property, as apex prints them."""
        quiet = (None, (), False, LEVELS.get(self.opt_level, self).promote)
        quiet = [(type(x), x) for x in quiet]  # NumPy says None == float64
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return [
            f"{name:<22} : {value}"
            for name, value in values.items()
            if name not in _QUIET or (type(value), value) not in quiet
        ]


_QUIET = ("patch_functions_type", "cast_model_outputs", "keep_fp32", "lists", "promote")
_QUIET += ("stochastic_rounding", "reduce_dtype", "fp8")
_FP16, _BF16 = HALF_DTYPES
_HALF_LEVELS = "'O2', 'O3', 'O5' or 'O6'"
DISABLED = Properties(enabled=False, opt_level=None)  # pyright: ignore[reportArgumentType]
_AUTOCAST = Properties(opt_level="O1", patch_functions=True)
_CAST = Properties(
    promote="narrowest",
    cast_model_type=_BF16,
    keep_batchnorm_fp32=True,
    master_weights=True,
)
LEVELS = {
    "O0": Properties(opt_level="O0", cast_model_type=FLOAT32, master_weights=False),
    "O1": dataclasses.replace(
        _AUTOCAST, patch_functions_type=_FP16, loss_scale="dynamic"
    ),
    "O2": dataclasses.replace(
        _CAST, opt_level="O2", cast_model_type=_FP16, loss_scale="dynamic"
    ),
    "O3": Properties(
        promote="narrowest",
        opt_level="O3",
        cast_model_type=_FP16,
        keep_batchnorm_fp32=False,
        master_weights=False,
    ),
    "O4": dataclasses.replace(_AUTOCAST, opt_level="O4", patch_functions_type=_BF16),
    "O5": dataclasses.replace(_CAST, opt_level="O5"),
    "O6": dataclasses.replace(_CAST, opt_level="O6", fp8=Fp8()),
}


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
            f"model weights to half, use opt_level={_HALF_LEVELS}. "
            f"cast_model_type was {dtype}."
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


def _parse_fp8(value: Any) -> Fp8 | None:
    if isinstance(value, Fp8):
        return value
    if not isinstance(value, bool):
        raise TypeError(f"fp8 must be a boolean or a jamp.Fp8, found fp8={value!r}")
    return Fp8() if value else None


def _dtype_among(
    name: str, legal: tuple[Any, ...], or_false: bool = False
) -> Callable[[Any], Any]:
    """A parser of what names one of some dtypes."""

    def parse(value):
        if or_false and value is False:
            return False
        try:
            dtype = None if isinstance(value, bool) else jnp.dtype(value)
        except TypeError:
            dtype = None
        if dtype is None or dtype not in legal:  # NumPy says None == float64
            names = ", ".join(map(str, legal)) + " or False" * or_false
            raise ValueError(f"{name} must be one of {names}, found {name}={value!r}")
        return dtype

    return parse


def _one_of(name: str, words: str, allowed: dict[Any, Any]) -> Callable[[Any], Any]:
    """A parser of what is a key of `allowed`, a bool or a string."""

    def parse(value):
        if not isinstance(value, bool | str) or value not in allowed:
            raise ValueError(f"{name} must be {words}, found {name}={value!r}")
        return allowed[value]

    return parse


def _parse_loss_scale(value: Any) -> Any:
    if isinstance(value, str) and value == "dynamic":
        return value
    if hasattr(value, "scale_loss") and not isinstance(value, type):  # a rule object
        return value
    try:
        scale = 0.0 if isinstance(value, bool | bytes | type) else float(value)
    except (TypeError, ValueError):
        scale = 0.0
    if not 2.0**-126 <= scale <= 2.0**126:  # as in _scaling/rules
        raise ValueError(
            "loss_scale must be 'dynamic', a positive finite number of at most 2**126 "
            "(also as a string), or a rule such as jamp.DynamicLossScale(), found "
            f"loss_scale={value!r}"
        )
    return scale


def _parse_lists(value: Any) -> Any:
    if not isinstance(value, AutocastLists):
        raise TypeError(f"lists must be a jamp.AutocastLists, found {value!r}")
    return value


parse_model_dtype = _dtype_among("dtype", MODEL_DTYPES)
_BOOLS = {True: True, False: False}
_PARSERS = {
    "cast_model_type": _dtype_among("cast_model_type", MODEL_DTYPES, or_false=True),
    "patch_functions": _one_of("patch_functions", "a boolean or None", _BOOLS),
    "keep_batchnorm_fp32": _one_of(
        "keep_batchnorm_fp32",
        "a boolean, the string 'True' or 'False', or None",
        _BOOLS | {"True": True, "False": False},
    ),
    "master_weights": _one_of("master_weights", "a boolean or None", _BOOLS),
    "stochastic_rounding": _one_of("stochastic_rounding", "a boolean or None", _BOOLS),
    "reduce_dtype": _dtype_among("reduce_dtype", (FLOAT32,)),
    "fp8": _parse_fp8,
    "loss_scale": _parse_loss_scale,
    "cast_model_outputs": _dtype_among("cast_model_outputs", CASTABLE_DTYPES),
    "keep_fp32": functools.partial(parse_rules, "keep_fp32"),
    "lists": _parse_lists,
    "promote": _one_of(
        "promote",
        "'widest' or 'narrowest'",
        {"widest": "widest", "narrowest": "narrowest"},
    ),
}
