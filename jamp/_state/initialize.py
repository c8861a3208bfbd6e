"""`initialize` takes params and an optimizer, and returns a state for an opt level.

Based on apex/amp/frontend.py and _initialize.py, without their global state.
"""

from numbers import Integral
from typing import Any, Unpack

import jax
from jaxtyping import PyTree
from typing_extensions import TypeVar

from jamp._core.devices import warn_without_fp8
from jamp._core.path_rules import check_rules
from jamp._core.tree import copy_shared, strong_array
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._policy.casting import cast_to_level, warn_without_batchnorm
from jamp._policy.forward import forwards
from jamp._policy.levels import BRIEFS, LEVELS, OptLevel, Properties, describe, one_line
from jamp._policy.options import InitOptions, LevelOptions
from jamp._scaling.rules import DynamicLossScale, loss_scale_rule
from jamp._state.amp_state import AmpState, Field, warn_of_half_field
from jamp._state.incoming import (
    ARRAY_LIKE,
    check_apply_fn,
    check_containers,
    check_fields,
    check_float32,
)
from jamp._state.new_state import new_state, replicate_uncommitted

S = TypeVar("S", bound=AmpState, default=AmpState)


class StateOptions(InitOptions, total=False, extra_items=Field):
    """The options, and the fields that `state_class` declares."""


def initialize(
    params: PyTree,
    tx: Any = None,
    opt_level: OptLevel = "O1",
    *,
    apply_fn: Any = None,
    batch_stats: PyTree = None,
    state_class: type[S] = AmpState,
    **options: Unpack[StateOptions],
) -> S:
    """Prepares params and an optimizer for training at an opt level.

    | level | params | optimizer | loss scale |
    |---|---|---|---|
    | O0 | float32 | float32 | 1 |
    | O1 | float32, autocast to float16 | float32 | dynamic |
    | O2 | float16, BatchNorm float32 | float32 masters | dynamic |
    | O3 | float16 | float32, no masters | 1 |
    | O4 | float32, autocast to bfloat16 | float32 | 1, checked |
    | O5 | bfloat16, BatchNorm float32 | float32 masters | 1, checked |
    | O6 | as O5, large matmuls in fp8 | float32 masters | 1, checked |

    Every override that is not None replaces the level's value. The state has copies of
    your arrays, so donating it does not delete them. `initialize` works under `jit` and
    `eval_shape`.

    Args:
        params: a pytree of float32 params. Non-float leaves have no gradient and are
            not trained. For several models with an optimizer each, pass a list, tuple
            or dict of params, and `tx` in the same container.
        tx: an optax transformation, or a container of them; None for inference.
        opt_level: "O0" to "O6".
        apply_fn: the forward function, `model.apply` or `(variables, *args) ->
            outputs`. `state.apply_fn` runs it under the policy.
        batch_stats: Flax's BatchNorm statistics. They become a field of the state, and
            make the recognition of BatchNorm exact; see `cast_model`.
        state_class: AmpState, or a subclass that declares more fields.
        enabled: True by default. With False, jamp casts, scales and checks nothing.
        cast_model_type: dtype of params and inputs; False casts nothing.
        patch_functions: apex's `patch_torch_functions`.
        keep_batchnorm_fp32: a bool, or "True" or "False".
        master_weights: whether to keep float32 masters of half params.
        stochastic_rounding: whether to round bfloat16 params without masters
            stochastically, at O5 with `master_weights=False`; see
            `jamp.optimizers.stochastic_rounding`.
        reduce_dtype: "float32" sums gradients over batch and devices in float32. Not at
            O0.
        fp8: whether large matmuls of weights run in fp8, by default only at O6; a
            `jamp.Fp8` selects them. Not at O0.
        loss_scale: "dynamic", a number (also as a string), or a rule such as
            `jamp.DynamicLossScale(window=500)`. A number checks nothing; the default
            of O4, O5 and O6, `jamp.StaticLossScale(1.0, check=True)`, skips a step
            whose gradients are not finite.
        cast_model_outputs: dtype of the model's outputs.
        num_losses: the number of losses, each with its own scale. 1 by default.
        verbosity: 1, the default, prints one line on process 0; 2 prints apex's report;
            0 prints nothing.
        min_loss_scale: floor of a dynamic scale.
        max_loss_scale: ceiling of a dynamic scale, 2**24 by default.
        keep_fp32: more leaves to keep in float32: regex, predicate, or a list of them.
        lists: additions to autocast's table, a `jamp.AutocastLists`; not at O0.
        promote: the dtype of operations with mixed operands, "widest" (by default at
            O1 and O4) or "narrowest" (at O2, O3, O5 and O6).
        store_remainder: whether to store 16 more bits of bfloat16 params instead of
            float32 masters; see `master_weights`. Only at O5 and O6.
        allow_incoming_model_not_fp32: whether half params are allowed.
        **options: the fields that `state_class` declares.

    Returns:
        A state of `state_class`.

    Raises:
        OptLevelError: the level is unknown, or overrides contradict it.
        ValueError: params are not float32; `params` and `tx` are in different
            containers; a `keep_fp32` regex matches nothing.
        TypeError: params, tx or apply_fn have the wrong type; a keyword is neither an
            option nor a field of `state_class`.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}}
    >>> state = jamp.initialize(params, optax.adam(1e-3), "O2", verbosity=0)
    >>> print(state.params["Dense_0"]["kernel"].dtype, state.loss_scale)
    float16 65536.0
    """
    return initialize_beside(
        (),
        params,
        tx,
        opt_level,
        apply_fn=apply_fn,
        batch_stats=batch_stats,
        state_class=state_class,
        **options,
    )


