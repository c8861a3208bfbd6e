"""Train a ResNet on a folder of images, on all devices of this machine.

    python examples/imagenet.py --width 8 --image-size 64 --epochs 15 -b 32 --lr 0.05
    python examples/imagenet.py DATA -a resnet50 -b 224 --sync-bn --checkpoint-dir run
    python examples/imagenet.py DATA -a resnet50 --resume run --evaluate

This follows apex's examples/imagenet/main_amp.py, its flags and its defaults. DATA
contains images of any size in train/CLASS/* and val/CLASS/*. Without DATA, the script
draws 1,440 small patterns of 12 classes, and the first command learns them on a CPU.
--batch-size counts per device. BatchNorm's statistics are per device too, except with
--sync-bn. XLA_FLAGS=--xla_force_host_platform_device_count=8 gives a CPU 8 devices. A
resumed run has the same bits as an uninterrupted one.
"""

import functools
import os
import pathlib
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

# Flags with their defaults: apex's, and from --width on, ours.
FLAGS = {"-j --workers": 4, "--epochs": 90, "--start-epoch": 0, "-b --batch-size": 256}
FLAGS |= {"--lr": 0.1, "--momentum": 0.9, "--weight-decay": 1e-4, "-p --print-freq": 10}
FLAGS |= {"-e --evaluate": False, "--prof": -1, "--deterministic": False}
FLAGS |= {"--sync-bn --sync_bn": False, "--width": 64, "--image-size": 224}


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add, path = parser.add_argument, {"type": pathlib.Path}
    add("data", nargs="?", **path, help="a folder; without one, see --generate")
    add("-a", "--arch", default="resnet18", help="resnet18 or resnet50")
    for flags, default in FLAGS.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default)}
        add(*flags.split(), **kind, default=default)
    add("--opt-level", default="O2", help="O0 to O6")
    add("--keep-batchnorm-fp32", metavar="BOOL", help="True or False")
    add("--loss-scale", help="dynamic, or a number such as 128.0")
    add("--seed", type=int, default=0)
    add("--plot", default="imagenet.png")
    add("--generate", **path, help="folder of the drawn patterns")
    add("--steps", type=int, help="instead of --epochs")
    add("--checkpoint-dir", **path, help="save every epoch here")
    add("--resume", **path, help="an earlier --checkpoint-dir")
    args = parser.parse_args(argv)
    if args.data and not (args.data / "train").is_dir():
        parser.error(
            f"{args.data}/train is not a folder; without DATA, patterns are drawn"
        )
    return args


if __name__ == "__main__":
    parse()

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from image_folder import MEAN, STD, train_and_val
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from matplotlib.figure import Figure
from resnet import ARCHS, ResNet

import jamp

COLUMNS = "steps", "loss", "prec1", "prec5", "scale", "skipped"
LINE = "Epoch {:.2f}  {:.1f} images/s  Loss {:.4f}  Prec@1 {:.2f}  Prec@5 {:.2f}"
LINE += "  Scale {:g}  Skipped {:g}"


