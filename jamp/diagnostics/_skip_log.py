"""`SkipLog` keeps the last skipped steps on the device."""

import dataclasses
import functools
import itertools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jamp._core.tree import all_finite, path_string, trained_params
from jamp._scaling.rules import unscale_tree
from jamp._scaling.unscaled import raw_of
from jamp._state.amp_state import AmpState

_SHOWN = 4


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["entries", "count"],
    meta_fields=["paths"],
)
@dataclasses.dataclass(frozen=True)
class SkipLog:
    """The last skipped steps, in a ring buffer that your steps carry.

    Only `print` and `skips` wait for the device.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> log = SkipLog.of(state)
    >>> def loss_fn(params, x):
    ...     return (params["a"] * x + params["b"]).sum(dtype="float32")
    >>> loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, jnp.float16(8))
    >>> log = log.add(state, loss, grads)
    >>> print(log)
    1 skipped step(s)
      step 0: loss 18, scale 65536: a, b
    """

    entries: dict[str, Array]  # arrays with one row per skip
    count: Int[Array, ""]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, state: AmpState, size: int = 16) -> Self:
        """Returns an empty log for a state, or in NNX for `optimizer.amp_state(model)`.

        The log keeps `size` skips. A size below 1 is a ValueError.
        """
        if size < 1:
            raise ValueError(f"`size` must be at least 1, got {size}.")
        paths = _paths(trained_params(state.params))
        entries = {
            "step": jnp.zeros(size, jnp.int32),
            "loss": jnp.zeros(size, jnp.float32),
            "scale": jnp.zeros(size, jnp.float32),
            "params": jnp.zeros((size, len(paths)), jnp.bool),
        }
        return cls(entries, jnp.zeros((), jnp.int32), paths)

    def add(
        self, state: AmpState, loss: Array, grads: PyTree, loss_id: int = 0
    ) -> Self:
        """Returns the log after a step. An overflow adds an entry.

        Pass it the results of `scaled_value_and_grad` in the same `jit`. In another
        `jit`, all gradients of a skipped step are NaN, so the entry names all params.

        Args:
            state: the state before the step, or the Optimizer of `jamp.nnx`.
            loss, grads: the results for the params of all groups.
            loss_id: the id of the loss.

        Raises:
            ValueError: the gradients and the log's params have different paths.
        """
        tree = trained_params(grads)
        if (paths := _paths(tree)) != self.paths:
            odd = sorted({*paths} ^ {*self.paths})[:3]
            raise ValueError(
                f"The gradients do not match the params of this log: {', '.join(odd)} "
                "differ. Pass the gradients of all groups of the state that SkipLog.of "
                "took."
            )
        flags = [~all_finite(_before_nan(x)) for x in jax.tree.leaves(tree)]
        checks = state.loss_scale_rules[loss_id].check
        bad = functools.reduce(jnp.logical_or, flags, ~jnp.isfinite(loss))
        skipped = bad & checks
        place = self.count % len(self.entries["step"])
        entry = {
            "step": jax.tree.leaves(state.step)[0],
            "loss": loss,
            "scale": jax.tree.leaves(state.loss_scale)[loss_id],
            "params": jnp.stack(flags),
        }

        def put(old, new):
            new = jnp.where(skipped, jnp.asarray(new, old.dtype), old[place])
            return old.at[place].set(new)

        entries = jax.tree.map(put, self.entries, entry)
        return dataclasses.replace(
            self, entries=entries, count=self.count + skipped.astype(jnp.int32)
        )

    def skips(self) -> list[dict[str, Any]]:
        """Returns the entries, oldest first. It waits for the device.

        An entry is a dict: "step" is the number of steps before it, "loss" and "scale"
        are of the step, and "params" are the paths of gradients that were not finite.
        """
        size, count = len(self.entries["step"]), int(self.count)
        found = jax.device_get(self.entries)
        skips = []
        for i in range(max(count - size, 0), count):
            skip = {name: x[i % size].tolist() for name, x in found.items()}
            skip["params"] = [*itertools.compress(self.paths, skip["params"])]
            skips.append(skip)
        return skips

    def __str__(self) -> str:
        lines = [f"{int(self.count)} skipped step(s)"]
        for skip in self.skips():
            shown, more = skip["params"][:_SHOWN], len(skip["params"]) - _SHOWN
            names = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
            lines.append(
                f"step {skip['step']}: loss {skip['loss']:g}, scale "
                f"{skip['scale']:g}: {names}"
            )
        return "\n  ".join(lines)


def _before_nan(grad: Array) -> Array:
    """Returns a gradient before an overflow of another gradient made it NaN."""
    raw = raw_of(grad)
    if raw is None or raw.grad is None:
        return grad
    return unscale_tree(raw.grad, raw.scale)


def _paths(tree: PyTree) -> tuple[str, ...]:
    return tuple(path_string(path) for path, _ in jax.tree.leaves_with_path(tree))
