"""Test ordinary programs under autocast: values, types, dtypes and source lines."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._autocast.primitives import primitive_name
from jamp._autocast.subjaxprs import subjaxprs_of
from tests.support.constructs import repeat
from tests.support.near import assert_near
from tests.support.programs import evaluate, products, results, walk

HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)) / 3
MASK = jnp.asarray(np.tri(8, k=-1, dtype=bool))  # its first row is all false
KEY = jax.random.key(0)


ORDINARY = {
    "masked softmax": lambda w: jax.nn.softmax(
        jnp.where(MASK, w @ w, jnp.finfo(jnp.float32).min)
    ),
    "zeros_like in carry": lambda w: lax.scan(
        lambda c, x: (c + x @ w, c), jnp.zeros_like(w[0] @ w), w
    ),
    "while on half": lambda w: lax.while_loop(
        lambda c: jnp.abs(c).max() > 0.1, lambda c: 0.1 * (c @ w), w @ w
    ),
    "preferred": lambda w: jnp.matmul(w, w, preferred_element_type=jnp.float32),
    "scatter max": lambda w: (w @ w).at[jnp.array([0, 1])].max(w[:2]),
    "reduce": lambda w: lax.reduce(
        w @ w, jnp.float32(0), lambda a, b: jnp.maximum(a, b), (0,)
    ),
    "complex": lambda w: (lax.complex(w, w @ w) @ jnp.fft.fft(w @ w)).real,
    "solve": lambda w: jnp.linalg.solve(w @ w.T + 4 * jnp.eye(8), w @ w),
    "linear solve": lambda w: jax.scipy.sparse.linalg.cg(
        w @ w.T + 4 * jnp.eye(8), w[0]
    )[0],
    "platform": lambda w: lax.platform_dependent(
        w, cpu=lambda w: w @ w, default=lambda w: w + 1
    ),
    "empty": lambda w: (jnp.zeros((0, 8)) @ w, lax.scan(lambda c, x: (c, x), w, w[:0])),
}
# Linear algebra is all in float32.
WITH_WIDE_PRODUCTS = ("solve", "linear solve")
WITH_GRADIENTS = ("masked softmax", "zeros_like in carry", "solve")


def close(got, expected, eps):
    assert_near(got, expected, 10 * eps)


def ordinary(name, cast):
    """Returns the program, with its gradients if the test checks them."""
    fn = cast(ORDINARY[name])
    if name not in WITH_GRADIENTS:
        return fn
    loss = lambda w: sum((y * y).sum() for y in jax.tree.leaves(fn(w)))  # noqa: E731
    return lambda w: (fn(w), jax.grad(loss)(w))


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_code(name):
    expected = evaluate(ordinary(name, lambda fn: fn), W)
    for half, eps in HALVES.items():
        fn = ordinary(name, functools.partial(jamp.autocast, dtype=half))
        close(evaluate(fn, W), expected, eps)
        if name not in WITH_WIDE_PRODUCTS:
            assert [p for p in products(fn, W) if p.is_wide] == []


@pytest.mark.parametrize("method", ["add", "multiply", "set"])
def test_a_scatter_joins_numbers_in_their_dtype(method):
    fn = jamp.half_function(lambda w: getattr(w.at[0, ::2], method)(1.5))
    close(jamp.autocast(fn)(W), fn(W), HALVES["float16"])
    (found,) = results(jamp.autocast(fn), [f"scatter-{method[:3]}", "scatter"], W)
    assert found == "float16"

    def counted(w, dtype):
        counts = getattr(jnp.ones(4, dtype).at[jnp.array([0, 2, 2])], method)(2)
        return (w @ w)[counts.real.astype(int)], counts

    for dtype in ("int32", "uint8", "complex64"):
        got, counts = jamp.autocast(functools.partial(counted, dtype=dtype))(W)
        expected, unrounded = counted(W, dtype)
        close(got, expected, HALVES["float16"])
        np.testing.assert_array_equal(counts, unrounded, strict=True)


def test_scalars_do_not_vote():
    def fn(w):
        y = jnp.where(MASK, w @ w, 0.0)
        y = jnp.clip(y, -1.0, 1.0) * 2.0 + jnp.sqrt(3.0)
        return (y - w @ w) @ w

    assert results(jamp.autocast(fn), ["sub"], W) == ["float16"]


NONE = jnp.zeros((8, 8)).at[4:].set(jnp.tril(jnp.ones((8, 8)))[4:])
CONSTANTS = {
    "floor": lambda w: jnp.maximum(w @ w, -1e30),
    "comparison": lambda w: (w @ w > -1e9).astype(jnp.float32),
    "tiny": lambda w: (w * 1e-12 > 0).astype(jnp.float32),
    "epsilon": lambda w: (lambda y: y / (jnp.abs(y).max() + 1e-8))(0 * w @ w),
    "large": lambda w: jnp.minimum(w @ w + 1e6, 2e6),
    "small array": lambda w: (w @ w) / jnp.full((8, 8), 1e-6),
    "masked": lambda w: jnp.where(MASK, w @ w, 1e6) * 1e-6,
    # Rows without any allowed position would be NaN with a mask of -inf.
    "product with a mask": lambda w: jax.nn.softmax(w @ w + (1 - NONE) * -1e9),
    "quotient by a small number": lambda w: jax.nn.softmax(w @ w - (1 - NONE) / 1e-9),
    "barrier": lambda w: lax.optimization_barrier((w @ w, jnp.exp(w + 14)))[1],
    "branch": lambda w: (
        lax.cond(w[0, 0] < 9, lambda: jnp.full((8, 8), 1e30), lambda: w @ w) + w @ w
    ),
}
MASKS = "product with a mask", "quotient by a small number"
IN_NARROWEST = "floor", "comparison", "epsilon", "barrier", "branch", *MASKS


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_half_cannot_hold_keep_their_value(name):
    fn = CONSTANTS[name]
    for promote in ("widest", "narrowest") if name in IN_NARROWEST else ("widest",):
        close(jamp.autocast(fn, promote=promote)(W), fn(W), HALVES["float16"])


def test_float64_stays():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)))
        fn = lambda x, w: (x @ x) + (w @ w).astype(jnp.float64)  # noqa: E731
        found = products(jamp.autocast(fn), x, x.astype(jnp.float32))
        assert [(p.lhs, p.rhs) for p in found] == [("float64",) * 2, ("float16",) * 2]
        np.testing.assert_array_equal(jamp.autocast(lambda x: x @ x)(x), x @ x)


def test_integers_bools_complex_and_keys_pass_untouched():
    def fn(i, b, c, key):
        drawn = jax.random.key_data(jax.random.split(key)), jax.random.uniform(key)
        return i @ i, b ^ True, c @ c, key, *drawn

    args = jnp.arange(8)[:, None] * jnp.arange(8), MASK, lax.complex(W, 2 * W), KEY
    got, expected = jamp.autocast(fn)(*args), fn(*args)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, expected)
    for g, e in zip(got[:3] + got[4:], expected[:3] + expected[4:], strict=True):
        np.testing.assert_array_equal(g, e)


def test_numpy_values_other_than_floats_stay_concrete():
    def fn(x, count, shape, names):
        assert count > 2 and names[0] == "a"
        return jnp.ones(shape) @ x

    args = W, np.int64(3), np.array([3, 8]), np.array(["a"])
    close(jamp.autocast(fn)(*args), fn(*args), HALVES["float16"])


def layers(w):
    with jax.named_scope("outer"):
        y = jnp.exp(w @ w)

    def body(c, _):
        with jax.named_scope("inner"):
            return jnp.abs(c @ w)

    return jax.checkpoint(lambda y: repeat(body, y, length=2))(y)


def places(fn):
    """Yields each equation's primitive, name stack and line in this file."""
    eqns = list(walk(jax.make_jaxpr(fn)(W).jaxpr))
    # `with_weight` replaces the matmul.
    names = "custom_jvp_call", "CustomJVPTraced"
    calls = [e for e in eqns if primitive_name(e) in names]
    programs = [subjaxprs_of(call)[0].jaxpr for call in calls]
    inside = [id(e) for program in programs for e in walk(program)]
    for eqn in (e for e in eqns if id(e) not in inside):
        lines = [
            frame.line_num
            for frame in eqn.source_info.traceback.frames
            if frame.file_name == __file__
        ]
        name = "dot_general" if eqn in calls else eqn.primitive.name
        yield name, (str(eqn.source_info.name_stack), *lines[:1])