# One step. Each device has its own images.
def score(logits, labels):
    """Returns per image the loss, and 100 if the first, or one of five guesses, hits.

    Padding has the label -1, and its loss is 0.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jax.lax.top_k(logits, min(5, logits.shape[1]))[1] == labels[:, None]
    return jnp.where(labels < 0, 0, losses), 100.0 * hits[:, 0], 100.0 * hits.any(1)


def make_train_step(mesh, sync_bn):
    @jax.jit(donate_argnums=0)  # the new state reuses the old state's memory
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    def train_step(state, images, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            x = (images - MEAN) / STD
            logits, new = state.apply_fn(variables, x, True, mutable=["batch_stats"])
            loss, *hits = (x.mean() for x in score(logits, labels))
            return loss, (hits, new["batch_stats"])

        # With `axis_name`, loss and gradients are float32 means over the devices. If
        # one device overflows, all devices skip.
        grad_fn = jamp.scaled_value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        (loss, (hits, stats)), grads = grad_fn(state)
        if not sync_bn:  # devices have their own statistics; average them
            stats = jax.lax.pmean(stats, "batch")
        after = state.apply_gradients(grads=grads, batch_stats=stats)
        hits = jax.lax.pmean(hits, "batch")
        return after, (loss, *hits, state.loss_scale, after.skipped_steps)

    return train_step


@jax.jit  # the sharded images spread it over all devices
def evaluate(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, (images - MEAN) / STD)
    return jnp.stack([x.sum() for x in score(logits, labels)])


def learning_rate(peak, per_epoch, start, count):
    """Warms up for 5 epochs, and divides by 10 every 30 epochs and at epoch 80."""
    epoch = (count + start) // per_epoch
    warmup = jnp.minimum(1, (count + start + 1) / (5 * per_epoch))
    return peak * warmup * 0.1 ** (epoch // 30 + (epoch >= 80))


# The training loop.
def train(args):
    if args.arch not in ARCHS:
        raise SystemExit(f"--arch {args.arch}: one of {', '.join(ARCHS)}")
    mesh = Mesh(jax.devices(), ("batch",))
    size = args.batch_size * mesh.size
    options = size, args.image_size, args.workers, NamedSharding(mesh, P("batch"))
    images, val_images = train_and_val(args.data, *options, drawn=args.generate)
    per_epoch = len(images)
    done = args.start_epoch * per_epoch
    steps = args.steps or args.epochs * per_epoch
    bn_axis = "batch" if args.sync_bn else None
    model = ResNet(args.arch, len(images.classes), args.width, bn_axis)
    key = jax.random.key(args.seed, impl="rbg")  # compiles faster for many params
    variables = jax.jit(model.init)(key, np.zeros((1, 64, 64, 3), np.float32))
    # The optimizer counts the steps, without skipped ones.
    rate = functools.partial(learning_rate, args.lr * size / 256, per_epoch, done)
    tx = jamp.optimizers.fused_sgd(rate, args.momentum, weight_decay=args.weight_decay)
    names = "opt_level", "keep_batchnorm_fp32", "loss_scale"
    strings = {name: getattr(args, name) for name in names}
    state = jamp.initialize(tx=tx, apply_fn=model.apply, **variables, **strings)
    state = jax.device_put(state, NamedSharding(mesh, P()))  # replicated
    if args.resume:  # from any level and number of devices
        with ocp.CheckpointManager(args.resume.resolve(strict=True)) as manager:
            done = manager.latest_step()
            target = ocp.args.StandardRestore(jamp.to_checkpoint(state))
            state = jamp.from_checkpoint(state, manager.restore(done, args=target))

    def validate(step):
        sums = [evaluate(state, *batch) for batch in val_images.in_order()]
        means = np.sum(sums, axis=0) / len(val_images.files)
        tqdm.tqdm.write(" * Loss {:.4f}  Prec@1 {:.3f}  Prec@5 {:.3f}".format(*means))
        val.append((step, *means))

    history, val, folder = [], [], args.checkpoint_dir
    if args.evaluate:
        validate(done)
        return {"state": state, "val": columns(val)}
    manager = folder and ocp.CheckpointManager(folder.absolute())
    if done >= steps or (manager and (manager.latest_step() or 0) > done):
        raise SystemExit(f"{done} of {steps} steps done. Resume {folder} or rename it.")
    train_step = make_train_step(mesh, args.sync_bn)
    bar = tqdm.trange(done + 1, steps + 1, initial=done, total=steps, disable=None)
    for step, batch in zip(bar, images.shuffled(args.seed, done, steps), strict=True):
        state, metrics = train_step(state, *batch)
        if step == done + 1:  # starts the clock after compilation
            jax.block_until_ready(state)
            since, clock = step, time.perf_counter()
            if args.prof > 0:
                jax.profiler.start_trace("imagenet_trace")
        elif step == done + 1 + args.prof:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            return {"state": state}
        if step % args.print_freq == 0 or step == steps:
            history.append((step, *map(float, metrics)))  # waits for the device
            speed = (step - since) * size / (time.perf_counter() - clock) or np.nan
            bar.write(LINE.format(step / per_epoch, speed, *history[-1][1:]))
            since, clock = step, time.perf_counter()
        if step % per_epoch == 0 or step == steps:
            jamp.check(state)  # raises if the loss scale has collapsed
            validate(step)
            if manager:
                saved = ocp.args.StandardSave(jamp.to_checkpoint(state))
                manager.save(step, args=saved)
            since, clock = step, time.perf_counter()
    if manager:
        manager.close()  # waits for the last save
    run = {"state": state, **columns(history), "val": columns(val)}
    figure(run).savefig(args.plot)
    return run


def columns(rows):
    return dict(zip(COLUMNS, np.transpose(rows), strict=False))


def figure(run):
    figure = Figure(figsize=(7, 8), dpi=120, layout="constrained")
    names = "loss", "prec1", "scale"
    for axes, name in zip(figure.subplots(3, sharex=True), names, strict=True):
        axes.plot(run["steps"], run[name], label="training")
        if name in run["val"]:
            axes.plot(run["val"]["steps"], run["val"][name], "o-", label="validation")
        axes.set(xlabel="step", ylabel=name)
    axes.set_yscale("log", base=2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[0].set_title("A ResNet on images")
    figure.axes[0].legend()
    return figure


def main(argv=None):
    args = parse(argv)
    if args.deterministic:  # before JAX looks for devices
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
    return train(args)


if __name__ == "__main__":
    main()
