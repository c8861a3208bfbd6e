"""Train on all devices of several processes, as on several hosts.

    python examples/distributed.py --processes 2     # both on this machine's CPU
    python examples/distributed.py --processes 2 --overflow-at 20 --opt-level O1
    JAX_NUM_CPU_DEVICES=2 python examples/distributed.py --processes 2 --fsdp
    python examples/distributed.py --processes 2 --checkpoint-dir run --resume
    srun python examples/distributed.py              # on a cluster: SLURM, Open MPI

This follows apex's examples/simple/distributed: a regression on random data. Without a
scheduler, start the script on each host with JAX_COORDINATOR_ADDRESS=host:port (of
process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. All processes run one program on one
state, and only their rows of the batch differ. At the end, each process prints a
checksum of its params, its loss scale and its skips. All processes print the same.
"""

import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import zlib
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser


# The command line. It is parsed before JAX is imported, so that --help is fast.
def parse(argv=None):
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=1, help="to start on this machine's CPU")
    add("--launched", action="store_true", help=SUPPRESS)
    add("--opt-level", default="O2", help="O0 to O6")
    add("--loss-scale", metavar="SCALE", help="dynamic, or a number such as 128.0")
    add("--fsdp", action="store_true", help="split params, masters and moments, too")
    add("--overflow-at", type=int, metavar="STEP", help="inf on one process (O1, O2)")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=256, help="of all processes together")
    add("--seed", type=int, default=0)
    add("--checkpoint-dir", type=pathlib.Path, help="writable for all")
    add("--save-every", type=int, default=50, metavar="STEPS")
    add("--resume", action="store_true", help="start from the newest checkpoint")
    add("--plot", default="distributed.png", metavar="PATH")
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
import tqdm
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jamp

INPUTS, HIDDEN, OUTPUTS = 64, 256, 16
model = nn.Sequential([nn.Dense(HIDDEN), nn.relu, nn.Dense(OUTPUTS)])


# One program in several processes.
def launch(processes, flags):
    """Starts this script in several processes. If one fails, ends all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *flags, "--processes", "1", "--launched"]
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    shared["JAX_PLATFORMS"] = "cpu"  # otherwise, each process takes all GPUs
    children = []
    try:
        for i in range(processes):
            env = os.environ | shared | {"JAX_PROCESS_ID": str(i)}
            options = {"stdin": subprocess.PIPE, "start_new_session": True}  # no Ctrl-C
            children.append(subprocess.Popen(command, env=env, **options))
        codes = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()  # before the others report a lost peer
        for child in children:
            child.communicate()  # also closes the pipe
    if any(codes):  # the others would wait for minutes
        sys.exit(f"A process failed, so all were ended. Their exit codes: {codes}")


def connect():
    """Joins the other processes, before JAX looks for devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # GPUs use NCCL
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        number, i = (os.environ[f"JAX_{k}"] for k in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(address, int(number), int(i))
    elif "SLURM_STEP_NODELIST" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        jax.distributed.initialize()  # JAX knows these schedulers


# One step, as on one device.
@jax.jit(donate_argnums=0)
def train_step(state, x, y):
    def loss_fn(params):  # x has the rows of all processes
        out = state.apply_fn({"params": params}, x)
        return ((out.astype(np.float32) - y) ** 2).mean()

    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
    # Gradients are equal on all processes, so all of them step or skip together.
    after = state.apply_gradients(grads=grads)
    metrics = {"loss": loss, "scale": state.loss_scale}
    return after, metrics | {"skipped": after.last_step_skipped}


# Each process adds its devices and its rows of the batch.
def own_rows(step, options):
    """Returns the rows of this process. A real loader would read only these."""
    teacher = np.random.default_rng(options.seed).normal(size=(INPUTS, OUTPUTS))
    rng = np.random.default_rng([options.seed, step])
    x = rng.normal(size=(options.batch_size, INPUTS)).astype(np.float32)
    i, number = jax.process_index(), jax.process_count()
    x = np.split(x, number)[i]
    y = np.tanh(x @ teacher / 4).astype(np.float32)
    if step == options.overflow_at and i == number - 1:
        x[0] = np.inf  # only on the last process
    return x, y


def train(options):
    mesh = Mesh(jax.devices(), ("data",))  # the devices of all processes
    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def init():
        return model.init(jax.random.key(options.seed), np.ones((1, INPUTS)))

    def sharding(x):
        split = options.fsdp and x.shape[0] % mesh.size == 0
        return by_rows if split else everywhere

    # Each process creates the shards of its devices, with --fsdp a part of each matrix.
    # Masters and moments are sharded like their params.
    shardings = jax.tree.map(sharding, jax.eval_shape(init))
    state = jamp.initialize(
        jax.jit(init, out_shardings=shardings)()["params"],
        optax.adam(3e-3),
        options.opt_level,
        loss_scale=options.loss_scale,
        apply_fn=model.apply,  # only process 0 prints the level
    )
    done = 0
    if folder := options.checkpoint_dir:  # each process saves its shards
        manager = ocp.CheckpointManager(folder.absolute())
        done = manager.latest_step() or 0
        if done >= options.steps or (done and not options.resume):
            raise SystemExit(f"{folder}: {done} of {options.steps} steps are done.")
    if done:  # from any number of processes
        target = ocp.args.StandardRestore(jamp.to_checkpoint(state))
        state = jamp.from_checkpoint(state, manager.restore(done, args=target))

    history, steps = [], range(done + 1, options.steps + 1)
    for step in tqdm.tqdm(steps, disable=jax.process_index() > 0 or None):
        rows = own_rows(step, options)
        x, y = (jax.make_array_from_process_local_data(by_rows, a) for a in rows)
        state, metrics = train_step(state, x, y)
        history.append(metrics)
        if folder and (step % options.save_every == 0 or step == options.steps):
            saved = ocp.args.StandardSave(jamp.to_checkpoint(state))
            manager.save(step, args=saved)
    jamp.check(state)  # raises on all processes, or on none
    if folder:
        manager.close()  # waits for the last save

    # Each process checks its own copy, and with --fsdp fetches the other shards.
    params = jax.jit(jamp.master_params, out_shardings=everywhere)(state)
    checksum = zlib.crc32(b"".join(map(np.asarray, jax.tree.leaves(params))))
    history = {k: [float(m[k]) for m in history] for k in metrics}
    return {"state": state, "steps": steps, "checksum": checksum, **history}


# The command line and the results.
def draw(run, path):
    from matplotlib.figure import Figure  # only process 0 needs it

    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    for axes, name in zip(figure.subplots(2), ("loss", "scale"), strict=True):
        axes.semilogy(run["steps"], run[name], base=2)  # a skip leaves a gap
        axes.set(xlabel="step", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("A regression on several processes")
    figure.savefig(path)


def main(argv=None):
    options = parse(argv)
    if options.processes > 1:
        return launch(options.processes, sys.argv[1:] if argv is None else argv)
    if options.launched:  # end with the launcher, even after kill -9
        end = lambda: (os.read(0, 1), os._exit(1))  # noqa: E731
        threading.Thread(target=end, daemon=True).start()
    connect()
    run = train(options)
    i, state = jax.process_index(), run["state"]
    has = f"params {run['checksum']:08x}, loss scale {state.loss_scale:g}"
    has += f", {state.skipped_steps} skipped, loss {run['loss'][-1]:.4f}"
    print(f"process {i} of {jax.process_count()}: {has}\n", end="")  # one write
    if i == 0:
        draw(run, options.plot)
    return run


if __name__ == "__main__":
    main()
