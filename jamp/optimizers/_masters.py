"""Steps half params with optax, with float32 masters or stochastic rounding.

Based on apex/amp/_process_optimizer.py, but never lazy (apex issues 480, 966 and 341).
A param with its master is a `pallas_kernels.Weight`; these functions take lists of
them. A state keeps masters as a tree with holes for float32 params, because a donated
state must not contain an array twice.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Int, PyTree

from jamp._core.dtypes import FLOAT32, cast, is_half, widen
from jamp._core.groups import check_transformation
from jamp._core.layout import Structure
from jamp._core.tree import copy_leaves, select, select_leaf
from jamp.optimizers._fused import Transformation, check_step, leaf_salts
from pallas_kernels import Weight, keys_of, split_float32, stochastic

_HOLE = optax.MaskedNode()


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: float32 copies of half params, or with `store_remainder` the 16 low
            bits, uint16; `optax.MaskedNode()` where a param is its own master.
        inner_state: the state of the wrapped transformation.
    """

    masters: PyTree
    inner_state: Any

    def __getitem__(self, index: Any) -> Any:
        """Raises, because an index means the wrapped state, as without masters."""
        raise TypeError(
            f"[{index!r}] of a MasterWeightsState, which has the fields masters and "
            f"inner_state. The optimizer's own state is in `opt_state.inner_state`: "
            f"write `state.opt_state.inner_state[{index!r}]`."
        )

    def __getattr__(self, name: str) -> Any:
        """Raises, and names the place of the wrapped state's fields."""
        raise AttributeError(
            f"A MasterWeightsState has no {name!r}. The optimizer's own state is in "
            f"`opt_state.inner_state`; `optax.tree.get(state, {name!r})` finds a field "
            "at every opt level."
        )


class MasterWeights(Transformation):
    """The result of `master_weights`: optax's pair, with the wrapped transformation."""

    @property
    def inner(self) -> optax.GradientTransformation:
        """The transformation that steps the masters."""
        return self.rule.tx

    @property
    def store_remainder(self) -> bool:
        """Whether masters are stored as the low bits that the params lack."""
        return self.rule.store_remainder


