"""Test `compare` on planted faults, known errors and many kinds of programs."""

import ast
import functools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jamp
import jamp.nnx
from benchmarks.lean_transformers import GPT2
from jamp.diagnostics import _compare, compare
from tests.diagnostics.frameworks import FRAMEWORKS, lines_of, run

pytestmark = pytest.mark.standard_promotion  # as in the reader's program

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((32, 32)) / np.sqrt(32)).astype(np.float32)
X = RNG.standard_normal((16, 32)).astype(np.float32)


def begin(params, level, **options):
    params = jax.tree.map(jnp.asarray, params)
    return jamp.initialize(params, optax.sgd(1.0), level, verbosity=0, **options)


# ---- planted faults: functions of params and a batch, each with its repair


def norm(p, x, how=jamp.half_function):
    def of(h):
        mean = h.mean(-1, keepdims=True)
        return (h - mean) * lax.rsqrt((h * h).mean(-1, keepdims=True) - mean**2)  # here

    return how(of)(x @ p["a"] + 30) @ p["b"]


def softmax(p, x, how=jamp.half_function):
    return how(jax.nn.softmax)(x @ p["a"] + 100) @ p["b"]  # here


def rotary(p, x):
    angle = jnp.arange(1000.0, 1016)[:, None] * p["inv_freq"]
    turn = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)  # here
    return (x @ p["a"] * turn) @ p["b"]


def steps(p, x, how=jamp.half_function):
    body = lambda t, _: (how(jnp.add)(t, 1e-4), None)  # noqa: E731  # here
    return x @ p["a"] * lax.scan(body, jnp.float32(1), length=300)[0]


def router(p, x):
    h = jnp.tanh(x @ p["a"])
    gate = (h @ p["router"] > 0).astype(x.dtype)  # here
    return (h @ p["b"] * gate) @ p["c"]


def subtract(s, m):
    return jamp.half_function(lambda s: s - m * 1e9)(s)  # here


def mask(p, x, hide=subtract):
    seen = (jnp.arange(32) > 15).astype(x.dtype)
    return jax.nn.softmax(hide(x @ p["a"], seen)) @ p["b"]


def where(s, m):
    return jnp.where(m > 0, jnp.finfo(s.dtype).min, s)


def total_exp(s):
    return jnp.log(jamp.half_function(lambda s: jnp.exp(s).sum(-1))(s))  # here


def log_sum_exp(p, x, of=total_exp):
    return jnp.clip(of(10 * (x @ p["a"])), 0, 20)


FREQUENCIES = (1 / 1e4 ** (np.arange(16) / 16)).astype(np.float32)
PAIR = {"a": W, "b": W}
FP8 = {"fp8": jamp.Fp8(smallest=1)}
FLOAT = {"how": jamp.float_function}
# A program, its params, level and options, words of the advice, and the repair.
FAULTS = {
    "norm": (norm, PAIR, "O5", {}, "jamp.float_function", FLOAT),
    "softmax": (softmax, PAIR, "O5", {}, "jamp.float_function", FLOAT),
    "inv_freq": (rotary, {**PAIR, "inv_freq": FREQUENCIES}, "O5", {}, "keep_fp32", {}),
    "steps": (steps, PAIR, "O5", {}, "jamp.float_function", FLOAT),
    "router": (router, {**PAIR, "router": W, "c": W}, "O6", FP8, "keep=", {}),
    "mask": (mask, PAIR, "O2", {}, "jnp.finfo(x.dtype).min", {"hide": where}),
    "logsumexp": (
        *(log_sum_exp, PAIR, "O2", {}, "jax.nn.logsumexp"),
        {"of": functools.partial(jax.nn.logsumexp, axis=-1)},
    ),
}
# `make test` runs each fault in one framework, and each framework.
ALL = [
    pytest.param(fault, framework, marks=[pytest.mark.slow] * ((i - j) % 3 > 0))
    for i, fault in enumerate(FAULTS)
    for j, framework in enumerate(FRAMEWORKS)
]


def square(y):
    return (y.astype(jnp.float32) ** 2).mean()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(("fault", "framework"), ALL)
def test_a_planted_fault_is_found_and_its_advice_repairs_it(fault, framework):
    fn, params, level, options, words, repair = FAULTS[fault]
    against_o0 = lambda loss_fn: compare(loss_fn, "O0")  # noqa: E731
    of = functools.partial(run, against_o0, framework, level, square)
    report = of(fn, params, X, options)
    lines = lines_of({mask: subtract, log_sum_exp: total_exp}.get(fn, fn))
    found = [row for row in report.operations[:3] if row.source in lines]
    assert found and found[0] in report.flagged, report
    advice = found[0].advice
    assert words in advice, advice
    if setting := re.search(r"(keep_fp32|keep)=('[^']*')", advice):
        kept = {setting[1]: ast.literal_eval(setting[2])}
        options = kept if "keep_fp32" in kept else {"fp8": jamp.Fp8(smallest=1, **kept)}
    again = of(functools.partial(fn, **repair), params, X, options)
    assert not [row for row in again.flagged if row.source in lines], again


