"""The cut-down `FP16_Optimizer` of apex.optimizers, with a flat vector per group.

Based on apex/optimizers/fp16_optimizer.py of 2019.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from jamp._core import groups
from jamp._scaling.rules import DynamicLossScale, StaticLossScale
from jamp._state.incoming import check_containers
from jamp.fp16_utils._fp16_optimizer import FP16_Optimizer
from jamp.optimizers._fused import FusedTransformation
from jamp.optimizers._masters import master_weights
from pallas_kernels import norm


class FlatFP16_Optimizer(FP16_Optimizer):  # noqa: N801, apex's name
    """`FP16_Optimizer` around fused optimizers that step one flat vector per group.

    `step` unscales the sum of all `backward` passes. It skips if the norm of a group's
    gradients is not finite, even with a static scale. A dynamic scale starts at 2^16,
    halves on overflow but not below 1, and doubles every 1000 clean steps. `zero_grad`
    always sets the gradients to None.

    Args:
        init_optimizer: a fused optimizer, or a list, tuple or dict with one per group.
        static_loss_scale, dynamic_loss_scale, verbose: see `FP16_Optimizer`.
        dynamic_loss_args: must be None, as in apex; otherwise a SystemError.

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

    _unscales_in_step = True

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        if args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        self._txs, flat = tx, {}
        for key, fused in groups.split(tx, tx).items():
            if not isinstance(fused, FusedTransformation):
                raise TypeError(
                    "FlatFP16_Optimizer takes a fused optimizer of jamp.optimizers, "
                    f"got {fused!r}. Use FP16_Optimizer for any other."
                )
            flat[key] = optax.flatten(fused)
        labels = functools.partial(groups.pack, {key: key for key in flat})
        one = flat.get(groups.SINGLE)
        self.optimizer = master_weights(one or optax.partition(flat, labels))
        self.rule = StaticLossScale(static, check=True)
        if self.dynamic_loss_scale:
            self.rule = DynamicLossScale(2.0**16, 2.0, 1000, 1.0, None)

    def _check_params(self, params: PyTree) -> None:
        check_containers(params, self._txs)
        for key, group in groups.split(params, self._txs).items():
            if not jax.tree.leaves(group):
                raise ValueError(
                    f"params[{key!r}] hold no arrays: got {group!r}. Leave this group "
                    "out."
                )

    def _are_finite(self, grads: PyTree) -> Bool[Array, ""]:
        by_group = groups.split(grads, self._txs).values()
        norms = [norm(jax.tree.leaves(tree)) for tree in by_group]
        return jnp.isfinite(jnp.stack(norms)).all()
