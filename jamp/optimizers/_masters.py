"""Float32 master weights: kept beside half params, and stepped by optax.

After apex/amp/_process_optimizer.py, but never lazy (apex issues 480, 966 and 341). A
param with its master is a `pallas_kernels.Weight`. States keep the masters as a tree
beside the params, with holes where a param is its own: no array occurs twice in them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from jamp._core.dtypes import FLOAT32, cast, is_castable, is_half, widen
from jamp._core.tree import check_like, copied, select
from jamp.optimizers._fused import FusedTransformation
from jamp.optimizers._transformation import Transformation
from pallas_kernels import Weight, split

_HOLE = optax.MaskedNode()


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: the params in float32, and of float64 ones copies; with
            `store_remainder` the 16 low bits beside bfloat16 params, uint16;
            `optax.MaskedNode()` where a param is float32 and so its own master.
        inner_state: the state of the wrapped transformation.
    """

    masters: PyTree
    inner_state: Any

    def __getattr__(self, name: str) -> NoReturn:
        """Says where a field of the optimizer's own state is."""
        raise AttributeError(
            f"MasterWeightsState has no {name!r}: it holds `masters` and the state of "
            "the optimizer inside, `inner_state`. At any opt level, "
            "`optax.tree.get(state, name)` finds a value by its name."
        )


class MasterWeights(Transformation):
    """What `master_weights` returns: optax's pair, with the wrapped transformation."""

    @property
    def inner(self) -> optax.GradientTransformation:
        """The transformation that steps the masters."""
        return self.rule.tx

    @property
    def store_remainder(self) -> bool:
        """Whether masters are stored as the low bits beside the params."""
        return self.rule.store_remainder


