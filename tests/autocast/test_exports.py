"""Test that `jax.export` exports forward passes and training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import jamp
from jamp._autocast.scope import size_of_shape
from tests.autocast.exported import MODELS, inputs_of, shapes_of
from tests.support.near import assert_near
from tests.support.states import make
from tests.support.subprocesses import run

pytestmark = pytest.mark.standard_promotion
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "O6")
PLATFORMS = ("cpu", "cuda", "tpu")
PASSES = ("forward", "step")


def loadable(tree):
    wide = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x  # noqa: E731
    return [wide(jnp.asarray(x)) for x in jax.tree.leaves(tree)]


def flat_pass(name, level, which):
    """Returns a pass of a model as a function of arrays, and the arrays of its state.

    No array is bfloat16, which NumPy cannot load from a file.
    """
    model = MODELS[name]
    options = {"fp8": jamp.Fp8(smallest=1)} if level == "O6" else {}
    state = make(level, model.params, optax.adam(0.1), apply_fn=model.fn, **options)
    leaves, tree = jax.tree.flatten(state)
    dtypes = [x.dtype for x in leaves]

    def state_of(leaves):
        pairs = zip(leaves, dtypes, strict=True)
        return tree.unflatten([x.astype(dtype) for x, dtype in pairs])

    def loss_fn(params, *inputs):
        return (model.fn(params, *inputs) ** 2).astype(jnp.float32).mean()

    def forward(leaves, *inputs):
        state = state_of(leaves)
        return loadable(state.apply_fn(state.params, *inputs))

    def step(leaves, *inputs):
        state = state_of(leaves)
        grads = jamp.scaled_grad(loss_fn)(state, *inputs)
        return loadable(state.apply_gradients(grads=grads).params)

    return jax.jit({"forward": forward, "step": step}[which]), loadable(leaves)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_may_be_unknown(name, level):
    """`jax.export` compares no unknown size with a number."""
    for which in PASSES:
        fn, leaves = flat_pass(name, level, which)
        fn.trace(leaves, *shapes_of(MODELS[name]))


def test_unknown_sizes_are_large_and_differ():
    b, t = export.symbolic_shape("b, t")
    sizes = (2, b % 2 + 1), (10_000,), (b,), (b, 2), (b, b % 7 + 3), (b, t), (b**3,)
    numbers = list(map(size_of_shape, sizes))
    assert numbers == sorted(set(numbers))
    assert size_of_shape((b, 16)) == size_of_shape((16 * b,)) != size_of_shape((t, 16))
    assert size_of_shape((b // 2,)) < size_of_shape((b,))


def test_a_gpu_transposes_only_the_gradient_unless_it_is_exported():
    """An optimizer that inherits cuDNN's layout moves twice the bytes."""
    fn, leaves = flat_pass("convolution", "O4", "step")
    args = leaves, *inputs_of(MODELS["convolution"])
    lowered = fn.trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("LayoutConstraint") == 1
    exported = export.export(fn, platforms=["cuda"])(*args)
    assert "LayoutConstraint" not in exported.mlir_module()


def saved(folder, name, level, which):
    """Exports a pass with fixed and unknown sizes, and returns its results here."""
    fn, leaves = flat_pass(name, level, which)
    inputs = inputs_of(MODELS[name])
    for sizes in (inputs, shapes_of(MODELS[name])):
        exported = export.export(fn, platforms=PLATFORMS)(leaves, *sizes)
        kind = "fixed" if sizes is inputs else "unknown"
        path = folder / f"{name} {level} {which} {kind}.exported"
        path.write_bytes(exported.serialize())
        np.savez(path.with_suffix(".inputs.npz"), *leaves, *inputs)
    return [np.asarray(x) for x in jax.tree.leaves(fn(leaves, *inputs))]


def assert_exported(folder, cases):
    """Checks that another process computes what this one does."""
    pytest.importorskip("flatbuffers", reason="`serialize` needs flatbuffers")
    expected = {case: saved(folder, *case) for case in cases}
    run("tests.autocast.exported", str(folder))
    for case, results in expected.items():
        for kind in ("fixed", "unknown"):
            with np.load(folder / f"{' '.join(case)} {kind}.results.npz") as file:
                assert_near([file[key] for key in file.files], results, 2.0**-7)


def test_another_process_runs_exported_passes(tmp_path):
    names = "recurrent", "convolution"
    assert_exported(
        tmp_path,
        [(n, level, p) for n in names for level in ("O1", "O5") for p in PASSES],
    )


@pytest.mark.slow  # exports 420 programs
@pytest.mark.parametrize("name", MODELS)
def test_another_process_runs_all_exported_passes(name, tmp_path):
    cases = [(name, level, which) for level in LEVELS for which in PASSES]
    assert_exported(tmp_path, cases)
