"""Count the changes of a module that its tests detect: `make mutate`.

A mutant differs in one comparison, operator, constant or statement. It runs in a fork
of this process, so no file changes. The seed determines the mutants. The tests of a
module are in the folder that mirrors its package. The file named after it runs first.
"""

import argparse
import ast
import datetime
import importlib.abc
import importlib.util
import os
import pathlib
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import flax.nnx  # noqa: F401, imported once for all forks
import jax
import optax  # noqa: F401
import pytest

from tests.support.pages import ROOT

NEVER_RUN = ("@overload", "if TYPE_CHECKING")
PAIRS = "And Or, Add Sub, Mult Div, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn"
PAIRS += ", BitAnd BitOr, LShift RShift, FloorDiv Mult, Mod Mult, Pow Mult"
SWAPS: dict[type, type] = {}
for one, other in (map(ast.__dict__.get, p.split()) for p in PAIRS.split(", ")):
    SWAPS |= {other: one, one: other} if other not in SWAPS else {one: other}


def changes(node: Any) -> Iterator[tuple[Any, str, Callable[[], None]]]:
    """Yields each node below that can change, how, and a function that changes it.

    Annotations and strings do not change.
    """
    if isinstance(node, ast.JoinedStr) or ast.unparse(node).startswith(NEVER_RUN):
        return

    def put(name, value):
        return lambda: setattr(node, name, value)

    match node:
        case ast.Raise():
            yield node, "removed", put("__class__", ast.Pass)
            return
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPS:
            yield node, "ops", put("ops", [SWAPS[type(op)](), *rest])
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
            pass
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in SWAPS:
            yield node, "op", put("op", SWAPS[type(op)]())
        case ast.Constant(value=bool() | int() | float() as x):
            yield node, "value", put("value", (not x) if x in (0, 1) else x + 1)
        case ast.UnaryOp():  # two negations cancel
            yield node, "op", put("operand", ast.UnaryOp(node.op, node.operand))
        case ast.If() | ast.IfExp():
            yield node, "test", put("test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "removed", put("__class__", ast.Pass)
    types = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
    for child in ast.iter_child_nodes(node):
        if id(child) not in types:
            yield from changes(child)


def mutants(source: str, count: int, seed: int) -> Iterator[tuple[Any, str]]:
    """Yields up to `count` changed trees, each with a description of the change."""
    sites = len(list(changes(ast.parse(source))))
    for k in random.Random(seed).sample(range(sites), min(count, sites)):
        tree = ast.parse(source)
        node, how, change = list(changes(tree))[k]
        said = f"{node.lineno}: {how} of `{ast.unparse(node).partition('\n')[0]}`"
        change()
        yield ast.fix_missing_locations(tree), said


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a tree."""

    def __init__(self, file: pathlib.Path, tree: Any):
        self.file, self.tree = file, tree
        self.name = ".".join(file.relative_to(ROOT).with_suffix("").parts)

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.file, loader=self)

    def exec_module(self, module):
        exec(compile(self.tree, self.file, "exec"), module.__dict__)


def dies(file: pathlib.Path, tree: Any, tests: list[str], limit: int) -> bool:
    """Returns whether tests fail or take more CPU seconds than the limit."""
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.meta_path.insert(0, _Loader(file, tree))
        args = ["-x", "-q", "--assert=plain", "--tb=no", "-pno:cacheprovider", *tests]
        try:
            os._exit(pytest.main(args))
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


# The test folders of packages whose folder has another name.
FOLDERS = {"_fp8": ["autocast"], "jamp": ["state"]}
FOLDERS["pallas_kernels"] = FOLDERS["mosaic"] = ["pallas_kernels", "optimizers"]


def tests_of(file: pathlib.Path) -> list[str]:
    """Returns the test files of a module's package, the module's own file first."""
    first, *inner, name = file.relative_to(ROOT).with_suffix("").parts
    package = inner[0] if inner else first
    folders = FOLDERS.get(package, [package.strip("_")])
    found = [
        path for f in folders for path in sorted(ROOT.glob(f"tests/{f}/test_*.py"))
    ]
    namesake = f"test_{name.strip('_')}.py"
    return [str(path) for path in sorted(found, key=lambda path: path.name != namesake)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="parts of paths; default: all")
    parser.add_argument("-n", type=int, default=30, help="mutants per module")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{datetime.date.today()}, JAX {jax.__version__}, {' '.join(sys.argv[1:])}")
    asked = given.modules or [""]
    files = [*ROOT.glob("jamp/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
    for file in sorted(file for file in files if not file.name.startswith("__")):
        name = str(file.relative_to(ROOT))
        if not any(part in name for part in asked):
            continue
        tests = [*tests_of(file), "-m", "not slow and not h200"]
        with tempfile.TemporaryDirectory() as cache:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache  # for all forks
            source, before = file.read_text(), os.times()
            assert not dies(file, ast.parse(source), tests, 600), tests
            limit = round(60 + 3 * (os.times().children_user - before.children_user))
            drawn = list(mutants(source, given.n, given.seed))
            alive = [x for t, x in drawn if not dies(file, t, tests, limit)]
        print(f"| {name} | {len(drawn)} | {len(drawn) - len(alive)} |", flush=True)
        for change in alive:
            print(f"  {name}:{change}", flush=True)


if __name__ == "__main__":
    main()
