"""Test loops: shared weights, sums over the trips, carries and conditions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp._autocast import subjaxprs
from tests.support.constructs import AROUND, repeat
from tests.support.extent import slow_except
from tests.support.near import assert_near
from tests.support.programs import equations, evaluate
from tests.support.states import make

N = 8
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32) / 3  # noqa: E731
W, XS, START = {"i": normal(N, N), "h": normal(N, N)}, normal(5, 2, N), jnp.ones((2, N))
HALVES = {"float16": "f16", "bfloat16": "bf16"}
halves = pytest.mark.parametrize("half", HALVES)
LEVELS = "O0", "O1", "O2", "O4", "O5", "O6"


def once(w, xs):
    """Reads each weight once, so that the concatenation can precede the loop."""
    both = lambda: jnp.concatenate([w["i"], w["h"].T])  # noqa: E731
    beside = lambda *arrays: jnp.concatenate(arrays, axis=1)  # noqa: E731
    return repeat(lambda c, x: jnp.tanh(beside(x, c) @ both()), START, xs)


def twice(w, xs):
    """Also reads one weight separately, as the left operand."""

    def trip(c, x):
        first, second = jnp.split(x @ jnp.concatenate([w["i"], w["h"].T], 1), 2, axis=1)
        return jnp.tanh(first + (w["h"] @ c.T).T * second)

    return repeat(trip, START, xs)


def printing(w, xs):
    def trip(c, x):
        jax.debug.print("{}", c.sum())
        return c + x @ jnp.concatenate([w["i"], w["h"]]).reshape(2, N, N).sum(0)

    return repeat(trip, START, xs)


WRAPS = AROUND | {
    "while": lambda fn: (
        lambda w, xs: jax.lax.fori_loop(
            0, xs.astype(int)[0, 0, 0] + 2, lambda _, c: c + fn(w, xs), START
        )
    )
}


def consts_and_body(fn):
    """Returns the innermost scan's number of constants, and its program."""
    scan = equations(fn, ["scan"], W, XS)[-1]
    return subjaxprs.scan_counts(scan)[0], str(scan.params["jaxpr"])


def assert_close(ours, plain, half):
    got, expected = (evaluate(fn, W, XS) for fn in (ours, plain))
    assert_near(got, expected, 30 * jnp.finfo(half).eps)


@pytest.mark.parametrize("name", WRAPS)
def test_constants_are_rearranged_before_the_loop(name):
    fn = WRAPS[name](once)
    _, body = consts_and_body(jamp.autocast(fn))
    assert body.count("concatenate[") == 1 and "transpose[" not in body
    assert_close(jamp.autocast(fn), fn, "float16")


@pytest.mark.parametrize("fn", [twice, printing])
def test_a_weight_read_twice_or_beside_an_effect_stays_in_the_loop(fn):
    consts, body = consts_and_body(jamp.autocast(fn))
    assert consts == consts_and_body(fn)[0] == 2 and "concatenate[" in body


def total(fn):
    return lambda w, xs: jnp.square(fn(w, xs)).sum()


