"""Train an MLP in Haiku or Equinox on handwritten digits, with the same step."""

import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser


def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--opt-level", default="O2", help="O0 to O6")
    parser.add_argument("--loss-scale", help="dynamic, or a number such as 128.0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--framework", choices=("haiku", "equinox"), default="haiku")
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args(argv)


if __name__ == "__main__":  # before JAX, which takes a while to import
    parse()

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jamp


def of_haiku(key, images):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 10])(x)))
    return model.init(key, images), model.apply


def of_equinox(key, images):
    model = eqx.nn.MLP(images.shape[1], 10, width_size=64, depth=1, key=key)
    # Leaves that are not arrays, such as relu, are static. Partition buffers out too.
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


@jax.jit(donate_argnums=0)
def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn(params, images)  # O2: in half; float32 logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
    return state.apply_gradients(grads=grads), loss


def main(argv=None):
    args, data = parse(argv), load_digits()
    models = {"haiku": of_haiku, "equinox": of_equinox}
    x, y = np.float32(data.data / 16), data.target  # test on the last 360
    params, apply = models[args.framework](jax.random.key(args.seed), x)
    options = {"apply_fn": apply, "loss_scale": args.loss_scale}
    state = jamp.initialize(params, optax.adam(3e-3), args.opt_level, **options)
    program = train_step.lower(state, x[:64], y[:64]).as_text()
    print("Matmuls in", *re.findall(r"dot_general.*x(\w+)>$", program, re.MULTILINE))
    for i in np.random.default_rng(args.seed).integers(1437, size=(args.steps, 64)):
        state, loss = train_step(state, x[i], y[i])
    accuracy = (state.apply_fn(state.params, x[1437:]).argmax(-1) == y[1437:]).mean()
    print(f"Test accuracy {accuracy:.1%}, loss {loss:.3f}, scale {state.loss_scale:g}")
    return state, accuracy


if __name__ == "__main__":
    main()
