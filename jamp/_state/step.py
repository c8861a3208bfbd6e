"""A step: gradients by loss and by group, and the optimizer step of one group.

What `apply_gradients` accepts is unscaled gradients, of one loss or of several. A step
is in float32, and is rounded to the dtypes of the params.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jaxtyping import Array, ArrayLike, Bool, PyTree

from jamp._core import groups
from jamp._core.devices import moves_constants
from jamp._core.dtypes import is_half
from jamp._core.groups import HasGroups, Key
from jamp._core.tree import (
    all_finite,
    check_like,
    differentiable,
    select,
    split_overwrite,
    trained_params,
    widen_tree,
    with_trained,
)
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.loss import find_loss_scale
from jamp._scaling.rules import HasLossScales
from jamp._scaling.unscaled import raw_of, still_scaled, warn_without_scale
from jamp._state.incoming import kind_of
from jamp.optimizers import FusedTransformation, _masters as masters
from pallas_kernels import Weight

_REMEDY = (
    "pass the `grads` of `loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, "
    "...)`, or a tree like `state.params`; of several losses `grads=(g0, g1), "
    "loss_id=(0, 1)`."
)

_NO_UPDATE_ARGS = (
    "{}: pass them by `state.apply_gradients(grads=grads, update_args=...)`. A line "
    'search takes `{{"value": loss, "grad": grads, "value_fn": '
    "jamp.closure(loss_fn)(state, ...)}}`."
)

_NO_MASTERS = (
    "state.opt_state is a {}, and this opt level keeps masters in it, a "
    "MasterWeightsState. Another optimizer begins with `state.replace(tx=tx)"
    ".load_params(state.params, reset_optimizer=True)`; another state of this one goes "
    "in with `state.opt_state._replace(inner_state=...)`."
)

# True, of Python, where the rule does not check.
type Flag = Bool[Array, ""] | Literal[True]


class LossGrads(NamedTuple):
    """The gradients of one loss.

    Attributes:
        loss_id: whose scale moves.
        finite: whether all are finite.
        trees: per group that the loss covers, its gradients in float32.
        overwrite: per group, new values of Flax's `_overwrite_with_gradient`, or None.
    """

    loss_id: int
    finite: Flag
    trees: dict[Key, PyTree]
    overwrite: dict[Key, Any]


class GroupGrads(NamedTuple):
    """The gradients of one group.

    Attributes:
        tree: in float32, summed.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether all are finite.
    """

    tree: PyTree
    overwrite: Any
    clean: Flag


def by_loss(grads: PyTree, loss_id: Any, state: HasLossScales) -> list[LossGrads]:
    """The gradients of each loss, checked as `apply_gradients` says."""
    if not isinstance(loss_id, Sequence):
        return [_loss_grads(grads, loss_id, state)]
    if not isinstance(grads, Sequence):
        raise TypeError(
            f"loss_id={loss_id!r} is for a sequence of gradients, one tree per loss; "
            f"got {type(grads).__name__}."
        )
    if not loss_id or len(grads) != len(loss_id):
        raise ValueError(
            f"grads are {len(grads)} trees, and loss_id={loss_id!r} names "
            f"{len(loss_id)} losses: pass one tree for each, as in "
            "`apply_gradients(grads=(g0, g1), loss_id=(0, 1))`."
        )
    return [_loss_grads(*pair, state) for pair in zip(grads, loss_id, strict=True)]


def by_group(losses: list[LossGrads]) -> dict[Key, GroupGrads]:
    """The gradients of each group that has some, summed over the losses."""
    total: dict[Key, GroupGrads] = {}
    for loss in losses:
        for key, tree in loss.trees.items():
            clean = loss.finite
            if key in total:
                before = total[key]
                tree = jax.tree.map(jnp.add, before.tree, tree)
                if before.clean is not True:
                    clean = before.clean if clean is True else before.clean & clean
            total[key] = GroupGrads(tree, loss.overwrite[key], clean)
    return total


def _loss_grads(grads: PyTree, loss_id: int, state: HasLossScales) -> LossGrads:
    rule, _ = find_loss_scale(state, loss_id, "apply_gradients")
    loss_id = operator.index(loss_id)  # it may be an array, and keys a dict
    trees, overwrite = {}, {}
    keys = groups.group_keys(state.tx)
    is_single = keys == (groups.SINGLE,)
    entries = {groups.SINGLE: grads} if is_single else _entries_of(grads, keys, state)
    for key, entry in entries.items():
        what = "gradients" if key is groups.SINGLE else f"gradients of group {key!r}"
        entry = differentiable(entry)
        expected = differentiable(groups.get(state.params, key))
        check_like(entry, expected, what, _REMEDY)
        trees[key], overwrite[key] = split_overwrite(entry)
    leaves = jax.tree.leaves(trees)
    finite = _finite(leaves, loss_id) if rule.checks else True
    if any(map(is_half, leaves)):
        _warn_half(trees, state)
        trees = widen_tree(trees)
    else:
        warn_without_scale(leaves, state)
    return LossGrads(loss_id, finite, trees, overwrite)


def _entries_of(
    grads: PyTree, keys: tuple[Key, ...], state: HasLossScales
) -> dict[Key, PyTree]:
    """The entries of the groups that have gradients."""
    if isinstance(state.params, Mapping):
        fits = isinstance(grads, Mapping) and set(grads) <= set(keys)
    else:
        fits = type(grads) is type(state.params) and len(grads) == len(keys)
    if not fits:
        raise ValueError(
            "gradients of several groups come in the container of `state.params`, "
            f"with the keys {list(keys)}, and None for a group without; got "
            f"{kind_of(grads)}. Those of `wrt=key` are `grads={{key: grads}}`; "
            f"else {_REMEDY}"
        )
    pairs = grads.items() if isinstance(grads, Mapping) else enumerate(grads)
    entries: dict[Key, PyTree] = {k: tree for k, tree in pairs if tree is not None}
    if not entries:
        raise ValueError(f"gradients of all groups are None: {_REMEDY}")
    return entries


def _finite(leaves: Sequence[Array], loss_id: int) -> Flag:
    """Whether all are finite: by the flag where it is known, else by a look.

    Raises for gradients that are known to be of another loss, whose scale should move.
    """
    flags, others = {}, []
    for leaf in leaves:
        raw = raw_of(leaf)
        if raw is not None and raw.loss_id != loss_id:
            raise ValueError(
                f"The gradients are of loss_id={raw.loss_id}, and apply_gradients got "
                f"loss_id={loss_id}: pass `loss_id={raw.loss_id}`, whose scale moves."
            )
        if raw is None or raw.finite is None:
            others.append(leaf)
        else:
            flags[id(raw.finite)] = raw.finite
    looked = [all_finite(others)] if others or not flags else []
    return functools.reduce(jnp.logical_and, [*flags.values(), *looked])


def _warn_half(trees: Mapping[Key, PyTree], state: HasLossScales) -> None:
    """Warns of gradients that are half, under a scale that is there for just those."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(list(trees.values())):
        if is_half(leaf) and any(rule.moves for rule in state.loss_scale_rules):
            warn(
                f"gradients{jax.tree_util.keystr(path[1:])} are {leaf.dtype}, and the "
                "loss scale is dynamic: the loss was not scaled, or they were not "
                "unscaled in float32. Write `jamp.scaled_grad(loss_fn)(state, ...)`, "
                "or `jamp.scale_loss` before `jax.grad` and `jamp.unscale` after it.",
                PrecisionWarning,
            )
            return


