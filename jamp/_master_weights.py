"""Float32 master weights: an optax wrapper that steps them and rounds to the params.

After apex/amp/_process_optimizer.py, but never lazy (apex issues 480, 966 and 341).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jamp._dtypes import FLOAT32, cast, is_castable, is_half, widen
from jamp._tree import check_like

_HOLE = optax.MaskedNode()


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: the params in float32; `optax.MaskedNode()` where a param is float32
            and so its own master.
        inner_state: the state of the wrapped transformation.
    """

    masters: PyTree
    inner_state: Any


class MasterWeights(optax.GradientTransformationExtraArgs):
    """What `master_weights` returns: optax's pair, with the wrapped transformation."""

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The transformation that steps the masters."""
        return self.init.inner  # pyright: ignore[reportAttributeAccessIssue]


def master_weights(tx: optax.GradientTransformation) -> MasterWeights:
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

    Args:
        tx: any optax transformation; it sees float32 gradients and params only.

    Returns:
        A transformation that is equal to, and hashes as, any other of the same `tx`.
        `init` widens half params. If all params are float32, it copies them: they are
        taken for the originals of params that are cast afterwards. `update` needs
        `params`, and passes extra arguments on.

    Raises:
        TypeError: `tx` is no transformation.
        ValueError: it is one of master_weights already.

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
    inner = optax.with_extra_args_support(tx)
    return MasterWeights(_Init(inner), _Update(inner))


ALREADY_WRAPPED = "The transformation keeps master weights already."


@dataclasses.dataclass(frozen=True)
class _Init:
    inner: optax.GradientTransformationExtraArgs

    def __call__(self, params):
        cast_later = not any(is_half(p) for p in jax.tree.leaves(params))
        masters = jax.tree.map(
            lambda p: _widened_copy(p) if is_half(p) or cast_later else _HOLE, params
        )
        return init_masters(self.inner, masters, params)


@dataclasses.dataclass(frozen=True)
class _Update:
    inner: optax.GradientTransformationExtraArgs

    def __call__(self, updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "master_weights needs the params: call `update(grads, state, params)`."
            )
        _check(updates, state, params)
        masters = full_masters(state.masters, params)
        updates, inner_state = self.inner.update(
            jax.tree.map(widen, updates), state.inner_state, masters, **extra_args
        )
        masters = optax.apply_updates(masters, updates)
        updates = jax.tree.map(_landing_update, updates, masters, params)
        masters = keep_holes(masters, state.masters)
        return updates, MasterWeightsState(masters, inner_state)


def init_masters(
    inner: optax.GradientTransformation, masters: PyTree, params: PyTree
) -> MasterWeightsState:
    """The state for given masters, with holes where `params` are their own."""
    return MasterWeightsState(masters, inner.init(full_masters(masters, params)))


def keep_holes(masters: PyTree, like: PyTree) -> PyTree:
    """`masters`, with the holes that `like` has."""
    return jax.tree.map(
        lambda old, new: old if _is_hole(old) else new, like, masters, is_leaf=_is_hole
    )


def full_masters(masters: PyTree, params: PyTree) -> PyTree:
    """The float32 tree: masters, and params where those are their own."""
    return jax.tree.map(
        lambda m, p: p if _is_hole(m) else m, masters, params, is_leaf=_is_hole
    )


def masters_for(originals: PyTree, params: PyTree) -> PyTree:
    """Copies `originals` in float32 where `params`, cast from them, are half."""
    return jax.tree.map(
        lambda x, p: _widened_copy(x) if is_half(p) else _HOLE, originals, params
    )


def _widened_copy(x: Any) -> Any:
    # A copy: a master that shared its buffer with a param could not be donated.
    return (
        jnp.array(x, FLOAT32, copy=True) if is_castable(x) else jnp.array(x, copy=True)
    )


def _landing_update(update: Any, new_master: Any, param: Any) -> Any:
    if not is_half(param):
        return update
    return cast(new_master, param.dtype).astype(FLOAT32) - param.astype(FLOAT32)


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


def _is_hole(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)
