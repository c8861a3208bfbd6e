"""Test autocast inside autocast, jit and checkpoints, and its effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jamp
from tests.support.constructs import AROUND
from tests.support.programs import equations, products, results

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)) / 3

half = jamp.autocast
bf16 = functools.partial(jamp.autocast, dtype=jnp.bfloat16)


def layer(x):
    return jnp.tanh(x @ W)


def dtypes(fn, *args):
    """Returns the dtypes of the left operands, in the order of the program."""
    return [p.lhs for p in products(fn, *args)]


def disabled(x):
    with jamp.disable_casts():
        return layer(bf16(layer)(x))


def disabling(fn):
    def call(x):
        with jamp.disable_casts():
            return fn(x)

    return call


@pytest.mark.parametrize("name", AROUND)
def test_a_jitted_function_may_close_over_an_array(name):
    """A checkpoint and a `shard_map` hold no arrays; a `jit` in them does."""
    row = jnp.arange(1.0, 9.0)
    scaled = jax.jit(lambda y: jnp.tanh(y) * row)

    def both(cast):
        fn = cast(AROUND[name](lambda x: scaled(x @ W)))
        return fn(W), jax.jit(jax.grad(lambda x: fn(x).sum()))(W)

    for got, expected in zip(both(half), both(lambda fn: fn), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02)


POLICIES = jax.checkpoint_policies
LABELS = jnp.arange(8)


def loss(w):
    logits = layer(w) @ w
    return (jax.nn.logsumexp(logits, -1) - logits[LABELS, LABELS]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
@pytest.mark.parametrize("within", ["plain", "jit", "scan", "vmap"])
def test_a_loss_may_be_checkpointed_inside_and_outside(within, policy):
    """Both checkpoints save sums that a head keeps."""
    checkpoint = functools.partial(jax.checkpoint, policy=getattr(POLICIES, policy))
    wanted = jax.grad(loss)(W)
    inside = half(checkpoint(AROUND[within](loss)))
    for fn in (inside, checkpoint(AROUND[within](half(loss)))):
        np.testing.assert_allclose(jax.grad(fn)(W), wanted, 2e-2, 1e-3)


FLOAT32 = jamp.AutocastLists().with_primitive("dot_general", "float32")
BOTH = ["float16", "bfloat16"]
JITTED = jax.jit(half(layer))
NESTED = {
    "inner": (half(lambda x: bf16(layer)(layer(x))), BOTH),
    "jit": (jax.jit(half(lambda x: jax.jit(bf16(jax.jit(layer)))(layer(x)))), BOTH),
    "twice": (half(half(layer)), ["float16"]),
    "disabled": (half(disabled), ["float32", "float32"]),
    "disabled_outside": (disabling(JITTED), ["float32"]),
    "marked": (half(jamp.float_function(bf16(layer))), ["bfloat16"]),
    "beside": (
        jax.jit(lambda x: half(layer)(x) - bf16(layer)(x) + layer(x)),
        [*BOTH, "float32"],
    ),
    "lists": (
        jamp.autocast(lambda x: half(layer)(layer(x)), lists=FLOAT32),
        ["float32", "float16"],
    ),
}

NESTED |= {
    f"in {name}": (half(lambda x, around=around: around(bf16(layer))(layer(x))), BOTH)
    for name, around in AROUND.items()
}


@pytest.mark.parametrize("name", NESTED)
def test_the_innermost_policy_wins(name):
    fn, expected = NESTED[name]
    assert dtypes(fn, W) == expected
    grads = dtypes(jax.grad(lambda x: fn(x).sum()), W)
    assert set(grads) == set(expected) and len(grads) >= 2 * len(expected)


def test_each_call_of_a_jitted_function_is_cast_separately():
    twice = jax.jit(lambda x: jnp.concatenate([x, x]))
    product = jax.jit(lambda x: x @ W)

    def fn(x):
        with jax.named_scope("trunk"):
            y = product(x)
        return y, product(x), jamp.float_function(product)(x)

    lists = jamp.AutocastLists().with_region("trunk", "float32")
    assert dtypes(half(fn), W) == ["float16", "float16", "float32"]
    assert dtypes(half(fn, lists=lists), W) == ["float32", "float16", "float32"]
    found = results(half(lambda x: (twice(x @ W), twice(x))), ["concatenate"], W)
    assert found == ["float16", "float32"]


def test_a_program_of_integers_is_unchanged():
    def fn(i, mask):
        return jnp.where(mask, i * 2, i).sum(), jnp.cumsum(i)

    args = jnp.arange(8), jnp.arange(8) > 3
    assert str(jax.make_jaxpr(half(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def test_constants_stay_float32_outside_and_are_cast_at_their_use():
    weights = np.asarray(W)
    fn = half(jax.jit(lambda x: x @ weights + weights))
    assert {str(c.dtype) for c in jax.make_jaxpr(fn)(W).consts} <= {"float32"}
    assert dtypes(fn, W) == ["float16"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_effects_keep_their_order_and_dtype(wrap, capfd):
    seen = []

    def fn(x):
        def body(i, c):
            jax.debug.print("step {}", i, ordered=True)
            return jnp.tanh(c @ W)

        y = x @ W
        jax.debug.print("sum {}", (y * 0 + 1.5).sum(), ordered=True)
        jax.debug.callback(lambda y: seen.append(y.dtype), y, ordered=True)
        y = lax.fori_loop(0, 2, body, y)
        return lax.cond(y[0, 0] < 9, lambda: jax.debug.print("yes"), lambda: None)

    wrap(half(fn))(W)
    jax.effects_barrier()
    assert seen == [np.float32]
    assert capfd.readouterr().out == "sum 96.0\nstep 0\nstep 1\nyes\n"


opaque = Primitive("opaque")
opaque.def_impl(lambda x: x)
opaque.def_abstract_eval(lambda x: x)
mlir.register_lowering(opaque, lambda _, x: [x])


def is_opaque(x):
    return opaque.bind(x @ W) @ W


def test_an_opaque_call_is_named_once():
    with pytest.warns(jamp.AutocastWarning, match="'opaque'") as caught:
        found = dtypes(half(lambda x: is_opaque(is_opaque(x))), W)
    assert len(caught) == 1 and found == ["float16"] * 4


@pytest.mark.parametrize(
    ("rule", "dtype"), [("half", "float16"), ("recorded", "float32")]
)
def test_the_advice_of_the_warning_works(rule, dtype):
    lists = jamp.AutocastLists().with_primitive("opaque", rule)
    cast = jamp.autocast(is_opaque, lists=lists)
    (call,) = equations(cast, ["opaque"], W)  # a warning would be an error
    assert [str(v.aval.dtype) for v in call.invars] == [dtype]
    np.testing.assert_allclose(cast(W), is_opaque(W), atol=1e-2)


def test_jit_without_results_in_a_loop():
    # JAX leaves such a call where it transposes a program with `jnp.resize`.
    empty = jax.jit(lambda: ())

    def step(carry, _):
        empty()
        return jnp.tanh(carry @ carry), None

    fn = jamp.autocast(lambda x: lax.scan(step, x, None, length=2)[0], "float16")
    assert jnp.isfinite(fn(jnp.ones((2, 2)))).all()
