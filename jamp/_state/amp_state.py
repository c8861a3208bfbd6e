"""The train state: `apply_gradients` unscales, checks, and steps or skips as one."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.devices import check_same_devices, moves_constants
from jamp._core.dtypes import is_half
from jamp._core.groups import Key
from jamp._core.show import summary
from jamp._core.tree import check_kinds, check_like, copy_shared_arrays, select
from jamp._core.warnings import PrecisionWarning, warn
from jamp._policy.forward import forwards
from jamp._policy.levels import Properties
from jamp._scaling.rules import (
    LossScaleRule,
    LossScaleState,
    count_skips,
    scales_in_use,
)
from jamp._state.add_params import grown
from jamp._state.loading import array_fields, has_values, loaded, register
from jamp._state.new_state import in_place_of
from jamp._state.step import (
    GroupGrads,
    LossGrads,
    by_group,
    by_loss,
    groups_of,
    packed,
    step,
)

_FIELD_REMEDY = (
    "a field keeps its structure and shapes; to change them, use "
    "`state.replace(...)` outside of the step."
)
_HALF_FIELD = (
    "The field {} has the structure of the params, and starts in {}: an average in "
    "half stands still. Start from `jamp.master_params(state)`, or from the float32 "
    "params given to jamp.initialize, and move it by "
    "`jamp.incremental_update(state, state.{}, step_size)`."
)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


# Numbers and strings are left out, so that a misspelt keyword is a type error.
type Field = (
    jax.Array
    | np.ndarray
    | Mapping[Any, Any]
    | tuple[Any, ...]
    | list[Any]
    | _Dataclass
)


class _Replace:
    """`replace`, in a base class: Flax writes its own into every class of states."""

    def replace(self, **changes: Any) -> Self:
        """The state with other values of some fields.

        New `params` without an `opt_state` are loaded: `state.load_params(params)`. A
        new `tx` keeps masters where the old one did, and a new `apply_fn` runs under
        the level. All else, and params beside an `opt_state`, is set as it is given.
        """
        state: Any = self
        if changes.get("tx") is not None:
            changes["tx"] = in_place_of(state, changes["tx"])
        if "apply_fn" in changes:
            changes["apply_fn"] = forwards(changes["apply_fn"], state.properties)
        params = changes.get("params", state.params)
        for name in set(changes).intersection(extra_fields(state)):
            old = getattr(state, name)
            warn_of_half_field(name, changes[name], state.params, old)
        loads = params is not state.params and "opt_state" not in changes
        if loads and has_values(params, state.params):
            changes |= loaded(state, params, False)
        new = dataclasses.replace(state, **_unshared(state, changes))
        is_array = lambda x: isinstance(x, jax.Array | np.ndarray)  # noqa: E731
        opt_state = changes.get("opt_state")
        if opt_state is not None and all(map(is_array, jax.tree.leaves(opt_state))):
            for group in groups_of(new).values():
                group.check_masters()
        return new


class AmpState(_Replace, TrainState, kw_only=True):
    """Flax's TrainState with a precision policy, masters and loss scales.

    Made by `jamp.initialize`, not by `create`. Subclass it to declare extra fields:
    `class Mine(jamp.AmpState): batch_stats: Any`.

    Attributes:
        step: steps that were not skipped, shape (), int32.
        apply_fn: the model's forward under the policy. Static.
        params: what the model consumes: half where the level says so.
        tx: the transformation, wrapped in `master_weights` at O2, O5 and O6. Static.
        opt_state: its state.
        loss_scales: one LossScaleState per loss.
        skipped_steps: skipped steps, shape (), int32; per group where there are
            several.
        last_step_skipped: whether the last step was skipped, shape (), bool; likewise.
        properties: what the opt level means. Static.
        loss_scale_rules: one rule per loss. Static.
    """

    loss_scales: tuple[LossScaleState, ...]
    skipped_steps: Any
    last_step_skipped: Any
    properties: Properties = flax.struct.field(pytree_node=False)
    loss_scale_rules: tuple[LossScaleRule, ...] = flax.struct.field(pytree_node=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(repr=False, **kwargs)  # as below, for subclasses too
        _complete(cls)

    def __repr__(self) -> str:
        """Level, params by dtype, step, scale and skips; not the arrays."""
        text = summary(type(self).__name__, self, self.params, self.opt_state)
        extra = extra_fields(self)
        return text + (f"\n  extra fields: {', '.join(extra)}" if extra else "")

    @classmethod
    def create(cls, **kwargs: object) -> NoReturn:
        """Not here: `jamp.initialize(params, tx, opt_level, state_class=...)` is."""
        del kwargs
        raise TypeError(
            f"{cls.__name__}.create would leave the params uncast. Write "
            "`jamp.initialize(params, tx, opt_level, apply_fn=..., "
            f"state_class={cls.__name__}, ...)`."
        )

    def __len__(self) -> NoReturn:
        """What optax asks of a state that is not one of its own."""
        raise TypeError(
            "An AmpState is not the state of an optax transformation. Write "
            "`state = state.apply_gradients(grads=grads)`, which calls `tx.update`; "
            "of the transformation itself, `tx.update(grads, state.opt_state, params)`."
        )

    def __bool__(self) -> bool:
        return True

    @property
    @moves_constants
    def loss_scale(self) -> Any:
        """The present loss scale, shape (), float32; a tuple of several."""
        return scales_in_use(self.loss_scale_rules, self.loss_scales)

    @moves_constants
    def apply_gradients(
        self,
        *,
        grads: PyTree,
        loss_id: int | Sequence[int] = 0,
        update_args: Mapping[str, Any] | None = None,
        **fields: Field,
    ) -> Self:
        """Steps; or skips, if the gradients are not finite.

        A skip is atomic: params, masters, optimizer state, `step` and `fields` keep
        their bits; only the loss scale and the counters of skips move. A static scale
        checks nothing, unless its rule says `check=True`.

        Args:
            grads: gradients divided by the scale, a tree like `params`: what
                `scaled_value_and_grad` returned, or what you made of it. Of several
                groups their container; a group whose entry is None, or is not in a
                dict, is left alone.
            loss_id: whose scale moves. Of several losses a sequence, and `grads` then
                is a sequence of such trees, which are summed in float32. An id may
                occur twice: its scale moves once per tree, in order.
            update_args: extra arguments for `tx.update`, such as `value`.
            **fields: new values of extra fields, such as `batch_stats`. What must
                advance on a skip too, such as an RNG key, goes through `replace`.

        Returns:
            The next state, with the structure, shapes and dtypes of this one.

        Raises:
            TypeError: there is no `tx`; a field is not declared; `loss_id` is a
                sequence and `grads` is not.
            IndexError: a `loss_id` is out of range.
            ValueError: gradients or a field differ from the state in structure or
                shape, or are on other devices; the gradients are of another loss.
        """
        if self.tx is None:
            raise TypeError(
                "The state has no optimizer: pass one to jamp.initialize(params, tx)."
            )
        check_same_devices(("state", self), ("grads", grads), *fields.items())
        losses = by_loss(grads, loss_id, self)
        stepped, keys = groups_of(self), groups.group_keys(self.tx)
        counts = groups.split(self.skipped_steps, keys)
        skipped = groups.split(self.last_step_skipped, keys)
        given = by_group(losses)
        count = self.step if self.properties.stochastic_rounding else None
        for key, (total, overwrite, clean) in given.items():
            stepped[key] = step(
                stepped[key],
                total,
                overwrite=overwrite,
                clean=None if clean is True else clean,
                count=count,
                key=key,
                update_args=update_args or {},
            )
            skipped[key] = jnp.logical_not(clean)
            counts[key] = counts[key] + skipped[key].astype(jnp.int32)
        moves = functools.reduce(jnp.logical_or, [~skipped[key] for key in given])
        return dataclasses.replace(
            self,
            step=self.step + moves.astype(jnp.int32),
            loss_scales=_next_scales(self, losses),
            skipped_steps=groups.pack(counts, self.params),
            last_step_skipped=groups.pack(skipped, self.params),
            **packed(stepped, self.params),
            **{
                name: _next_field(self, name, new, given)
                for name, new in fields.items()
            },
        )

    def load_params(self, params: PyTree, *, reset_optimizer: bool = False) -> Self:
        """The state with other params: a checkpoint's, or your own edit of them.

        They are cast as the level says, and masters and remainders follow: float32
        params keep all of their digits there. Half params have no more, but a value
        that stays the same keeps its master. Works inside of `jit`.

        Args:
            params: a tree like `state.params`, of float32 or half; of several groups,
                their container.
            reset_optimizer: whether to reset the optimizer's state: its moments
                are of the params before.

        Returns:
            A state of the same class; `step` and the loss scales stay.

        Raises:
            ValueError: another structure or shape; a leaf that is a float here, and not
                there.

        >>> import jamp, jax.numpy as jnp, optax
        >>> params = {"w": jnp.zeros(2)}
        >>> state = jamp.initialize(params, optax.sgd(0.1), "O2", verbosity=0)
        >>> state = state.load_params({"w": jnp.full(2, 0.1)})
        >>> print(state.params["w"], jamp.master_params(state)["w"])
        [0.1 0.1] [0.1 0.1]
        """
        return dataclasses.replace(self, **loaded(self, params, reset_optimizer))

    @moves_constants
    def add_params(
        self,
        params: PyTree,
        tx: Any = None,
        *,
        allow_incoming_model_not_fp32: bool = False,
        **fields: Field,
    ) -> Self:
        """The state with more params, as after apex's `add_param_group`.

        New params are cast as the level says, and get masters and fresh optimizer
        state; every bit of the old ones stays. Call it outside of `jit`: the state has
        another structure afterwards, so the step is compiled again.

        With one group the optimizer takes the params on, and its count of steps is
        theirs too: Adam's first updates of them are up to three times larger than at
        step 1. A new group has a count of its own.

        Args:
            params: new float32 params: a mapping, merged into `state.params`; or with
                several groups new ones, in the container of `state.params`.
            tx: with several groups, the optimizers of the new ones.
            allow_incoming_model_not_fp32: whether half params are allowed.
            **fields: more of extra fields, merged alike. `batch_stats` makes the
                recognition of BatchNorm exact.

        Returns:
            A state of the same class.

        Raises:
            TypeError: `params` or `tx` in the wrong container; an unknown field.
            ValueError: a name is there already; params that are not float32; an
                optimizer whose state is not kept per param.

        >>> import jamp, jax.numpy as jnp, optax
        >>> params = {"body": jnp.ones(2)}
        >>> state = jamp.initialize(params, optax.adam(1e-3), "O2", verbosity=0)
        >>> state = state.add_params({"head": jnp.zeros(3)})
        >>> print(state.params["head"].dtype, state.opt_state.masters["head"].dtype)
        float16 float32
        """
        allowed, extra = allow_incoming_model_not_fp32, extra_fields(self)
        return grown(self, params, tx, allowed, extra, fields)


def _complete(state_class: Any) -> None:
    """Takes Flax's `replace` out of a class, and has Flax check what it restores."""
    if "replace" in vars(state_class):
        del state_class.replace
    register(state_class)


