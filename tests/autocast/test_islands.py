"""Test which residuals autocast keeps, and the dtypes after a norm or a bias."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp._autocast import rewrite, softmax
from tests.support import constructs
from tests.support.programs import equations, results, walk

# An odd number of rows tells activations from weights.
ROWS, WIDTH = 7, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), jnp.float32)
BIAS = jnp.arange(8.0)


def softmax_by_hand(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


ISLANDS = {
    "softmax": jax.nn.softmax,
    "softmax by hand": softmax_by_hand,
    "masked softmax": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by hand": lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.045 * x * x * x))),
    "in jit": jax.jit(jax.nn.gelu),
    "steps": lambda x: jax.nn.gelu(x) + jnp.floor(x) % 3 + x.round(),
    "two in a row": lambda x: jax.nn.softmax(jax.nn.gelu(x)),
    # The division changes the result of the softmax before the matmul reads it.
    "dropped": lambda x: jnp.where(jnp.arange(8) < 5, jax.nn.softmax(x) / 0.625, 0),
    "dropped at random": lambda x: nn.Dropout(0.1, deterministic=False).apply(
        {}, jax.nn.softmax(x), rngs={"dropout": jax.random.key(0)}
    ),
}
NORMS = {
    "bias": lambda x: x + BIAS,
    "bias as a row": lambda x: x + jnp.broadcast_to(BIAS, x.shape),
    "by hand": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3) * jnp.arange(8.0),
    "rms": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
    "batch norm": lambda x: nn.BatchNorm(use_running_average=False).init_with_output(
        jax.random.key(0), x
    )[0],
}


def kept(fn):
    """Returns the shape and dtype of each residual of a function."""
    residuals = jax.eval_shape(lambda w, x: jax.vjp(fn, w, x)[1], W, X)
    return [(r.shape, str(r.dtype)) for r in jax.tree.leaves(residuals)]


@pytest.mark.parametrize("platform", ["default", "tpu"])
@pytest.mark.parametrize("name", ISLANDS)
def test_the_backward_pass_keeps_half_and_gives_the_same(name, platform, monkeypatch):
    choose = lambda *args, **fns: fns[platform](*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    monkeypatch.setattr(softmax, "_softmax", softmax._softmax.__wrapped__)  # no cache

    def fn(w, x):
        return ISLANDS[name](x @ w) @ w

    assert ((ROWS, WIDTH), "float32") in kept(fn)
    found = kept(jamp.autocast(lambda w, x: fn(w, x * 1)))
    assert ((ROWS, WIDTH), "float32") not in found, found

    x = jnp.abs(X)  # leaves no row of the masked softmax empty
    grad = jax.grad(lambda w, x: jamp.autocast(fn)(w, x).sum(), (0, 1))
    found = grad(W, x)
    monkeypatch.setattr(rewrite, "checkpoint_islands", lambda jaxpr, *_: jaxpr)
    # The derivative of a softmax reads its result in half, except on a TPU.
    in_half = "softmax" in name or name == "two in a row"
    error = 2**-10 if in_half and platform != "tpu" else 1e-5
    for got, expected in zip(found, grad(W, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=error, atol=error)


NO_SOFTMAX = {
    "no exp": lambda x: (y := jnp.cosh(x)) / y.sum(-1, keepdims=True),
    "a maximum": lambda x: (y := jnp.exp(x)) / y.max(-1, keepdims=True),
    "another's sum": lambda x: jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True),
    "another row's sum": lambda x: (y := jnp.exp(x)) / y.sum(-1),
}


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_a_lookalike_is_not_a_softmax(name, monkeypatch):
    fn = jamp.autocast(lambda w: jnp.sum(NO_SOFTMAX[name](w @ w) @ w))
    found = jax.grad(fn)(W)
    monkeypatch.setattr(rewrite, "checkpoint_islands", lambda jaxpr, *_: jaxpr)
    np.testing.assert_allclose(found, jax.grad(fn)(W), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [jax.checkpoint(jax.nn.gelu), jax.scipy.special.i0e])
def test_user_checkpoints_and_slow_functions_are_in_no_island(fn):
    written = jax.make_jaxpr(jamp.autocast(lambda w, x: fn(x @ w) @ w))(W, X)
    policies = [e.params["policy"] for e in walk(written) if "policy" in e.params]
    assert not any(policies)


def test_a_gelu_of_one_row_adds_no_bias():
    """With one row, the terms of `x + 0.04 * x**3` have the shape of a bias."""
    fn = jamp.autocast(lambda w, x: nn.gelu(x @ w))
    assert results(fn, ["add"], W, X[:1]) == results(fn, ["add"], W, X)


def test_a_derivative_is_in_half_where_its_function_is():
    """A relu in float32 would raise the memory of an MLP at O4 by a third."""
    grad = jax.grad(lambda w: jamp.autocast(lambda w: nn.relu(X @ w) @ w)(w).sum())
    assert set(results(grad, ["max", "select_n"], W)) == {"float16"}


AROUND = constructs.AROUND | {
    "grad": lambda fn: lambda w, x: jax.grad(lambda w: fn(w, x).sum())(w)
}


def barriers(fn, platform):
    """Returns the lines of barriers in the program of a gradient."""
    lowered = jax.jit(jax.grad(fn)).trace(W).lower(lowering_platforms=(platform,))
    lines = lowered.as_text().splitlines()
    return [line for line in lines if "optimization_barrier" in line]


@pytest.mark.parametrize(
    "name", ["plain", "vmap", "checkpoint", "scan", "shard_map", "grad"]
)
def test_barriers_are_for_gpus_and_a_softmax(name):
    """On a TPU, barriers prevent fusions: GPT-2 would move 1.22 times the bytes."""
    attend = lambda w, x: jax.nn.softmax(x @ w) @ w + w[0]  # noqa: E731
    fn = AROUND[name](jamp.autocast(attend))
    cpu, cuda, tpu = (
        len(barriers(lambda w: fn(w, X).sum(), platform))
        for platform in ("cpu", "cuda", "tpu")
    )
    remat = name == "checkpoint"  # which adds its own barrier
    assert tpu == remat
    assert cuda >= 2 + remat  # the softmax's and the bias's
    assert cpu == cuda - (name != "grad")  # the second derivative of a bias is zero


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", ["plain", "vmap", "shard_map"])
def test_a_barrier_holds_one_residual_and_no_cotangent(name, platform):
    """A TPU would store a cotangent behind a barrier: 1.12 times a Mixer's bytes."""
    act = lambda w, x: nn.gelu(x @ w) @ w  # noqa: E731
    fn = constructs.AROUND[name](jamp.autocast(act))
    (barrier,) = barriers(lambda w: fn(w, X).sum(), platform)
    assert barrier.count("%") == 2 and "f16" in barrier