class Group(NamedTuple):
    """Params with an optimizer of their own.

    Attributes:
        tx: a transformation, maybe wrapped in `master_weights`; None for inference.
        opt_state: its state.
        params: the whole params, non-float leaves included.
    """

    tx: optax.GradientTransformation | None
    opt_state: Any
    params: PyTree

    @property
    def inner_state(self) -> Any:
        """The state of the optimizer without masters, alike at all levels."""
        kept = self.opt_state
        return (
            kept.inner_state if isinstance(kept, masters.MasterWeightsState) else kept
        )

    def weights(self) -> PyTree:
        """What is trained of the params, with the masters that are kept beside it."""
        trained = trained_params(self.params)
        if isinstance(self.tx, masters.MasterWeights):
            return masters.join_masters(trained, self.opt_state.masters)
        return jax.tree.map(Weight, trained)

    def check_masters(self) -> None:
        """Raises where the optimizer keeps masters, and its state has none."""
        kept = isinstance(self.opt_state, masters.MasterWeightsState)
        if isinstance(self.tx, masters.MasterWeights) and not kept:
            raise TypeError(_NO_MASTERS.format(type(self.opt_state).__name__))

    def with_weights(
        self, weights: PyTree, inner_state: PyTree, overwrite: PyTree = None
    ) -> Self:
        """The group with other weights, optimizer state, and values of fp8 scales."""
        trained, kept = masters.split_masters(weights)
        if isinstance(self.tx, masters.MasterWeights):
            inner_state = masters.MasterWeightsState(kept, inner_state)
        params = with_trained(self.params, trained, overwrite)
        return self._replace(opt_state=inner_state, params=params)