_complete(AmpState)


def _next_scales(
    state: AmpState, losses: list[LossGrads]
) -> tuple[LossScaleState, ...]:
    scales = list(state.loss_scales)
    flags: dict[int, list[Any]] = {}
    for loss in losses:  # in order: those that share a scale count one after another
        rule, before = state.loss_scale_rules[loss.loss_id], scales[loss.loss_id]
        scales[loss.loss_id] = rule.update(before, jnp.asarray(loss.finite))
        flags.setdefault(loss.loss_id, []).append(loss.finite)
    for loss_id, finite in flags.items():
        if len(finite) > 1 and state.loss_scale_rules[loss_id].checks:
            # They skip one step, and a clean loss must not hide one that never is.
            clean = functools.reduce(jnp.logical_and, finite)
            scales[loss_id] = scales[loss_id]._replace(
                consecutive_skips=count_skips(state.loss_scales[loss_id], clean)
            )
    return tuple(scales)


def _next_field(
    state: AmpState, name: str, new: PyTree, given: Mapping[Key, GroupGrads]
) -> Any:
    """An extra field: the new value if the groups that it belongs to were clean."""
    extra = extra_fields(state)
    if name not in extra:
        raise TypeError(
            f"apply_gradients cannot set {name!r}; the state's extra fields are "
            f"{extra}. Declare one with `jamp.initialize(..., name=value)`."
        )
    if name not in array_fields(state):
        raise TypeError(f"{name} is static: set it by `state.replace({name}=...)`.")
    old, keys = getattr(state, name), groups.group_keys(state.tx)
    check_like(new, old, name, _FIELD_REMEDY)
    check_kinds(new, old, name)
    warn_of_half_field(name, new, state.params, old)
    if groups.is_per_group(old, keys):
        chosen = {k: select(x.clean, new[k], old[k]) for k, x in given.items()}
        return groups.pack(groups.split(old, keys) | chosen, old)
    clean = functools.reduce(jnp.logical_and, [x.clean for x in given.values()])
    return select(clean, new, old)


def _unshared(state: AmpState, changes: dict[str, Any]) -> dict[str, Any]:
    """New values, in which no extra field has an array twice, or another's."""
    own = array_fields(state)
    extra = {n: changes[n] for n in own if n in changes and n in extra_fields(state)}
    if not extra:
        return changes
    others = [changes.get(n, getattr(state, n)) for n in own if n not in extra]
    return changes | copy_shared_arrays(extra, others)


def warn_of_half_field(
    name: str, new: PyTree, params: PyTree, old: PyTree = None
) -> None:
    """Warns if a field like the params starts in half: an average would stand still."""
    halves = [x.dtype for x in jax.tree.leaves(new) if is_half(x)]
    if not halves or any(map(is_half, jax.tree.leaves(old))):
        return
    forms = [
        (jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)])
        for tree in (new, params)
    ]
    if forms[0] == forms[1]:
        warn(_HALF_FIELD.format(name, halves[0], name), PrecisionWarning)


def extra_fields(state: AmpState) -> list[str]:
    """The names of a state's fields beyond those of AmpState."""
    own = AmpState.__dataclass_fields__
    return [name for name in state.__dataclass_fields__ if name not in own]
