"""Train a small CNN on handwritten digits, in half precision.

    python examples/digits.py                        # O2: float16, float32 masters
    python examples/digits.py --beside O0 --init-scale 1e12  # far too high: it recovers
    python examples/digits.py --compare              # O0 to O6, side by side
    python examples/digits.py --checkpoint-dir digits --resume   # at any level

The data are scikit-learn's 1,797 real images of 8 x 8 pixels; nothing is downloaded.
A resumed run ends with the same bits as one that was never stopped.
"""

import pathlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add, either = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--opt-level", default="O2", help="O0 to O6")
    add("--keep-batchnorm-fp32", metavar="BOOL", help="True or False")
    add("--loss-scale", help="dynamic, or a number such as 128.0")
    add("--init-scale", type=float, help="a dynamic scale that starts here")
    either.add_argument("--compare", action="store_true", help="train at O0 to O6")
    either.add_argument("--beside", metavar="LEVEL", help="also train this level")
    either.add_argument("--checkpoint-dir", type=pathlib.Path, help="save every epoch")
    add("--epochs", type=int, default=20)
    add("--steps", type=int, help="instead of --epochs")
    add("-b", "--batch-size", type=int, default=64)
    add("--lr", type=float, default=3e-3, help="at the first step; a cosine ends at 0")
    add("--resume", action="store_true", help="start from the newest checkpoint")
    add("--seed", type=int, default=0, help="of params and data")
    add("--plot", default="digits.png", help="the picture to write")
    options = parser.parse_args(argv)
    if options.resume and not options.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    return options


if __name__ == "__main__":
    parse()

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich
import tqdm
from matplotlib.figure import Figure
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

FEATURES = (16, 32, 64)  # channels per convolution; all but the first halve the image
LEVELS = {"O0": "#777777", "O1": "#cc79a7", "O2": "#0072b2"}  # with their colors
LEVELS |= {"O3": "#d55e00", "O4": "#e69f00", "O5": "#009e73", "O6": "#000000"}


# The model. It does not mention half.
class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for i, features in enumerate(FEATURES):
            x = nn.Conv(features, (3, 3), strides=2 if i else 1, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))  # Flax's 0.99 lags
        return nn.Dense(10)(x.mean((1, 2)))


# One step. It is the same at every level.
@jax.jit(donate_argnums=0)  # the new state reuses the old state's memory
def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        # At O2 the model computes in float16 and returns float32 logits.
        logits, updated = state.apply_fn(
            variables, images, train=True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    # Differentiates the scaled loss, and returns loss and gradients unscaled.
    (loss, stats), grads = jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)
    # Steps the float32 masters and rounds them to half. After an overflow, all
    # gradients are NaN: the step skips batch_stats too, and halves the scale.
    after = state.apply_gradients(grads=grads, batch_stats=stats)
    metrics = {"loss": loss, "scale": state.loss_scale}
    return after, metrics | {"skipped": after.last_step_skipped}


@jax.jit
def accuracy(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, images).argmax(-1) == labels).mean()


