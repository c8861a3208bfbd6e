"""Train a DCGAN on handwritten digits: two models, two optimizers, three losses.

    python examples/dcgan.py                        # O1, as in apex's example
    python examples/dcgan.py --opt_level O2 --manualSeed 1 --outf /tmp

This follows apex's examples/dcgan/main_amp.py and its flags. The data are
scikit-learn's 1,797 real images of 8 x 8 pixels, so the models are smaller, and
--niter, --nz and --lr have other defaults.

dcgan.png shows real digits at the left and generated digits at the right. The plot
below shows one scale per loss. All scales start at 65536, which is too high for this
model in float16, and each falls until its gradients fit. A cross marks an overflow.
After an overflow in "D real" or "D fake", D skips its step and G takes its step; after
one in "G", G skips.
"""

import pathlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--opt_level", "--opt-level", default="O1", help="O0 to O6")
    add("--niter", type=int, default=60, help="epochs")
    add("--steps", type=int, help="instead of --niter")
    add("--batchSize", type=int, default=64)
    add("--nz", type=int, default=32, help="numbers of noise per image")
    add("--lr", type=float, default=1e-3)
    add("--beta1", type=float, default=0.5, help="of Adam")
    add("--manualSeed", type=int, default=2809, help="of params, batches and noise")
    add("--outf", type=pathlib.Path, default=".", help="the folder for dcgan.png")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tqdm
from matplotlib.figure import Figure
from rich.table import Column, Table
from sklearn.datasets import load_digits

import jamp

NGF = NDF = 32  # channels next to the image; the next layer has twice as many
CONV = {"strides": (2, 2), "use_bias": False}  # each layer doubles or halves the image
CONV |= {"kernel_init": nn.initializers.normal(0.02)}  # as in the DCGAN paper
BATCHNORM_MOMENTUM = 0.9
REAL, FAKE = 0.9, 0.0  # targets: with 1 for real images, D becomes overconfident
LOSSES = {"D real": "#0072b2", "D fake": "#d55e00", "G": "#009e73"}  # with their colors


