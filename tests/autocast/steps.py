"""Lowers the training steps of six models in a process of its own.

python -m tests.autocast.steps       prints a digest of each step's text
python -m tests.autocast.steps DIR   also compiles, with a cache in the folder DIR,
                                     and prints which programs it found there
"""

import hashlib
import os
import sys

# The addresses of objects also depend on what a process allocated before.
_moved = [object() for _ in range(1000 * int(os.environ.get("PYTHONHASHSEED", "0")))]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax import lax, nn  # noqa: E402

import jamp  # noqa: E402
from tests.support import models  # noqa: E402

HIT = "/jax/compilation_cache/cache_hits"
X = jnp.ones((8, 16))
W = {name: jnp.full((16, 16), 0.1) for name in "abcd"}


@jax.jit
def combined(statistic, a, b, w):
    return ((a - statistic) * (b + statistic)) @ w


def statistics(params, x):
    """Calls a program with operands, and with a statistic of all of them."""
    loss = 0.0
    for _ in range(6):
        a, b = nn.gelu(x @ params["a"]), jnp.tanh(x @ params["b"])
        statistic = a.mean(-1, keepdims=True) + b.mean(-1, keepdims=True)
        x = combined(statistic, a, b, params["c"])
        loss += x.mean()
    return loss


def looped(params, x):
    def step(carry, w):
        carry = nn.silu(carry @ w + x)
        return carry / jnp.linalg.norm(carry), carry.sum()

    ws = jnp.stack(list(params.values()))
    return lax.scan(step, x, ws)[1].sum()


def attention(params, x):
    q, k, v = (x @ params[name] for name in "abc")
    return (nn.softmax(q @ k.T) @ v @ params["d"]).var()


def labelled(params, x):
    logits = nn.relu(x @ params["a"] + params["b"][0]) @ params["c"]
    labels = jnp.arange(len(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def convolved(params, x):
    kernel = params["a"].reshape(4, 4, 1, 16)
    return lax.conv(x[None, None], kernel.transpose(3, 2, 0, 1), (1, 1), "SAME").std()


def models_to_train():
    for loss in (statistics, looped, attention, labelled, convolved):
        yield loss.__name__, W, loss, X
    model = models.Transformer(depth=1)
    tokens = jnp.ones((2, 16), int)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    yield "transformer", params, lambda p, x: model.apply(p, x).mean(), tokens


def main(folder=""):
    hits = []
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        jax.monitoring.register_event_listener(
            lambda event, **_: hits.append(event) if event == HIT else None
        )
    for name, params, loss, x in models_to_train():
        for level in ("O1", "O5"):
            state = jamp.initialize(params, optax.sgd(0.1), level, verbosity=0)

            def step(state, x, loss=loss):
                grads = jamp.scaled_grad(loss)(state, x)
                return state.apply_gradients(grads=grads)

            lowered = jax.jit(step).lower(state, x)
            print(name, level, hashlib.sha256(lowered.as_text().encode()).hexdigest())
            if folder:
                hits.clear()
                lowered.compile()
                print(name, level, "found" if hits else "compiled")


if __name__ == "__main__":
    main(*sys.argv[1:])
