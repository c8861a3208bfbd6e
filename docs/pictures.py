"""Draw the pictures of README and the site: `python docs/pictures.py [NAME ...]`.

Each number in them is a dtype, a property or a run of the library.
"""

import functools
import json
import pathlib
import runpy
import sys
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from sklearn.datasets import load_digits

import jamp

FOLDER = pathlib.Path(__file__).parent / "pictures"
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O6")
COLORS = {"float32": "#c9d6e8", "float16": "#f6b26b", "bfloat16": "#93c47d"}
COLORS["fp8"] = "#d5a6bd"
DARK, SCALED, UNSCALED = "#1f2933", "#1b5e9e", "#c0392b"
STYLE = {
    "svg.hashsalt": "jamp",  # equal numbers give equal bytes
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": DARK,
    "axes.labelcolor": DARK,
}


def draw_demo():
    """Draws the picture of `make demo`: O2 with a far too high loss scale, and O0."""
    sys.path.insert(0, str(EXAMPLES))
    demo = runpy.run_path(str(EXAMPLES / "digits.py"))
    flags = "--init-scale 1e12 --beside O0 --plot".split()
    with tempfile.TemporaryDirectory() as folder:
        figure = demo["figure"](demo["main"]([*flags, f"{folder}/demo.png"]))
    figure.set_size_inches(8, 6.4)
    return figure


def regression(loss_scale, steps=200):
    """Trains at O2 on targets of about 0.001, and returns losses, scales and skips."""
    hidden = jax.random.normal(jax.random.key(0), (8, 64)) / 3
    params = {"hidden": hidden, "out": jnp.zeros((64, 8))}

    def model(params, x):
        return jax.nn.relu(x @ params["hidden"]) @ params["out"]

    state = jamp.initialize(
        params,
        optax.adam(2e-5),
        "O2",
        apply_fn=model,
        loss_scale=loss_scale,
        verbosity=0,
    )

    @jax.jit
    def step(state, key):
        x, noise = jax.random.normal(key, (2, 8192, 8))
        y = 1e-3 * jnp.sin(x) + 1e-4 * noise

        def loss_fn(params):
            return optax.l2_loss(state.apply_fn(params, x), y).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        return state.apply_gradients(grads=grads), loss

    rows = []
    for key in jax.random.split(jax.random.key(1), steps):
        scale = state.loss_scale
        state, loss = step(state, key)
        rows.append((float(loss), float(scale), bool(state.last_step_skipped)))
    losses, scales, skips = map(np.array, zip(*rows, strict=True))
    return losses, scales, skips


def runs(steps=200):
    rule = jamp.DynamicLossScale(init_scale=2.0**34, window=12, max_scale=None)
    return regression(rule, steps), regression(1.0, steps)


def draw_runs():
    (losses, scales, skips), (flat, _, _) = runs()
    steps = np.arange(len(losses))
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 4.6), sharex=True, height_ratios=(3, 2)
    )
    top.semilogy(steps, flat, color=UNSCALED, lw=2, label="float16, no loss scale")
    top.semilogy(
        steps, losses, color=SCALED, lw=2, label="float16, dynamic loss scale (O2)"
    )
    top.set_ylabel("training loss")
    text = "every gradient rounds to zero: the params never move"
    top.text(steps[-1], flat[-1] * 0.93, text, ha="right", va="top", color=UNSCALED)
    top.legend(frameon=False, loc="center right")
    bottom.step(steps, scales, where="post", color=SCALED, lw=2)
    bottom.plot(
        steps[skips],
        scales[skips],
        "x",
        color=DARK,
        ms=5,
        label="step skipped: overflow",
    )
    bottom.set_yscale("log", base=2)
    bottom.set_ylim(top=scales.max() * 8)
    bottom.set(ylabel="loss scale", xlabel="step")
    bottom.legend(frameon=False, loc="upper center")
    return figure


