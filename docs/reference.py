"""Write the reference: `python docs/reference.py` writes docs/reference/*.md."""

import ast
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "reference"
# Public names by module and purpose.
NAMES = {
    "jamp": {
        "Training": "initialize AmpState scaled_value_and_grad scaled_grad "
        "master_params incremental_update check closure",
        "Loss scales": "DynamicLossScale StaticLossScale LossScaleState",
        "Your own gradient": "scale_loss unscale",
        "Levels and casts": "Properties Fp8 OptLevelError cast_model cast_forward",
        "Autocast": "autocast explain AutocastLists half_function float_function "
        "promote_function half_kernel disable_casts disable_fp8",
        "Master weights": "master_weights MasterWeightsState",
        "Checkpoints": "to_checkpoint from_checkpoint state_dict load_state_dict",
        "Warnings": "PrecisionWarning AutocastWarning UnusedOptionWarning",
    },
    "jamp.nnx": {
        "Training": "initialize Optimizer scaled_value_and_grad scaled_grad",
        "Other functions of models": "cast_forward autocast pure",
    },
    "jamp.optimizers": {
        "Optimizers": "fused_adam fused_sgd fused_lamb fused_novograd fused_adagrad "
        "larc eight_bit stochastic_rounding",
        "States": "FusedAdamState FusedSGDState FusedNovoGradState FusedAdagradState "
        "LARCState EightBit EightBitState StochasticRoundingState",
    },
    "jamp.diagnostics": {
        "Functions": "locate compare",
        "Reports": "Location Comparison Explanation Operation",
    },
    "jamp.fp16_utils": {
        "Optimizers": "FP16_Optimizer FlatFP16_Optimizer FP16State",
        "Loss scalers": "LossScaler DynamicLossScaler",
        "Helpers": "network_to_half BN_convert_float convert_module convert_network "
        "FP16Model tofp16 prep_param_lists model_grads_to_master_grads "
        "master_params_to_model_params clip_grad_norm to_python_float",
    },
}
_GUIDES = {
    "jamp": "[Start in five minutes](../quickstart.md)",
    "jamp.nnx": "[NNX](../nnx.md)",
    "jamp.optimizers": "[Fused optimizers](../optimizers.md)",
    "jamp.diagnostics": "[It overflowed](../overflow.md), [My loss is off](../off.md)",
    "jamp.fp16_utils": "[apex's older interfaces](../fp16_utils.md)",
}
_WIDTH = 88
_SECTION = re.compile(r"(Args|Attributes|Raises)( \(when called\))?:$")
_NAMES = re.compile(r"\*{0,2}\w+(, \*{0,2}\w+)*")


def page(module: str) -> str:
    """Returns the page of a module in Markdown."""
    about = inspect.getdoc(importlib.import_module(module)).partition("\n")[0]
    about = about.removeprefix("jamp: ")
    lines = [f"# {module}", "", about[0].upper() + about[1:]]
    lines += [f"Guide: {_GUIDES[module]}.", ""]
    for purpose, names in NAMES[module].items():
        lines += [f"## {purpose}", ""]
        for name in names.split():
            lines += _entry(f"{module}.{name}")
    lines += ["`python docs/reference.py` writes this page from the docstrings."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _entry(path: str) -> Iterator[str]:
    """Yields the lines of a function, or of a class and its public members."""
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    yield from _described(path, thing, "###")
    for key, member in sorted(vars(thing).items() if inspect.isclass(thing) else ()):
        member = getattr(member, "__func__", member)
        listed = inspect.isfunction(member) or isinstance(member, property)
        if listed and key[0] != "_" and inspect.getdoc(member):
            yield from _described(f"{name}.{key}", member, "####")


def _described(path: str, thing: Any, heading: str) -> Iterator[str]:
    yield from (f"{heading} `{path}`", "")
    if callable(thing) and (text := _call(path, thing)):
        yield from ("```python", text, "```", "")
    yield from _markdown(inspect.getdoc(thing))


def _call(path: str, thing: Any) -> str:
    """Returns the signature with annotations as in the source."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # exceptions have no signature
        return ""
    annotations = _annotations(thing)
    parts: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not any(x.startswith("*") for x in parts):
            parts.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        note = f": {annotations[p.name]}" if p.name in annotations else ""
        equals = " = " if note else "="
        default = "" if p.default is p.empty else equals + _shown(p.default)
        if p.name not in ("self", "cls"):
            parts.append(stars + p.name + note + default)
    end = f") -> {annotations['return']}" if "return" in annotations else ")"
    line = f"{path}({', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{path}(", *(f"    {part}," for part in parts), end])


def _shown(default: Any) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return default.__name__ if inspect.isclass(default) else repr(default)


def _annotations(thing: Any) -> dict[str, str]:
    """Returns annotations by parameter, and of the result, as the source has them."""
    if not inspect.isclass(thing):
        return _of_function(_parsed(inspect.unwrap(thing)))
    found: dict[str, str] = {}
    for cls in reversed(thing.__mro__):
        for node in _parsed(cls).body if cls.__module__.startswith("jamp") else ():
            if isinstance(node, ast.AnnAssign):
                found[ast.unparse(node.target)] = ast.unparse(node.annotation)
            elif getattr(node, "name", "") == "__init__":
                found |= _of_function(node)
    found.pop("return", None)
    return found


def _parsed(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def _of_function(node: Any) -> dict[str, str]:
    args = node.args
    each = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    found = {a.arg: a.annotation for a in each if a} | {"return": node.returns}
    return {name: ast.unparse(note) for name, note in found.items() if note}


def _markdown(docstring: str) -> Iterator[str]:
    """Yields Markdown for a docstring in Google's style."""
    for paragraph in re.split(r"\n\n+", docstring.strip()):
        first, _, rest = paragraph.partition("\n")
        body = re.sub(r"\n +", " ", textwrap.dedent(rest))  # an item in one line
        if first.startswith(">>>"):
            yield from ("```pycon", paragraph, "```")
        elif first == "Returns:":
            yield f"*Returns*: {body}"
        elif section := _SECTION.match(first):
            yield from (f"*{section[1]}*{section[2] or ''}:", "")
            yield from map(_item, body.splitlines())
        else:
            yield paragraph
        yield ""


def _item(text: str) -> str:
    names, colon, rest = text.partition(": ")
    if not colon or not _NAMES.fullmatch(names):
        return f"- {text}"
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {rest}"


def pages() -> dict[pathlib.Path, str]:
    """Returns the text of each page by its path."""
    return {
        FOLDER / f"{module.removeprefix('jamp.')}.md": page(module) for module in NAMES
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
