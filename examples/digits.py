"""Train a small CNN on handwritten digits, in half precision.

    python examples/digits.py                        # O2: float16, float32 masters
    python examples/digits.py --opt-level O3 --keep-batchnorm-fp32 True
    python examples/digits.py --loss-scale 128.0     # instead of a dynamic scale
    python examples/digits.py --init-scale 1e12      # far too high: watch it recover
    python examples/digits.py --compare              # O0, O2, O3 and O5, side by side

The data are scikit-learn's 1,797 real images of 8 x 8 pixels; nothing is downloaded. The
first three flags have the names of apex's imagenet example, and their values go to
`jamp.initialize` as the strings that they are. Read from top to bottom.
"""

import argparse
import functools
import time
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

# Data
TEST_FRACTION = 0.2  # 360 images, so one image is 0.28 % of the test accuracy
# Model
FEATURES = (16, 32, 64)  # channels per convolution; each but the first halves the image
BATCHNORM_MOMENTUM = 0.9  # Flax's 0.99 lags behind in a run of 440 steps
# Optimizer: AdamW, with a cosine that ends at 0
WEIGHT_DECAY = 1e-4
# Levels that --compare trains, and the colors of all
LEVELS = ("O0", "O2", "O3", "O5")
COLORS = {"O0": "#777777", "O2": "#0072b2", "O3": "#d55e00", "O5": "#009e73"}


# ---- Model: nothing in it knows about half ------------------------------------------


class CNN(nn.Module):
    """Convolution, BatchNorm, relu, a few times; then a mean over pixels."""

    @nn.compact
    def __call__(self, x, *, train):
        for i, features in enumerate(FEATURES):
            x = nn.Conv(features, (3, 3), strides=2 if i else 1, use_bias=False)(x)
            x = nn.BatchNorm(not train, momentum=BATCHNORM_MOMENTUM)(x)
            x = nn.relu(x)
        return nn.Dense(10)(x.mean((1, 2)))


# ---- One step, for all levels: the state knows which ---------------------------------


@functools.partial(
    jax.jit, donate_argnums=0
)  # the new state takes the old one's memory
def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        # At O2 the images enter in float16, and the logits come out in float32.
        logits, updated = state.apply_fn(
            variables, images, train=True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    # Multiplies the loss by the loss scale; `loss` itself comes back unscaled.
    grad_fn = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state)
    # Unscales the gradients, steps the float32 masters and rounds them to half. If a
    # gradient is inf or NaN: skips all of it, batch_stats too, and halves the scale.
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    skipped = state.last_step_skipped
    return state, {"loss": loss, "scale": grads.scale, "skipped": skipped}