def digits(level, steps=400, **options):
    """Returns the losses of an MLP on digits with Adam (learning rate 0.0001)."""
    images, labels = map(jnp.asarray, load_digits(return_X_y=True))
    images = images.astype(jnp.float32) / 16
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"hidden": (64, 64), "out": (64, 10)}
    params = {
        name: jax.random.normal(key, shape) / 8
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def model(params, x):
        return jax.nn.relu(x @ params["hidden"]) @ params["out"]

    options = {"apply_fn": model, "verbosity": 0} | options
    state = jamp.initialize(params, optax.adam(1e-4), level, **options)

    def step(state, key):
        batch = jax.random.randint(key, (128,), 0, len(images))

        def loss_fn(params):
            logits = state.apply_fn(params, images[batch])
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(logits, labels[batch]).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        return state.apply_gradients(grads=grads), loss

    keys = jax.random.split(jax.random.key(1), steps)
    return np.array(jax.jit(lambda s: jax.lax.scan(step, s, keys)[1])(state))


def masters_runs(steps=400):
    """Returns losses in float32, at O5, and in bfloat16 without masters."""
    return {
        "float32 (O0)": digits("O0", steps),
        "bfloat16, float32 masters (O5)": digits("O5", steps),
        "bfloat16, no masters": digits("O5", steps, master_weights=False),
    }


def draw_masters():
    figure, axes = plt.subplots(figsize=(8, 3.4))
    colors = ("#8c8c8c", SCALED, UNSCALED)
    for (name, losses), color, width in zip(
        masters_runs().items(), colors, (6, 2, 2), strict=True
    ):
        smooth = np.convolve(losses, np.full(10, 0.1), mode="valid")
        axes.plot(smooth, color=color, lw=width, label=name)
    text = "most updates are below half a unit\nin the last place, and are lost"
    axes.text(390, smooth[-1] - 0.03, text, ha="right", va="top", color=UNSCALED)
    axes.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    axes.legend(frameon=False, loc="lower left")
    return figure


def draw_formats():
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for row, dtype in enumerate((jnp.float16, jnp.bfloat16, jnp.float32)):
        info = jnp.finfo(dtype)
        low, normal, high = (
            np.log2(float(x)) for x in (info.smallest_subnormal, info.tiny, info.max)
        )
        color = COLORS[info.dtype.name]
        axes.barh(row, high - normal, left=normal, color=color, height=0.55)
        axes.barh(row, normal - low, left=low, color=color, height=0.55, alpha=0.4)
        digits = f"{float(info.max):.3g} at most · steps of {float(info.eps):.2g} at 1"
        # In the bar, or after a short one.
        place, side = (high - 2, "right") if high > 24 else (high + 2, "left")
        axes.text(place, row, digits, ha=side, va="center", fontsize=9)
    for exponent, text in ((-28, "a small gradient "), (-12, " the same × 65536")):
        axes.plot([exponent, exponent], [-0.4, 2.4], color=UNSCALED, lw=1, ls=":")
        side = "right" if exponent == -28 else "left"
        axes.text(exponent, 2.5, text, ha=side, va="bottom", fontsize=9, color=UNSCALED)
    axes.set_yticks(range(3), ("float16", "bfloat16", "float32"))
    ticks = range(-144, 145, 24)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_ylim(-0.5, 3.2)
    axes.set_xlabel("magnitude; pale: subnormal numbers, with fewer digits")
    return figure


def level_table():
    """Returns the dtypes and the loss scale of a small model at each level."""
    shapes = {
        "BatchNorm_0": {"scale": (8,)},
        "first": {"kernel": (8, 4096)},
        "hidden": {"kernel": (4096, 4096)},  # large enough for fp8
        "head": {"kernel": (4096, 8)},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )

    def forward(params, x):
        for name in ("first", "hidden", "head"):
            x = x @ params[name]["kernel"]
        return x

    table = {}
    for level in LEVELS:
        init = functools.partial(
            jamp.initialize, opt_level=level, apply_fn=forward, verbosity=0
        )
        state = jax.eval_shape(lambda p, init=init: init(p, optax.adam(1e-3)), params)
        x = jax.ShapeDtypeStruct((8192, 8), jnp.float32)
        loss_fn = lambda params, x, f=state.apply_fn: f(params, x).mean()  # noqa: E731
        operations = jamp.explain(loss_fn)(state, x).operations
        hidden = [op.dtype for op in operations if op.flops][1]
        rule = state.properties.loss_scale
        stepped = jax.tree.leaves(getattr(state.opt_state, "masters", state.params))
        kind = "masters" if hasattr(state.opt_state, "masters") else "params"
        table[level] = {
            "params": state.params["head"]["kernel"].dtype.name,
            "BatchNorm params": state.params["BatchNorm_0"]["scale"].dtype.name,
            "large matmuls": "fp8" if "float8" in hidden else hidden,
            "optimizer steps": f"{stepped[-1].dtype} {kind}",
            "loss scale": {"dynamic": rule, None: "1, checked"}.get(rule, "1"),
        }
    return table


def draw_levels():
    table = level_table()
    columns = list(table["O0"])
    figure, axes = plt.subplots(figsize=(8, 3.3))
    for row, level in enumerate(LEVELS):
        for column, name in enumerate(columns):
            text = table[level][name]
            color = COLORS.get(
                text.partition(" ")[0], "#f6b26b" if text == "dynamic" else "#eef1f5"
            )
            box = FancyBboxPatch(
                (column + 0.05, row + 0.1), 0.9, 0.8, "round,pad=0,rounding_size=0.08"
            )
            box.set(facecolor=color, edgecolor="none")
            axes.add_patch(box)
            axes.text(
                column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9
            )
    axes.set(xlim=(0, len(columns)), ylim=(len(LEVELS), 0))
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=9)
    axes.set_yticks(np.arange(len(LEVELS)) + 0.5, LEVELS, weight="bold")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def boxes(axes, items, width=1.9, height=0.8):
    """Draws boxes from (x, y, text, color), and returns a function that adds arrows."""
    for x, y, text, color in items:
        box = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.1")
        box.set(facecolor=color, edgecolor=DARK, linewidth=0.8)
        axes.add_patch(box)
        axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9
        )

    def arrow(start, end, text="", **options):
        style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": DARK} | options
        axes.add_patch(FancyArrowPatch(start, end, **style))
        middle = np.mean([start, end], axis=0)
        axes.text(*middle + (0, 0.12), text, ha="center", va="bottom", fontsize=9)

    return arrow