# The training loop.
def train(opt_level, options):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    seed, batch_size, folder = options.seed, options.batch_size, options.checkpoint_dir
    split = {"test_size": 360, "stratify": labels, "random_state": seed}
    images, test_images, labels, test_labels = train_test_split(images, labels, **split)
    steps_per_epoch = max(1, len(images) // batch_size)  # drop the last partial batch
    steps = options.steps or options.epochs * steps_per_epoch

    model = CNN()
    variables = jax.jit(model.init)(jax.random.key(seed), images[:1])
    state = jamp.initialize(
        variables["params"],
        optax.adamw(optax.cosine_decay_schedule(options.lr, steps), weight_decay=1e-4),
        opt_level,
        keep_batchnorm_fp32=options.keep_batchnorm_fp32,
        loss_scale=None if opt_level == options.beside else options.loss_scale,
        apply_fn=model.apply,
        batch_stats=variables["batch_stats"],  # also identifies BatchNorm's params
        verbosity=0 if options.compare or options.beside else 1,
    )
    history, test_accuracy, done = [], {}, 0
    if folder:
        manager = ocp.CheckpointManager(folder.absolute())
        done = manager.latest_step() or 0
        if done >= steps or (done and not options.resume):
            raise SystemExit(f"{folder}: {done} of {steps} steps. Resume or rename it.")
    if done:  # loads a checkpoint of any level
        target = ocp.args.StandardRestore(jax.eval_shape(jamp.to_checkpoint, state))
        state = jamp.from_checkpoint(state, manager.restore(done, args=target))

    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(images)) for _ in range(0, steps, steps_per_epoch)]
    count = {"initial": done, "total": steps, "disable": None}  # a bar in a terminal
    bar = tqdm.trange(done + 1, steps + 1, desc=opt_level, **count)
    for step in bar:
        epoch, i = divmod(step - 1, steps_per_epoch)
        batch = orders[epoch][i * batch_size : (i + 1) * batch_size]
        state, metrics = train_step(state, images[batch], labels[batch])
        history.append(metrics)  # on the device, so the loop does not wait
        if step % steps_per_epoch == 0 or step == steps:
            test_accuracy[step] = float(accuracy(state, test_images, test_labels))
            bar.set_postfix_str(f"test accuracy {test_accuracy[step]:.1%}")
            jamp.check(state)  # raises if the loss scale has collapsed
            if folder:
                saved = ocp.args.StandardSave(jamp.to_checkpoint(state))
                manager.save(step, args=saved)

    history = {k: np.array([float(m[k]) for m in history]) for k in metrics}
    return {
        "level": opt_level,
        "state": state,
        "steps": np.arange(done + 1, steps + 1),
        **history,  # loss, scale, skipped: one value per step
        "test_accuracy": test_accuracy,  # by step
        "accuracy": test_accuracy[steps],
        "final_loss": history["loss"][-steps_per_epoch:].mean(),
    }


def table(runs):
    names = "level", "test accuracy", "final loss", "skipped", "final scale"
    columns = [Column(name, justify="right") for name in names]
    table = Table(*columns, title=f"Handwritten digits, {runs[0]['steps'][-1]} steps")
    for run in runs:
        numbers = [f"{run['final_loss']:.4f}", f"{run['state'].skipped_steps}"]
        numbers += [f"{run['state'].loss_scale:g}"]
        table.add_row(run["level"], f"{100 * run['accuracy']:.2f} %", *numbers)
    return table


def figure(runs):
    figure = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    losses, accuracies, scales = figure.subplots(3, sharex=True)
    steps = runs[0]["steps"]
    window = max(1, len(steps) // 40)
    smooth = [
        np.convolve(r["loss"], np.full(window, 1 / window), "valid") for r in runs
    ]
    name, scale = "training loss", "log"
    if len(runs) > 2:  # many curves that agree: show their differences
        smooth = [100 * (loss / smooth[0] - 1) for loss in smooth]
        name, scale = f"loss beside {runs[0]['level']}'s in %", "linear"
    for i, run in enumerate(runs):
        # A thin line over a wide one, so that equal curves stay visible.
        style = {"color": LEVELS.get(run["level"]), "lw": 1.5 if i else 4}
        losses.plot(steps[window - 1 :], smooth[i], label=run["level"], **style)
        tested = {step: 100 * value for step, value in run["test_accuracy"].items()}
        accuracies.plot(tested.keys(), tested.values(), marker=".", **style)
        scales.semilogy(steps, run["scale"], base=2, drawstyle="steps-mid", **style)
        skipped = run["skipped"] > 0
        scales.plot(steps[skipped], run["scale"][skipped], "kx")
    losses.set(ylabel=f"{name}, mean of {window} steps", yscale=scale)
    losses.legend(frameon=False, ncols=min(4, len(runs)))
    learned = min(run["accuracy"] for run in runs) > 0.9
    accuracies.set(ylabel="test accuracy in %", ylim=(90 if learned else 0, 100.5))
    scales.set(ylabel="loss scale; x: skipped", xlabel="step")
    scales.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("A CNN on handwritten digits")
    return figure


def main(argv=None):
    options = parse(argv)
    if scale := options.init_scale:
        options.loss_scale = jamp.DynamicLossScale(scale, max_scale=max(scale, 2.0**24))
    levels = LEVELS if options.compare else (options.beside, options.opt_level)
    runs = [train(level, options) for level in levels if level]
    figure(runs).savefig(options.plot)
    rich.print(table(runs), f"Loss, accuracy and loss scale over steps: {options.plot}")
    return runs


if __name__ == "__main__":
    main()
