"""The architecture, as a test: each module imports only from rows above its own."""

import ast
import pathlib

import pytest

import jamp

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "jamp")

# Foundation first. A name covers what is inside it too, but for the two packages: a new
# file needs a row, or a folder that has one.
LAYERS = (
    (
        "pallas_kernels._backend",
        "pallas_kernels._compat",
        "pallas_kernels._dtypes",
        "pallas_kernels._once",
    ),
    ("pallas_kernels._xla", "pallas_kernels._weights"),
    ("pallas_kernels._launch",),
    ("pallas_kernels._shard",),
    ("pallas_kernels._run",),
    ("pallas_kernels._step",),
    ("pallas_kernels.l2norm",),
    ("pallas_kernels.scale",),
    (
        "pallas_kernels.adagrad",
        "pallas_kernels.adam",
        "pallas_kernels.axpby",
        "pallas_kernels.lamb",
        "pallas_kernels.novograd",
        "pallas_kernels.sgd",
    ),
    ("pallas_kernels",),
    ("jamp._compat", "jamp._dtypes", "jamp._warnings", "jamp._layout"),
    ("jamp._restore", "jamp._loss"),
    ("jamp._tree",),
    ("jamp._devices", "jamp._groups", "jamp._loss_scale"),
    ("jamp._names",),
    ("jamp._loss_scaler",),
    ("jamp.multi_tensor", "jamp.optimizers._fused", "jamp.optimizers._flat"),
    (
        "jamp.optimizers._adagrad",
        "jamp.optimizers._adam",
        "jamp.optimizers._fp16_optimizer",
        "jamp.optimizers._lamb",
        "jamp.optimizers._larc",
        "jamp.optimizers._novograd",
        "jamp.optimizers._sgd",
    ),
    ("jamp.optimizers",),
    ("jamp._autocast._lists",),
    ("jamp._autocast._program",),
    ("jamp._autocast._demand", "jamp._autocast._regions", "jamp._autocast._islands"),
    ("jamp._autocast._paint",),
    ("jamp._autocast._control_flow",),
    ("jamp._autocast._transform", "jamp._autocast._page"),
    ("jamp._autocast",),
    ("jamp._opt_level",),
    ("jamp._cast",),
    ("jamp._forward",),
    ("jamp._master_weights",),
    ("jamp._scaled_grads",),
    ("jamp._scale_loss", "jamp._redo", "jamp._mapped_axis"),
    ("jamp._scaled_grad", "jamp._gradients"),
    ("jamp._placement",),
    ("jamp._step", "jamp._closure", "jamp._incoming"),
    ("jamp._add_params",),
    ("jamp._amp_state",),
    ("jamp._state_class", "jamp._check", "jamp._checkpoint", "jamp._state_dict"),
    ("jamp._initialize",),
    (
        "jamp.fp16_utils._casting",
        "jamp.fp16_utils._params",
        "jamp.fp16_utils._rule",
        "jamp.fp16_utils._state",
    ),
    ("jamp.fp16_utils._closure", "jamp.fp16_utils._state_dict"),
    ("jamp.fp16_utils._fp16_optimizer",),
    ("jamp.fp16_utils",),
    ("jamp.diagnostics._flops", "jamp.diagnostics._explanation"),
    ("jamp.diagnostics._explain",),
    ("jamp.nnx._variables",),
    ("jamp.nnx._arguments",),
    ("jamp.nnx._autocast", "jamp.nnx._origin"),
    ("jamp.nnx._optimizer",),
    ("jamp.nnx._cast", "jamp.nnx._scaled_grad"),
    ("jamp.nnx._initialize",),
    ("jamp.linen", "jamp.diagnostics", "jamp.nnx"),
    ("jamp",),
)


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(modules())


def row(module):
    name = module
    while True:
        for index, names in enumerate(LAYERS):
            if name in names:
                return index
        name = name.rpartition(".")[0]
        assert name and name not in PACKAGES, f"{module} is in no row of LAYERS"


def imports(path):
    """The modules that a file imports, with the line; inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node.lineno


def public_names():
    """What `jamp/__init__.py` imports or assigns, but for dunders."""
    for node in ast.parse((ROOT / "jamp" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.TypeAlias):
            names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        else:
            names = [getattr(node, "name", "__doc__")]
        yield from (name for name in names if not name.startswith("__"))


each_module = pytest.mark.parametrize("module", MODULES)


@each_module
def test_imports_point_one_way(module):
    path = MODULES[module]
    for target, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        assert not target.startswith("jax._src"), f"{where}: private part of JAX"
        if target.partition(".")[0] in PACKAGES:
            assert row(target) < row(module), f"{where}: may not import {target}"


@each_module
def test_module_is_in_a_layer(module):
    assert row(module) >= 0


def test_every_layer_has_a_module():
    assert {name for names in LAYERS for name in names} <= MODULES.keys()


@each_module
def test_file_is_one_idea(module):
    source = MODULES[module].read_text()
    assert len(source.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(source)), "the first line says the idea"


def test_public_surface_is_the_one_on_file():
    on_file = (ROOT / "tests" / "public_surface.txt").read_text().split()
    assert sorted(public_names()) == on_file


def test_public_names_are_importable_and_documented():
    for name in public_names():
        assert getattr(jamp, name).__doc__, f"jamp.{name} has no docstring"