# Sizes of a leading axis.
SIZES = (4, 32, 40)


@pytest.mark.parametrize(("platform", "sizes"), [("tpu", (40,)), ("cuda", SIZES)])
@pytest.mark.parametrize("more", [(), (64,)])
def test_a_tpu_needs_no_barrier_beside_a_small_axis(platform, sizes, more):
    """It saves an erfc as bits, and ConvNeXt kept 1.14 of the memory with a barrier."""

    def has_barrier(size):
        x = jnp.ones((*more, size, *X.shape))
        fn = jamp.autocast(lambda w: (ISLANDS["exact gelu"](x @ w) @ w).sum())
        return barriers(fn, platform)

    assert tuple(filter(has_barrier, SIZES)) == sizes


DROPPED = {
    "each": ISLANDS["dropped at random"],
    "one": lambda x: jax.nn.softmax(x) * jnp.where(jnp.arange(WIDTH) < 5, 1.6, 0),
    "capped": lambda x: jax.nn.softmax(jnp.tanh(x / 5) * 5),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_or_capped_softmax_is_recomputed_from_its_scores(name):
    """XLA would save their exponentials or caps in float32, 1.5 times the memory."""
    fn = jamp.autocast(lambda w: (DROPPED[name](X @ w) @ w).sum())
    assert len(barriers(fn, "cuda")) == 1


@pytest.mark.parametrize("join", [jnp.add, jnp.multiply, jnp.subtract])
@pytest.mark.parametrize("name", ["softmax", "one", "gelu"])
def test_the_gradient_of_a_small_input_sums_half_cotangents(name, join):
    """XLA stored a cotangent of T5's scores in float32 for their bias."""
    island, stop = (ISLANDS | DROPPED)[name], jax.lax.stop_gradient

    def count(bias):
        fn = lambda w: (island(join(X @ w, bias(w).T)) @ w).sum()  # noqa: E731
        return len(barriers(jamp.autocast(fn), "cuda"))

    of_rows = lambda w: jnp.exp(w[:1, :1])  # noqa: E731
    assert count(of_rows) == count(lambda w: stop(of_rows(w))) + 1


BORDERS = {
    "jit": jax.jit,
    "two jits": lambda fn: jax.jit(jax.jit(fn)),
    "reshaped": lambda fn: lambda *args: jax.jit(fn)(*args).T.reshape(2, 4, ROWS),
    "cond": lambda fn: lambda w, x: jax.lax.cond(x[0, 0] > 0, fn, fn, w, x),
}
# Each operates on a matmul, so autocast does not inline its call.
PLAIN = lambda fn: fn, lambda fn: lambda *args: fn(*args).T.reshape(2, 4, ROWS)  # noqa: E731
ACTS = ("gelu", "exact gelu", "softmax", "gelu by hand")
ACTS_OF_JAX = ("softplus", "log_sigmoid", "standardize", "silu", "swish", "mish")


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("name", ACTS + ACTS_OF_JAX)
def test_a_border_changes_no_residual(name, border):
    """A gelu in a `jit` kept four times the bytes while its cast was outside."""
    act = ISLANDS[name] if name in ISLANDS else getattr(jax.nn, name)

    def residuals(around):
        call = around(lambda w, x: act(x @ w))
        v = jnp.ones((ROWS if border == "reshaped" else WIDTH, 3))
        found = kept(jamp.autocast(lambda w, x: call(w, x) @ v))
        large = [d for shape, d in found if np.prod(shape) == ROWS * WIDTH]
        return large.count("float32"), len(large)

    # The derivative of a softmax reads its half result, if no reshape comes before it.
    more = name == "softmax" and border == "reshaped"
    wide, count = residuals(PLAIN[border == "reshaped"])
    assert residuals(BORDERS[border]) == (wide, count + more)


def test_a_result_with_another_reader_is_not_rounded():
    def fn(w, x):
        y = jax.jit(lambda w, x: nn.gelu(x @ w))(w, x)
        return y @ w, y.sum()

    w, x = np.asarray(W, np.float16), np.asarray(X, np.float16)
    h = np.float64(np.float16(x @ w))
    y = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    np.testing.assert_allclose(jamp.autocast(fn)(W, X)[1], y.sum(), 1e-4)


def test_an_island_contains_the_bias_of_its_input():
    """XLA saved the matmul's sum with the bias too: GPT-2 moved 1.01 of the bytes."""
    fn = jamp.autocast(lambda w, x, b: nn.gelu(x @ w + b) @ w)
    written = jax.make_jaxpr(fn)(W, X, jnp.ones(WIDTH))
    (island,) = [e for e in walk(written) if "policy" in e.params]
    assert "with_bias" in str(island.params["jaxpr"])
    saved = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], W, X, jnp.ones(WIDTH))
    shapes = [(r.shape, str(r.dtype)) for r in jax.tree.leaves(saved)]
    assert shapes.count(((ROWS, WIDTH), "float16")) == 3  # x, x @ w and the gelu