def draw_scale():
    figure, axes = plt.subplots(figsize=(8, 3.2))
    half, full = COLORS["float16"], COLORS["float32"]
    arrow = boxes(
        axes,
        [
            (0, 2.6, "params\nfloat16", half),
            (2.7, 2.6, "forward pass\nfloat16", half),
            (5.4, 2.6, "loss\nfloat32", full),
            (8.1, 2.6, "loss × scale\nfloat32", "#fff2cc"),
            (8.1, 0.6, "backward pass\nfloat16, × scale", half),
            (5.4, 0.6, "gradients ÷ scale\nfloat32", "#fff2cc"),
            (2.7, 0.6, "all finite?", "#ffffff"),
            (0, 0.6, "optimizer steps\nfloat32 masters", full),
        ],
    )
    for x in (1.9, 4.6, 7.3):
        arrow((x, 3.0), (x + 0.8, 3.0))
        arrow((x + 0.8, 1.0), (x, 1.0), "yes" if x == 1.9 else "")
    arrow((9.05, 2.6), (9.05, 1.4))
    arrow((0.95, 1.4), (0.95, 2.6))
    axes.text(1.1, 2.0, "round to float16", va="center", fontsize=9)
    arrow((3.65, 0.6), (3.65, 0.1), color=UNSCALED)
    axes.text(
        3.85, 0.2, "no: skip, all bits stay; scale ÷ 2", fontsize=9, color=UNSCALED
    )
    axes.set(xlim=(-0.1, 10.1), ylim=(-0.1, 3.5))
    axes.axis("off")
    return figure


def held_bytes(level, tx=jamp.optimizers.fused_adam, **options):
    """Returns bytes per parameter of params, masters and Adam's moments."""
    params = {"w": jnp.ones((256, 256))}
    state = jamp.initialize(params, tx(1e-3), level, verbosity=0, **options)
    inner = getattr(state.opt_state, "inner_state", state.opt_state)
    parts = state.params, getattr(state.opt_state, "masters", ()), inner
    leaves = (jax.tree.leaves(part) for part in parts)
    return [sum(x.nbytes for x in part if x.ndim) / 2**16 for part in leaves]


def adam_bytes(store_remainder):
    """Returns bytes per parameter and array that fused_adam reads and writes at O5."""
    param, master, moments = held_bytes("O5", store_remainder=store_remainder)
    name = "remainder" if store_remainder else "master"
    read = {"gradient, to check": param, "gradient": param, name: master}
    read |= {"param": param} if store_remainder else {}
    return read | {"moments": moments}, {
        "param": param,
        name: master,
        "moments": moments,
    }


def draw_bytes():
    figure, axes = plt.subplots(figsize=(8, 2.7))
    colors = {"param": COLORS["bfloat16"], "moments": "#b4a7d6", "gradient": "#ffe599"}
    for row, store in enumerate((True, False)):
        left = 0
        read, written = adam_bytes(store)
        for kind, items in (("read", read), ("write", written)):
            for name, size in items.items():
                color = colors.get(name.split(",")[0], COLORS["float32"])
                axes.barh(
                    row, size, left=left, color=color, edgecolor="white", height=0.6
                )
                wrapped = name.replace(", ", ",\n")
                fits = wrapped if size > 2 else ""
                axes.text(
                    left + size / 2, row, fits, ha="center", va="center", fontsize=8
                )
                if size <= 2:
                    axes.text(
                        left + size / 2, row, wrapped, ha="center", va="center",
                        fontsize=7, rotation=90,
                    )  # fmt: skip
                left += size
            axes.plot([left, left], [row - 0.4, row + 0.4], color=DARK, lw=1.5)
            axes.text(left - 0.1, row + 0.36, kind, ha="right", va="bottom", fontsize=9)
        axes.text(left + 0.3, row, f"{left:g} bytes", va="center", weight="bold")
    axes.set_yticks((0, 1), ("16-bit\nremainders", "float32\nmasters"))
    axes.set(xlabel="bytes per parameter: one step of fused_adam at O5, one large leaf")
    axes.set(xlim=(0, 34), ylim=(-0.5, 1.7))
    return figure