LOSSES = optax.softmax_cross_entropy_with_integer_labels


def gpt2(level, shape=(2, 16), width=48, options=(), **sizes):
    """Returns a loss, a state and tokens."""
    tokens = jax.random.randint(jax.random.key(1), shape, 0, 100)
    model = GPT2(**{"depth": 2, "width": width, "vocabulary": 128} | sizes)
    params = model.init(jax.random.key(0), tokens)["params"]
    state = begin(params, level, apply_fn=model.apply, **dict(options))

    def loss_fn(params, x):
        logits = state.apply_fn({"params": params}, x).astype(jnp.float32)
        return LOSSES(logits[:, :-1], x[:, 1:]).mean()

    return loss_fn, state, tokens


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5", "O6"])
@pytest.mark.parametrize("scan", [False, True])
def test_an_intact_gpt2_has_no_flag(level, scan):
    options = FP8 if level == "O6" else {}
    loss_fn, state, tokens = gpt2(level, scan=scan, options=options)
    report = compare(loss_fn, "O0")(state, tokens)
    assert report.flagged == (), report
    assert "Block_0" in str(report) or scan
    if level == "O6":
        assert any(row.dtype.startswith("float8") for row in report.rows)
    else:
        assert len(report.unaligned) < len(report.rows) / 8, report.unaligned


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_the_errors_of_three_layers_match_numpy():
    def loss_fn(p, x):
        return square(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"])

    weights = [W, 2 * W.T, W @ W]
    state = begin(dict(zip("abc", weights, strict=True)), "O5")
    report = compare(loss_fn, "O0")(state, X)
    right = half = X.astype(np.float64)
    expected = []
    for i, w in enumerate(weights):
        right, half = right @ w.astype(np.float64), rounded(rounded(half) @ rounded(w))
        expected.append(np.linalg.norm(half - right) / np.linalg.norm(right))
        right, half = (np.tanh(right), np.tanh(half)) if i < 2 else (right, half)
    products = [row for row in report.rows if row.primitive == "dot_general"]
    forward = [row for row in products if row.phase == "forward"]
    np.testing.assert_allclose([row.error for row in forward], expected, rtol=0.02)
    # Only the weight of the first matmul's operands has an error before it.
    rounding = np.linalg.norm(rounded(W) - W) / np.linalg.norm(W)
    assert abs(forward[0].added - (expected[0] - rounding)) < 1e-5
    assert report.flagged == () and report.first() is None
    assert report.first(beyond=expected[0] * 0.99) is forward[0]
    assert 0.5 < report.gradients["c"] / expected[-1] < 2


@pytest.mark.slow
def test_comparing_takes_at_most_four_times_the_memory_of_a_step(monkeypatch):
    loss_fn, state, tokens = gpt2("O5", (8, 64), 96, vocabulary=512)

    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads=grads), loss

    memory = jax.jit(step).lower(state, tokens).compile().memory_analysis()
    of_step = memory.temp_size_in_bytes + memory.output_size_in_bytes
    live = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    before, most, add = live(), [], _compare.Rows.add
    watched = lambda *args: (most.append(live()), add(*args))  # noqa: E731
    monkeypatch.setattr(_compare.Rows, "add", watched)
    compare(loss_fn, "O0")(state, tokens)
    assert 1 < (max(most) - before) / of_step < 4


def test_ulps_overflow_and_underflow_match_numpy():
    x = 10.0 ** RNG.uniform(-9, 5.5, 4096).astype(np.float32)
    double = jamp.half_function(lambda x: x + x)
    report = compare(lambda p, x: square(double(x) * p["a"]), "O0")(
        begin({"a": np.ones(1, np.float32)}, "O2"), x
    )
    (row,) = (x for x in report.rows if x.primitive == "add" and x.phase == "forward")
    with np.errstate(over="ignore"):
        half, right = x.astype(np.float16), x.astype(np.float64) * 2
        half = (half + half).astype(np.float64)
    good = np.isfinite(half)
    unit = np.spacing(right[good].astype(np.float16)).astype(np.float64)
    normal = right[good] > 2.0**-14
    gap = np.abs(half - right)[good]
    assert row.overflow == np.mean(~good) > 0 and np.isinf(row.error)
    assert row.underflow == np.mean(half == 0) > 0
    np.testing.assert_allclose(row.ulps, (gap / unit)[normal].max(), 0.01)


