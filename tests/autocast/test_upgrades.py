"""Test JAX's planned upgrades, which flags enable, and their primitives.

`.ci/run` runs other files under the flags that JAX can differentiate. test_coverage has
the gradients of all constructs.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import hijax

import jamp
from jamp._autocast.hijax import expanded, with_jaxpr
from tests.autocast.test_coverage import TOLERANCE, W, X
from tests.support.constructs import AROUND, TABLE, custom_vjp, layer
from tests.support.near import assert_near
from tests.support.programs import evaluate, products, products_of

DIFFERENTIABLE = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3")
OLD = jax.__version_info__ < (0, 12)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OLD, reason="JAX 0.11 has other flags"),
]
half = functools.partial(jamp.autocast, dtype="float16")


@pytest.fixture
def upgraded():
    """Switches flags on until the end of the test."""
    before = {}

    def switch_on(*flags):
        for flag in flags:
            before[flag] = getattr(jax.config, flag)
            jax.config.update(flag, True)

    yield switch_on
    for flag, value in before.items():
        jax.config.update(flag, value)


def assert_half(fn, *args, at_least=1):
    found = products(fn, *args)
    assert len(found) >= at_least
    assert {(p.lhs, p.rhs) for p in found} == {("float16", "float16")}


assert_close = functools.partial(assert_near, most=TOLERANCE)


@pytest.mark.parametrize("name", TABLE)
def test_a_construct_under_all_flags(name, upgraded):
    """Runs forward only: JAX 0.12 cannot differentiate its new scan in reverse."""
    upgraded(*DIFFERENTIABLE, "jax_scan3")
    fn = TABLE[name](lambda fn: fn)
    try:
        expected = evaluate(fn, W, X)
    except NotImplementedError:
        assert name in ("grad_in", "grad_of_grad")
        return
    cast = TABLE[name](half)
    assert_half(cast, W, X)
    assert_close(evaluate(cast, W, X), expected)


def fwd(w, x):
    return layer(w, x), (w, x)


def bwd(saved, g):
    """Triples the gradient of `w`, so that ignoring this rule shows."""
    return 3.0 * (saved[1].T @ g), g @ saved[0].T


def tripled(**options):
    return custom_vjp(layer, fwd, bwd, **options)


def gradients(fn, *args):
    return jax.jit(jax.grad(lambda *args: fn(*args).sum(), (0, 1)))(*args)


def test_a_custom_vjp_eagerly_and_with_autocast_inside():
    fn = tripled(generic_batching=True)
    expected = gradients(fn, W, X)
    eager = jax.grad(lambda w: half(fn)(w, X).sum())(W)
    assert_close(eager, expected[0])
    assert_close(half(gradients)(half(fn), W, X), expected)


def defremat():
    """Returns `tripled` with its own rule for `jax.checkpoint`."""
    function = jax.custom_vjp(layer)
    function.defremat(lambda w, x: (layer(w, x), ()), lambda _, w, x: fwd(w, x), bwd)
    return function


def with_accums():
    def accumulate(saved, g, w, x):
        for place, grad in zip((w, x), bwd(saved, g), strict=True):
            place.accum(grad)

    function = jax.custom_vjp(layer)
    function.defvjp_with_accums(fwd, accumulate)
    return function


def with_argument():
    """Takes a mutable array, which is an effect."""
    function = custom_vjp(
        lambda w, x, by: layer(w, x) * by[...],
        lambda w, x, by: (layer(w, x) * by[...], (w, x, by[...])),
        lambda saved, g: (*bwd(saved[:2], g * saved[2]), None),
    )
    return lambda w, x: function(w, x, jax.new_ref(jnp.float32(2.0)))


RULES = {
    "defremat": defremat,
    "with_accums": with_accums,
    "generic_batching": lambda: tripled(generic_batching=True),
    "optimize_remat": lambda: tripled(optimize_remat=True),
    "reference": with_argument,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("place", ["plain", "vmap", "checkpoint"])
def test_gradients_of_rules(name, place, upgraded):
    upgraded(*DIFFERENTIABLE)
    fn = AROUND[place](RULES[name]())
    count = len(products(lambda *args: gradients(fn, *args), W, X))
    assert_half(lambda *args: gradients(half(fn), *args), W, X, at_least=count)
    both = lambda fn: (jax.jit(fn)(W, X), gradients(fn, W, X))  # noqa: E731
    assert_close(both(half(fn)), both(fn))


def with_reference(w, x):
    """Checkpoints a mutable array, which JAX allows only under `jax_remat3`."""

    def body(x):
        kept = jax.new_ref(jnp.zeros_like(x))
        kept[...] = x @ w
        return jax.nn.relu(kept[...]) @ w

    return jax.checkpoint(body)(x)


def test_a_checkpoint_around_a_reference(upgraded):
    upgraded(*DIFFERENTIABLE)
    assert_half(half(with_reference), W, X, at_least=2)
    assert_close(evaluate(half(with_reference), W, X), with_reference(W, X))


class Mystery(hijax.HiPrim):
    """Can expand, and has a derivative that is wrong by a factor."""

    def __init__(self, aval, fails=False):
        self.in_avals, self.out_aval = (aval, aval), aval
        self.params = {"fails": fails, "jaxpr": "not a program"}
        super().__init__()

    def expand(self, w, x):
        if self.params["fails"]:
            raise self.params["fails"]
        return layer(w, x)

    def vjp_fwd(self, nzs_in, w, x):
        return self(w, x), (w, x)

    def vjp_bwd_retval(self, saved, g):
        return bwd(saved, g)


def mystery(w, x, **params):
    return Mystery(jax.typeof(w), **params)(w, x) @ w


def lowered_products(fn):
    return [p.lhs for p in products_of(jax.jit(fn).trace(W, X).lojax.jaxpr)]


def test_autocast_expands_an_unknown_object():
    assert set(lowered_products(half(mystery))) == {"float16"}
    assert_close(evaluate(half(mystery), W, X), mystery(W, X))
    assert_close(gradients(half(mystery), W, X), gradients(mystery, W, X))
    lists = jamp.AutocastLists().with_primitive("Mystery", "recorded")
    assert lowered_products(half(mystery, lists=lists)) == ["float32", "float16"]


def test_a_rewritten_object_differs_from_the_users():
    """JAX compares objects by class and params, and some caches compare objects."""
    prim = Mystery(jax.typeof(W))
    new = with_jaxpr(prim, expanded(prim))
    assert new != prim and expanded(new) is not expanded(prim)


@pytest.mark.parametrize("error", [NotImplementedError(), KeyError("scale")])
def test_an_object_that_cannot_expand_is_opaque(error):
    fn = functools.partial(mystery, fails=error)
    with pytest.warns(jamp.AutocastWarning, match="'Mystery'") as warned:
        found = products(half(fn), W, X)
    assert [p.lhs for p in found] == ["float16"]
    reports = [w for w in warned if "raised KeyError: 'scale'" in str(w.message)]
    assert len(reports) == isinstance(error, KeyError)


def linear_call(w, x):
    by = lambda w, x: x @ w  # noqa: E731
    back = lambda w, g: 3.0 * (g @ w.T)  # noqa: E731
    return jax.custom_derivatives.linear_call(by, back, w, x) @ w


def root(w, x):
    """Solves in float32."""
    solve = lambda f, y: y - f(y) / 2.0  # noqa: E731
    linear = lambda g, y: y / g(jnp.ones_like(y))  # noqa: E731
    return lax.custom_root(lambda y: 2.0 * y - layer(w, x), x, solve, linear) @ w


def scaled_blocks(w, x):
    """Multiplies in the dtypes that the user chose."""
    scales = jnp.ones((1, 8, 4), jnp.float8_e8m0fnu)
    blocks = [jnp.tile(y, 16)[None].astype(jnp.float8_e4m3fn) for y in (x @ w, w)]
    return jax.nn.scaled_matmul(*blocks, scales, scales)[0] @ w


# Each with the arguments that JAX can differentiate.
HIGHER_ORDER = {
    "linear_call": (linear_call, (1,)),
    "composite": (lax.composite(layer, "test.layer"), ()),
    "custom_root": (root, (0, 1)),
    "scaled_matmul": (scaled_blocks, ()),
}


@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_other_primitives_that_hold_programs(name):
    fn, argnums = HIGHER_ORDER[name]

    def both(fn):
        grad = jax.grad(lambda *args: fn(*args).sum(), argnums)
        return lambda *args: (fn(*args), grad(*args) if argnums else ())

    assert_close(evaluate(both(half(fn)), W, X), evaluate(both(fn), W, X))
    if name != "custom_root":
        assert_half(both(half(fn)), W, X, at_least=len(products(both(fn), W, X)))
