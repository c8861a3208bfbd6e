"""The front end: params and an optimizer in, a state that trains at an opt level out.

After apex/amp/frontend.py and _initialize.py, without their global state.
"""

import functools
import inspect
import re
from collections.abc import Collection
from numbers import Integral
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import PyTree
from typing_extensions import TypeVar

from jamp._autocast.transform import Promote
from jamp._core.devices import check_same_devices, moves_constants, warn_without_fp8
from jamp._core.path_rules import check_rules
from jamp._core.tree import copy_shared, strong_array
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._fp8.options import Fp8
from jamp._policy.casting import cast_to_level, warn_without_batchnorm
from jamp._policy.forward import forwards
from jamp._policy.levels import BRIEFS, LEVELS, OptLevel, Properties, describe
from jamp._policy.options import hint
from jamp._scaling.rules import DynamicLossScale, LossScaleRule, loss_scale_rule
from jamp._state.amp_state import AmpState, Field, warn_of_half_field
from jamp._state.incoming import ARRAY_LIKE, check_containers, check_float32
from jamp._state.new_state import new_state, settled
from jamp._state.stalls import forget

S = TypeVar("S", bound=AmpState, default=AmpState)
_NAME = re.compile(r"AmpState\[(\w+(?:,\w+)*)\]")


@moves_constants
def initialize(
    params: PyTree,
    tx: Any = None,
    opt_level: OptLevel = "O1",
    *,
    enabled: bool = True,
    cast_model_type: Any = None,
    patch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    stochastic_rounding: bool | None = None,
    reduce_dtype: DTypeLike | None = None,
    fp8: bool | Fp8 | None = None,
    loss_scale: float | str | LossScaleRule | None = None,
    cast_model_outputs: DTypeLike | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    apply_fn: Any = None,
    keep_fp32: Any = None,
    lists: Any = None,
    promote: Promote | None = None,
    store_remainder: bool = False,
    allow_incoming_model_not_fp32: bool = False,
    state_class: type[S] = AmpState,
    **fields: Field,
) -> S:
    """Prepares params and an optimizer for training at an opt level.

    | level | params | optimizer | loss scale |
    |---|---|---|---|
    | O0 | float32 | float32 | 1 |
    | O1 | float32, autocast to float16 | float32 | dynamic |
    | O2 | float16, BatchNorm float32 | float32 masters | dynamic |
    | O3 | float16 | float32, no masters | 1 |
    | O4 | float32, autocast to bfloat16 | float32 | 1 |
    | O5 | bfloat16, BatchNorm float32 | float32 masters | 1 |
    | O6 | as O5, large products in fp8 | float32 masters | 1 |

    Every override that is not None replaces the level's value. Arrays are copied, so
    donating the state never deletes yours. Works under `jit` and `eval_shape`.

    Args:
        params: float32 params, any pytree. Non-float leaves are kept out of
            gradients and optimizer. Several models with an optimizer each: a list,
            tuple or dict of them, with `tx` in the same container.
        tx: an optax transformation, or the container of them; None for inference.
        opt_level: "O0" to "O6".
        enabled: False leaves everything as it is.
        cast_model_type: dtype of params and inputs; False casts nothing.
        patch_functions: apex's `patch_torch_functions`.
        keep_batchnorm_fp32: also as "True" or "False". `batch_stats=` makes the
            recognition of BatchNorm exact, see `cast_model`.
        master_weights: whether to keep float32 masters of half params.
        stochastic_rounding: whether to round bfloat16 params without masters
            stochastically, see `jamp.optimizers.stochastic_rounding`: O5 with
            `master_weights=False`.
        reduce_dtype: "float32" to sum gradients, over batch and devices, in float32,
            and leave them so; not at O0.
        fp8: whether large products of weights run in fp8, by default at O6 alone; a
            `jamp.Fp8` says which. Not at O0.
        loss_scale: "dynamic", a number (also as a string), or a rule such as
            `jamp.DynamicLossScale(window=500)`.
        cast_model_outputs: dtype of the model's outputs.
        num_losses: how many losses get a scale of their own.
        verbosity: 1 prints the level and its properties, once, on process 0.
        min_loss_scale: floor of a dynamic scale.
        max_loss_scale: ceiling of a dynamic scale.
        apply_fn: the model's forward, `model.apply` or `(variables, *args) -> outputs`;
            `state.apply_fn` runs it under the policy.
        keep_fp32: more leaves to keep in float32: regex, predicate, or a list of them.
        lists: additions to autocast's table, a `jamp.AutocastLists`; not at O0.
        promote: what mixed operands become, "widest" (by default at O1 and O4) or
            "narrowest" (at O2, O3, O5 and O6).
        store_remainder: whether to keep 16 more bits beside bfloat16 params instead of
            float32 masters, see `master_weights`; O5 and O6 only.
        allow_incoming_model_not_fp32: whether half params are allowed.
        state_class: AmpState, or a subclass that declares extra fields.
        **fields: extra fields of the state, such as `batch_stats`.

    Returns:
        An AmpState.

    Raises:
        OptLevelError: unknown level, or overrides that contradict it.
        ValueError: params that are not float32, or on different meshes; `params` and
            `tx` in different containers; a `keep_fp32` regex that matches nothing.
        TypeError: params or tx of the wrong kind; an unknown keyword close to a known
            one.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}}
    >>> state = jamp.initialize(params, optax.adam(1e-3), "O2", verbosity=0)
    >>> print(state.params["Dense_0"]["kernel"].dtype, state.loss_scale)
    float16 65536.0
    """
    return _initialized((), **locals())