# The models. They do not mention half.
class Generator(nn.Module):
    @nn.compact
    def __call__(self, noise, train=False):
        x = noise[:, None, None, :]  # 1 x 1, then 2 x 2, 4 x 4 and 8 x 8
        for features, kernel in (2 * NGF, (2, 2)), (NGF, (4, 4)):
            x = nn.ConvTranspose(features, kernel, **CONV)(x)
            x = nn.relu(nn.BatchNorm(not train, momentum=BATCHNORM_MOMENTUM)(x))
        return nn.tanh(nn.ConvTranspose(1, (4, 4), **CONV)(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.leaky_relu(nn.Conv(NDF, (4, 4), **CONV)(x), 0.2)
        x = nn.Conv(2 * NDF, (4, 4), **CONV)(x)
        x = nn.BatchNorm(not train, momentum=BATCHNORM_MOMENTUM)(x)
        return nn.Conv(1, (2, 2), **CONV)(nn.leaky_relu(x, 0.2))  # logits, 1 x 1


# One step of D on the sum of two losses, and one step of G.
@jax.jit(donate_argnums=0)  # the new state reuses the old state's memory
def train_step(state, images, noise):
    def forward(name, params, stats, x):
        variables = {"params": params[name], "batch_stats": stats[name]}
        x, new = state.apply_fn[name](variables, x, train=True, mutable=["batch_stats"])
        return x, stats | {name: new["batch_stats"]}

    # A loss receives the params of both models; `wrt` selects the model that it trains.
    def d_loss(params, stats, images, target):
        logits, stats = forward("D", params, stats, images)
        return optax.sigmoid_binary_cross_entropy(logits, target).mean(), stats

    def g_loss(params, stats, noise):
        fakes, stats = forward("G", params, stats, noise)
        logits, stats = forward("D", params, stats, fakes)
        return optax.sigmoid_binary_cross_entropy(logits, 1.0).mean(), stats

    losses = (d_loss, "D"), (d_loss, "D"), (g_loss, "G")  # each loss has its own scale
    d_real, d_fake, g = (
        jamp.scaled_value_and_grad(loss_fn, has_aux=True, loss_id=i, wrt=name)
        for i, (loss_fn, name) in enumerate(losses)
    )
    # Sum the gradients of D's two losses. Each loss moves its own scale.
    scale = jnp.stack(state.loss_scale)
    fakes, _ = forward("G", state.params, state.batch_stats, noise)
    (loss_real, stats), real = d_real(state, state.batch_stats, images, REAL)
    (loss_fake, stats), fake = d_fake(state, stats, fakes, FAKE)
    both = {"D": real}, {"D": fake}
    state = state.apply_gradients(grads=both, loss_id=(0, 1), batch_stats=stats)

    # G must deceive the new D. This step trains only G, so it updates only G's running
    # statistics, and a skip updates nothing. The step of D above does the same.
    (loss_g, stats), grads = g(state, state.batch_stats, noise)
    state = state.apply_gradients(grads={"G": grads}, loss_id=2, batch_stats=stats)

    return state, {
        "loss": jnp.stack([loss_real, loss_fake, loss_g]),
        "scale": scale,
        "overflow": jnp.stack([s.consecutive_skips > 0 for s in state.loss_scales]),
    }


# The training loop.
def train(options):
    images = load_digits().images.astype(np.float32)[..., None] / 8 - 1  # -1 to 1
    steps = options.steps or options.niter * (len(images) // options.batchSize)
    random = np.random.default_rng(options.manualSeed)
    models = {"D": Discriminator(), "G": Generator()}
    inputs = {"D": images[:1], "G": np.zeros((1, options.nz), np.float32)}
    key = jax.random.key(options.manualSeed)
    variables = {k: jax.jit(models[k].init)(key, inputs[k]) for k in models}
    state = jamp.initialize(
        {k: variables[k]["params"] for k in models},
        {k: optax.adam(options.lr, b1=options.beta1) for k in models},
        options.opt_level,
        num_losses=len(LOSSES),
        apply_fn={k: models[k].apply for k in models},
        batch_stats={k: variables[k]["batch_stats"] for k in models},
    )
    history = []
    bar = tqdm.trange(1, steps + 1, desc=options.opt_level, disable=None)
    for step in bar:
        batch = random.choice(images, options.batchSize, replace=False)
        noise = random.standard_normal((len(batch), options.nz), np.float32)
        state, metrics = train_step(state, batch, noise)
        history.append(metrics)  # on the device, so the loop does not wait
        if step % 100 == 0 or step == steps:
            losses = zip(LOSSES, metrics["loss"], strict=True)
            bar.set_postfix_str(", ".join(f"{name} {x:.2f}" for name, x in losses))
            jamp.check(state)  # raises if a loss scale has collapsed

    noise = random.standard_normal((64, options.nz), np.float32)
    variables = {"params": state.params["G"], "batch_stats": state.batch_stats["G"]}
    generated = state.apply_fn["G"](variables, noise)
    history = {k: np.array([m[k] for m in history]) for k in metrics}  # by step, loss
    return {"state": state, **history, "real": images[:64], "generated": generated}


# The results.
def table(run):
    names = "loss", "last value", "overflows", "final scale", "steps skipped"
    table = Table(*(Column(name, justify="right") for name in names))
    for i, name in enumerate(LOSSES):
        model, state = name[0], run["state"]
        cells = f"{run['loss'][-1, i]:.3f}", f"{run['overflow'][:, i].sum()}"
        skipped = f"{state.skipped_steps[model]} of {model}"
        table.add_row(name, *cells, f"{state.loss_scales[i].scale:g}", skipped)
    return table


def figure(run):
    figure = Figure(figsize=(10, 8), dpi=100, layout="constrained")
    (*grids, losses, scales) = figure.subplots(2, 2, height_ratios=(5, 3)).flat
    for axes, title in zip(grids, ("real", "generated"), strict=True):
        tiles = np.pad(run[title][..., 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1)
        tiles = tiles.reshape(8, 8, 10, 10).swapaxes(1, 2).reshape(80, 80)
        axes.imshow(tiles, cmap="gray", vmin=-1, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    figure.suptitle("A GAN on handwritten digits")
    steps = np.arange(1, len(run["loss"]) + 1)
    window = max(1, len(steps) // 40)
    for i, (name, color) in enumerate(LOSSES.items()):
        loss, scale, bad = (run[k][:, i] for k in ("loss", "scale", "overflow"))
        smooth = np.convolve(loss, np.full(window, 1 / window), mode="valid")
        losses.plot(steps[window - 1 :], smooth, color=color, label=name)
        # Draw narrow lines over wide ones, so that equal curves stay visible.
        scales.step(steps, scale, where="mid", color=color, lw=2 * (3 - i))
        scales.plot(steps[bad], scale[bad], "kx", zorder=3)
    losses.set(ylabel=f"loss, mean of {window} steps", xlabel="step")
    losses.legend(frameon=False)
    scales.set(ylabel="loss scale; x: skipped", xlabel="step")
    scales.xaxis.get_major_locator().set_params(integer=True)
    scales.set_yscale("log", base=2)
    return figure


def main(argv=None):
    options = parse(argv)
    run = train(options)
    path = options.outf / "dcgan.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(run).savefig(path)
    rich.print(table(run), f"Digits, losses and loss scales: {path}")
    return run


if __name__ == "__main__":
    main()