def initialize_beside(
    frozen: PyTree,
    params: PyTree,
    tx: Any,
    opt_level: OptLevel,
    *,
    apply_fn: Any = None,
    batch_stats: PyTree = None,
    state_class: type[Any] = AmpState,
    enabled: bool = True,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = DynamicLossScale.max_scale,
    store_remainder: bool = False,
    allow_incoming_model_not_fp32: bool = False,
    **others: Any,
) -> Any:
    """Implements `initialize`. Rules such as `keep_fp32` may match `frozen` params."""
    overrides = {k: others.pop(k) for k in LevelOptions.__optional_keys__ & {*others}}
    properties = Properties.from_opt_level(opt_level, enabled=enabled, **overrides)
    check_containers(params, tx)
    check_apply_fn(apply_fn)
    check_fields(others, state_class, AmpState)
    rules = _rules(properties, num_losses, min_loss_scale, max_loss_scale)

    fields = {"batch_stats": batch_stats, **others}
    fields = {name: _field(name, x, state_class) for name, x in fields.items()}
    for name, value in fields.items():
        warn_of_half_field(name, value, params)
    params = jax.tree.map(strong_array, params)
    if enabled and not allow_incoming_model_not_fp32:
        check_float32(params)
    check_rules("keep_fp32", properties.keep_fp32, params, frozen)
    if properties.fp8:
        check_rules("Fp8(keep=)", properties.fp8.keep, params, frozen)
        warn_without_fp8()
    model_params = cast_to_level(params, properties, batch_stats)
    if overrides.get("keep_batchnorm_fp32"):
        warn_without_batchnorm(params, properties, batch_stats)
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
        state_class,
        params,
        model_params,
        tx,
        store_remainder=store_remainder,
        apply_fn=forwards(apply_fn, properties),
        properties=properties,
        loss_scale_rules=rules,
        **fields,
    )
    _print(state, verbosity)
    return replicate_uncommitted(copy_shared(state, (params, fields)), params)


def _field(name: str, value: Any, state_class: type[AmpState]) -> Any:
    """Returns an extra field as arrays, unless its class declares it static."""
    if not state_class.__dataclass_fields__[name].metadata.get("pytree_node", True):
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
    rule = loss_scale_rule(properties.loss_scale, min_loss_scale, max_loss_scale)
    limits = {"min": min_loss_scale, "max": max_loss_scale}
    for end, value in limits.items():
        is_given = value != getattr(DynamicLossScale, f"{end}_scale")  # the default
        if is_given and properties.loss_scale != "dynamic" and properties.enabled:
            warn(
                f"{end}_loss_scale={value} has no effect: the loss scale is {rule}. "
                f"Pass loss_scale='dynamic', or {end}_scale to the rule.",
                UnusedOptionWarning,
            )
    return (rule,) * num_losses


def _print(state: AmpState, verbosity: int) -> None:
    """Prints one line, or apex's report if `verbosity` is 2."""
    properties = state.properties
    if verbosity < 1 or not properties.enabled or jax.process_index() != 0:
        return
    level = properties.opt_level
    lines = [
        f"Selected optimization level {BRIEFS[level]}",
        "Defaults for this optimization level are:",
        *describe(LEVELS[level]),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *describe(properties),
    ]
    print("\n".join(lines) if verbosity > 1 else one_line(properties))
