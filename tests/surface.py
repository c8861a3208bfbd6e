"""List every public name with its parameters and public members.

`python -m tests.surface > tests/public_surface.txt` writes the list that a test reads.
It omits types, which `tests/project/test_types.py` checks with pyright.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

ROOMS = ("", "diagnostics", "fp16_utils", "nnx", "optimizers")


def lines() -> Iterator[str]:
    """Yields a line per name, and one per public method and property of a class."""
    for room in ROOMS:
        module = importlib.import_module(f"jamp.{room}".rstrip("."))
        for name in sorted(public(module)):
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                yield from described(f"{module.__name__}.{name}", thing)


def public(module: Any) -> set[str]:
    """Returns names that a module defines or exports with `import a as a`."""
    source = inspect.getsource(module)
    names = re.findall(r"\b([a-zA-Z]\w*) as (\w+)", source)
    defined = re.findall(r"^def ([a-z]\w*)", source, re.MULTILINE)
    return {name for name, same in names if name == same} | set(defined)


def described(name: str, thing: Any) -> Iterator[str]:
    taken = parameters(thing)
    yield f"{name}({', '.join(taken)})"
    for key, member in sorted(vars(thing).items() if inspect.isclass(thing) else ()):
        if isinstance(member, property) and key[0] != "_":
            yield f"{name}.{key}"
        elif hasattr(member, "__get__") and key[0] != "_":
            fn = getattr(member, "__func__", member)
            if inspect.isfunction(fn):
                yield f"{name}.{key}({', '.join(parameters(fn))})"


def parameters(thing: Any) -> list[str]:
    """Formats parameters with defaults and without types."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # exceptions have no signature
        return []
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=bare, return_annotation=signature.empty)
    return [re.sub(r"<class '([\w.]+)'>", r"\1", str(plain))[1:-1]]


if __name__ == "__main__":
    print("\n".join(lines()))
