"""Float32 master weights: an optax wrapper that steps them and rounds to the params.

After apex/amp/_process_optimizer.py, but never lazy (apex issues 480, 966 and 341).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jamp._core.dtypes import FLOAT32, cast, is_castable, is_half, widen
from jamp._core.tree import check_like, select
from jamp.optimizers import FusedTransformation
from pallas_kernels import Weight, join, split

_HOLE = optax.MaskedNode()


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: the params in float32; with `store_remainder` the 16 bits, uint16, that
            bfloat16 params lack; `optax.MaskedNode()` where a param is float32 and so
            its own master.
        inner_state: the state of the wrapped transformation.
    """

    masters: PyTree
    inner_state: Any


class MasterWeights(optax.GradientTransformationExtraArgs):
    """What `master_weights` returns: optax's pair, with the wrapped transformation."""

    @property
    def inner(self) -> optax.GradientTransformation:
        """The transformation that steps the masters."""
        return self.init.tx  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def store_remainder(self) -> bool:
        """Whether masters are kept as what the params lack."""
        return self.init.store_remainder  # pyright: ignore[reportAttributeAccessIssue]


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
        arguments. `init` widens half params. If all params are float32, it copies them:
        they are taken for the originals of params that are cast afterwards, which
        `store_remainder` does not allow. `update` needs `params`, and passes extra
        arguments on.

    Raises:
        TypeError: `tx` is no transformation.
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
        raise ValueError(f"{ALREADY_WRAPPED} Pass the bare transformation.")
    return MasterWeights(_Init(tx, store_remainder), _Update(tx))


def fused_inside(tx: Any) -> FusedTransformation | None:
    """The fused optimizer that `tx` is, or keeps masters for."""
    tx = tx.inner if isinstance(tx, MasterWeights) else tx
    return tx if isinstance(tx, FusedTransformation) else None


ALREADY_WRAPPED = "The transformation keeps master weights already."


@dataclasses.dataclass(frozen=True)
class _Init:
    tx: optax.GradientTransformation
    store_remainder: bool

    def __call__(self, params):
        if self.store_remainder:
            _check_bfloat16(params)
            return init_masters(self.tx, no_remainders(params), params)
        cast_later = not any(is_half(p) for p in jax.tree.leaves(params))
        masters = jax.tree.map(
            lambda p: _widened_copy(p) if is_half(p) or cast_later else _HOLE, params
        )
        return init_masters(self.tx, masters, params)


@dataclasses.dataclass(frozen=True)
class _Update:
    tx: optax.GradientTransformation

    def __call__(self, updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "master_weights needs the params: call `update(grads, state, params)`."
            )
        _check(updates, state, params)
        masters = full_masters(state.masters, params)
        # Wrapped here: what wraps makes a new function each time, and is never equal.
        inner = optax.with_extra_args_support(self.tx)
        updates, inner_state = inner.update(
            jax.tree.map(widen, updates), state.inner_state, masters, **extra_args
        )
        stepped = optax.apply_updates(masters, updates)
        new, masters = write_back(stepped, state.masters, params)
        updates = jax.tree.map(_landing_update, updates, new, params)
        return updates, MasterWeightsState(masters, inner_state)


def init_masters(
    inner: optax.GradientTransformation, masters: PyTree, params: PyTree
) -> MasterWeightsState:
    """The state for given masters, with holes where `params` are their own."""
    return MasterWeightsState(masters, inner.init(full_masters(masters, params)))


def full_masters(masters: PyTree, params: PyTree) -> PyTree:
    """The float32 tree: masters, and params where those are their own."""

    def leaf(master, param):
        if _is_hole(master):
            return param
        return join(param, master) if _is_remainder(master) else master

    return jax.tree.map(leaf, masters, params, is_leaf=_is_hole)


def write_back(
    stepped: PyTree, masters: PyTree, params: PyTree, clean: Any = None
) -> tuple[PyTree, PyTree]:
    """Rounds stepped masters to the params, unless the step is to be skipped.

    Args:
        stepped: new masters, in float32.
        masters: the old ones, as stored.
        params: the old params.
        clean: whether to take the step, shape (), bool; None for always.

    Returns:
        The params, and the masters as they are stored.
    """

    def choose(new, old):
        return new if clean is None else select(clean, new, old)

    def leaf(master, new, param):
        if _is_hole(master):
            return choose(new, param), _HOLE
        if _is_remainder(master):
            high, low = split(new)
            return choose(high, param), choose(low, master)
        # Select, then round: the other way round would read the old half params too.
        master = choose(new, master)
        return cast(master, param.dtype), master

    written = jax.tree.map(
        lambda *leaves: Written(*leaf(*leaves)),
        masters,
        stepped,
        params,
        is_leaf=_is_hole,
    )
    return separate(written)


class Written(NamedTuple):
    """One leaf after a step: the param, and its master as stored."""

    param: Any
    master: Any


def separate(written: PyTree) -> tuple[PyTree, PyTree]:
    """A tree of `Written` as params and masters."""
    is_written = lambda x: isinstance(x, Written)  # noqa: E731
    return (
        jax.tree.map(lambda x: x.param, written, is_leaf=is_written),
        jax.tree.map(lambda x: x.master, written, is_leaf=is_written),
    )


def weights_for(masters: PyTree, params: PyTree) -> PyTree:
    """Params and masters as kernels take them: a tree of `Weight`."""

    def leaf(master, param):
        if _is_hole(master):
            return Weight(param)
        if _is_remainder(master):
            return Weight(param, remainder=master)
        return Weight(master, copy=param)

    return jax.tree.map(leaf, masters, params, is_leaf=_is_hole)


def from_weights(weights: PyTree) -> tuple[PyTree, PyTree]:
    """The inverse of `weights_for`: params and masters."""

    def leaf(weight):
        if weight.kind == "own":
            return Written(weight.param, _HOLE)
        if weight.kind == "split":
            return Written(weight.param, weight.remainder)
        return Written(weight.copy, weight.param)

    is_weight = lambda x: isinstance(x, Weight)  # noqa: E731
    return separate(jax.tree.map(leaf, weights, is_leaf=is_weight))


def masters_for(originals: PyTree, params: PyTree) -> PyTree:
    """Copies `originals` in float32 where `params`, cast from them, are half."""
    return jax.tree.map(
        lambda x, p: _widened_copy(x) if is_half(p) else _HOLE, originals, params
    )


def no_remainders(params: PyTree) -> PyTree:
    """The remainders of masters that half can hold."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, jnp.uint16) if is_half(p) else _HOLE, params
    )


def split_masters(originals: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """`originals` as bfloat16 params and remainders, where `params` are bfloat16."""
    _check_bfloat16(params)
    holes = masters_for(originals, params)
    return write_back(full_masters(holes, originals), no_remainders(params), params)


def _widened_copy(x: Any) -> Any:
    # A copy: a master that shared its buffer with a param could not be donated.
    return (
        jnp.array(x, FLOAT32, copy=True) if is_castable(x) else jnp.array(x, copy=True)
    )


def _landing_update(update: Any, new: Any, param: Any) -> Any:
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


def _check(updates: PyTree, state: Any, params: PyTree) -> None:
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


def _is_remainder(master: Any) -> bool:
    return master.dtype == jnp.uint16


def _is_hole(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)
