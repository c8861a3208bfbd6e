"""The command line of the examples, checked before JAX is imported.

    parser = Flags(__doc__, opt_level="O2", loss_scale=None)  # flags that many have
    parser.add_argument("--steps", type=int, default=100)

`--help` shows every default. Opt levels, loss scales, counts and the path of a plot are
checked by the flag's name.
"""

import argparse
import math
import os
import pathlib
import sys

# XLA's compiler for NVIDIA GPUs may be installed where no GPU is, as after `make test`.
# Its check for cuDNN would then print a traceback.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(f"jamp needs Python 3.12 or newer; this is {sys.version.split()[0]}.")

LEVELS = "O0", "O1", "O2", "O3", "O4", "O5", "O6"
FROM_ZERO = "seed", "manualSeed", "start_epoch", "layers", "sample", "workers", "prof"


def level(text):
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(LEVELS)}")
    return text


def number(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number, such as 128")
    return value


def loss_scale(text):
    if text != "dynamic":
        try:
            number(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or 'dynamic'") from None
    return text  # as it was given: jamp takes strings


def count(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1")
    return int(text)


def picture(text):
    folder = pathlib.Path(text).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {folder} cannot be written to")
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .png, .svg or .pdf")
    return text


HELP = {
    "opt_level": "O0 to O6",
    "keep_batchnorm_fp32": "True or False",
    "loss_scale": "dynamic, or a number such as 128.0",
    "init_scale": "a dynamic scale that starts here",
    "seed": "of params and data",
    "resume": "from the newest checkpoint, if any",
    "plot": "the picture to write",
}
NAMED = {
    "opt_level": level,
    "beside": level,
    "loss_scale": loss_scale,
    "init_scale": number,
}
NAMED |= {"static_loss_scale": number, "plot": picture}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action)


class Flags(argparse.ArgumentParser):
    def __init__(self, doc, **defaults):
        super().__init__(description=doc.splitlines()[0], formatter_class=_Help)
        for name, default in defaults.items():
            options = {"type": int} if type(default) is int else {"metavar": "VALUE"}
            if default is False:
                options = {"action": "store_true"}
            flag = "--" + name.replace("_", "-")
            self.add_argument(flag, default=default, help=HELP[name], **options)

    def parse_args(self, *args, **kwargs):
        for action in self._actions:
            by_type = count if action.type is int else action.type
            by_type = int if action.dest in FROM_ZERO else by_type
            action.type = NAMED.get(action.dest, by_type)
            action.help = action.help or "(default: %(default)s)"
        options = super().parse_args(*args, **kwargs)
        if getattr(options, "resume", None) is True and not options.checkpoint_dir:
            self.error("--resume needs --checkpoint-dir")
        return options


SAVERS = []


def saver(manager):
    """A checkpoint manager whose last save is waited for when Ctrl-C ends the run."""
    SAVERS.append(manager)
    return manager


def run_script(main):
    """Runs a script; Ctrl-C ends it with one line, and its last checkpoint is whole."""
    try:
        main()
    except KeyboardInterrupt:
        for manager in SAVERS:
            manager.close()
        sys.exit(
            "\nStopped. What was saved is whole: --resume goes on, where there is one."
        )