@jax.jit
def accuracy(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return (logits.argmax(-1) == labels).mean()


# ---- The training loop -----------------------------------------------------------------


class Run(NamedTuple):
    """What a run leaves behind."""

    opt_level: str
    loss: np.ndarray  # one per step, as the two below
    scale: np.ndarray
    skipped: np.ndarray
    accuracy: dict[int, float]  # on the test images, after so many steps
    final_loss: float  # mean over the last epoch
    final_scale: float
    skipped_steps: int
    seconds: float


def train(opt_level, options, *, verbosity=1):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(
        images,
        labels,
        test_size=TEST_FRACTION,
        stratify=labels,
        random_state=options.seed,
    )
    epoch = max(1, len(images) // options.batch_size)  # in steps
    steps = options.steps or options.epochs * epoch

    start = time.perf_counter()
    model = CNN()
    variables = model.init(jax.random.key(options.seed), images[:1], train=False)
    schedule = optax.cosine_decay_schedule(options.lr, steps)
    loss_scale = options.loss_scale
    if options.init_scale:
        ceiling = max(options.init_scale, 2.0**24)
        loss_scale = jamp.DynamicLossScale(options.init_scale, max_scale=ceiling)
    state = jamp.initialize(
        variables["params"],
        optax.adamw(schedule, weight_decay=WEIGHT_DECAY),
        opt_level,
        keep_batchnorm_fp32=options.keep_batchnorm_fp32,
        loss_scale=loss_scale,
        apply_fn=model.apply,
        batch_stats=variables["batch_stats"],  # an extra field; it tells BatchNorm too
        verbosity=verbosity,
    )

    shuffle = np.random.default_rng(options.seed)
    history, test_accuracy = [], {}
    bar = tqdm.trange(1, steps + 1, desc=opt_level, unit="step")
    for step in bar:
        first = (step - 1) % epoch * options.batch_size
        if first == 0:
            order = shuffle.permutation(len(images))
        batch = order[first : first + options.batch_size]
        state, metrics = train_step(state, images[batch], labels[batch])
        history.append(metrics)  # still on the device: nothing here waits for the step
        if step % epoch == 0 or step == steps:
            test_accuracy[step] = float(accuracy(state, test_images, test_labels))
            bar.set_postfix_str(f"test accuracy {test_accuracy[step]:.1%}")
            jamp.check(state)  # raises if the loss scale has collapsed

    seconds = time.perf_counter() - start
    history = {k: np.stack([m[k] for m in jax.device_get(history)]) for k in metrics}
    return Run(
        opt_level,
        **history,
        accuracy=test_accuracy,
        final_loss=float(history["loss"][-epoch:].mean()),
        final_scale=float(state.loss_scale),
        skipped_steps=int(state.skipped_steps),
        seconds=seconds,
    )


# ---- What came out ---------------------------------------------------------------------


def table(runs):
    table = Table(title=f"Handwritten digits, {len(runs[0].loss)} steps")
    table.add_column("level")
    for name in ("test accuracy", "final loss", "skipped", "final scale", "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run.opt_level,
            f"{100 * list(run.accuracy.values())[-1]:.2f} %",
            f"{run.final_loss:.4f}",
            f"{run.skipped_steps}",
            f"{run.final_scale:g}",
            f"{run.seconds:.1f}",
        )
    return table


def figure(runs):
    figure = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    losses, accuracies, scales = figure.subplots(3, sharex=True)
    for i, run in enumerate(runs):
        steps = np.arange(1, len(run.loss) + 1)
        # Where levels agree, wide lines below and narrow ones above show all of them.
        style = {"color": COLORS.get(run.opt_level), "lw": 1.5 * (len(runs) - i)}
        window = max(1, len(steps) // 40)
        smooth = np.convolve(run.loss, np.ones(window) / window, mode="valid")
        losses.plot(steps[window - 1 :], smooth, label=run.opt_level, **style)
        tested = {step: 100 * value for step, value in run.accuracy.items()}
        accuracies.plot(tested.keys(), tested.values(), marker=".", **style)
        scales.step(steps, run.scale, where="mid", **style)
        if run.skipped.any():
            label = f"{run.opt_level}: {run.skipped_steps} skipped steps"
            where = steps[run.skipped], run.scale[run.skipped]
            scales.plot(*where, "x", color="black", label=label, zorder=3)
            scales.legend(frameon=False)
    losses.set(ylabel=f"training loss, mean of {window} steps", yscale="log")
    losses.legend(frameon=False)
    accuracies.set(ylabel="test accuracy in %")
    scales.set(ylabel="loss scale", xlabel="step")
    scales.set_yscale("log", base=2)
    for axes in (losses, accuracies, scales):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# ---- Command line ----------------------------------------------------------------------


def positive(text):
    if (value := int(text)) < 1:
        raise ValueError
    return value


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--opt-level", default="O2", help="O0, O2, O3 or O5 (default: %(default)s)")
    add("--keep-batchnorm-fp32", metavar="BOOL", help="True or False")
    add("--loss-scale", metavar="SCALE", help="dynamic, or a number such as 128.0")
    add("--init-scale", type=float, help="dynamic, from this scale on")
    add("--compare", action="store_true", help=f"train {', '.join(LEVELS)}")
    add("--epochs", type=positive, default=20)
    add("--steps", type=positive, help="overrides --epochs")
    add("-b", "--batch-size", type=positive, default=64)
    add("--lr", type=float, default=3e-3, help="the first learning rate")
    add("--seed", type=int, default=0, help="of the split, the params and the order")
    add("--plot", default="digits.png", metavar="PATH", help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    levels = LEVELS if options.compare else (options.opt_level,)
    verbosity = 0 if options.compare else 1
    runs = [train(level, options, verbosity=verbosity) for level in levels]
    console = Console()
    console.print(table(runs))
    if options.compare:
        console.print("O1 and O4 come with autocast, which jamp does not have yet.")
    figure(runs).savefig(options.plot)
    console.print(f"Loss, accuracy and loss scale over steps: {options.plot}")
    return runs


if __name__ == "__main__":
    main()
