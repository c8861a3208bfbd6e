"""Pretrain a small BERT with LAMB: half precision, accumulated gradients, clipping.

    python examples/bert_lamb.py                     # O2: float16, float32 masters
    python examples/bert_lamb.py --init-scale 1e12   # far too high: it recovers
    python examples/bert_lamb.py --batch-size 32 --accumulate 1   # the same steps

The text is Python's own help. The model guesses 15 % of the words: [MASK] hides 80 % of
these, another word replaces 10 %, and 10 % stay. In paragraphs that it never saw, BERT
guesses better than a model that knows only the frequencies of words.
"""

import re
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pydoc_data.topics import topics


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--opt-level", default="O2", help="O0 to O6")
    add("--loss-scale", metavar="SCALE", help="dynamic, or a number such as 128.0")
    add("--init-scale", type=float, help="a dynamic scale that starts here")
    add("--steps", type=int, default=2000)
    add("-b", "--batch-size", type=int, default=8, help="rows of a micro-batch")
    add("--accumulate", type=int, default=4, metavar="N", help="micro-batches per step")
    add("--lr", type=float, default=5e-3, help="highest rate")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=128, help="64 for each head of attention")
    add("--length", type=int, default=32, help="words per row")
    add("--seed", type=int, default=0, help="of params, batches and masks")
    add("--plot", default="bert_lamb.png", metavar="PATH")
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
from rich.table import Table

import jamp

SPECIAL = "[UNK]", "[SEP]", "[MASK]"  # the first words; the model never guesses them
UNK, SEP, MASK, SIZE = 0, 1, 2, 1000  # SIZE: words in the vocabulary


# The text. Every tenth paragraph belongs to the test set.
def load_text():
    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    split = (re.finditer(r"\w+|([^\w\s])\1*", p) for p in re.split(r"\n\s*\n", text))
    # Topics quote each other, so drop test paragraphs that occur in the training text.
    paragraphs = list(dict.fromkeys(tuple(m[0] for m in found) for found in split))
    parts = [p for i, p in enumerate(paragraphs) if i % 10], paragraphs[::10]
    words, counts = np.unique([w for p in parts[0] for w in p], return_counts=True)
    vocabulary = [*SPECIAL, *words[(-counts).argsort(kind="stable")]][:SIZE]
    ids = {word: i for i, word in enumerate(vocabulary)} | {"\n": SEP}
    parts = ([ids.get(w, UNK) for p in part for w in (*p, "\n")] for part in parts)
    return np.array(vocabulary), *map(np.array, parts)


def mask(random, tokens):
    """Masks 15 % of each row. Equal counts give all micro-batches the same weight."""
    order = random.random(tokens.shape) + (tokens < len(SPECIAL))  # these come last
    positions = order.argsort(1)[:, : max(1, round(0.15 * tokens.shape[1]))]
    targets = np.take_along_axis(tokens, positions, 1)
    other = random.integers(len(SPECIAL), SIZE, targets.shape)
    choice = random.choice(3, targets.shape, p=(0.8, 0.1, 0.1))
    masked = tokens.copy()
    np.put_along_axis(masked, positions, np.choose(choice, [MASK, other, targets]), 1)
    return (masked, positions), targets