def groups_of(state: HasGroups) -> dict[Key, Group]:
    """The groups of a state, by key."""
    keys = groups.group_keys(state.tx)
    parts = [groups.split(x, keys) for x in (state.tx, state.opt_state, state.params)]
    return {key: Group(*(part[key] for part in parts)) for key in keys}


def packed(by_key: Mapping[Key, Group], like: PyTree) -> dict[str, Any]:
    """The params and optimizer states of groups, as fields of a state."""
    return {
        name: groups.pack({k: getattr(x, name) for k, x in by_key.items()}, like)
        for name in ("params", "opt_state")
    }


@moves_constants
def master_params(state: TrainState) -> PyTree:
    """The params in float32: the masters where there are any.

    Args:
        state: an AmpState.

    Returns:
        A tree like `state.params`. Without masters, half params are widened.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = jnp.full(1, 0.1)
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> print(f"{state.params.item():.6f} {master_params(state).item():.6f}")
    0.099976 0.100000
    """
    wide = {key: wide_group(group) for key, group in groups_of(state).items()}
    return groups.pack(wide, state.params)


def wide_group(group: Group) -> PyTree:
    """The same of one group."""
    return with_trained(group.params, masters.values(group.weights()))


def step(
    group: Group,
    grads: PyTree,
    *,
    overwrite: PyTree = None,
    clean: Bool[Array, ""] | None = None,
    count: ArrayLike | None = None,
    key: Key = groups.SINGLE,
    update_args: Mapping[str, Any],
) -> Group:
    """Steps the masters, or where there are none the params, widened for the step.

    A fused optimizer does so in one pass over each leaf.

    Moments of half params are in float32 too: in float16 the second would underflow,
    and an epsilon of 1e-8 would be zero.

    Args:
        group: params and the state of their optimizer.
        grads: unscaled gradients, in float32.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        clean: whether to step; if not, all bits stay. By select: a `lax.cond` would
            spare the work of a rare skip, and cost a GPU 40 % more traffic always. None
            for always.
        count: steps taken before, where params without masters are rounded
            stochastically.
        key: of the group, which random bits depend on.
        update_args: extra arguments for `tx.update`.

    Returns:
        The group with new params and optimizer state.
    """
    inner, weights, state = masters.bare(group.tx), group.weights(), group.inner_state
    if isinstance(inner, FusedTransformation):
        skip = None if clean is None else ~clean
        grads, scale = still_scaled(grads, skips=skip is not None)
        weights, state = inner.rule.apply(
            grads,
            state,
            weights,
            grad_scale=scale,
            found_inf=skip,
            rounds=count is not None,
            group=key,
        )
    else:
        try:
            weights, state, _ = masters.step_weights(
                inner, grads, state, weights, clean, count, key, **update_args
            )
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(_NO_UPDATE_ARGS.format(error)) from error
    if overwrite is not None and clean is not None:
        overwrite = select(clean, overwrite, split_overwrite(group.params)[1])
    return group.with_weights(weights, state, overwrite)