def test_equations_and_casts_point_at_the_lines_of_the_user():
    found = list(places(jamp.autocast(layers)))
    others = [found for found in found if found[0] != "convert_element_type"]
    assert others == list(places(layers)) and all(len(at) == 2 for _, at in others)
    casts = [at for name, at in found if name == "convert_element_type"]
    assert casts and set(casts) <= {at for _, at in others}


def test_a_derivative_keeps_the_plain_name_stacks():
    def stacks(fn):
        # A compiled program from JAX's cache has the names of its first caller.
        lowered = jax.jit(jax.grad(lambda w: fn(w).sum())).lower(W)
        names = re.findall(r'"([^"]*)/dot_general"', lowered.as_text(debug_info=True))
        # Under JAX's flags, names in the derivative of `with_weight` have a suffix.
        own = r"(/eval_jaxpr|/transpose\(\))?(/cond/branch_\d_fun)?$"
        return {re.sub(own, "", name) for name in names}

    assert stacks(jamp.autocast(layers)) == stacks(layers)
    assert any("outer" in where for where in stacks(layers))


X = jnp.arange(4.0)
WEAK = jnp.asarray(2.0)
WEAK_ROW = jnp.full((4,), 2.0)
TABLE = np.arange(3.0)  # float64
RETURNED = {
    "literal": (lambda x: jnp.asarray(3.0), X),
    "array": (lambda x: jnp.array([1, 2]), X),
    "closed over": (lambda x: (WEAK_ROW, jnp.asarray(TABLE), X), X),
    "key": (lambda x: jax.random.key(0), X),
    "passed through": (lambda x: (x, x), WEAK),
    "a weak product": (lambda y: (jnp.dot(y, y), y @ X), WEAK_ROW),
    "a product of constants": (lambda x: jnp.dot(WEAK_ROW, WEAK_ROW), X),
    "elementwise": (lambda w: (jnp.exp(w), w * 2, w + X, w > 1), WEAK),
    "scan": (lambda w: lax.scan(lambda c, _: (c * w, c), w, length=2), WEAK),
    "cond": (lambda w: lax.cond(w > 1, lambda: w * 2.0, lambda: w), WEAK),
    "jit": (jax.jit(lambda w: (w, w * 2, 3.0, TABLE)), WEAK),
    "grad": (jax.grad(lambda w: jnp.dot(w, w)), WEAK_ROW),
    "half": (lambda x: x.astype("float16") * 2, X),
}