def master_weights(
    tx: optax.GradientTransformation, *, store_remainder: bool = False
) -> MasterWeights:
    r"""Keeps float32 masters of half params, and steps the masters with `tx`.

    With masters $m$, params $p$ and the update $u$ of `tx` at the masters,

    $$m' = m + u, \quad p' = \mathrm{half}(m'),$$

    `update` returns $\mathrm{f32}(p') - \mathrm{f32}(p)$. `optax.apply_updates` adds it
    to $p$ and gets $p'$ bit for bit, if both are finite and $|p| / |p'|$ is below about
    $2^{13}$ ($2^{16}$ in bfloat16). `half` rounds to nearest and clamps to the largest
    finite half. Float32 params are their own masters.

    Make it the outermost transformation: `master_weights(optax.chain(clip, adam))`.

    Args:
        tx: an optax transformation, which gets only float32 gradients and params.
        store_remainder: whether to store the lower 16 bits of each master instead of a
            float32 copy, for bfloat16 params. Then exact ties round away from zero, and
            all NaNs become one NaN.

    Returns:
        A transformation. Two with the same arguments are equal and have the same hash.
        If no param is half, `init` makes masters for params that you cast afterwards.

    Raises:
        TypeError: `tx` is not a transformation.
        ValueError: `tx` keeps masters already; or, in `init`, `store_remainder` gets
            params that are not bfloat16.

    >>> import jax.numpy as jnp, optax
    >>> params, tx = jnp.ones(1, jnp.bfloat16), master_weights(optax.sgd(1e-3))
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...     updates, state = tx.update(jnp.ones(1, jnp.bfloat16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(params)  # without masters it would stay at 1: half of its spacing is 2e-3
    [0.898438]
    """
    check_transformation("master_weights", tx)
    if isinstance(tx, MasterWeights):
        raise ValueError(ALREADY_WRAPPED)
    wrapped = MasterWeights.from_rule(_MasterRule(tx, store_remainder))
    wrapped.all_finite = tx.all_finite if isinstance(tx, Transformation) else None
    return wrapped


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        count: steps taken, shape (), int32.
        inner_state: the state of the wrapped transformation.
    """

    count: Int[Array, ""]
    inner_state: Any


def stochastic_rounding(tx: optax.GradientTransformation) -> Transformation:
    r"""Steps bfloat16 params without masters, and rounds them stochastically.

    A param is rounded up or down with probabilities that keep the mean of its float32
    value, so small steps add up. The random bits are a hash of step, path and element.
    They are the same under any sharding and after a resume.

    Make it the outermost transformation. For `jamp.initialize`, pass
    `stochastic_rounding=True` instead.

    Args:
        tx: an optax transformation, which gets only float32 gradients and params.

    Returns:
        A transformation. Two with the same `tx` are equal and have the same hash.

    Raises:
        TypeError: `tx` is not a transformation.

    >>> import jax.numpy as jnp, optax
    >>> params, tx = jnp.ones(1000, jnp.bfloat16), stochastic_rounding(optax.sgd(1e-3))
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...     updates, state = tx.update(jnp.ones(1000), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(f"{params.astype(jnp.float32).mean():.2f}")  # to nearest it would stay 1
    0.90
    """
    check_transformation("stochastic_rounding", tx)
    return Transformation.from_rule(_StochasticRule(tx))


def delta_to(
    structure: Structure,
    updates: PyTree,
    new: Sequence[Weight],
    params: Sequence[Array],
) -> PyTree:
    """Returns updates with which `optax.apply_updates` gives the new half params."""
    return structure.unflatten(
        [
            w.param.astype(FLOAT32) - p.astype(FLOAT32) if is_half(p) else u
            for u, w, p in zip(jax.tree.leaves(updates), new, params, strict=True)
        ]
    )


ALREADY_WRAPPED = (
    "The transformation keeps master weights already. Pass it without master_weights, "
    "or choose master_weights=False at a level that casts."
)


@dataclasses.dataclass(frozen=True)
class _MasterRule:
    tx: optax.GradientTransformation
    store_remainder: bool

    def init(self, params: PyTree) -> MasterWeightsState:
        leaves, structure = jax.tree.flatten(params)
        if self.store_remainder or any(map(is_half, leaves)):
            remainder = self.store_remainder
            weights = with_masters(structure, leaves, leaves, store_remainder=remainder)
        else:  # the caller casts these params afterwards
            dtypes = [jnp.result_type(p) for p in leaves]
            weights = list(map(Weight, leaves, copy_leaves(leaves, dtypes)))
        inner_state = self.tx.init(structure.unflatten([w.value for w in weights]))
        return MasterWeightsState(masters_of(structure, weights), inner_state)

    def update(self, updates, state, params=None, **extra_args):
        _check_update(updates, state, params)
        params, structure = jax.tree.flatten(params)
        grads = jax.tree.leaves(updates)
        weights = join_masters(structure, params, state.masters)
        new, inner_state, updates = step_weights(
            self.tx, structure, grads, state.inner_state, weights, **extra_args
        )
        masters = masters_of(structure, new)
        updates = delta_to(structure, updates, new, params)
        return updates, MasterWeightsState(masters, inner_state)


@dataclasses.dataclass(frozen=True)
class _StochasticRule:
    tx: optax.GradientTransformation

    def init(self, params: PyTree) -> StochasticRoundingState:
        wide = jax.tree.map(widen, params)
        return StochasticRoundingState(jnp.int32(0), self.tx.init(wide))

    def update(self, updates, state, params=None, **extra_args):
        check_step("stochastic_rounding", updates, params)
        params, structure = jax.tree.flatten(params)
        weights, grads = list(map(Weight, params)), jax.tree.leaves(updates)
        inner, count = state.inner_state, state.count
        new, inner_state, updates = step_weights(
            self.tx, structure, grads, inner, weights, count=count, **extra_args
        )
        count = optax.safe_increment(count)
        state = state._replace(count=count, inner_state=inner_state)
        return delta_to(structure, updates, new, params), state


def with_masters(
    structure: Structure,
    params: Sequence[Array],
    originals: Sequence[Array],
    *,
    store_remainder: bool = False,
) -> list[Weight]:
    """Returns params with masters, which are copies of `originals`.

    `params` are cast from `originals`. With `store_remainder`, they are rounded again.
    """
    if store_remainder:
        _check_bfloat16(structure.unflatten(params))
    dtypes = [FLOAT32 if is_half(p) else None for p in params]
    # Donation needs a master that shares no buffer with a param.
    masters = copy_leaves(originals, dtypes)
    weights = []
    for param, dtype, master in zip(params, dtypes, masters, strict=True):
        if dtype is None:
            weights.append(Weight(param))
        elif store_remainder:
            weights.append(Weight(*split_float32(master)))
        else:
            weights.append(Weight(param, master))
    return weights


def join_masters(
    structure: Structure, params: Sequence[Array], masters: PyTree
) -> list[Weight]:
    """Returns params with the masters of a state."""
    kept = structure.flatten_up_to(masters)
    masters = [None if isinstance(m, optax.MaskedNode) else m for m in kept]
    return list(map(Weight, params, masters))


def masters_of(structure: Structure, weights: Sequence[Weight]) -> PyTree:
    """Returns the tree of masters, with holes: the inverse of `join_masters`."""
    return structure.unflatten(
        [_HOLE if w.master is None else w.master for w in weights]
    )


def step_weights(
    tx: optax.GradientTransformation,
    structure: Structure,
    grads: Sequence[Array],
    state: PyTree,
    weights: Sequence[Weight],
    finite: Bool[Array, ""] | None = None,
    count: ArrayLike | None = None,
    group: Hashable = None,
    **extra_args: Any,
) -> tuple[list[Weight], Any, PyTree]:
    """Steps weights with an optax transformation.

    Args:
        tx: the transformation.
        structure: the structure of the params, because masks and labels need paths.
        grads, state: unscaled gradients, and the state.
        weights: one per gradient.
        finite: whether to step, shape (), bool; None always steps.
        count: the number of earlier steps, to round bfloat16 weights without masters
            stochastically; None rounds them to nearest.
        group: the key of the group of these weights, for the random bits.
        **extra_args: extra arguments of `tx.update`.

    Returns:
        The new weights, the new state, and the updates of the masters.
    """
    masters = structure.unflatten([w.value for w in weights])
    # A wrapped transformation equals no other, so callers keep the bare one.
    tx = optax.with_extra_args_support(tx)
    wide = structure.unflatten(map(widen, grads))
    updates, new_state = tx.update(wide, state, masters, **extra_args)
    stepped = optax.apply_updates(masters, updates)
    if finite is not None:
        new_state = select(finite, new_state, state)
    keys: Any = [None] * len(weights)
    if count is not None:
        keys = keys_of(count, leaf_salts(structure, group))
    each = zip(weights, structure.flatten_up_to(stepped), keys, strict=True)
    new = [_written(*leaf, finite) for leaf in each]
    return new, new_state, updates


def _written(
    old: Weight, value: Array, key: Array | None, finite: Array | None
) -> Weight:
    """Returns the weight with a new value if `finite`, and unchanged otherwise."""
    if old.master is not None and old.kind == "copied":
        # Select before rounding: a select of half params would also read the old one.
        master = value if finite is None else select_leaf(finite, value, old.master)
        return Weight(cast(master, old.param.dtype), master)
    if old.kind == "split":
        new = Weight(*split_float32(value))
    elif key is not None and old.param.dtype == jnp.bfloat16:
        new = Weight(stochastic(value, key))
    else:
        new = Weight(cast(value, old.param.dtype))
    if finite is None:
        return new
    pairs: Any = zip(new, old, strict=True)
    return Weight(*[select_leaf(finite, n, o) for n, o in pairs if o is not None])


def _check_bfloat16(params: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if is_half(leaf) and leaf.dtype != jnp.bfloat16:
            raise ValueError(
                f"store_remainder needs bfloat16 params, but "
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype}: choose opt level "
                "O5, or keep float32 masters."
            )
    if leaves and not any(is_half(leaf) for _, leaf in leaves):
        raise ValueError(
            "store_remainder needs bfloat16 params, and all are float32: cast them "
            "before `init`."
        )


def _check_update(updates: PyTree, state: PyTree, params: PyTree) -> None:
    if not isinstance(state, MasterWeightsState):
        raise TypeError(
            f"master_weights got a state of type {type(state).__name__}, expected the "
            "MasterWeightsState that its `init` returned. In an AmpState, this is "
            "`state.opt_state`, and `state.apply_gradients(grads=grads)` steps it."
        )
    check_step("master_weights", updates, params)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    masters = structure.flatten_up_to(state.masters)
    for (path, param), master in zip(leaves, masters, strict=True):
        if isinstance(master, optax.MaskedNode) and is_half(param):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {param.dtype} but was float32 "
                "when master_weights was initialized, so it has no master: call `init` "
                "with the params that you train."
            )