BFLOAT16, EIGHT_BIT = {"moment_dtype": jnp.bfloat16}, {"moment_dtype": "8bit"}
ADAM = {  # level, options of fused_adam, options of initialize
    "O0, O1, O4: float32 params": ("O4", {}, {}),
    "O2, O5, O6: half params, float32 masters": ("O5", {}, {}),
    "O5, 16-bit remainders": ("O5", {}, {"store_remainder": True}),
    "O5, 16-bit remainders, bfloat16 moments": (
        "O5",
        BFLOAT16,
        {"store_remainder": True},
    ),
    "O5, 16-bit remainders, 8-bit moments": (
        "O5",
        EIGHT_BIT,
        {"store_remainder": True},
    ),
    "O5, no masters, bfloat16 moments": (
        "O5",
        BFLOAT16,
        {"master_weights": False, "stochastic_rounding": True},
    ),
    "O5, no masters, 8-bit moments": (
        "O5",
        EIGHT_BIT,
        {"master_weights": False, "stochastic_rounding": True},
    ),
}


def adam_rows():
    """Returns bytes per parameter by row: float32 first, then from large to small."""
    rows = {
        name: held_bytes(
            level, functools.partial(jamp.optimizers.fused_adam, **of_tx), **options
        )
        for name, (level, of_tx, options) in ADAM.items()
    }
    first, *others = rows
    return {
        name: rows[name]
        for name in (first, *sorted(others, key=lambda n: -sum(rows[n])))
    }


def draw_memory():
    rows = adam_rows()
    figure, axes = plt.subplots(figsize=(8, 0.5 + 0.42 * len(rows)))
    colors = COLORS["bfloat16"], COLORS["float32"], "#b4a7d6"
    parts = zip(("params", "masters", "moments"), colors, strict=True)
    sizes, left = np.array(list(rows.values())), np.zeros(len(rows))
    for (name, color), size in zip(parts, sizes.T, strict=True):
        axes.barh(list(rows), size, left=left, color=color, label=name, height=0.7)
        for row, (n, start) in enumerate(zip(size, left, strict=True)):
            text = f"{n:.3g}" if n else ""
            axes.text(start + n / 2, row, text, ha="center", va="center", fontsize=9)
        left += size
    for row, total in enumerate(left):
        axes.text(total + 0.2, row, f"{total:.3g}", va="center", weight="bold")
    axes.invert_yaxis()
    axes.set(xlabel="bytes per parameter that a state of Adam holds", xlim=(0, 15))
    axes.legend(frameon=False, loc="lower right")
    return figure


def fp8_curves():
    """Returns the loss curves of each seed, by model and setting."""
    file = FOLDER.parents[1] / "benchmarks" / "results" / "fp8.jsonl"
    found = {}
    for run in map(json.loads, file.read_text().splitlines()):
        curves = found.setdefault(run["model"], {"O5": [], "fp8": []})
        curves[run["setting"]].append(run["losses"])
    return found


def draw_fp8():
    models = fp8_curves()
    figure, panels = plt.subplots(1, len(models), figsize=(8, 2.8))
    for axes, (model, curves) in zip(panels, models.items(), strict=True):
        for seed, losses in enumerate(curves["fp8"]):
            axes.plot(range(15, 300, 30), losses, color=f"C{seed}", lw=1)
        for seed, losses in enumerate(curves["O5"]):
            style = {"color": f"C{seed}", "ms": 3, "mfc": "white"}
            axes.plot(range(15, 300, 30), losses, "o", **style)
        axes.set(title=model, xlabel="step")
    panels[0].set_ylabel("training loss, mean of 30 steps")
    panels[0].plot([], color=DARK, label="fp8, a color per seed")
    panels[0].plot([], [], "o", color=DARK, ms=3, mfc="white", label="O5")
    panels[0].legend(frameon=False, fontsize=8, loc="upper right")
    figure.tight_layout()
    return figure


PICTURES = {
    "demo": draw_demo,
    "fp8": draw_fp8,
    "runs": draw_runs,
    "masters": draw_masters,
    "formats": draw_formats,
    "levels": draw_levels,
    "scale": draw_scale,
    "bytes": draw_bytes,
    "memory": draw_memory,
}


def main():
    with plt.rc_context(STYLE):
        for name in sys.argv[1:] or PICTURES:
            figure = PICTURES[name]()
            path = FOLDER / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    main()