def initialize_beside(frozen: PyTree, *args: Any, **kwargs: Any) -> AmpState:
    """`initialize`, beside params that are not trained, which rules may name too."""
    given = inspect.signature(initialize).bind(*args, **kwargs)
    given.apply_defaults()
    return _initialized(frozen, **given.arguments)


def _initialized(
    frozen: PyTree,
    *,
    params: PyTree,
    tx: Any,
    opt_level: OptLevel,
    enabled: bool,
    num_losses: int,
    verbosity: int,
    min_loss_scale: float | None,
    max_loss_scale: float | None,
    apply_fn: Any,
    store_remainder: bool,
    allow_incoming_model_not_fp32: bool,
    state_class: type[Any],
    fields: dict[str, Any],
    **overrides: Any,
) -> Any:
    properties = Properties.from_opt_level(opt_level, enabled=enabled, **overrides)
    check_containers(params, tx)
    _check_fields(fields, state_class)
    rules = _rules(properties, num_losses, min_loss_scale, max_loss_scale)
    _print(opt_level, properties, verbosity)

    fields = {name: _field(name, x, state_class) for name, x in fields.items()}
    for name, value in fields.items():
        warn_of_half_field(name, value, params)
    check_same_devices(("params", params), *fields.items())
    params = jax.tree.map(strong_array, params)
    if enabled and not allow_incoming_model_not_fp32:
        check_float32(params)
    check_rules("keep_fp32", properties.keep_fp32, params, frozen)
    if properties.fp8:
        check_rules("Fp8(keep=)", properties.fp8.rules, params, frozen)
        warn_without_fp8()
    model_params = cast_to_level(params, properties, fields.get("batch_stats"))
    if overrides.get("keep_batchnorm_fp32"):
        warn_without_batchnorm(params, properties, fields.get("batch_stats"))
    has_masters = properties.master_weights and tx is not None
    if store_remainder and enabled and not has_masters:
        reason = f"{opt_level} keeps no master weights"
        if LEVELS[opt_level].master_weights:
            reason = "there is no tx" if tx is None else "master_weights is False"
        warn(
            f"store_remainder has no effect: {reason}. It is for O5 and O6.",
            UnusedOptionWarning,
        )
    state = new_state(
        _state_class_with(state_class, fields),
        params,
        model_params,
        tx,
        store_remainder=store_remainder,
        apply_fn=forwards(apply_fn, properties),
        properties=properties,
        loss_scale_rules=rules,
        **fields,
    )
    forget()
    return settled(copy_shared(state, (params, fields)), params)


