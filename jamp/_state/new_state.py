"""Creates a state: its optimizer states, loss scales, counters and their placement.

Moments get the sharding of their params; scalars are replicated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.devices import put, with_full_spec
from jamp._core.dtypes import is_castable
from jamp._core.layout import Layout
from jamp._core.tree import is_traced
from jamp._policy.levels import Properties
from jamp._scaling.rules import LossScaleRule
from jamp._state.group import Group, pack_groups
from jamp.optimizers import StochasticRoundingState, _masters as masters
from jamp.optimizers._codes import is_eight_bit, largest
from jamp.optimizers._fused import FusedTransformation


def new_state[S](
    state_class: Callable[..., S],
    originals: PyTree,
    params: PyTree,
    txs: Any,
    *,
    store_remainder: bool,
    apply_fn: Any,
    properties: Properties,
    loss_scale_rules: tuple[LossScaleRule, ...],
    **fields: Any,
) -> S:
    """Returns a state with fresh optimizer states, loss scales and counters.

    Args:
        state_class: AmpState or a subclass, which declares `fields`.
        originals: the params in float32, one tree per group.
        params: the params, cast to the level.
        txs: one transformation per group, without masters.
        store_remainder: whether masters are stored as 16 low bits.
        apply_fn, properties, loss_scale_rules, **fields: fields of the state.
    """
    wrapped, new = groups.split(txs, txs), {}
    for key, tx in wrapped.items():
        cast = groups.get(params, key)
        if tx is not None:
            wrapped[key] = _wrap(tx, cast, properties, store_remainder)
        new[key] = init_group(wrapped[key], groups.get(originals, key), cast)
    return state_class(
        step=jnp.int32(0),
        apply_fn=apply_fn,
        tx=groups.pack_hashable(wrapped, txs),
        **pack_groups(new, params),
        loss_scales=tuple(rule.init() for rule in loss_scale_rules),
        skipped_steps=groups.pack({k: jnp.int32(0) for k in new}, params),
        last_step_skipped=groups.pack({k: jnp.bool_(False) for k in new}, params),
        properties=properties,
        loss_scale_rules=loss_scale_rules,
        **fields,
    )


def wrap_like(state: Any, txs: Any) -> Any:
    """Wraps new transformations for a state's groups like the old ones.

    Raises:
        ValueError: the groups differ.
    """
    old, params = (groups.split(x, state.tx) for x in (state.tx, state.params))
    new = groups.split(txs, txs)
    if set(new) != set(old):
        raise ValueError(
            f"replace(tx=...) got {txs!r} for the groups {list(old)}: it takes one "
            "transformation for each, in the container of `params`."
        )
    for key, tx in new.items():
        if groups.is_transformation(tx) and tx != old[key]:
            remainder = getattr(old[key], "store_remainder", False)
            tx = tx.rule.tx if isinstance(tx, masters.MasterWeights) else tx
            new[key] = _wrap(tx, params[key], state.properties, remainder)
    return groups.pack_hashable(new, state.tx)


def _wrap(
    tx: optax.GradientTransformation,
    params: PyTree,
    properties: Properties,
    store_remainder: bool,
) -> optax.GradientTransformation:
    """Returns a group's transformation, with masters if the level keeps them."""
    tx = _with_shardings(tx, params)
    if not properties.master_weights:
        return tx
    return masters.master_weights(tx, store_remainder=store_remainder)


def init_group(
    tx: optax.GradientTransformation | None, originals: PyTree, params: PyTree
) -> Group:
    """Returns a group whose optimizer is initialized from the params before the cast.

    Raises:
        ValueError: the transformation contains `master_weights` already.
    """
    wraps = isinstance(tx, masters.MasterWeights)
    group = Group.of(tx.rule.tx if wraps else tx, None, params)
    if wraps:
        layout, remainder = group.layout, tx.store_remainder
        both = map(layout.pick, (group.leaves, jax.tree.leaves(originals)))
        weights = masters.with_masters(layout.trained, *both, store_remainder=remainder)
        group = group._replace(has_masters=True, weights=weights)
    return group if tx is None else init_optimizer(group)