def test_derivatives_of_all_orders_and_modes_agree_behind_barriers():
    """The oracle is the derivatives of the sum of `tanh(2 * x)` in float64."""
    x, two = jnp.linspace(-1, 1, 8)[None], 2 * jnp.eye(8)
    fn = jamp.autocast(lambda x: (jnp.tanh(x @ two) @ jnp.eye(8)).sum())
    t = np.tanh(2 * np.asarray(x, np.float64))
    first, second = 2 * (1 - t**2), -8 * t * (1 - t**2)
    reverse = jax.grad(fn)
    along = lambda f: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]  # noqa: E731
    for got, wanted in [
        (reverse(x), first),
        (along(fn), first.sum()),
        (along(reverse), second),
        (jax.grad(lambda x: reverse(x).sum())(x), second),
        (jax.grad(jax.checkpoint(lambda x: reverse(x).sum()))(x), second),
    ]:
        np.testing.assert_allclose(got, wanted, rtol=0.01, atol=0.01)


def test_a_scan_has_no_barriers():
    """The backward pass is its own loop. Barriers add 28 % to an LSTM's kernels."""

    def fn(w, x):
        layer = lambda c, xw: (c, nn.gelu(xw[0] @ xw[1]) @ xw[1])  # noqa: E731
        return jax.lax.scan(layer, 0, (x[None], w[None]))[1]

    assert not barriers(lambda w: jamp.autocast(fn)(w, X).sum(), "cuda")


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_returns_its_inputs_dtype(name):
    """The relu and the shortcut after a norm read and save half.

    A batch norm's mean divides by the number of rows, which float16 may not hold.
    """
    fn = jamp.autocast(lambda w, x: nn.relu(NORMS[name](x @ w)) @ w)
    for rows in (ROWS, 2**17):
        x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
        found = [e.outvars[0].aval for e in equations(fn, ["max"], W, x)]
        assert [str(y.dtype) for y in found if y.shape == x.shape] == ["float16"]