def _field(name: str, value: Any, state_class: type[AmpState]) -> Any:
    """An extra field as arrays, unless a class of the user's declares it static."""
    declared = state_class.__dataclass_fields__.get(name)
    if declared is not None and not declared.metadata.get("pytree_node", True):
        return value
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if not isinstance(leaf, ARRAY_LIKE):
            raise TypeError(
                f"The extra field {name}{jax.tree_util.keystr(path)} is {leaf!r}, "
                "which is not an array. Declare a static field on a subclass of "
                f"AmpState: `{name}: Any = flax.struct.field(pytree_node=False)`."
            )
    return jax.tree.map(strong_array, value)


def _rules(
    properties: Properties,
    num_losses: int,
    min_loss_scale: float | None,
    max_loss_scale: float | None,
) -> tuple[Any, ...]:
    is_integer = isinstance(num_losses, Integral) and not isinstance(num_losses, bool)
    if not is_integer or num_losses < 1:
        raise ValueError(f"num_losses must be a positive integer, got {num_losses!r}.")
    scale = properties.loss_scale
    limits = {"min": min_loss_scale, "max": max_loss_scale}
    for end, value in limits.items():
        is_given = value != getattr(DynamicLossScale, f"{end}_scale")  # the default
        if is_given and scale != "dynamic" and properties.enabled:
            warn(
                f"{end}_loss_scale={value} has no effect: the loss scale is {scale!r}. "
                f"Pass loss_scale='dynamic', or {end}_scale to the rule.",
                UnusedOptionWarning,
            )
    return (loss_scale_rule(scale, min_loss_scale, max_loss_scale),) * num_losses


def _print(opt_level: str, properties: Properties, verbosity: int) -> None:
    if verbosity < 1 or not properties.enabled or jax.process_index() != 0:
        return
    lines = [
        f"Selected optimization level {BRIEFS[opt_level]}",
        "Defaults for this optimization level are:",
        *describe(LEVELS[opt_level]),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *describe(properties),
    ]
    print("\n".join(lines))


def _check_fields(fields: dict[str, Any], state_class: type[AmpState]) -> None:
    if not (isinstance(state_class, type) and issubclass(state_class, AmpState)):
        raise TypeError(
            f"state_class must be jamp.AmpState or a subclass, got {state_class!r}."
        )
    known = inspect.signature(initialize).parameters
    options = [name for name in known if name not in ("params", "tx", "fields")]
    for name in fields:
        meant = hint(name, options)
        if meant and name not in state_class.__dataclass_fields__:
            raise TypeError(f"initialize got an unknown keyword {name!r}.{meant}")
        if name in AmpState.__dataclass_fields__ or hasattr(AmpState, name):
            raise TypeError(
                f"initialize cannot take an extra field {name!r}: AmpState has its own."
            )


def _state_class_with[S: AmpState](
    state_class: type[S], fields: Collection[str]
) -> type[S]:
    """`state_class`, with the fields that it does not declare; a user's has all."""
    undeclared = sorted(set(fields) - set(state_class.__dataclass_fields__))
    if not undeclared:
        return state_class
    if state_class is not AmpState:
        raise TypeError(
            f"{state_class.__name__} declares no field {undeclared[0]!r}: add "
            f"`{undeclared[0]}: Any` to it."
        )
    return _subclass(tuple(undeclared))  # pyright: ignore[reportReturnType]


def __getattr__(name: str) -> Any:
    """Where pickle finds `AmpState[batch_stats]`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _subclass(tuple(match[1].split(",")))


@functools.cache
def _subclass(names: tuple[str, ...]) -> type[AmpState]:
    """Made once per set of names: a fresh class per call would retrace."""
    body = {"__annotations__": dict.fromkeys(names, Any), "__module__": __name__}
    return type(f"AmpState[{','.join(names)}]", (AmpState,), body)