def master_weights(
    tx: optax.GradientTransformation, *, store_remainder: bool = False
) -> MasterWeights:
    r"""Keeps float32 masters of half params, and steps those with `tx`.

    With masters $m$, params $p$ and the update $u$ of `tx` at the masters,

    $$m' = m + u, \quad p' = \mathrm{half}(m'),$$

    `update` returns $\mathrm{f32}(p') - \mathrm{f32}(p)$, so that `optax.apply_updates`
    lands on $p'$ bit for bit while $|p| / |p'|$ stays below about $2^{13}$ (in bfloat16
    $2^{16}$) and both are finite. `half` rounds to nearest and clamps to the largest
    finite half. Params in float32 are their own masters, and receive $u$ itself.

    Place it last in a chain and outside of `inject_hyperparams`: what changes updates
    afterwards breaks `params == half(masters)`, and clipping before it sees half
    gradients. Everything may go inside: `master_weights(optax.chain(clip, adam))`.

    With `store_remainder`, a bfloat16 param and 16 more bits are the master: 2 bytes
    per param where a float32 copy takes 4, and bit-exact. The param is then the master
    rounded to nearest with exact ties away from zero, not to even. Masters are clamped
    to what does not round to infinity, and all NaNs are one.

    Args:
        tx: any optax transformation; it sees float32 gradients and params only.
        store_remainder: whether to keep the lower 16 bits beside bfloat16 params
            instead of a float32 copy.

    Returns:
        A transformation that is equal to, and hashes as, any other of the same
        arguments. `init` widens half params. If none is half, it copies all of them:
        they are taken for the originals of params that are cast afterwards, which
        `store_remainder` does not allow. `update` needs `params`, and passes extra
        arguments on.

    Raises:
        TypeError: `tx` is not a transformation.
        ValueError: it is one of master_weights already; `init` with `store_remainder`
            and params that are not bfloat16.

    >>> import jax.numpy as jnp, optax
    >>> params, tx = jnp.ones(1, jnp.bfloat16), master_weights(optax.sgd(1e-3))
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...     updates, state = tx.update(jnp.ones(1, jnp.bfloat16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(params)  # without masters it would stay at 1: half of its spacing is 2e-3
    [0.898438]
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"master_weights takes an optax transformation, got {tx!r}.")
    if isinstance(tx, MasterWeights):
        raise ValueError(ALREADY_WRAPPED)
    return MasterWeights.from_rule(_MasterRule(tx, store_remainder))


def inside(tx: optax.GradientTransformation | None) -> Any:
    """The transformation that `tx` keeps masters for; `tx` itself if it keeps none."""
    return tx.rule.tx if isinstance(tx, MasterWeights) else tx


def fused_inside(tx: optax.GradientTransformation | None) -> FusedTransformation | None:
    """The fused optimizer that `tx` is, or keeps masters for."""
    tx = inside(tx)
    return tx if isinstance(tx, FusedTransformation) else None


ALREADY_WRAPPED = (
    "The transformation keeps master weights already. Pass the bare one, or choose "
    "master_weights=False at a level that casts."
)


@dataclasses.dataclass(frozen=True)
class _MasterRule:
    tx: optax.GradientTransformation
    store_remainder: bool

    def init(self, params: PyTree) -> MasterWeightsState:
        leaves, structure = jax.tree.flatten(params)
        if self.store_remainder:
            _check_bfloat16(params)
            low = lambda p: Weight(p, jnp.zeros_like(p, jnp.uint16))  # noqa: E731
            weights = [low(p) if is_half(p) else Weight(p) for p in leaves]
        elif any(map(is_half, leaves)):
            weights = _with_copies(leaves, leaves)
        else:  # taken for the originals of params that are cast afterwards
            dtypes = [jnp.result_type(p) for p in leaves]
            weights = list(map(Weight, leaves, copied(leaves, dtypes)))
        tree = structure.unflatten(weights)
        return MasterWeightsState(parted(tree)[1], self.tx.init(values(tree)))

    def update(self, updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "master_weights needs the params: call `update(grads, state, params)`."
            )
        _check_update(updates, state, params)
        weights = joined(params, state.masters)
        new, inner_state, updates = step_weights(
            self.tx, updates, state.inner_state, weights, **extra_args
        )
        new, masters = parted(new)
        landing = jax.tree.map(_landing_update, updates, new, params)
        return landing, MasterWeightsState(masters, inner_state)


def with_masters(
    params: PyTree, originals: PyTree, *, store_remainder: bool = False
) -> PyTree:
    """A tree of `Weight`, with masters where `params` are half.

    Args:
        params: cast from `originals`.
        originals: float32, copied where they become masters.
        store_remainder: whether to keep 16 bits beside each bfloat16 param, which is
            rounded again from its original then, ties away from zero.
    """
    leaves, structure = jax.tree.flatten(params)
    weights = _with_copies(leaves, structure.flatten_up_to(originals))
    if store_remainder:
        _check_bfloat16(params)
        own = lambda w: w.master is None  # noqa: E731
        weights = [w if own(w) else Weight(*split(w.master)) for w in weights]
    return structure.unflatten(weights)


def _with_copies(params: Sequence[Any], originals: Sequence[Any]) -> list[Weight]:
    """Params with float32 copies of the originals as masters, where they are half.

    A master that shared its buffer with a param could not be donated.
    """
    dtypes = [FLOAT32 if is_half(p) else None for p in params]
    masters = copied(originals, dtypes)
    return [
        Weight(p) if dtype is None else Weight(p, master)
        for p, dtype, master in zip(params, dtypes, masters, strict=True)
    ]


def joined(params: PyTree, masters: PyTree) -> PyTree:
    """A tree of `Weight` from params, and masters as a state keeps them."""

    leaves, structure = jax.tree.flatten(masters, is_leaf=_is_hole)
    both = zip(structure.flatten_up_to(params), leaves, strict=True)
    weights = [  # `optax.masked` leaves holes in both
        p if _is_hole(p) else Weight(p, None if _is_hole(m) else m) for p, m in both
    ]
    return structure.unflatten(weights)


def parted(weights: PyTree) -> tuple[PyTree, PyTree]:
    """The inverse of `joined`: params, and masters with holes."""
    leaves, structure = jax.tree.flatten(weights, is_leaf=_is_weight)
    masters = [_HOLE if w.master is None else w.master for w in leaves]
    params = [w.param for w in leaves]
    return structure.unflatten(params), structure.unflatten(masters)


def values(weights: PyTree) -> PyTree:
    """What an optimizer steps: the masters, and float32 params in place of holes."""
    return _map_weights(lambda w: w.value, weights)


def step_weights(
    tx: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    weights: PyTree,
    clean: Bool[Array, ""] | None = None,
    **extra_args: Any,
) -> tuple[PyTree, Any, PyTree]:
    """Steps a tree of `Weight` with an optax transformation.

    Args:
        tx: it sees float32 gradients and params only.
        grads: gradients, already unscaled.
        state: of `tx`.
        weights: what to step.
        clean: whether to take the step, shape (), bool; None for always.
        **extra_args: for `tx.update`.

    Returns:
        The weights, rounded again; the state; and what was added to the masters.
    """
    masters = values(weights)
    # Wrapped here: what wraps makes a new function each time, and is never equal.
    tx = optax.with_extra_args_support(tx)
    grads = jax.tree.map(widen, grads)
    updates, new_state = tx.update(grads, state, masters, **extra_args)
    stepped = optax.apply_updates(masters, updates)
    new = _map_weights(_to_select, weights, stepped), new_state
    if clean is not None:
        new = select(clean, new, (_map_weights(_to_select, weights), state))
    return _map_weights(_selected, weights, new[0]), new[1], updates


def _to_select(old: Weight, new: Any = None) -> Any:
    """A weight, or its next value; of a param with a float32 copy, that copy alone.

    Select, then round: the other way round would read the old half params too.
    """
    if old.kind == "copied":
        return old.master if new is None else new
    if new is None:
        return old
    if old.kind == "split":
        return Weight(*split(new))
    return Weight(cast(new, old.param.dtype) if is_castable(old.param) else new)


def _selected(old: Weight, chosen: Any) -> Weight:
    if old.kind == "copied":
        return Weight(cast(chosen, old.param.dtype), chosen)
    return chosen


def _map_weights(fn: Callable[..., Any], weights: PyTree, *rest: PyTree) -> PyTree:
    return jax.tree.map(fn, weights, *rest, is_leaf=_is_weight)


def _landing_update(update: jax.Array, new: jax.Array, param: jax.Array) -> Any:
    if not is_half(param):
        return update
    return new.astype(FLOAT32) - param.astype(FLOAT32)


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
            "MasterWeightsState that its `init` returned."
        )
    check_like(updates, params, "updates", "they must match the params.")

    def leaf(path, master, param):
        if _is_hole(master) and is_half(param):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {param.dtype} but was float32 "
                "when master_weights was initialized, so it has no master: call `init` "
                "with the params that you train."
            )

    jax.tree_util.tree_map_with_path(leaf, state.masters, params, is_leaf=_is_hole)


def _is_weight(x: object) -> bool:
    return isinstance(x, Weight)


def _is_hole(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)