def with_haiku():
    hk = pytest.importorskip("haiku")  # absent in `make dist`
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 32])(x)))
    params = net.init(jax.random.key(0), X)
    return params, lambda p, x: square(net.apply(p, x)), "mlp/linear_0"


def with_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(32, 32, 32, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss_fn = lambda p, x: square(jax.vmap(eqx.combine(p, static))(x))  # noqa: E731
    return params, loss_fn, "eqx.nn.MLP/eqx.nn.Linear"


@pytest.mark.slow
@pytest.mark.parametrize("model", [with_haiku, with_equinox])
def test_models_of_other_libraries_have_modules_and_no_flag(model):
    params, loss_fn, module = model()
    report = compare(loss_fn, "O0")(begin(params, "O5"), X)
    matmuls = [row for row in report.rows if row.primitive == "dot_general"]
    assert {row.phase for row in matmuls} == {"forward", "backward"}
    # Rounding switches some relus, so gradients differ more.
    assert all(0 < row.error < 0.1 for row in matmuls), report
    assert report.flagged == (), report
    assert matmuls[0].module == module
    assert len(report.unaligned) < len(report.rows) / 8, report.unaligned
    title = str(report).splitlines()[1].split()
    assert title == "module forward backward error added worst operation".split()


def test_errors_of_loops_are_counted_by_iteration():
    half = jamp.half_function(jnp.add)

    def loss_fn(p, x):
        t, _ = lax.scan(lambda t, _: (half(t, 1e-3), None), jnp.float32(1), length=5)
        # In half, the sum never reaches 1.01.
        end = lambda c: (c[0] < 1.01) & (c[1] < 30)  # noqa: E731
        step = lambda c: (half(c[0], 1e-3), c[1] + 1)  # noqa: E731
        u, _ = lax.while_loop(end, step, (jnp.float32(1), 0))
        return square(x @ p["a"]) + t + lax.stop_gradient(u)

    report = compare(loss_fn, "O0")(begin({"a": W}, "O5"), X)
    scan, loop = (row for row in report.rows if row.primitive == "add" and row.loops)
    assert scan.loops == ("iteration 4 of 5 of a scan",)
    # 1 stays 1 in bfloat16: the error is n / 1000 after n iterations.
    expected = [1 - 1 / (1 + n / 1000) for n in range(1, 6)]
    np.testing.assert_allclose(
        [scan.mean, scan.error], [np.mean(expected), expected[-1]], 1e-3
    )
    assert loop.loops == ("iteration 9 of a while loop",)
    assert any("more iterations" in x and "O5" in x for x in report.unaligned)


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (g * 2,))


@pytest.mark.slow
def test_a_model_of_many_constructs():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(nn.Dense)(32)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            return nn.Dropout(0.5, deterministic=False)(identity(x))

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    mapped = jax.shard_map(lambda x: 2 * x, mesh=mesh, **specs)
    key = jax.random.key(0)
    variables = Layer().init({"params": key, "dropout": key}, X)

    def loss_fn(params, x):
        given = {"params": params, "batch_stats": variables["batch_stats"]}
        y, _ = Layer().apply(given, x, rngs={"dropout": key}, mutable=["batch_stats"])
        y = lax.cond(y[0, 0] > -100, jnp.tanh, jnp.sin, mapped(y))
        return square(y), "aux"

    state = begin(variables["params"], "O2")
    report = compare(loss_fn, "O0")(state, X)
    found = {row.primitive for row in report.rows}
    assert {"dot_general", "shard_map", "tanh", "rsqrt"} <= found
    assert all(row.error < 0.05 for row in report.rows), report  # the same dropout
    assert {row.phase for row in report.rows} == {"forward", "backward"}
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    added = [row["added"] for row in found["rows"]]
    assert added == sorted(added, reverse=True)
    few = compare(loss_fn, "O0", only="Layer/BatchNorm_0")(state, X)
    assert {row.module for row in few.rows} == {"Layer/BatchNorm_0"}


def test_two_settings_of_one_level_are_compared():
    def loss_fn(p, x):
        scores, chosen = lax.top_k(x @ p["a"], 4)
        return square(scores @ p["b"][:4]) + 0 * chosen.sum()

    report = compare(loss_fn, "O5", keep_fp32="a")(begin(PAIR, "O5"), X)
    assert report.levels == ("O5", "O5, keep_fp32")
    (row,) = (row for row in report.rows if row.primitive == "top_k")
    right = np.argsort(-(X @ W), kind="stable")[:, :4]
    half = lax.top_k(jnp.asarray(X, "bfloat16") @ W.astype("bfloat16"), 4)[1]
    assert row.error == pytest.approx(np.mean(np.asarray(half) != right), abs=0.05)