READ_IN_BOTH = {
    "of one array": (lambda w, x: x @ w * 3.0, "float32"),
    "of two arrays": (lambda w, x: (x @ w) * (x @ w.T), "float16"),
    "after a norm": (lambda w, x: NORMS["by hand"](x @ w) * 3.0, "float16"),
}


@pytest.mark.parametrize("name", READ_IN_BOTH)
def test_a_value_is_computed_in_float32_for_one_reader_if_that_is_free(name):
    """Recomputing a value from one array needs no more reads."""
    fn, expected = READ_IN_BOTH[name]
    both = jamp.autocast(lambda w, x: (lambda y: (jnp.exp(y), y @ w))(fn(w, x)))
    assert results(both, ["mul"], W, X)[-1] == expected


def test_two_broadcast_operands_both_vote():
    def fn(w, x):
        return jnp.tanh((x @ w)[:, :1] * jnp.sin(x[:1]))

    assert results(jamp.autocast(fn), ["tanh"], W, X) == ["float32"]


@pytest.mark.parametrize("promote", ["widest", "narrowest"])
def test_a_bias_is_part_of_its_product_and_the_loss_in_float32(promote):
    bias, labels = jnp.linspace(50.0, 51.0, WIDTH), jnp.arange(ROWS)

    def loss(w, x):
        logits = x @ w + bias
        return jax.nn.logsumexp(logits, -1) - logits[jnp.arange(ROWS), labels]

    product = X.astype(jnp.float16) @ W.astype(jnp.float16)
    # Only the loss reads the sum, so it is added in float32.
    logits = np.asarray(product.astype(jnp.float32) + bias, np.float64)
    shifted = logits - logits[np.arange(ROWS), labels][:, None]
    expected = np.log(np.exp(shifted).sum(-1))
    found = jamp.autocast(loss, promote=promote)(W, X)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def biased(b, x):
    return nn.gelu(x @ W + b).sum()


def shifted(b, x):
    """The second term is a matmul that is broadcast over a middle axis."""
    return nn.gelu(x @ W + (x[:, :1] * b) @ W).sum()


