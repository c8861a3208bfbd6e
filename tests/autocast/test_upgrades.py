"""JAX's planned upgrades, which become its default, and the primitives that they bring.

Under each flag, and under those together that JAX can differentiate: every construct is
in half, and its values and gradients are those of the same JAX without autocast.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax, io_callback

import jamp
from jamp._autocast import rewrite
from tests.autocast.constructs import CUSTOM, TABLE, custom_vjp, layer, squared
from tests.autocast.test_coverage import TOLERANCE, W, X, both_passes, distance
from tests.support.programs import evaluate, products, products_of

DIFFERENTIABLE = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3")
OLD = jax.__version_info__ < (0, 12)
pytestmark = pytest.mark.skipif(OLD, reason="JAX 0.11 has others")
half = functools.partial(jamp.autocast, dtype="float16")


@pytest.fixture
def upgraded():
    """Switches flags on, until the end of the test."""
    before = {}

    def switch_on(*flags):
        for flag in flags:
            before[flag] = getattr(jax.config, flag)
            jax.config.update(flag, True)

    yield switch_on
    for flag, value in before.items():
        jax.config.update(flag, value)


@pytest.fixture(autouse=True)
def known():
    """Nothing is unknown: a warning is an error."""
    rewrite._warn_of_unknown.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", jamp.AutocastWarning)
        yield


def assert_half(fn, *args, at_least=1):
    found = products(fn, *args)
    assert len(found) >= at_least
    assert {(p.lhs, p.rhs) for p in found} == {("float16", "float16")}


def assert_close(got, expected):
    errors = jax.tree.map(distance, got, expected)
    assert max(jax.tree.leaves(errors)) <= TOLERANCE, errors


# ---- the constructs


@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_function_under_flags(name, upgraded):
    """The other constructs .ci/run has test_coverage try, under flags of JAX."""
    upgraded(*DIFFERENTIABLE)
    plain, cast = both_passes(name, lambda fn: fn), both_passes(name, half)
    assert_half(cast, W, X)
    assert_close(evaluate(cast, W, X), evaluate(plain, W, X))


@pytest.mark.parametrize("name", TABLE)
def test_a_construct_under_all_flags(name, upgraded):
    """Forward: JAX 0.12 has no reverse derivative of its new scan."""
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


# ---- what only the new kind has


def tripled(**options):
    """A product whose gradient in `w` is three times too large: to ignore it shows."""
    return custom_vjp(
        lambda w, x: jnp.tanh(x @ w),
        lambda w, x: (jnp.tanh(x @ w), (w, x)),
        lambda saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
        **options,
    )


def gradients(fn, *args):
    return jax.jit(jax.grad(lambda *args: fn(*args).sum(), (0, 1)))(*args)


def vmapped(fn):
    return lambda w, x: jax.vmap(lambda row: fn(w, row[None])[0])(x)


def test_a_custom_vjp_eagerly_and_with_autocast_inside():
    fn = tripled(generic_batching=True)
    expected = gradients(fn, W, X)
    eager = jax.grad(lambda w: half(fn)(w, X).sum())(W)
    assert_close(eager, expected[0])
    assert_close(half(gradients)(half(fn), W, X), expected)


def defremat():
    """As `tripled`, with what `jax.checkpoint` keeps said by the function itself."""
    function = jax.custom_vjp(lambda w, x: jnp.tanh(x @ w))
    function.defremat(
        lambda w, x: (jnp.tanh(x @ w), ()),
        lambda _, w, x: (jnp.tanh(x @ w), (w, x)),
        lambda saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
    )
    return function


def with_accums():
    def bwd(saved, g, w, x):
        w.accum(3.0 * (saved[1].T @ g))
        x.accum(g @ saved[0].T)

    function = jax.custom_vjp(lambda w, x: jnp.tanh(x @ w))
    function.defvjp_with_accums(lambda w, x: (jnp.tanh(x @ w), (w, x)), bwd)
    return function


RULES = {
    "defremat": defremat,
    "with_accums": with_accums,
    "generic_batching": lambda: tripled(generic_batching=True),
    "optimize_remat": lambda: tripled(optimize_remat=True),
    "nondiff": lambda: lambda w, x: scaled(2.0, w, x),
}
scaled = custom_vjp(
    lambda by, w, x: x @ w * by,
    lambda by, w, x: (x @ w * by, (w, x)),
    lambda by, saved, g: (3.0 * (saved[1].T @ g), g @ saved[0].T),
    nondiff_argnums=(0,),
)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("place", [lambda fn: fn, vmapped, jax.checkpoint])
def test_other_rules_of_a_custom_vjp(name, place, upgraded):
    upgraded(*DIFFERENTIABLE)
    fn = place(RULES[name]())
    assert_half(lambda w, x: (half(fn)(w, x), gradients(half(fn), w, x)), W, X)
    assert_close(gradients(half(fn), W, X), gradients(fn, W, X))


def test_rules_may_close_over_values_of_the_program(upgraded):
    upgraded(*DIFFERENTIABLE)

    def fn(w, x):
        factor = x.sum()
        function = custom_vjp(
            lambda w: x @ w * factor,
            lambda w: (x @ w * factor, ()),
            lambda _, g: (3.0 * factor * (x.T @ g),),
        )
        return function(w)

    def grad(fn):
        return jax.jit(jax.grad(lambda w: fn(w, X).sum()))(W)

    assert_close(grad(half(fn)), grad(fn))


@pytest.mark.parametrize("names", [(), ("kept",)])
def test_a_checkpoint_keeps_what_its_policy_says(names, upgraded):
    upgraded(*DIFFERENTIABLE)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def fn(w, x):
        body = lambda x: checkpoint_name(layer(w, x), "kept") @ w  # noqa: E731
        return jax.checkpoint(body, policy=policy)(x)

    expected, found = (
        len(products(jax.grad(squared(f)), W, X)) for f in (fn, half(fn))
    )
    assert found == expected
    assert_close(gradients(half(fn), W, X), gradients(fn, W, X))


def with_reference(w, x):
    """A checkpoint around a mutable array, which JAX has under `jax_remat3` alone."""

    def body(x):
        kept = jax.new_ref(jnp.zeros_like(x))
        kept[...] = x @ w
        return jax.nn.relu(kept[...]) @ w

    return jax.checkpoint(body)(x)


def normed(w, x):
    return jax.nn.softmax(jax.nn.standardize(jax.nn.relu(x @ w)) @ w) @ w


DERIVATIVES = {
    "forward": lambda fn: lambda w, x: jax.jvp(lambda w: fn(w, x), (w,), (x,)),
    "linear": lambda fn: lambda w, x: jax.linearize(lambda w: fn(w, x), w)[1](x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_outside_and_inside_of_autocast(name, upgraded):
    upgraded(*DIFFERENTIABLE)
    derivative = DERIVATIVES[name]
    expected = evaluate(derivative(normed), W, X)
    for fn in (derivative(half(normed)), half(derivative(normed))):
        assert_close(evaluate(fn, W, X), expected)


def test_a_checkpoint_around_a_reference(upgraded):
    upgraded(*DIFFERENTIABLE)
    assert_half(half(with_reference), W, X, at_least=2)
    assert_close(evaluate(half(with_reference), W, X), with_reference(W, X))


# ---- objects that nobody knows


class Mystery(hijax.HiPrim):
    """Says what it does, and has a derivative that is wrong by a factor."""

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
        return 3.0 * (saved[1].T @ g), g @ saved[0].T


def mystery(w, x, **params):
    return Mystery(jax.typeof(w), **params)(w, x) @ w


def test_an_object_that_nobody_knows_is_looked_into():
    cast = half(mystery)
    lowered = jax.jit(cast).trace(W, X).lojax.jaxpr
    assert {p.lhs for p in products_of(lowered)} == {"float16"}
    assert_close(evaluate(cast, W, X), mystery(W, X))
    assert_close(gradients(cast, W, X), gradients(mystery, W, X))


def test_an_object_runs_as_the_user_says():
    lists = jamp.AutocastLists().with_primitive("Mystery", "recorded")
    cast = jax.jit(jamp.autocast(mystery, lists=lists))
    lowered = cast.trace(W, X).lojax.jaxpr
    assert [p.lhs for p in products_of(lowered)] == ["float32", "float16"]


@pytest.mark.parametrize("error", [NotImplementedError(), KeyError("scale")])
def test_an_object_that_does_not_say_what_it_does_is_opaque(error):
    fn = functools.partial(mystery, fails=error)
    rewrite._warn_of_unknown.cache_clear()
    with pytest.warns(jamp.AutocastWarning, match="'Mystery'") as warned:
        found = products(half(fn), W, X)
    assert [p.lhs for p in found] == ["float16"]
    reports = [w for w in warned if "raised KeyError: 'scale'" in str(w.message)]
    assert len(reports) == isinstance(error, KeyError)


# ---- primitives of the old kind that hold programs, or none


def test_a_linear_call_and_its_transpose():
    def fn(w, x):
        by = lambda w, x: x @ w  # noqa: E731
        back = lambda w, g: 3.0 * (g @ w.T)  # noqa: E731
        return jax.custom_derivatives.linear_call(by, back, w, x) @ w

    def grad(fn):
        return jax.grad(lambda x: fn(W, x).sum())

    assert_half(lambda x: (half(fn)(W, x), grad(half(fn))(x)), X, at_least=4)
    assert_close(jax.jit(grad(half(fn)))(X), grad(fn)(X))


def test_a_composite_keeps_its_types():
    fn = lax.composite(layer, "test.layer")
    assert_half(half(fn), W, X)
    assert_close(evaluate(half(fn), W, X), fn(W, X))


def test_a_root_is_found_in_float32():
    def fn(w, x):
        solve = lambda f, y: y - f(y) / 2.0  # noqa: E731
        linear = lambda g, y: y / g(jnp.ones_like(y))  # noqa: E731
        return lax.custom_root(lambda y: 2.0 * y - layer(w, x), x, solve, linear) @ w

    assert_close(evaluate(half(fn), W, X), fn(W, X))
    assert_close(gradients(half(fn), W, X), gradients(fn, W, X))


def test_a_product_that_scales_its_blocks_is_as_the_user_says():
    scales = jnp.ones((1, 8, 4), jnp.float8_e8m0fnu)

    def fn(w, x):
        blocks = [jnp.tile(y, 16)[None].astype(jnp.float8_e4m3fn) for y in (x @ w, w)]
        return jax.nn.scaled_matmul(*blocks, scales, scales)[0] @ w

    assert_half(half(fn), W, X, at_least=2)
    assert_close(evaluate(half(fn), W, X), jax.jit(fn)(W, X))


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
def test_a_callback_gets_what_the_program_says(call):
    seen = []

    def seeing(x):
        seen.append(x.dtype)
        return np.float32(x)

    fn = lambda w, x: call(seeing, jax.typeof(x), x @ w) @ w  # noqa: E731
    assert_close(half(fn)(W, X), fn(W, X))
    assert seen == [np.float32] * 2
