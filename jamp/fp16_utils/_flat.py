"""The cut-down `FP16_Optimizer` of apex.optimizers, on one flat buffer per group.

After apex/optimizers/fp16_optimizer.py of 2019.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jamp._core import groups
from jamp._core.dtypes import HALF_DTYPES
from jamp._scaling.rules import DynamicLossScale, StaticLossScale, unscale_tree
from jamp._state.incoming import check_containers
from jamp.fp16_utils._wrapper import Wrapper, WrapperState, check_dtypes, needed, say
from jamp.optimizers import FusedTransformation
from jamp.optimizers._masters import master_weights
from pallas_kernels import norm


class FlatFP16State(WrapperState):
    """State of `FlatFP16_Optimizer`.

    Attributes:
        params: the half params, one tree per group.
        opt_state: by group the masters, and the flat state of the fused optimizer.
        model_grads: gradients times the scale, half; None if there are none.
        overflow: whether the last step was skipped, shape (), bool.
        loss_scaler: the loss scale and its counters.
        cur_iter: steps and skips so far, shape (), int32.
    """

    cur_iter: Int[Array, ""]


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
    >>> print(loss, state.params["w"])
    2.0 [0. 0.]
    """

    state_class: ClassVar[type] = FlatFP16State

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        self._given = tx
        self._txs = groups.split(tx, groups.group_keys(tx))
        for fused in self._txs.values():
            if not isinstance(fused, FusedTransformation):
                raise TypeError(
                    "FlatFP16_Optimizer takes a fused optimizer of jamp.optimizers, "
                    f"got {fused!r}. Use FP16_Optimizer for any other."
                )
        flat = {key: optax.flatten(fused) for key, fused in self._txs.items()}
        labels = functools.partial(groups.pack, {key: key for key in flat})
        is_one = groups.SINGLE in flat
        tx = flat[groups.SINGLE] if is_one else optax.partition(flat, labels)
        self.optimizer = master_weights(tx)
        if args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        self.rule = StaticLossScale(static, check=True)
        if self.dynamic_loss_scale:
            self.rule = DynamicLossScale(2.0**16, 2.0, 1000, 1.0, None)

    def init(self, params: PyTree) -> FlatFP16State:
        """The state for trees of half params, in the container of the optimizers.

        Raises:
            TypeError: a leaf is not half.
            ValueError: params are in another container than the optimizers.
        """
        check_containers(params, self._given)
        check_dtypes(params, HALF_DTYPES)
        return self._init(params, model_grads=None, cur_iter=jnp.int32(0))

    def step(self, state: FlatFP16State) -> FlatFP16State:
        """Steps or skips, and moves the scale. It takes no closure."""
        self._check(state)
        grads, scale = needed(state.model_grads), state.loss_scale
        by_group = [jax.tree.leaves(groups.get(grads, key)) for key in self._txs]
        clean = jnp.isfinite(jnp.stack([norm(leaves) for leaves in by_group])).all()
        if self.verbose or not self.dynamic_loss_scale:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            text = (
                f"Grad overflow on iteration {state.cur_iter}\nUsing {kind} loss scale"
            )
            say(~clean, f"{text} of {scale}")
        state = self._stepped(state, unscale_tree(grads, scale), clean)
        return state.replace(
            overflow=~clean,
            loss_scaler=self.rule.update(state.loss_scaler, clean),
            cur_iter=state.cur_iter + 1,
        )

    def zero_grad(
        self, state: FlatFP16State, set_grads_to_None: bool = True
    ) -> FlatFP16State:
        """The state without gradients, or with zeros."""
        self._check(state)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.replace(model_grads=None if set_grads_to_None else zeros)

    def _saved(self, state: FlatFP16State) -> dict[str, PyTree]:
        return super()._saved(state) | {"cur_iter": state.cur_iter}