def init_optimizer(group: Group) -> Group:
    """Returns the group with a fresh optimizer state for its weights."""
    wide = group.layout.trained.unflatten([w.value for w in group.weights])
    opt_state = group.tx.init(wide)
    is_wrapped = lambda x: type(x) in _WRAPPED  # noqa: E731
    for x in filter(is_wrapped, jax.tree.leaves(opt_state, is_leaf=is_wrapped)):
        raise ValueError(_WRAPPED[type(x)])
    return group._replace(inner_state=_moments_like_params(opt_state, group))


_WRAPPED = {
    masters.MasterWeightsState: masters.ALREADY_WRAPPED,
    StochasticRoundingState: "The transformation rounds stochastically already. Pass "
    "it without stochastic_rounding, and at O5 `master_weights=False, "
    "stochastic_rounding=True`.",
}


def _with_shardings(
    tx: optax.GradientTransformation, params: PyTree
) -> optax.GradientTransformation:
    """Tells a fused optimizer the shardings of its params, which `jit` hides."""
    if not isinstance(tx, FusedTransformation):
        return tx
    layout, leaves = Layout.of(params)
    named = tuple(map(_named, layout.pick(leaves)))
    spread = named and all(s is not None and s.mesh.size > 1 for s in named)
    return tx.replace(shardings=named if spread else None)


def _moments_like_params[T](opt_state: T, group: Group) -> T:
    """Under jit, shards the leaves of an optimizer state like their params.

    XLA would replicate them. Outside `jit`, they follow their params. A subtree belongs
    to the params if it has their structure, with `optax.MaskedNode` for any subtree.
    """
    if not any(map(is_traced, group.leaves)):
        return opt_state
    params = group.layout.trained.unflatten([w.param for w in group.weights])
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    is_leaf = lambda x: is_masked(x) or is_eight_bit(x)  # noqa: E731

    def parts_of_params(x: Any) -> list[Any] | None:
        """Returns the part of the params for each leaf of `x`, or None."""
        structure = jax.tree.structure(x, is_leaf=is_leaf)
        try:
            return structure.flatten_up_to(params)
        except ValueError:
            return None

    def sharded(x: Any) -> Any:
        parts = parts_of_params(x)
        if parts is None:
            return x
        leaves, structure = jax.tree.flatten(x, is_leaf=is_leaf)
        pairs = zip(leaves, parts, strict=True)
        return structure.unflatten(
            [x if is_masked(x) else _shard_like(x, part) for x, part in pairs]
        )

    is_like = lambda x: is_leaf(x) or parts_of_params(x) is not None  # noqa: E731
    return jax.tree.map(sharded, opt_state, is_leaf=is_like)


def replicate_uncommitted[T](state: T, params: PyTree) -> T:
    """Replicates scalars and uncommitted fields on the mesh of the params.

    Otherwise, the first step would replicate them, and the second step would compile
    again.
    """
    shardings = [_named(x) for x in jax.tree.leaves(params)]
    meshes = {s.mesh for s in shardings if s is not None}
    if len(meshes) != 1:
        return state
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())

    def leaf(x):
        if is_traced(x) or not isinstance(x, jax.Array):
            return x
        if not x.committed:
            return put(x, _as_given_back(everywhere, x.ndim))
        if sharding := _named(x):
            return jax.device_put(x, _as_given_back(sharding, x.ndim))
        return x

    return jax.tree.map(leaf, state)


def _as_given_back(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding of a program's result: a full spec on Explicit axes."""
    explicit = all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)
    return with_full_spec(sharding, ndim) if explicit else sharding


def _shard_like(x: Any, param: Any) -> Any:
    """Combines `x` with `param`, so that XLA gives it the sharding of `param`."""
    if is_eight_bit(x) and jnp.shape(param) == x.shape:
        pairs = zip(x, (param, largest(param)), strict=True)
        return type(x)(*[_shard_like(*pair) for pair in pairs])
    if not is_castable(param) or jnp.shape(x) != param.shape or not param.shape:
        return x
    never = jnp.abs(param) < 0  # XLA would fold a constant
    return jax.lax.select(never, param.astype(x.dtype), x)


def _named(x: Any) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh, or None."""
    sharding = None if is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