# The model. It does not mention half.
class BERT(nn.Module):
    layers: int
    hidden: int

    @nn.compact
    def __call__(self, tokens, positions):
        embed = nn.Embed(SIZE, self.hidden)  # its transpose is the decoder
        places = nn.Embed(tokens.shape[1], self.hidden)(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm()(embed(tokens) + places)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(max(1, self.hidden // 64))
            x = nn.LayerNorm()(x + attention(x))
            inner = nn.gelu(nn.Dense(4 * self.hidden)(x))
            x = nn.LayerNorm()(x + nn.Dense(self.hidden)(inner))
        x = jnp.take_along_axis(x, positions[..., None], 1)  # the masked positions
        x = nn.LayerNorm()(nn.gelu(nn.Dense(self.hidden)(x)))
        return embed.attend(x) + self.param("bias", nn.initializers.zeros, (SIZE,))


# One step with several micro-batches.
@jax.jit(donate_argnums=0)  # the new state reuses the old state's memory
def train_step(state, batches):
    def add(total, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, *batch[0])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, jamp.master_params(state))
    total, losses = jax.lax.scan(add, zeros, batches)
    mean = jax.tree.map(lambda g: g / len(losses), total)
    # If one micro-batch overflows, the mean is NaN and the step is skipped.
    after = state.apply_gradients(grads=mean)
    metrics = {"loss": losses.mean(), "scale": state.loss_scale}
    return after, metrics | {"skipped": after.last_step_skipped}


@jax.jit
def evaluate(state, inputs, targets):
    logits = state.apply_fn({"params": state.params}, *inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), (logits.argmax(-1) == targets).mean(), nn.softmax(logits)


# The training loop.
def train(options, text, inputs, targets):
    random, key = np.random.default_rng(options.seed), jax.random.key(options.seed)
    steps, lr = options.steps, options.lr
    model = BERT(options.layers, options.hidden)
    params = jax.jit(model.init)(key, *inputs)["params"]
    warmup = max(1, steps // 10)
    rise = optax.linear_schedule(lr / warmup, lr, warmup)
    fall = optax.polynomial_schedule(lr, 0.0, 1, steps - warmup)  # linear
    schedule = optax.join_schedules([rise, fall], [warmup])
    kinds = "kernel", "embedding"  # biases and scales do not decay
    decays = jax.tree.map_with_path(lambda path, _: path[-1].key in kinds, params)
    # Gradients are already unscaled here, so the limit does not depend on the scale.
    tx = jamp.optimizers.fused_lamb(schedule, max_grad_norm=1.0, mask=decays)
    level = {"opt_level": options.opt_level, "loss_scale": options.loss_scale}
    state = jamp.initialize(params, tx, apply_fn=model.apply, **level)
    history, tests, shape = [], [], (options.accumulate, options.batch_size)
    bar = tqdm.trange(1, steps + 1, desc=options.opt_level, disable=None)
    for step in bar:
        starts = random.integers(len(text) - options.length, size=(np.prod(shape), 1))
        batch = mask(random, text[starts + np.arange(options.length)])
        batches = jax.tree.map(lambda x: x.reshape(*shape, -1), batch)
        state, metrics = train_step(state, batches)
        history.append(metrics)  # on the device, so the loop does not wait
        if step % max(1, steps // 10) == 0 or step == steps:
            loss, right, guesses = map(np.asarray, evaluate(state, inputs, targets))
            tests.append((step, loss, right))
            bar.set_postfix_str(f"test loss {loss:.2f}, right {right:.1%}")
            jamp.check(state)  # raises if the loss scale has collapsed
    run = {k: np.array([m[k] for m in history]) for k in metrics}
    lr = schedule(np.cumsum(~run["skipped"]) - ~run["skipped"])  # by steps taken
    return run | {"lr": lr, "state": state, "tests": tests, "guesses": guesses}


# The results.
def report(options, run, baseline, words, inputs, targets):
    numbers = Table("", "test loss", "right", "skipped", "final scale")
    numbers.add_row("frequency", f"{baseline[0]:.3f}", f"{baseline[1]:.1%}")
    (_, loss, right), scale = run["tests"][-1], run["state"].loss_scale
    cells = f"{loss:.3f} {right:.1%} {run['skipped'].sum()} {scale:g}".split()
    numbers.add_row(options.opt_level, *cells)
    examples = Table("held-out text", "word", "guesses")
    tokens, positions = inputs
    hidden = np.argwhere(np.take_along_axis(tokens, positions, 1) == MASK)
    for row, i in hidden[:: len(hidden) // 7 + 1]:
        at, p = positions[row, i], run["guesses"][row, i]
        near = words[tokens[row, max(0, at - 6) : at + 7]]
        best = ", ".join(f"{words[j]} {p[j]:.0%}" for j in p.argsort()[:-4:-1])
        examples.add_row(" ".join(near), words[targets[row, i]], best)
    figure = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    losses, scales, rates = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    steps, skipped = np.arange(1, len(run["loss"]) + 1), run["skipped"]
    losses.plot(steps, run["loss"], color="#bbbbbb", label="training")
    losses.plot(*np.transpose(run["tests"])[:2], "o-", label="test")
    losses.axhline(baseline[0], color="k", ls=":", label="frequency of words")
    losses.legend(title="loss of the masked words")
    scales.semilogy(steps, run["scale"], base=2, drawstyle="steps-mid")
    scales.plot(steps[skipped], run["scale"][skipped], "kx")
    scales.set(ylabel="loss scale; x: skipped")
    rates.plot(steps, run["lr"])
    rates.set(ylabel="learning rate", xlabel="step")
    rates.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("A small BERT on Python's help")
    figure.savefig(options.plot)
    rich.print(numbers, examples, f"Loss, loss scale, learning rate: {options.plot}")


def main(argv=None):
    options = parse(argv)
    if scale := options.init_scale:
        options.loss_scale = jamp.DynamicLossScale(scale, max_scale=max(scale, 2.0**24))
    words, text, held_out = load_text()
    rows = held_out[: len(held_out) // options.length * options.length]
    test = mask(np.random.default_rng(0), rows.reshape(-1, options.length))
    counts = np.bincount(text[text >= len(SPECIAL)])
    losses = -np.log(counts[test[1]] / counts.sum())
    baseline = losses.mean(), (test[1] == counts.argmax()).mean()
    run = train(options, text, *test)
    report(options, run, baseline, words, *test)
    return run | {"baseline": baseline}


if __name__ == "__main__":
    main()