def types(tree):
    def of(leaf):
        assert isinstance(leaf, jax.Array)
        return leaf.shape, str(leaf.dtype), jax.typeof(leaf).weak_type

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("name", RETURNED)
def test_types_match_the_plain_function(name):
    fn, x = RETURNED[name]
    cast, expected = jamp.autocast(fn), fn(x)
    assert types(cast(x)) == types(jax.jit(cast)(x)) == types(expected)
    mapped, wanted = (jax.vmap(f)(jnp.stack([x, x])) for f in (cast, fn))
    assert types(mapped) == types(wanted)
    if name != "key":
        jax.tree.map(np.testing.assert_array_equal, cast(x), expected)


@pytest.mark.parametrize("kind", [np.float64, np.float32, jnp.bfloat16])
def test_a_returned_numpy_array_is_a_copy(kind):
    for x in (TABLE.astype(kind), kind(1.5)):
        y = jamp.autocast(lambda x: x)(x)
        assert types(y) == types(jnp.asarray(x))
        np.testing.assert_array_equal(y.at[...].get(), x)
        if x.ndim:
            x[:] = 7
            np.testing.assert_array_equal(y, TABLE)


def test_other_objects_are_returned_unchanged():
    other = object()
    fn = lambda x: (x.shape[0], 2.0, "name", None, other, TABLE)  # noqa: E731
    got = jamp.autocast(fn)(X)
    assert got[:5] == (4, 2.0, "name", None, other) and type(got[0]) is int
    assert got[5] is TABLE
