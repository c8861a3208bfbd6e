"""The train state: `apply_gradients` checks the gradients, and steps or skips."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.dtypes import is_half
from jamp._core.groups import Key
from jamp._core.show import summary
from jamp._core.tree import check_kinds, check_like, copy_shared_arrays
from jamp._core.warnings import PrecisionWarning, warn
from jamp._policy.forward import forwards
from jamp._policy.levels import Properties
from jamp._scaling.rules import LossScaleRule, LossScaleState, scales_in_use
from jamp._state.add_params import with_more_params
from jamp._state.grads import read_gradients
from jamp._state.group import check_masters, groups_of, pack_groups
from jamp._state.loading import (
    array_fields,
    from_state_dict,
    has_values,
    load,
    to_state_dict,
)
from jamp._state.new_state import wrap_like
from jamp._state.skip import Finite, every, keep_on_skip, next_counters
from jamp._state.step import step

_FIELD_REMEDY = (
    "a field keeps its structure and shapes; to change them, use "
    "`state.replace(...)` outside of the step."
)
_LOSS_SCALE = (
    "replace got loss_scale={0!r}, but the scale is in loss_scales: write `scale = "
    "state.loss_scales[0]._replace(scale=jnp.float32({0!r}))` and "
    "`state.replace(loss_scales=(scale, *state.loss_scales[1:]))`. For another rule, "
    "write `state.replace(loss_scale_rules=(jamp.DynamicLossScale(...),))`."
)
_HALF_FIELD = (
    "The field {0} has the structure of the params, and starts in {1}: an average in "
    "half does not move. Start from `jamp.master_params(state)`, or from the float32 "
    "params that you pass to jamp.initialize, and move it with "
    "`jamp.incremental_update(state, state.{0}, step_size)`."
)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


# It excludes numbers and strings, so that a type checker reports a misspelt keyword.
type Field = (
    jax.Array
    | np.ndarray
    | Mapping[Any, Any]
    | tuple[Any, ...]
    | list[Any]
    | _Dataclass
)


class AmpState(TrainState, kw_only=True):
    """Flax's TrainState with a precision policy, masters and loss scales.

    Make it with `jamp.initialize`, not with `create`. A subclass declares more fields,
    as with TrainState: `class State(jamp.AmpState): ema: Any`.

    Attributes:
        step: steps that were not skipped, shape (), int32.
        apply_fn: the model's forward function under the policy. Static.
        params: the params of the model, in half at the levels that cast.
        tx: the transformation, wrapped in `master_weights` at O2, O5 and O6. Static.
        opt_state: the state of `tx`.
        batch_stats: Flax's BatchNorm statistics, or None.
        loss_scales: one LossScaleState per loss.
        skipped_steps: skipped steps, shape (), int32. With several groups, a container
            with one count per group.
        last_step_skipped: whether the last step was skipped, shape (), bool. With
            several groups, a container.
        properties: the properties of the opt level. Static.
        loss_scale_rules: one rule per loss. Static.
    """

    batch_stats: Any = None
    loss_scales: tuple[LossScaleState, ...]
    skipped_steps: Any
    last_step_skipped: Any
    properties: Properties = flax.struct.field(pytree_node=False)
    loss_scale_rules: tuple[LossScaleRule, ...] = flax.struct.field(pytree_node=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(repr=False, **kwargs)
        _set_up(cls)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises, because TrainState's constructor neither casts nor keeps masters."""
        raise TypeError(
            f"{cls.__name__}.create cannot cast params and make masters: write "
            f"`jamp.initialize(params, tx, opt_level, apply_fn=..., "
            f"state_class={cls.__name__})`."
        )

    def __repr__(self) -> str:
        """Summarizes the state in a few lines, without the arrays."""
        text = summary(type(self).__name__, self, self.params, self.opt_state)
        extra = [x for x in extra_fields(self) if getattr(self, x) is not None]
        return text + (f"\n  extra fields: {', '.join(extra)}" if extra else "")

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, shape (), float32; a tuple for several losses."""
        return scales_in_use(self.loss_scale_rules, self.loss_scales)

    def apply_gradients(
        self,
        grads: PyTree,
        *,
        loss_id: int | Sequence[int] = 0,
        update_args: Mapping[str, Any] | None = None,
        **fields: Field,
    ) -> Self:
        """Steps, or skips the step if the gradients are not finite.

        A skip is atomic: params, masters, optimizer state, `step` and `fields` keep
        their bits, and only the loss scale and the counters of skips change. A number
        as `loss_scale` checks nothing.

        Args:
            grads: unscaled gradients, a tree like `params`: the result of
                `scaled_value_and_grad`, or values computed from it. With several
                groups, their container. A group without an entry, or with None, does
                not step.
            loss_id: the loss whose scale moves. For several losses, pass a sequence of
                ids and a sequence of trees as `grads`, which are summed in float32. An
                id may occur twice: its scale moves once per tree, in order.
            update_args: extra arguments for `tx.update`, such as `value`.
            **fields: new values of `batch_stats` or of declared fields. If a value must
                advance on a skip too, as an RNG key must, set it with `replace`.

        Returns:
            The next state, with the structure, shapes and dtypes of this one.

        Raises:
            TypeError: the state has no `tx`; a field is not declared; `loss_id` is a
                sequence, but `grads` is not.
            IndexError: a `loss_id` is out of range.
            ValueError: gradients or a field differ from the state in structure or
                shape; the gradients are of another loss.
        """
        if self.tx is None:
            raise TypeError(
                "The state has no optimizer: pass one to jamp.initialize(params, tx)."
            )
        stepped = groups_of(self)
        losses, given = read_gradients(grads, loss_id, self, stepped)
        finite = {key: grads.finite for key, grads in given.items()}
        for key, grads in given.items():
            stepped[key] = step(
                stepped[key],
                grads,
                count=self.step if self.properties.stochastic_rounding else None,
                key=key,
                update_args=update_args or {},
            )
        return dataclasses.replace(
            self,
            **next_counters(self, [(x.loss_id, x.finite) for x in losses], finite),
            **pack_groups(stepped, self.params),
            **{name: _next_field(self, name, x, finite) for name, x in fields.items()},
        )

    def load_params(self, params: PyTree, *, reset_optimizer: bool = False) -> Self:
        """Returns the state with other params, such as a checkpoint's.

        It casts the params to the level and sets the masters. Masters keep all digits
        of float32 params. A half value that does not change keeps its master. It works
        inside `jit`.

        Args:
            params: a tree like `state.params`, in float32 or half; with several groups,
                their container.
            reset_optimizer: whether to reset the optimizer's state, whose moments
                belong to the old params.

        Returns:
            A state of the same class, with the same `step` and loss scales.

        Raises:
            ValueError: another structure or shape; a leaf is a float in only one of the
                trees.

        >>> import jamp, jax.numpy as jnp, optax
        >>> params = {"w": jnp.zeros(2)}
        >>> state = jamp.initialize(params, optax.sgd(0.1), "O2", verbosity=0)
        >>> state = state.load_params({"w": jnp.full(2, 0.1)})
        >>> print(state.params["w"], jamp.master_params(state)["w"])
        [0.1 0.1] [0.1 0.1]
        """
        return dataclasses.replace(self, **load(self, params, reset_optimizer))

    def add_params(
        self,
        params: PyTree,
        tx: Any = None,
        *,
        allow_incoming_model_not_fp32: bool = False,
        **fields: Field,
    ) -> Self:
        """Returns the state with more params, like apex's `add_param_group`.

        It casts new params to the level and gives them masters and a fresh optimizer
        state. Old params keep every bit. Call it outside `jit`. The structure of the
        state changes, so the step compiles again.

        With one group, the new params share the optimizer's count of steps: Adam's
        first updates of them are up to three times larger than at step 1. A new group
        has its own count.

        Args:
            params: a mapping of new float32 params, which is merged into
                `state.params`. With several groups, new groups in the container of
                `state.params`.
            tx: the optimizers of new groups, in the same container.
            allow_incoming_model_not_fp32: whether half params are allowed.
            **fields: more entries of extra fields, which are merged too. `batch_stats`
                makes the recognition of BatchNorm exact.

        Returns:
            A state of the same class.

        Raises:
            TypeError: new groups have no `tx`, or one group has one; a field is
                unknown.
            ValueError: a name exists already; `params` or `tx` are in the wrong
                container; params are not float32; the optimizer does not keep its state
                per param.

        >>> import jamp, jax.numpy as jnp, optax
        >>> params = {"body": jnp.ones(2)}
        >>> state = jamp.initialize(params, optax.adam(1e-3), "O2", verbosity=0)
        >>> state = state.add_params({"head": jnp.zeros(3)})
        >>> print(state.params["head"].dtype, state.opt_state.masters["head"].dtype)
        float16 float32
        """
        allowed, extra = allow_incoming_model_not_fp32, extra_fields(self)
        return with_more_params(self, params, tx, allowed, extra, fields)


def _replace(self: AmpState, **changes: Any) -> Any:
    """Returns the state with other values of some fields.

    New `params` without an `opt_state` go through `state.load_params`. A new `tx` keeps
    masters if the old one did, and a new `apply_fn` runs under the level. All other
    fields, and `params` with an `opt_state`, are set unchanged.
    """
    if "loss_scale" in changes:
        raise TypeError(_LOSS_SCALE.format(changes["loss_scale"]))
    if changes.get("tx") is not None:
        changes["tx"] = wrap_like(self, changes["tx"])
    if "apply_fn" in changes:
        changes["apply_fn"] = forwards(changes["apply_fn"], self.properties)
    params = changes.get("params", self.params)
    extra = {name: changes[name] for name in extra_fields(self) if name in changes}
    for name, new in extra.items():
        warn_of_half_field(name, new, params, getattr(self, name))
    loads = params is not self.params and "opt_state" not in changes
    if loads and has_values(params, self.params):
        changes |= load(self, params, False)
    own = array_fields(self)
    others = [changes.get(n, getattr(self, n)) for n in own if n not in extra]
    arrays = {name: value for name, value in extra.items() if name in own}
    if arrays:
        changes |= copy_shared_arrays(arrays, others)
    new = dataclasses.replace(self, **changes)
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)  # noqa: E731
    opt_state = changes.get("opt_state")
    if opt_state is not None and all(map(is_array, jax.tree.leaves(opt_state))):
        for key, tx in groups.split(new.tx, new.tx).items():
            check_masters(tx, groups.get(opt_state, key))
    return new


def _set_up(state_class: Any) -> None:
    """Sets `replace`, which Flax defines on each class, and checks restored values."""
    state_class.replace = _replace
    serialization.register_serialization_state(
        state_class, to_state_dict, from_state_dict, override=True
    )


_set_up(AmpState)


def _next_field(
    state: AmpState, name: str, new: PyTree, finite: Mapping[Key, Finite]
) -> Any:
    """Returns the new value of an extra field if all groups of the call step."""
    extra = extra_fields(state)
    if name not in extra:
        raise TypeError(
            f"apply_gradients cannot set {name!r}; the state's extra fields are "
            f"{extra}. Declare one on a subclass: `class State(jamp.AmpState): {name}: "
            "Any`."
        )
    if name not in array_fields(state):
        raise TypeError(f"{name} is static: set it with `state.replace({name}=...)`.")
    old = getattr(state, name)
    if old is None and new is None:
        return None
    if old is None:
        raise ValueError(
            f"The state has no {name}: pass `{name}=` to jamp.initialize too."
        )
    check_like(new, old, name, _FIELD_REMEDY)
    check_kinds(new, old, name)
    warn_of_half_field(name, new, state.params, old)
    return keep_on_skip(every(finite.values()), new, old)


def warn_of_half_field(
    name: str, new: PyTree, params: PyTree, old: PyTree = None
) -> None:
    """Warns if a field like the params is half, where an average does not move."""
    halves = [x.dtype for x in jax.tree.leaves(new) if is_half(x)]
    if not halves or any(map(is_half, jax.tree.leaves(old))):
        return
    forms = [
        (jax.tree.structure(x), *map(jnp.shape, jax.tree.leaves(x)))
        for x in (new, params)
    ]
    if forms[0] == forms[1]:
        warn(_HALF_FIELD.format(name, halves[0]), PrecisionWarning)


def extra_fields(state: AmpState) -> list[str]:
    """Returns the names of `batch_stats` and of the fields that a subclass declares."""
    own = AmpState.__dataclass_fields__
    declared = [name for name in state.__dataclass_fields__ if name not in own]
    return ["batch_stats", *declared]
