"""The options of `initialize`: names, types, and parsers of the values."""

import difflib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from typing_extensions import TypedDict

from jamp._autocast.lists import AutocastLists
from jamp._autocast.transform import Promote
from jamp._core.dtypes import CASTABLE_DTYPES, FLOAT32, MODEL_DTYPES
from jamp._core.numbers import is_scale, number
from jamp._core.path_rules import parse_rules
from jamp._fp8.options import Fp8


class LevelOptions(TypedDict, total=False):
    """The overrides of an opt level, by default all None; see `Properties`."""

    cast_model_type: DTypeLike | Literal[False] | None
    patch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | None
    stochastic_rounding: bool | None
    reduce_dtype: DTypeLike | None
    fp8: bool | Fp8 | None
    loss_scale: Any
    cast_model_outputs: DTypeLike | None
    keep_fp32: Any
    lists: AutocastLists | None
    promote: Promote | None


class InitOptions(LevelOptions, total=False):
    """The options of `jamp.initialize` and `jamp.nnx.initialize`; see `initialize`."""

    enabled: bool
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    store_remainder: bool
    allow_incoming_model_not_fp32: bool


# Names from other libraries, and the names of the same options in jamp.
_MEANT = {
    "patch_torch_functions": "patch_functions",
    "model": "params",
    "models": "params",
    "optimizer": "tx",
    "optimizers": "tx",
    "dynamic_loss_scale": "loss_scale='dynamic'",
}


_RATE = "It belongs in tx, as in `optax.adamw(learning_rate=1e-3)`."
_DTYPE = "The opt level sets the dtypes; cast_model_type= overrides the params' dtype."
# Names of options that jamp does not have, and the places of their values.
_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr", "weight_decay", "momentum"), _RATE),
    **dict.fromkeys(("dtype", "param_dtype", "compute_dtype"), _DTYPE),
}


def elsewhere(name: str) -> str:
    """Returns a sentence that says where the value of an option belongs, or ""."""
    return f" {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""


def check_options(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises if a keyword argument of `call` is unknown."""
    for name in given:
        if name not in known:
            raise TypeError(
                f"{call} got an unknown keyword {name!r}."
                f"{elsewhere(name) or hint(name, known)}"
            )


def hint(name: str, known: Collection[str]) -> str:
    """Returns a sentence that suggests another name for an unknown option, or ""."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    meant = _MEANT.get(name) or next(iter(close), None)
    return f" Did you mean {meant!r}?" if meant else ""


def _parse_fp8(value: Any) -> Fp8 | None:
    if isinstance(value, Fp8):
        return value
    if not isinstance(value, bool):
        raise TypeError(f"`fp8` must be a bool or a jamp.Fp8, got {value!r}.")
    return Fp8() if value else None


def _dtype_among(
    name: str, legal: tuple[Any, ...], or_false: bool = False
) -> Callable[[Any], Any]:
    """Returns a parser that accepts the legal dtypes, and False if `or_false`."""

    def parse(value):
        if or_false and value is False:
            return False
        try:
            dtype = None if isinstance(value, bool) else jnp.dtype(value)
        except TypeError:
            dtype = None
        if dtype is None or dtype not in legal:  # NumPy says None == float64
            names = ", ".join(map(str, legal)) + " or False" * or_false
            raise ValueError(f"`{name}` must be one of {names}, got {value!r}.")
        return dtype

    return parse


def _one_of(name: str, words: str, allowed: dict[Any, Any]) -> Callable[[Any], Any]:
    """Returns a parser that maps the keys of `allowed`, bools or strings, to values."""

    def parse(value):
        if not isinstance(value, bool | str) or value not in allowed:
            raise ValueError(f"`{name}` must be {words}, got {value!r}.")
        return allowed[value]

    return parse


def _parse_loss_scale(value: Any) -> Any:
    if isinstance(value, str) and value == "dynamic":
        return value
    if hasattr(value, "scale_loss") and not isinstance(value, type):  # a rule object
        return value
    scale = number(value, text=True)
    if not is_scale(scale):
        raise ValueError(
            "`loss_scale` must be 'dynamic', a positive finite number of at most "
            "2**126 (also as a string), or a rule such as jamp.DynamicLossScale(), "
            f"got {value!r}."
        )
    return scale


def _parse_lists(value: Any) -> Any:
    if not isinstance(value, AutocastLists):
        raise TypeError(f"`lists` must be a jamp.AutocastLists, got {value!r}.")
    return value


parse_model_dtype = _dtype_among("dtype", MODEL_DTYPES)
_BOOLS = {True: True, False: False}
_FLAGS = ("patch_functions", "master_weights", "stochastic_rounding")
_PROMOTE = {x: x for x in ("widest", "narrowest")}
PARSERS = {
    "cast_model_type": _dtype_among("cast_model_type", MODEL_DTYPES, or_false=True),
    **{name: _one_of(name, "a boolean or None", _BOOLS) for name in _FLAGS},
    "keep_batchnorm_fp32": _one_of(
        "keep_batchnorm_fp32",
        "a boolean, the string 'True' or 'False', or None",
        _BOOLS | {"True": True, "False": False},
    ),
    "reduce_dtype": _dtype_among("reduce_dtype", (FLOAT32,)),
    "fp8": _parse_fp8,
    "loss_scale": _parse_loss_scale,
    "cast_model_outputs": _dtype_among("cast_model_outputs", CASTABLE_DTYPES),
    "keep_fp32": functools.partial(parse_rules, "keep_fp32"),
    "lists": _parse_lists,
    "promote": _one_of("promote", "'widest' or 'narrowest'", _PROMOTE),
}
