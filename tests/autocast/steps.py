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
from jax import nn  # noqa: E402

import jamp  # noqa: E402
from tests.autocast.exported import MODELS, inputs_of  # noqa: E402
from tests.support.states import step_on  # noqa: E402

HIT = "/jax/compilation_cache/cache_hits"
X = jnp.ones((8, 16))
W = {name: jnp.full((16, 16), 0.1) for name in "abc"}


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


def models_to_train():
    yield "statistics", W, statistics, (X,)
    for name in ("attention", "convolution", "cross entropy", "recurrent", "jitted"):
        model = MODELS[name]
        loss = lambda p, *x, fn=model.fn: jnp.square(fn(p, *x)).mean()  # noqa: E731
        yield name, model.params, loss, inputs_of(model)


def main(folder=""):
    hits = []
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        jax.monitoring.register_event_listener(
            lambda event, **_: hits.append(event) if event == HIT else None
        )
    for name, params, loss, inputs in models_to_train():
        for level in ("O1", "O5"):
            state = jamp.initialize(params, optax.sgd(0.1), level, verbosity=0)
            lowered = jax.jit(step_on(loss)).lower(state, *inputs)
            print(name, level, hashlib.sha256(lowered.as_text().encode()).hexdigest())
            if folder:
                hits.clear()
                lowered.compile()
                print(name, level, "found" if hits else "compiled")


if __name__ == "__main__":
    main(*sys.argv[1:])