@pytest.mark.slow
@pytest.mark.parametrize("fn", [biased, shifted])
def test_a_summed_gradient_for_each_example_and_eagerly(fn):
    grad = jax.grad(jamp.autocast(fn))
    examples, bias = jnp.stack([X[:-1], X[1:]], 1)[:, None], jnp.ones(WIDTH)
    found = jax.vmap(grad, (None, 0))(bias, examples)
    with jax.disable_jit():
        expected = jnp.stack([grad(bias, x) for x in examples])
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    in_float32 = jax.vmap(jax.grad(fn), (None, 0))(bias, examples)
    np.testing.assert_allclose(found, in_float32, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("promote", "casts"), [("widest", 1), ("narrowest", 2)])
def test_a_norm_casts_once_or_apart_from_its_statistics(promote, casts):
    def norm(x):
        h = x @ x
        scale = jax.lax.rsqrt(jnp.square(h).mean(0) - jnp.square(h.mean(0)) + 1)
        return (h - h.mean(0)) * scale @ x

    program = jax.make_jaxpr(jamp.autocast(norm, promote=promote))(jnp.eye(8))
    wide = [e for e in program.eqns if e.params.get("new_dtype") == jnp.float32]
    assert [e.invars[0].aval.shape for e in wide[:-1]] == casts * [(8, 8)]


def test_a_users_checkpoint_policy_saves_no_value_of_jamp():
    """The names of jamp's own values begin with `jamp_`."""
    fn = jamp.autocast(lambda w, x: jax.nn.softmax(x @ w) @ w)
    policies = jax.checkpoint_policies
    nothing = kept(jax.checkpoint(fn, policy=policies.nothing_saveable))
    for name in ("softmax", "residual"):
        policy = policies.save_only_these_names(name)
        assert kept(jax.checkpoint(fn, policy=policy)) == nothing


@pytest.mark.parametrize(
    ("axis", "length", "scale", "recomputes"),
    [
        (-1, 32, None, True),
        (-1, 32, lambda g: g[:, None], True),
        (-1, 32, lambda g: g, False),
        (-1, 32, lambda g: g.reshape(1, 1, -1), False),
        (-1, 32, lambda g: g.reshape(1, -1, 1), True),
        (0, 32, None, False),
        (-1, 20_480, None, False),
    ],
)
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_gpu_recomputes_sums_only_in_rows_that_fit_a_kernel(
    level, axis, length, scale, recomputes
):
    properties = jamp.Properties.from_opt_level(level)

    def loss(params, x, keys, keep):
        w, g = params
        y = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w, keys), axis)
        y = y if scale is None else y * scale(g.astype(y.dtype))
        return jnp.where(keep, y / 0.9, 0) @ keys

    dtype = properties.cast_model_type or jnp.float32
    params = jnp.ones((8, 8), dtype), jnp.ones(32, dtype)
    x, keys = jnp.ones((2, 32, 8)), jnp.ones((2, length, 8))
    grads = jax.grad(lambda *args: jamp.cast_forward(loss, properties)(*args).sum())
    text = str(jax.make_jaxpr(grads)(params, x, keys, jnp.ones((32, length), bool)))
    assert ("jamp_sum" in text) == recomputes


@pytest.mark.parametrize("shift", [20.0, -20.0])
@pytest.mark.parametrize("scaled", [True, False])
def test_cotangents_of_exponentials_are_float32(shift, scaled):
    """Exponentials of shifted scores are e**20 times smaller or larger than 1."""

    def loss(w, t, x):
        e = jnp.exp(x @ w + shift)
        e, total = (e * t, 0.0) if scaled else (e, jnp.exp(t + shift))
        return ((e / (e.sum(-1, keepdims=True) + total)) @ x[:8]).std()

    x = jax.random.normal(jax.random.key(0), (16, 8))
    w, t = jnp.eye(8), jnp.ones(8) if scaled else jnp.ones((16, 1))
    want = jax.grad(loss, (0, 1))(w, t, x)
    got = jax.grad(lambda *a: 64 * jamp.autocast(loss)(*a), (0, 1))(w, t, x)
    for a, b in zip(got, want, strict=True):
        assert jnp.linalg.norm(a / 64 - b) < 0.02 * jnp.linalg.norm(b)
