"""The cut-down `FP16_Optimizer` of apex.optimizers: one half buffer per group.

After apex/optimizers/fp16_optimizer.py of 2019.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core import groups
from jamp._core.dtypes import HALF_DTYPES
from jamp._core.numbers import check_count, check_scale
from jamp._core.tree import copy_shared
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.rules import unscale_tree
from jamp._state.closure import rounded
from jamp._state.incoming import check_containers
from jamp._state.new_state import begun_group
from jamp._state.step import Group, packed, step
from jamp.fp16_utils._scalers import DynamicLossScaler, LossScaler, LossScalerState
from jamp.fp16_utils._wrapper import Wrapper, add, needed, say
from jamp.optimizers import FusedTransformation
from jamp.optimizers._masters import MasterWeightsState, master_weights
from pallas_kernels import norm

_DYNAMIC = DynamicLossScaler(2.0**16, scale_factor=2.0, scale_window=1000)


class FlatFP16State(flax.struct.PyTreeNode):
    """State of `FlatFP16_Optimizer`. Each group has its own buffers.

    Attributes:
        fp16_flat: the params, half, shape (n,).
        opt_state: the masters, and the state of the fused optimizer, flat too.
        grads: gradients times the scale, half, shape (n,); None if there are none.
        overflow: whether the last step was skipped, shape (), bool.
        loss_scaler: the scale, the iteration, and the last one with an overflow.
        specs: by group, the function from a buffer to its params. Static.
    """

    fp16_flat: Any
    opt_state: Any
    grads: Any
    overflow: Bool[Array, ""]
    loss_scaler: LossScalerState
    specs: tuple[tuple[groups.Key, Callable[[Array], Any]], ...] = flax.struct.field(
        pytree_node=False
    )

    @property
    def params(self) -> Any:
        """The half params in the structure that `init` was given."""
        flat = self.fp16_flat
        trees = {k: unravel(groups.get(flat, k)) for k, unravel in self.specs}
        return groups.pack(trees, flat)

    @property
    def fp32_flat(self) -> Any:
        """The masters, float32, shape (n,)."""
        return _field_of_each("masters", self.opt_state)

    @property
    def loss_scale(self) -> Float[Array, ""]:
        """The loss scale, shape (), float32."""
        return self.loss_scaler.cur_scale


class FlatFP16_Optimizer(Wrapper):  # noqa: N801, apex's way to write it
    """Loss scale and masters around a fused optimizer, on flat buffers.

    `backward` adds in half. `step` skips if the norm of a group's gradients is not
    finite, under a static scale too. A dynamic scale starts at 2^16, halves on overflow
    but not below 1, and doubles every 1000 clean steps.

    Args:
        init_optimizer: one of `jamp.optimizers`, or a list, tuple or dict with one per
            group.
        static_loss_scale, dynamic_loss_scale: see `FP16_Optimizer`.
        dynamic_loss_args: a SystemError, as in apex.
        verbose: whether to print overflows under a dynamic scale.

    >>> import jamp
    >>> tx = jamp.optimizers.fused_sgd(0.5)
    >>> optimizer = FlatFP16_Optimizer(tx, 64.0, verbose=False)
    >>> state = optimizer.init({"w": jnp.ones(2, jnp.float16)})
    >>> loss_fn = lambda params: (params["w"] ** 2).sum(dtype="float32")
    >>> loss, state = optimizer.backward(state, loss_fn)
    >>> state = optimizer.zero_grad(optimizer.step(state))
    >>> print(loss, state.params["w"], state.fp32_flat)
    2.0 [0. 0.] [0. 0.]
    """

    state_class: ClassVar[type] = FlatFP16State
    checks: ClassVar[bool] = True

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        self.optimizer = tx
        self._txs = groups.split(tx, groups.group_keys(tx))
        for key, fused in self._txs.items():
            if not isinstance(fused, FusedTransformation):
                raise TypeError(
                    "FlatFP16_Optimizer takes a fused optimizer of jamp.optimizers, "
                    f"got {fused!r}. Use FP16_Optimizer for any other."
                )
            self._txs[key] = master_weights(fused)
        if args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        scaler = LossScaler(static)
        self._scaler = _DYNAMIC if self.dynamic_loss_scale else scaler

    def init(self, params: PyTree) -> FlatFP16State:
        """The state for trees of half params, in the container of the optimizers.

        Raises:
            TypeError: a leaf is not half, or its dtype differs from the first leaf's.
            ValueError: params are in another container than the optimizers.
        """
        check_containers(params, self.optimizer)
        by_key, specs = {}, []
        for key, tx in self._txs.items():
            tree = groups.get(params, key)
            _check_half(tree, "params" if key is None else f"params[{key!r}]")
            flat, unravel = ravel_pytree(tree)
            specs.append((key, unravel))
            by_key[key] = begun_group(tx, flat, flat)
        flat, opt_state = packed(by_key, params).values()
        overflow, scaler = jnp.asarray(False), self._scaler.init()
        state = FlatFP16State(flat, opt_state, None, overflow, scaler, tuple(specs))
        return copy_shared(state, params)

    def _add(self, state: FlatFP16State, grads: PyTree) -> FlatFP16State:
        flat = {key: ravel_pytree(groups.get(grads, key))[0] for key in self._txs}
        return state.replace(grads=add(state.grads, groups.pack(flat, grads)))

    def step(self, state: FlatFP16State, closure: object = None) -> FlatFP16State:
        """Steps or skips, and moves the scale. It calls no closure, as in apex."""
        self._check(state)
        if closure is not None:
            warn("FlatFP16_Optimizer does not call a closure.", UnusedOptionWarning)
        grads, scaler = needed(state.grads), state.loss_scaler
        finite = [jnp.isfinite(norm([flat])) for flat in jax.tree.leaves(grads)]
        clean = functools.reduce(jnp.logical_and, finite)
        if self.verbose or not self.dynamic_loss_scale:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            scale = f"Using {kind} loss scale of {scaler.cur_scale}"
            say(~clean, f"Grad overflow on iteration {scaler.cur_iter}\n{scale}")
        by_key, fresh = {}, unscale_tree(grads, scaler.cur_scale)
        for key, tx in self._txs.items():
            parts = state.opt_state, state.fp16_flat, fresh
            opt_state, flat, own = (groups.get(part, key) for part in parts)
            group = Group(tx, opt_state, flat)
            by_key[key] = step(group, own, clean=clean, key=key, update_args={})
        flat, opt_state = packed(by_key, state.fp16_flat).values()
        moved = self._scaler.update_scale(scaler, ~clean)
        return state.replace(
            fp16_flat=flat,
            opt_state=opt_state,
            overflow=~clean,
            loss_scaler=moved._replace(cur_iter=scaler.cur_iter + 1),
        )

    def zero_grad(
        self, state: FlatFP16State, set_grads_to_None: bool = True
    ) -> FlatFP16State:
        """The state without gradients, or with zeros."""
        self._check(state)
        zeros = jax.tree.map(jnp.zeros_like, state.fp16_flat)
        return state.replace(grads=None if set_grads_to_None else zeros)

    def _saved(self, state: FlatFP16State) -> dict[str, PyTree]:
        kept = state.loss_scaler._asdict()
        if self.dynamic_loss_scale:
            kept["scale_factor"] = jnp.float32(_DYNAMIC.scale_factor)
            kept["scale_window"] = jnp.int32(_DYNAMIC.scale_window)
        else:
            del kept["last_overflow_iter"]
        return kept | {
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "optimizer_state_dict": _field_of_each("inner_state", state.opt_state),
            "fp32_groups_flat": state.fp32_flat,
        }

    def _loaded(self, state: FlatFP16State, parts: dict[str, PyTree]) -> FlatFP16State:
        check_scale("cur_scale", parts["cur_scale"])
        check_count("cur_iter", parts["cur_iter"])
        masters, inner = parts["fp32_groups_flat"], parts["optimizer_state_dict"]
        scaler = {k: parts[k] for k in LossScalerState._fields if k in parts}
        return state.replace(
            fp16_flat=rounded(masters, state.fp16_flat),
            opt_state=jax.tree.map(MasterWeightsState, masters, inner),
            loss_scaler=state.loss_scaler._replace(**scaler),
        )


def _field_of_each(name: str, opt_states: Any) -> Any:
    """A field of each group's MasterWeightsState, in their container."""
    is_state = lambda x: isinstance(x, MasterWeightsState)  # noqa: E731
    return jax.tree.map(lambda x: getattr(x, name), opt_states, is_leaf=is_state)


def _check_half(tree: PyTree, name: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise TypeError(f"{name} hold no arrays.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if dtype not in HALF_DTYPES or dtype != leaves[0][1].dtype:
            raise TypeError(
                "FlatFP16_Optimizer takes params that are all float16, or all "
                f"bfloat16; {name}{jax.tree_util.keystr(path)} is {dtype}."
            )
