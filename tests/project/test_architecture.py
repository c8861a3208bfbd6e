"""Test the architecture: packages import only from layers below, without cycles."""

import ast
import graphlib
import inspect
import pydoc

import jamp
from tests import surface
from tests.support.pages import ROOT

PACKAGES = ("pallas_kernels", "jamp")

# The lowest layer first. A package includes all files inside it.
LAYERS = (
    ("pallas_kernels",),
    ("jamp._core",),
    ("jamp._autocast",),
    ("jamp._fp8",),
    ("jamp._policy",),
    ("jamp._scaling", "jamp.optimizers"),
    ("jamp._state",),
    ("jamp._checkpoint", "jamp.fp16_utils", "jamp.diagnostics"),
    ("jamp.nnx",),
    ("jamp",),
    ("jamp.__main__",),
)
# A lazy attribute of `jamp`, because a program without NNX should not load it.
LATE = {("jamp", "jamp.nnx")}
# Undocumented parts of JAX, and the files that may use them.
UNDOCUMENTED = (
    "jax._src aval.mat strip_weak_type manual_axis_type source_info with_consts remat2 "
    "remat_opt DropVar ad_util call_wrapped jvp_jaxpr_fun fwd_jaxpr_thunk fwd_jaxpr "
    "out_trees with_unknown_names call_jaxpr num_consts num_carry ft_in cond_jaxpr "
    'cond_nconsts body_jaxpr body_nconsts .aval.update "Zero" .name_stack) '
    "bind_with_trace get_referent partial_eval_jaxpr_custom_rules lowering_parameters "
    "get_bind_params current_name_stack"
).split()
INTERNALS = {
    "pallas_kernels._compat",
    "pallas_kernels.layouts",
    "jamp._autocast.jax_internals",
    "jamp._autocast.calls",
    "jamp._autocast.derivatives",
    "jamp._autocast.subjaxprs",
    "jamp._autocast.hijax",
    "jamp._autocast.barriers",
    "jamp._autocast.run",
    "jamp._core.tracers",
    "jamp._fp8.outermost",
}
ENTRIES = {name.partition(".")[2] for layer in LAYERS for name in layer} - {""}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


ROOMS = {name: row for row, names in enumerate(LAYERS) for name in names}


def room_of(module):
    package, *inside = module.split(".")
    return ".".join([package, *inside[:1]]) if package == "jamp" else package


def imports(module):
    """Yields the modules that a file imports, also inside functions, except LATE."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        yield from (name for name in names if (module, name) not in LATE)


def graph():
    """Returns the modules of jamp that each module imports."""

    return {
        module: [name for name in imports(module) if name in MODULES]
        for module in MODULES
    }


def test_the_root_has_only_the_packages():
    paths = set((ROOT / "jamp").iterdir()) - {ROOT / "jamp" / "__pycache__"}
    found = {path.name.removesuffix(".py") for path in paths}
    assert found == ENTRIES | {"__init__", "py.typed"}
    assert len(found) <= 16


def test_packages_import_only_from_layers_below():
    assert len(LAYERS) <= 11
    for module, targets in graph().items():
        here = room_of(module)
        for target in targets:
            there = room_of(target)
            assert here == there or ROOMS[there] < ROOMS[here], (
                f"{module} may not import {target}"
            )


def test_imports_make_no_cycle():
    tuple(graphlib.TopologicalSorter(graph()).static_order())


def test_files_are_short_and_have_a_docstring():
    for module, path in MODULES.items():
        source = path.read_text()
        assert len(source.splitlines()) <= 400, module
        assert ast.get_docstring(ast.parse(source)), f"{module}: what is the idea?"


def test_undocumented_parts_of_jax_are_in_few_files():
    for module in MODULES.keys() - INTERNALS:
        source = MODULES[module].read_text()
        assert [name for name in UNDOCUMENTED if name in source] == [], module


def test_no_file_is_written_and_no_text_or_pickle_is_run():
    """SECURITY.md says so, and names the exception."""
    sizes = ("jamp._autocast.scope", "eval")  # JAX's text of an unknown size
    calls = {"eval", "exec", "compile", "open", "__import__"}
    modules = {"pickle", "marshal", "shelve", "socket", "subprocess"}
    for module, path in MODULES.items():
        assert not modules & {name.split(".")[0] for name in imports(module)}, module
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                allowed = name not in calls or (module, name) == sizes
                assert allowed, f"{module}:{node.lineno} calls {name}"


def test_only_one_function_imports_the_pallas_folder():
    fence, gates = "pallas_kernels.mosaic", []
    for module in [m for m in MODULES if not m.startswith(fence)]:
        assert "experimental.pallas" not in MODULES[module].read_text(), module
        gates += [module for name in imports(module) if name.startswith(fence)]
    assert gates == ["pallas_kernels._run"]
    body = ast.parse(MODULES[gates[0]].read_text()).body
    top = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "mosaic" not in "".join(map(ast.unparse, top))


def test_help_lists_the_public_functions():
    wanted = {
        name
        for name in surface.public(jamp)
        if not inspect.ismodule(getattr(jamp, name))
    }
    assert set(jamp.__all__) == wanted
    text = pydoc.plain(pydoc.render_doc(jamp))
    listed = text.partition("\nFUNCTIONS")[2]
    for name in filter(str.islower, wanted):  # classes are in another section
        assert f"\n    {name}(" in listed, name


def test_public_names_and_parameters_match_the_file():
    on_file = (ROOT / "tests" / "public_surface.txt").read_text().splitlines()
    assert list(surface.lines()) == on_file, "python -m tests.surface writes the file"
