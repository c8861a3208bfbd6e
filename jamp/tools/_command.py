"""The command line: `python -m jamp levels | doctor | explain | cost`."""

import argparse
import os
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jamp._autocast.fp8 import Fp8
from jamp._policy.levels import LEVELS
from jamp.diagnostics._explain import explain
from jamp.diagnostics._table import columns
from jamp.tools import _doctor
from jamp.tools._cost import cost

_PROPERTIES = (
    "cast_model_type patch_functions patch_functions_type keep_batchnorm_fp32 "
    "master_weights fp8 loss_scale"
).split()
_TARGET = (
    "`module:function`, of a function without arguments that returns `(fn, *args)`: "
    "what is called, and arrays or their shapes; `(loss_fn, state, *args)` is a step."
)
_STEP = (
    "`module:function`, of a function without arguments that returns `(step, state, "
    "*args)`; the state may be a dict of several, by name, to compare."
)
# Of `explain`: a page has all operations, and folds them itself.
_APART = [("html", x) for x in ("depth", "filter", "markdown")] + [
    ("markdown", "depth")
]


class CommandError(Exception):
    """What was typed cannot be done; the message says what to type."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what was typed after `python -m jamp`; None for `sys.argv`.

    Returns:
        The exit status: 0, or 2 for what cannot be done.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        print(chosen.run(chosen))
    except CommandError as error:
        print(f"python -m jamp {chosen.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jamp", description=__doc__)
    commands = parser.add_subparsers(dest="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], str], help: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    command("levels", lambda _: _levels(), "The properties of O0 to O6.")
    command("doctor", lambda _: _doctor.report(), "Versions, devices, what is missing.")
    explained = command("explain", _explain, "What runs in which precision, and why.")
    explained.add_argument("target", help=_TARGET)
    explained.add_argument("--dtype", default="float16", help="float16 or bfloat16")
    explained.add_argument("--depth", type=int, help="how many levels of modules")
    words = 'list operations: "products", "float32", "all" or a regex'
    explained.add_argument("--filter", help=words)
    words = "a table in Markdown, with reasons; without --depth"
    explained.add_argument("--markdown", action="store_true", help=words)
    words = "write a page to a file; without --depth, --filter and --markdown"
    explained.add_argument("--html", metavar="FILE", help=words)
    costs = command("cost", _cost, "What a step costs on a GPU that need not be here.")
    costs.add_argument("target", help=_STEP)
    costs.add_argument("--gpu", default="H200", help="H200 or B200")
    return parser


def _levels() -> str:
    rows = [
        (name, *(_word(getattr(level, name)) for level in LEVELS.values()))
        for name in _PROPERTIES
    ]
    return columns(("property", *LEVELS), *rows)


def _word(value: object) -> str:
    if value is None or isinstance(value, bool | Fp8):
        return "yes" if value else "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cost(chosen: argparse.Namespace) -> str:
    step, *args = _made(chosen.target)
    return str(_or_error(cost, step, *args, target=chosen.gpu))


def _explain(chosen: argparse.Namespace) -> str:
    given = {
        name for name, x in vars(chosen).items() if x is not None and x is not False
    }
    for one, other in _APART:
        if {one, other} <= given:
            raise CommandError(f"--{one} and --{other} do not go together: omit one.")
    fn, *args = _made(chosen.target)
    explanation = _or_error(explain, fn, chosen.dtype)(*args)
    if chosen.html:
        pathlib.Path(chosen.html).write_text(explanation.to_html())
        return f"Wrote {chosen.html}."
    if chosen.markdown:
        return _or_error(explanation.to_markdown, chosen.filter)
    return _or_error(explanation.show, depth=chosen.depth, filter=chosen.filter)


def _or_error[**P, T](fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns; what it says of its arguments is said of the command."""
    try:
        return fn(*args, **kwargs)
    except (ImportError, ValueError) as error:
        raise CommandError(str(error)) from None


def _made(target: str) -> tuple[Any, ...]:
    """What the function of a target returns."""
    module, _, name = target.partition(":")
    if not name:
        raise CommandError(f"expected {_TARGET} Got {target!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(target)
    except (ModuleNotFoundError, ValueError) as error:
        raise CommandError(f"{error}; looked for {module!r} from here.") from None
    except AttributeError as error:
        raise CommandError(f"{module} has no {name!r}: {error}.") from None
    made = found() if callable(found) else found
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise CommandError(f"{target} must return `(fn, *args)`, got {made!r:.80}.")
    return made