DERIVATIVES = {
    "of both": lambda f: jax.grad(total(f), argnums=(0, 1)),
    "of inputs": lambda f: jax.grad(total(f), argnums=1),
    "forward": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "of weights": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
    "of examples": lambda f: (
        lambda w, x: jax.vmap(jax.grad(total(f)), (None, 0))(w, jnp.stack([x, 2 * x]))
    ),
    "second": lambda f: lambda w, x: jax.jvp(jax.grad(total(f)), (w, x), (w, x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    half = list(HALVES)[list(DERIVATIVES).index(name) % 2]
    for fn in (once, twice):
        ours = jamp.autocast(fn, half)
        assert_close(DERIVATIVES[name](ours), DERIVATIVES[name](fn), half)


@halves
def test_a_sum_over_many_trips_is_exact(half):
    """A half sum would stop at 256 in bfloat16, and at 2,048 in float16."""
    fn = jamp.autocast(
        lambda w, x: jax.lax.scan(lambda c, x: (c, x @ w), 0, x)[1], half
    )
    grad = jax.grad(lambda w: fn(w, jnp.ones((2500, 1, 2))).sum())
    np.testing.assert_array_equal(grad(jnp.ones((2, 2))), 2500)


@halves
@pytest.mark.parametrize("promote", ["widest", "narrowest"])
def test_all_readers_of_a_gate_read_the_same_digits(half, promote):
    """A weighted mean of ones is one if both weights use the same gate."""

    def cell(h, x):
        gate = jax.nn.sigmoid(x @ W["i"] + h @ W["h"])
        return (1 - gate) * h + gate * jnp.tanh(x @ W["i"] + 20)

    cast = jamp.autocast(lambda xs: repeat(cell, START, xs), half, promote=promote)
    # With narrowest, the gate makes the carry half, and each of five sums rounds.
    error = 1e-6 if promote == "widest" else 5 * float(jnp.finfo(half).eps)
    np.testing.assert_allclose(evaluate(cast, XS), 1, rtol=error)


SMALL, STEPS = 1 / 512, 200  # half of the step from 1 to the next bfloat16 number
GROWN = (1 + SMALL) ** STEPS
EYE = jnp.eye(4)


def small(c, w):
    return SMALL * (c @ w)


def step(c, w):
    return c + small(c, w)


def looped(body):
    return lambda w, c: repeat(lambda c, _: body(c, w), c, length=STEPS)


def midpoint(c, w):
    half = c + small(c, w) / 2
    return c + small(half, w) * (1 - SMALL / 2) / (1 + SMALL / 2)  # the sum is exact


def masked(c, w):
    new = jnp.clip((c + small(c, w) / 2) + small(c, w) / 2, -1e3, 1e3)
    return jnp.where(jnp.isfinite(new), new, c)


def flash(w, c):
    """Sums exponentials, each divided by the largest so far."""

    def trip(c, x):
        top = jnp.maximum(c[0], (x @ w).max())
        return top, c[1] * jnp.exp(c[0] - top) + jnp.exp(x @ w - top) / 256

    return repeat(trip, (jnp.float32(0), c), jnp.zeros((STEPS, *c.shape)))[1]


INTEGRATE = {
    **{name: looped(AROUND[name](step)) for name in AROUND},
    "midpoint": looped(midpoint),
    "masked": looped(masked),
    "decay": looped(lambda c, w: (1 - SMALL) * c + 2 * small(c, w)),
    "numbers": lambda w, c: repeat(
        lambda c, t: (1 - t) * c + 2 * t * (c @ w), c, jnp.full(STEPS, SMALL)
    ),
    "scales": looped(lambda c, w: c * (1 + SMALL * (c @ w) / c)),
    "subtracts": looped(lambda c, w: c - small(-c, w)),
    "two": lambda w, c: looped(
        lambda cs, w: (cs[0] + small(cs[1], w), cs[1] + small(cs[0], w))
    )(w, (c, c))[0],
    "exchanged": lambda w, c: looped(
        lambda cs, w: repeat(lambda c, _: (c[1], c[0] + small(c[1], w)), cs, length=2)
    )(w, (c, c))[1],
    "fori": lambda w, c: jax.lax.fori_loop(0, STEPS, lambda _, c: step(c, w), c),
    "while": lambda w, c: jax.lax.while_loop(
        lambda state: state[0] < STEPS,
        lambda state: (state[0] + 1, state[1] + small(state[1], w)),
        (0, c),
    )[1],
    # With one row, the sum looks like a matmul and its bias.
    "one row": lambda w, c: looped(lambda c, w: c + c @ w)(SMALL * w, c[0]),
    "data": lambda w, c: repeat(
        lambda c, x: c + x @ w, c, c * jnp.full((STEPS, 1, 1), 2**-8)
    ),
    "flash": flash,
}


FAST = "plain scan while fori cond subtracts midpoint jit custom_jvp custom_vjp".split()


@pytest.mark.parametrize("name", slow_except(FAST, INTEGRATE))
def test_a_loop_that_adds_to_its_carry_keeps_the_small_steps(name):
    """The carry starts as an input and as the result of a matmul."""
    loop = INTEGRATE[name]
    exact = 1 + STEPS / 256 if name in ("data", "flash") else GROWN
    start = jnp.ones((2, 4))

    def loss_fn(w, start):
        ends = loop(w, start), loop(w, start @ w)
        return 0.0 * w.sum(), jax.lax.stop_gradient(ends)

    grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    found = {level: grad(make(level, EYE), start)[0][1] for level in LEVELS}
    for promote in ("widest", "narrowest"):
        cast = jamp.autocast(loss_fn, "bfloat16", promote=promote)
        found[promote] = jax.jit(cast)(EYE, start)[1]
    for where, ends in found.items():
        for end in ends:
            np.testing.assert_allclose(end, exact, rtol=2**-7, err_msg=where)


def carries(fn, *args, promote="narrowest"):
    """Returns the dtypes that the innermost scan carries."""
    cast = jamp.autocast(fn, "bfloat16", promote=promote)
    scan = equations(cast, ["scan"], *args)[-1]
    _, count = subjaxprs.scan_counts(scan)
    found = [str(v.aval.dtype) for v in scan.outvars[:count]]
    return [dtype for dtype in found if dtype != "int32"]


def gated(ws, x):
    def cell(h, x):
        gate = jax.nn.sigmoid(x @ ws[0] + h @ ws[1])
        return gate * h + (1 - gate) * jnp.tanh(x @ ws[2])

    return repeat(cell, x @ ws[0], jnp.stack([x, x]))


IN_HALF = {
    "layers": lambda ws, x: repeat(lambda x, w: x + jnp.tanh(x @ w), x, ws),
    "counter": lambda ws, x: jax.lax.fori_loop(
        0, len(ws), lambda i, x: x + jnp.tanh(x @ ws[i]), x
    ),
    "gated": gated,
    "lstm": lambda ws, x: repeat(
        lambda c, x: lstm(ws, c, x), (x @ ws[0], x @ ws[1]), jnp.stack([x, x])
    ),
}
# Loops whose iterations share their weights, and that start in half.
IN_FLOAT32 = {
    "rnn": lambda ws, h, x: jnp.tanh(x @ ws[0] + h @ ws[1]),
    "masked": lambda ws, h, x: jnp.where(x[:1] > 0, jnp.tanh(x @ ws[0] + h @ ws[1]), h),
    "blend": lambda ws, h, x: 0.9 * h + 0.1 * (x @ ws[0]),
    "blend with data": lambda ws, h, x: x * h + (1 - x) * (x @ ws[0]),
    "small gate": lambda ws, h, x: (1 - 0.01 * jax.nn.sigmoid(h @ ws[1])) * h,
    "gate of a step": lambda ws, h, x: h + jax.nn.sigmoid(h @ ws[1]) * (x @ ws[0]),
    "logsumexp": lambda ws, h, x: (
        jax.nn.logsumexp(h[:, None] + ws[1], axis=-1) + x @ ws[0]
    ),
    "logaddexp": lambda ws, h, x: jnp.logaddexp(h, x @ ws[0]),
    "viterbi": lambda ws, h, x: (h[:, None] + ws[1]).max(-1) + x @ ws[0],
    "running maximum": lambda ws, h, x: jnp.maximum(h, x @ ws[0]),
    "kept": lambda ws, h, x: h * 1.0,
    "normalized": lambda ws, h, x: (h @ ws[0]) / jnp.linalg.norm(h @ ws[0]),
}


def lstm(ws, carry, x):
    c, h = carry
    i, f, o = (jax.nn.sigmoid(x @ w + h @ w.T) for w in ws)
    c = f * c + i * jnp.tanh(x @ ws[0] + h @ ws[1])
    return c, o * jnp.tanh(c)


@pytest.mark.parametrize("fn", IN_HALF.values(), ids=IN_HALF)
def test_layers_and_gates_carry_half(fn):
    found = carries(fn, jnp.stack([EYE] * 3), jnp.ones((4, 4)))
    assert set(found) == {"bfloat16"}


@pytest.mark.parametrize("name", IN_FLOAT32)
@pytest.mark.parametrize("wrap", slow_except(["jit"], ["plain", "jit", "checkpoint"]))
def test_loops_that_share_their_weights_carry_float32(wrap, name):
    def fn(ws, x):
        step = lambda h, x: AROUND[wrap](lambda h, x: IN_FLOAT32[name](ws, h, x))(h, x)  # noqa: E731
        return repeat(step, x @ ws[0], jnp.stack([x, x]))

    assert carries(fn, jnp.stack([EYE] * 3), jnp.ones((4, 4))) == ["float32"]


@pytest.mark.parametrize(
    ("promote", "stream"), [("widest", "float32"), ("narrowest", "bfloat16")]
)
def test_a_carry_that_only_holds_activations_is_half_with_narrowest(promote, stream):
    def layer(carry, w):
        x, total, mean = carry
        y = x @ w
        return x + y, total + y.sum(), 0.9 * mean + 0.1 * w[0]

    fn = lambda ws, x: repeat(layer, (x, 0.0, x[0]), ws)  # noqa: E731
    found = carries(fn, jnp.stack([EYE] * 2), jnp.ones((4, 4)), promote=promote)
    assert found == [stream, "float32", "float32"]


# Loops over 1,000 rows, with float32 carries. In half, their steps would be lost.
SLOWLY = jnp.full(N, 1 - 2.0**-8)
LONG = {
    "decay per channel": lambda h, u: SLOWLY * h + (1 - SLOWLY) * u,
    "growth": lambda h, u: h * (1 + u * 0.001) + u * 0.001,
    "fires": lambda h, u: (h * SLOWLY + u * 0.01) * jnp.where(h > 5, 0.0, 1.0),
    "under vmap": lambda h, u: jax.vmap(lambda h, u, r: r * h + u)(h, u, SLOWLY),
    "ratio": lambda h, u: h / SLOWLY + u * 0.001 - h * 2.0**-8,
    "sorted": lambda h, u: jnp.sort(h) + u * 0.1,
    "maximum": lambda h, u: jax.lax.cummax(h) + u * 0.1,
    "exp of log": lambda h, u: jnp.exp(jnp.log(h)) + u * 0.1,
    "statistic": lambda h, u: jax.nn.logsumexp(h) + u * 0.01,
    "silu": lambda h, u: jax.nn.silu(h + 8) + u * 0.01 - 8,
}


def long_loop(name, w, x):
    step = lambda h, u: LONG[name](h, u)  # noqa: E731
    return repeat(step, jnp.ones(N), x @ w).mean()


def sum_in_a_ref(w, x):
    total = jax.new_ref(jnp.zeros(N))

    def step(c, row):
        total[...] += row @ w
        return c

    repeat(step, 0.0, x)
    return total[...].mean()


def noise_from_a_carried_key(w, x):
    def step(carry, _):
        (key, now), h = jax.random.split(carry[0]), carry[1]
        return key, h + (h @ jax.random.normal(now, (N, N))) * 0.0005 + 0.003

    return repeat(step, (jax.random.key(0), x[:64] @ w + 4), length=400)[1].mean()


def data_by_a_counter(w, x):
    noise = x[:, :, None] * x[:, None] - 1
    step = lambda i, h: h + (h @ noise[i]) * 0.0005 + 0.003  # noqa: E731
    return jax.lax.fori_loop(0, 400, step, x[:64] @ w + 4).mean()


LONG_LOOPS = {name: functools.partial(long_loop, name) for name in LONG} | {
    "ref": sum_in_a_ref,
    "key": noise_from_a_carried_key,
    "counter": data_by_a_counter,
}


@pytest.mark.parametrize("level", slow_except(["O5"], LEVELS))
@pytest.mark.parametrize("name", LONG_LOOPS)
def test_long_loops_keep_their_digits(name, level):
    """The matmul with the identity is exact in half, so float32 is the oracle."""
    eye = jnp.eye(N)
    x = jnp.round(jnp.abs(jnp.asarray(rng_of(1000, N), jnp.float32)) * 16) / 16
    state = make(level, eye, loss_scale=8.0)
    loss_fn = LONG_LOOPS[name]
    want, exact = jax.jit(jax.value_and_grad(loss_fn))(eye, x)
    loss, grads = evaluate(jamp.scaled_value_and_grad(loss_fn), state, x)
    np.testing.assert_allclose(loss, want, rtol=0.005)
    error = jnp.linalg.norm(grads - exact) / (jnp.linalg.norm(exact) + 1e-6)
    assert error < 0.02, error


def rng_of(*shape):
    return np.random.default_rng(1).normal(size=shape)


def chain_in_numpy(combined, params, x):
    scores = x @ params["w"]
    a = scores[0]
    for score in scores[1:]:
        a = combined(a[:, None] + params["moves"], axis=0) + score
    return combined(a, axis=0)


def chain(combined, params, x):
    """Combines the scores of all paths of a chain, as in a CRF."""
    scores, moves = x @ params["w"], params["moves"]
    step = lambda a, score: (combined(a[:, None] + moves, axis=0) + score, None)  # noqa: E731
    return combined(jax.lax.scan(step, scores[0], scores[1:])[0], axis=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("combined", "in_numpy"),
    [(jax.nn.logsumexp, np.logaddexp.reduce), (jnp.max, np.max)],
    ids=["log_partition", "viterbi"],
)
def test_dynamic_programs_in_log_space(combined, in_numpy, level):
    params = {"w": 3 * normal(16, 8), "moves": 3 * normal(8, 8)}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1024, 16)), jnp.float32)
    state = make(level, params, loss_scale=1.0)
    fn = functools.partial(chain, combined)
    loss, grads = evaluate(jamp.scaled_value_and_grad(fn), state, x)
    wide, x = {k: np.float64(p) for k, p in params.items()}, np.float64(x)
    np.testing.assert_allclose(loss, chain_in_numpy(in_numpy, wide, x), rtol=0.002)
    # Each of the 1,023 moves is counted once.
    np.testing.assert_allclose(grads["moves"].sum(), 1023, rtol=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_ctc_loss(level):
    """Moving all logits of a frame by one number changes no probability."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (16, 16))}
    x = jax.random.normal(keys[1], (2, 96, 16))
    labels = jnp.arange(32).reshape(2, 16) % 15 + 1

    def loss_fn(params, x):
        logits, pads = x @ params["w"], jnp.zeros((2, 96))
        return optax.ctc_loss(logits, pads, labels, jnp.zeros((2, 16))).mean()

    want, exact = jax.value_and_grad(loss_fn)(params, x)  # in float32
    state = make(level, params, loss_scale=1.0)
    loss, grads = evaluate(jamp.scaled_value_and_grad(loss_fn), state, x)
    np.testing.assert_allclose(loss, want, rtol=0.001)
    error = jnp.linalg.norm(grads["w"] - exact["w"]) / jnp.linalg.norm(exact["w"])
    assert error < 0.02


def cell(w, x, z, product=jnp.matmul):
    return jnp.tanh(product(z, w) / 9 + x)


def fixed_point(w, x, cell=cell):
    """Iterates to a fixed point. A bfloat16 matmul keeps the residual above 1e-4."""

    step = lambda c: (cell(w, x, c[0]), c[0])  # noqa: E731
    ends = lambda c: jnp.abs(c[0] - c[1]).max() > 1e-4  # noqa: E731
    return jax.lax.while_loop(ends, step, (cell(w, x, x), x))[0]


def late(w, x):
    """The condition depends on the matmul through two other carries."""
    step = lambda c: (c[1], c[2], (c[2] @ w).sum() * x, c[3] + 1)  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0].sum() > 0, step, (x, x, x, 0))[1]


PRECISE = functools.partial(cell, product=jamp.float_function(jnp.matmul))
# Loops, and whether their condition depends on a half matmul.
WAITING = {
    "fixed point": (fixed_point, True),
    "in jit": (jax.jit(jax.checkpoint(fixed_point)), True),
    "late": (late, True),
    "in the condition": (
        lambda w, x: jax.lax.while_loop(
            lambda z: (z @ w).sum() > 1, lambda z: z / 2, x
        ),
        True,
    ),
    "counted": (
        lambda w, x: jax.lax.while_loop(
            lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ w), (0, x)
        )[1],
        False,
    ),
    "in float32": (lambda w, x: fixed_point(w, x, PRECISE), False),
}


@pytest.mark.parametrize("name", WAITING)
def test_explain_warns_of_a_condition_that_depends_on_a_half_matmul(name):
    (fn, depends), x = WAITING[name], jnp.ones((8, 8))
    warnings = {"autocast": jamp.explain(fn)(x, x).warnings}
    loss_fn = lambda w, x: 0 * w.sum() + jax.lax.stop_gradient(fn(w, x)).sum()  # noqa: E731
    for level in LEVELS:
        warnings[level] = jamp.explain(loss_fn)(make(level, x), x).warnings
    for where, found in warnings.items():
        waits = [w for w in found if "while: half condition" in w]
        assert len(waits) == (depends and where != "O0"), where


def test_a_gradient_in_a_loop_asks_for_no_device(monkeypatch):
    """A program may be lowered for another platform than the one that traces it."""

    def asked(*_, **__):
        raise AssertionError("A trace asked for the local devices.")

    monkeypatch.setattr(jax, "local_devices", asked)
    step = lambda w: repeat(lambda c, _: c @ w, jnp.ones((2, 8)), length=3).sum()  # noqa: E731
    jax.jit(jax.grad(jamp.autocast(step))).trace(jnp.eye(8))
