"""Find the operation that loses digits at O5, and follow the advice.

python examples/lost_digits.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jamp


class Rotary(nn.Module):
    @nn.compact
    def __call__(self, x):
        angle = jnp.arange(1000.0, 1032)[:, None] * self.param("inv_freq", frequencies)
        turn = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        return nn.Dense(1)(nn.Dense(32)(x) * turn)


def frequencies(key):
    return 1 / 1e4 ** (jnp.arange(16) / 16)


def main():
    x = jax.random.normal(jax.random.key(1), (4, 32, 32))
    params = Rotary().init(jax.random.key(0), x)["params"]
    for options in ({}, {"keep_fp32": "inv_freq$"}):  # the advice of the first report
        state = jamp.initialize(
            params, optax.sgd(0.1), "O5", apply_fn=Rotary().apply, **options
        )
        loss_fn = lambda p, x: optax.l2_loss(state.apply_fn({"params": p}, x)).mean()  # noqa: B023, E731
        print(jamp.diagnostics.compare(loss_fn, "O0")(state, x), end="\n\n")


if __name__ == "__main__":
    main()
