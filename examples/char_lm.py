"""Train a transformer to write Python's documentation, one character at a time.

    python examples/char_lm.py                       # O2: float16, float32 masters
    python examples/char_lm.py --compare             # O0, O1, O2, O4, O5 side by side
    python examples/char_lm.py --width 384 --layers 6 --context 256 --steps 3000   # GPU

The text is the topics of Python's `help()`, in `pydoc_data`. A model that knows only
the frequencies of characters has a loss of 3.2 nats per character. The trained model's
sample has words. `--compare` trains all levels from one seed on the same batches.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pydoc_data.topics import topics


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--opt-level", default="O2", help="O0 to O6")
    add("--loss-scale", metavar="SCALE", help="dynamic, or a number such as 128.0")
    add("--compare", action="store_true", help="train at O0, O1, O2, O4 and O5")
    add("--lr", type=float, default=3e-3, help="after the warm-up; a cosine ends at 0")
    sizes = {"steps": 800, "batch-size": 32, "context": 64}
    sizes |= {"width": 96, "heads": 4, "layers": 3}
    for name, size in sizes.items():
        add(f"--{name}", type=int, default=size)
    add("--seed", type=int, default=0, help="of params, batches and the sample")
    add("--sample", type=int, default=400, metavar="N", help="characters to write")
    add("--temperature", type=float, default=0.8, help="of the sample")
    add("--plot", default="char_lm.png", metavar="PATH")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse()

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tqdm
from flax import nnx
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from rich.table import Column, Table

import jamp.nnx

LEVELS = {"O0": "#777777", "O1": "#cc79a7", "O2": "#0072b2"}  # with their colors
LEVELS |= {"O4": "#e69f00", "O5": "#009e73"}


# The text, without repeated paragraphs. The last tenth is held out.
def load_text():
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = list("\n\n".join(dict.fromkeys(paragraphs)))
    characters, tokens = np.unique(text, return_inverse=True)
    return characters, *np.split(tokens.astype(np.int32), [len(tokens) * 9 // 10])


# The model. It does not mention half.
class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        qkv = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:-1], self.heads, -1) for y in qkv)
        # Divide first, so that float16 sums stay below 65504.
        scores = jnp.einsum("...qhd,...khd->...hqk", q / q.shape[-1] ** 0.5, k)
        seen = jnp.tri(x.shape[-2], dtype=bool)  # attend to earlier characters
        weights = nnx.softmax(jnp.where(seen, scores, -jnp.inf))
        v = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        x = x + self.out(v.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, characters, context, width, heads, layers, rngs):
        self.token = nnx.Embed(characters, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, characters, rngs=rngs)

    def __call__(self, tokens):
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# One step. It is the same at every level.
def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    # Differentiates the scaled loss, and returns loss and gradients unscaled.
    loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, tokens)
    scale = optimizer.loss_scale
    # Steps the float32 masters and rounds them to half. After an overflow, all
    # gradients are NaN: `update` skips the step and halves the scale.
    optimizer.update(model, grads)
    skipped = optimizer.last_step_skipped.get_value()
    return {"loss": loss, "scale": scale, "skipped": skipped}


@nnx.jit(static_argnums=(0, 5))
def sample(forward, model, window, key, temperature, length):
    def step(window, key):
        token = jax.random.categorical(key, forward(model, window)[-1] / temperature)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, window, jax.random.split(key, length))[1]


# The training loop.
def train(opt_level, options):
    characters, *texts = load_text()
    context, steps = options.context, options.steps
    windows, tests = (sliding_window_view(text, context + 1) for text in texts)
    tests = tests[:: context + 1]  # without overlaps
    sizes = len(characters), context, options.width, options.heads, options.layers
    model = Transformer(*sizes, rngs=nnx.Rngs(options.seed))
    schedule = optax.warmup_cosine_decay_schedule(0, options.lr, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    overrides = {"loss_scale": options.loss_scale, "verbosity": not options.compare}
    model, optimizer = jamp.nnx.initialize(model, tx, opt_level, **overrides)
    # Outside of a step, these functions of the model run at its level.
    evaluate = nnx.jit(jamp.nnx.cast_forward(loss_fn, optimizer))
    forward = jamp.nnx.cast_forward(lambda model, tokens: model(tokens), optimizer)
    rng, history, validation = np.random.default_rng(options.seed), [], {}
    for step in (bar := tqdm.trange(1, steps + 1, desc=opt_level, disable=None)):
        metrics = train_step(model, optimizer, rng.choice(windows, options.batch_size))
        history.append(metrics)  # on the device, so the loop does not wait
        if step % 100 == 0 or step == steps:
            validation[step] = float(evaluate(model, tests))
            bar.set_postfix_str(f"validation loss {validation[step]:.3f}")
            jamp.check(optimizer.amp_state(model))  # raises if the scale has collapsed

    # Loss, scale and skipped have one value per step; validation maps steps to losses.
    run = {k: np.array([float(m[k]) for m in history]) for k in metrics}
    run |= {"level": opt_level, "optimizer": optimizer, "validation": validation}
    run["final_loss"] = run["loss"][-max(1, steps // 10) :].mean()
    prompt, key = texts[1][:context], jax.random.key(options.seed)
    written = sample(forward, model, prompt, key, options.temperature, options.sample)
    return run | {"text": ["".join(characters[part]) for part in (prompt, written)]}


# The results.
def table(runs):
    steps, first = len(runs[0]["loss"]), f"to {runs[0]['level']}"
    names = "level", "loss", first, "validation loss", "skipped", "scale"
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title=f"Nats per character, {steps} steps")
    for run in runs:
        loss, optimizer = run["final_loss"], run["optimizer"]
        cells = f"{loss:.4f}", f"{loss / runs[0]['final_loss'] - 1:+.2%}"
        cells += f"{run['validation'][steps]:.4f}", f"{optimizer.skipped_steps[...]}"
        cells += (f"{optimizer.loss_scale:g}",)
        table.add_row(run["level"], *cells)
    return table


def figure(runs):
    figure = Figure(figsize=(7, 7), dpi=120, layout="constrained")
    losses, scales = figure.subplots(2, sharex=True)
    steps = np.arange(1, len(runs[0]["loss"]) + 1)
    window = max(1, len(steps) // 40)
    for i, run in enumerate(runs):
        # Draw narrow lines over wide ones, so that equal curves stay visible.
        style = {"color": LEVELS.get(run["level"]), "lw": 1.5 * (len(runs) - i)}
        smooth = np.convolve(run["loss"], np.full(window, 1 / window), mode="valid")
        losses.plot(steps[window - 1 :], smooth, label=run["level"], **style)
        losses.plot(*zip(*run["validation"].items(), strict=True), "o", **style)
        scales.semilogy(steps, run["scale"], base=2, drawstyle="steps-mid", **style)
        skips = np.flatnonzero(run["skipped"])
        scales.plot(steps[skips], run["scale"][skips], "kx")
    losses.set(ylabel=f"loss, mean of {window} steps; dots: validation")
    losses.legend(frameon=False)
    scales.set(ylabel="loss scale; x: skipped", xlabel="step")
    scales.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("A transformer on Python's help")
    return figure


def main(argv=None):
    options = parse(argv)
    levels = LEVELS if options.compare else (options.opt_level,)
    runs = [train(level, options) for level in levels]
    if not options.compare:
        print(*runs[0]["text"], sep="[sample:]")
    figure(runs).savefig(options.plot)
    rich.print(table(runs), f"Losses and loss scale over steps: {options.plot}")
    return runs


if __name__ == "__main__":
    main()
