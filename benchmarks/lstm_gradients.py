"""How wrong an LSTM's gradients are in bfloat16: `python -m benchmarks.lstm_gradients`.

The gradient of a weight is a sum over the steps: by hand in bfloat16, at O5 in float32.
Prints the relative errors, one per leaf, of one layer of 64 over 256 steps, against
float32 with the same rounded params and inputs.
"""

import statistics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

import jamp
from benchmarks.lean_images import zeros_in
from benchmarks.runs import conditions


class LSTM(nn.Module):
    """One layer, and a product behind it."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cell = nn.OptimizedLSTMCell(
            64, dtype=self.dtype, carry_init=zeros_in(self.dtype)
        )
        return nn.Dense(16, dtype=self.dtype)(nn.RNN(cell)(x))


def errors(got: Any, true: Any) -> list[float]:
    """Per leaf, the norm of the difference over that of the true gradient."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True)
    arrays = [[np.asarray(x, np.float64) for x in pair] for pair in pairs]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in arrays]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (16, 256, 64), jnp.bfloat16)
    y = jax.random.normal(keys[1], (16, 256, 16))
    init = LSTM().init(keys[2], x.astype(jnp.float32))["params"]
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), init)
    params = jax.tree.map(lambda w: w.astype(jnp.float32), half)

    def loss(apply_fn: Any, params: Any, x: Array) -> Array:
        return jnp.square(
            apply_fn({"params": params}, x).astype(jnp.float32) - y
        ).mean()

    true = jax.grad(lambda p: loss(LSTM().apply, p, x.astype(jnp.float32)))(params)
    by_hand = jax.grad(lambda p: loss(LSTM(jnp.bfloat16).apply, p, x))(half)
    options = {"apply_fn": LSTM().apply, "verbosity": 0}
    state = jamp.initialize(params, optax.sgd(1e-3), "O5", **options)
    ours = jamp.scaled_grad(lambda p: loss(state.apply_fn, p, x))(state)
    for name, grads in (("by hand", by_hand), ("O5", ours)):
        found = errors(grads, true)
        median = f"median {statistics.median(found):.4f}"
        print(f"{name:8}{median}, {min(found):.4f} to {max(found):.4f}")
    print(f"{', '.join(f'{k} {v}' for k, v in conditions().items())}")


if __name__ == "__main__":
    main()
