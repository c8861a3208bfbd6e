"""What autocast returns: arrays of the plain function's dtypes and weak types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp

X = jnp.arange(4.0)
WEAK = jnp.asarray(2.0)
WEAK_ROW = jnp.full((4,), 2.0)
TABLE = np.arange(3.0)  # float64
PROGRAMS = {
    "literal": (lambda x: jnp.asarray(3.0), X),
    "integer": (lambda x: jnp.int32(3), X),
    "bool": (lambda x: jnp.bool_(True), X),
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
    "complex": (lambda x: lax.complex(x, x), X),
}


def types(tree):
    def of(leaf):
        assert isinstance(leaf, jax.Array)
        return leaf.shape, str(leaf.dtype), jax.typeof(leaf).weak_type

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_types_are_those_of_the_plain_function(name, dtype):
    fn, x = PROGRAMS[name]
    cast, expected = jamp.autocast(fn, dtype), fn(x)
    assert types(cast(x)) == types(jax.jit(cast)(x)) == types(expected)
    assert types(jax.vmap(cast)(jnp.stack([x, x]))) == types(
        jax.vmap(fn)(jnp.stack([x, x]))
    )
    if name != "key":
        jax.tree.map(np.testing.assert_array_equal, cast(x), expected)


@pytest.mark.parametrize("kind", [np.float64, np.float32, jnp.bfloat16])
def test_numpy_comes_back_as_an_array_of_its_own(kind):
    for x in (TABLE.astype(kind), kind(1.5)):
        y = jamp.autocast(lambda x: x)(x)
        assert types(y) == types(jnp.asarray(x))
        np.testing.assert_array_equal(y.at[...].get(), x)
    x = TABLE.astype(kind)
    y = jamp.autocast(lambda x: x)(x)
    x[:] = 7
    np.testing.assert_array_equal(y, TABLE)


def test_what_is_no_array_is_untouched():
    other = object()
    fn = lambda x: (x.shape[0], 2.0, "name", None, other, TABLE)  # noqa: E731
    got = jamp.autocast(fn)(X)
    assert got[:5] == (4, 2.0, "name", None, other) and type(got[0]) is int
    assert got[5] is TABLE
