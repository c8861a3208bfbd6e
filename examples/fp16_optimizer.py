"""Train an MLP on handwritten digits with apex's older interface, `FP16_Optimizer`.

    python examples/fp16_optimizer.py
    python examples/fp16_optimizer.py --init-scale 16777216   # too high: it recovers
    python examples/fp16_optimizer.py --static-loss-scale 128

This script shows how to port code for `apex.fp16_utils`. Each method keeps its name,
takes a state and returns the next state. A new program is shorter with
`jamp.initialize`, as in digits.py.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--init-scale", type=float, default=65536, help="if dynamic")
    parser.add_argument("--static-loss-scale", type=float)
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()


import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jamp.fp16_utils import FP16_Optimizer, FP16Model, network_to_half


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, momentum=0.9)(nn.Dense(128)(x))
        return nn.Dense(10)(nn.relu(x))


def main(argv=None):
    options = parse(argv)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, random_state=0)
    images, test_images, labels, test_labels = split

    variables = jax.jit(MLP().init)(jax.random.key(0), images[:1])
    stats = variables["batch_stats"]
    half_params = network_to_half(variables["params"], stats)  # except BatchNorm's
    model = FP16Model(MLP().apply)  # casts its inputs and outputs to float16
    scaling = {"dynamic_loss_scale": True}
    scaling["dynamic_loss_args"] = {"init_scale": options.init_scale}
    if options.static_loss_scale:
        scaling = {"static_loss_scale": options.static_loss_scale}
    optimizer = FP16_Optimizer(optax.adam(3e-3), **scaling)
    state = optimizer.init(half_params)  # makes masters in float32

    @jax.jit(donate_argnums=(0, 1))
    def train_step(state, stats, images, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": stats}
            logits, new = model(variables, images, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), labels
            )
            return losses.mean(), new["batch_stats"]

        state = optimizer.zero_grad(state)
        (loss, new), state = optimizer.backward(state, loss_fn, has_aux=True)
        norm, state = optimizer.clip_master_grads(state, max_norm=1.0)
        state = optimizer.step(state)  # changes nothing after an overflow
        # The optimizer does not hold the running statistics, so skip them here.
        stats = jax.tree.map(lambda a, b: jnp.where(state.overflow, a, b), stats, new)
        return state, stats, (loss, norm)

    random, overflows = np.random.default_rng(0), 0
    bar = tqdm.trange(options.steps, disable=None)
    for _ in bar:
        i = random.choice(len(images), 64, replace=False)
        state, stats, (loss, norm) = train_step(state, stats, images[i], labels[i])
        overflows += int(state.overflow)  # FP16_Optimizer prints nothing under jit
        bar.set_postfix_str(f"loss {loss:.3f}, norm {norm:.2f}", refresh=False)
    variables = {"params": state.params, "batch_stats": stats}
    accuracy = float((model(variables, test_images).argmax(-1) == test_labels).mean())
    scale = f"loss scale {state.loss_scale:g}, {overflows} overflows"
    print(f"test accuracy {accuracy:.1%}, {scale}")
    return state, stats, accuracy


if __name__ == "__main__":
    main()