def test_a_sum_that_cancels_is_no_fault():
    def loss_fn(p, x):
        y = jax.nn.softmax(x @ p["a"] + p["bias"])  # softmax does not see `bias`
        return square(y @ p["b"])

    params = {**PAIR, "bias": np.zeros((16, 1), np.float32)}
    report = compare(loss_fn, "O0")(begin(params, "O5"), X)
    assert report.flagged == (), report


def in_a_loop(p, x, key):
    body = lambda c, key: (c + jax.random.normal(key, c.shape), c)  # noqa: E731
    return square(lax.scan(body, x @ p["a"], jax.random.split(key, 2))[1])


def branches(p, x, flag):
    return (square(x @ p["a"]) if flag else 0.0), {"text": "aux", "n": x.argmax()}


KEY = jax.random.key(0)
# Losses and their other arguments.
OTHERS = {
    "dropout": (
        lambda p, x, key: square(
            jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ p["a"]
        ),
        KEY,
    ),
    "noise in a loop": (in_a_loop, KEY),
    "no iteration": [
        lambda p, x: square(lax.scan(lambda c, _: (c, c), x @ p["a"], length=0)[0])
    ],
    "a branch of Python": (branches, True),
    "complex": [lambda p, x: square(jnp.abs(jnp.fft.fft(x @ p["a"])))],
    "no numbers": [lambda p, x: square(x @ p["a"]) + x[:0].sum() + 0 * p["n"]],
    "infinite mask": [
        lambda p, x: square(jax.nn.softmax(jnp.where(x > 0, x @ p["a"], -jnp.inf)))
    ],
}


@pytest.mark.parametrize("name", OTHERS)
def test_programs_with_unusual_values_have_no_flag(name):
    loss_fn, *args = OTHERS[name]
    state = begin({"a": W, "n": np.int32(3), "empty": {}}, "O5")
    report = compare(loss_fn, "O0")(state, X, *args)
    row = next(row for row in report.rows if row.primitive == "dot_general")
    assert 0 < row.error < 0.01 and report.flagged == (), report


def test_calls_of_one_program_in_one_line_are_all_compared():
    def loss_fn(p, x):
        for name in "abc":
            x = jax.nn.silu(x @ p[name])
        return square(x)

    report = compare(loss_fn, "O0")(begin(dict.fromkeys("abc", W), "O5"), X)
    found = [row for row in report.rows if row.primitive == "logistic"]
    assert len([row for row in found if row.phase == "forward"]) == 3, report.unaligned


def test_gradients_of_groups_are_named():
    loss_fn = lambda p, x: square(x @ p["a"]["w"] @ p["b"]["w"])  # noqa: E731
    params = {name: {"w": jnp.asarray(W)} for name in "ab"}
    tx = dict.fromkeys("ab", optax.sgd(1.0))
    state = jamp.initialize(params, tx, "O5", verbosity=0)
    assert {*compare(loss_fn, "O0")(state, X).gradients} == {"a/w", "b/w"}
    assert {*compare(loss_fn, "O0", wrt="a")(state, X).gradients} == {"w"}


def test_compare_refuses_calls_without_a_comparison():
    def loss_fn(p, x):
        return square(x @ p["a"])

    def report(level="O0", x=X, at="O5", **options):
        return compare(loss_fn, level, **options)(begin({"a": W}, at), x)

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    write = r'got \(function, .*\). Write compare\(loss_fn, "O0"\)\(state'
    for call, error, words in (
        (lambda: report("O5"), ValueError, "at O5 with itself: name another level"),
        (lambda: report(fp8=True), jamp.OptLevelError, "fp8 needs matmuls in half"),
        (lambda: report("O5", keep_fp32="nowhere"), ValueError, "keep_fp32"),
        (lambda: report(only="nowhere"), ValueError, "only='nowhere' is in no module"),
        (lambda: jax.jit(lambda x: report(x=x).loss)(X), TypeError, "outside of jit"),
        (
            lambda: report(x=X * np.nan),
            FloatingPointError,
            "The loss is nan at O0, the",
        ),
        (lambda: report(keep_fp32="a", at="O0"), ValueError, "Neither O0 nor O0, keep"),
        (lambda: report(x=shape), TypeError, "got traced arrays or shapes"),
        (lambda: report(loss_id=5), IndexError, "loss_id=5 is out of range"),
        (lambda: compare(loss_fn, 0, X), TypeError, write),
        (lambda: compare(loss_fn, begin({"a": W}, "O5"), X), TypeError, write),
    ):
        with pytest.raises(error, match=words):
            call()


def test_progress_is_shown_after_some_seconds(capsys, monkeypatch):
    loss_fn = lambda p, x: square(x @ p["a"])  # noqa: E731
    state = begin({"a": W}, "O5")
    compare(loss_fn, "O0")(state, X)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_compare, "_QUIET", -1.0)
    compare(loss_fn, "O0")(state, X)
    assert "compare [###" in capsys.readouterr().err
