"""Test diagnostics and warnings of rare programs."""

import dataclasses
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from jamp import __main__ as doctor
from jamp.diagnostics import compare, locate
from tests.support import subprocesses
from tests.support.programs import products
from tests.support.states import make

W = jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (4, 8))


def per_step(p, x):
    step = lambda c, _: (c := jnp.tanh(c @ p), c.sum())  # noqa: E731
    return lax.scan(step, x, length=5)[1].mean()


def called_twice(p, x):
    layer = jax.jit(lambda x: jnp.exp(-jnp.abs(x @ p)))
    return layer(layer(x)).mean()


def through_a_reference(p, x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x @ p
    ref[0] = jnp.ones(8)
    return jnp.exp(ref[...] / 4).mean()


@pytest.mark.parametrize("loss_fn", [per_step, called_twice, through_a_reference])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_comparison_prints(loss_fn, level):
    assert "dot_general" in str(compare(loss_fn, "O0")(make(level, W), X))


def test_an_operation_without_a_loop_may_have_a_mean():
    report = compare(called_twice, "O0")(make("O1", W), X)
    rows = [dataclasses.replace(row, mean=row.error / 2) for row in report.rows]
    assert not any(row.loops for row in rows)
    assert "% in the mean" in str(dataclasses.replace(report, rows=tuple(rows)))


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_locate_reads_through_references(level):
    location = locate(through_a_reference)(make(level, W), X.at[1, 1].set(jnp.inf))
    assert "dot_general" in str(location) or "argument" in str(location)


class Layer:
    @classmethod
    def of_class(cls, x, w):
        assert isinstance(cls, type)
        return x @ w, cls.__name__

    @staticmethod
    def static(x, w):
        return x @ w, ""

    def method(self, x, w):
        assert isinstance(self, Layer)
        return x @ w, ""


class Inherits(Layer):
    pass


@pytest.mark.parametrize("name", ["of_class", "static", "method"])
@pytest.mark.parametrize("owner", [Layer, Inherits])
@pytest.mark.parametrize("caller", [Layer, Inherits, Layer(), Inherits()])
def test_a_registered_method_may_be_called_on_classes_and_objects(name, owner, caller):
    if name == "method" and isinstance(caller, type):
        caller = caller()
    lists = jamp.AutocastLists().register_float_function(owner, name)
    names = []

    def fn(x):
        product, called = getattr(caller, name)(x, W)
        names.append(called)
        return product

    (product,) = products(jamp.autocast(fn, lists=lists), X)
    kind = caller if isinstance(caller, type) else type(caller)
    assert product.lhs == ("float32" if issubclass(kind, owner) else "float16")
    assert names[0] in ("", kind.__name__)


@pytest.mark.parametrize("name", ["eigh", "cholesky", "qr"])
def test_linear_algebra_in_a_half_function_says_what_to_write(name):
    function = getattr(jnp.linalg, name)
    fn = jamp.half_function(lambda x: function(x @ x.T + jnp.eye(4))[0])
    with pytest.raises(TypeError, match=f"no kernel for '{name}'.*jamp.float_function"):
        jamp.autocast(fn)(X)
    inner = jamp.float_function(lambda x: function(x + jnp.eye(4))[0])
    jamp.autocast(jamp.half_function(lambda x: inner(x @ x.T)))(X)


_unknown = jax.extend.core.Primitive("made_up")
_unknown.def_impl(lambda x: x)
_unknown.def_abstract_eval(lambda x: x)


def rounds_kept(x):
    state = make("O5", {"w": W, "kept": W}, keep_fp32="kept")

    def loss(p, x):
        return (x @ p["w"] @ p["kept"].astype(jnp.bfloat16).astype("float32")).mean()

    return jamp.scaled_grad(loss)(state, x)


WARNINGS = {
    "unknown primitive": (jamp.autocast(_unknown.bind), jamp.AutocastWarning),
    "kept param": (rounds_kept, jamp.PrecisionWarning),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_filters_decide_how_often_a_warning_is_shown(name):
    fn, category = WARNINGS[name]
    for action, count in [("always", 3), ("default", 1), ("ignore", 0)]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter(action)
            for _ in range(3):
                fn(X)
        assert [w.category for w in found] == [category] * count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(category):
                fn(X)


def test_a_float64_batch_warns():
    x = np.asarray(X, np.float64)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for level in ("O1", "O2", "O5"):
            state = make(level, {"w": jnp.asarray(W, jnp.float32)})
            loss = lambda p, x: (x @ p["w"]).mean().astype("float32")  # noqa: E731
            with pytest.warns(jamp.PrecisionWarning, match="float64.*np.float32"):
                jamp.scaled_grad(loss)(state, x)
            jamp.scaled_grad(loss)(state, x.astype(np.float32))
        jamp.autocast(lambda x: x @ x.T)(jnp.asarray(x))  # all of it is float64


@pytest.mark.eight_devices
@pytest.mark.parametrize("params", [{"a": {"b": W}}, (W, W)])
def test_the_warning_of_half_sums_names_the_path(params):
    state = make("O5", params)
    loss = lambda p, x: sum(x.mean() * w.sum() for w in jax.tree.leaves(p))  # noqa: E731
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    grad = jax.shard_map(jamp.scaled_grad(loss), mesh=mesh, **specs)
    path = "a/b" if isinstance(params, dict) else "0"
    with pytest.warns(jamp.PrecisionWarning, match=f"params '{path}' are bfloat16"):
        jax.jit(grad)(state, X)


@pytest.mark.slow
def test_the_doctor_prints_a_screen():
    printed = subprocesses.run("jamp")
    assert f"jax {jax.__version__}, " in printed
    assert "(cpu): half is correct here, and no faster" in printed
    assert "JAX_PLATFORMS=cpu" in printed and len(printed.splitlines()) < 12


def test_the_doctor_warns_of_a_precision_that_keeps_matmuls_in_float32():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with jax.default_matmul_precision("highest"):
        printed = "\n".join(doctor.report())
        (product,) = jamp.explain(jnp.matmul)(x, x).operations
    assert "=highest keeps every matmul in float32 at O1 and O4." in printed
    assert product.dtype == "float32"  # the warning is true


@pytest.mark.parametrize(
    "platform, capability, says",
    [
        ("gpu", "8.9", "multiplies float16, bfloat16, float8"),
        ("gpu", "6.1", "multiplies no half"),
        ("gpu", "gfx942", "unknown"),
        ("tpu", None, "use O4 or O5; float16 is slow"),
    ],
)
def test_which_dtypes_a_device_multiplies(platform, capability, says):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert doctor._half(device).endswith(says)
