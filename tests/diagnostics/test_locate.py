"""Test that `locate` names the operation, the line, the module and the advice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jamp
import jamp.nnx
from jamp.diagnostics import locate
from tests.diagnostics.frameworks import NNX, lines_of, run
from tests.support.states import SGD, make

pytestmark = pytest.mark.standard_promotion  # as in the reader's program

EYE = np.eye(8, dtype=np.float32)
ONES = np.ones((4, 8), np.float32)


# Programs of (8, 8) and (4, 8) that overflow at the lines marked `here`.


def attention_logit(w, x):
    q, k = x @ w, x @ w
    return jax.nn.softmax(q @ k.T) @ x  # here


def log_of_zero(w, x):
    return jnp.log((x @ w) * 0).mean()  # here


def zero_by_zero(w, x):
    h = x @ w
    return h / h.sum(axis=-1, keepdims=True)  # here


def data(w, x):
    return jnp.tanh(x @ w)


def exp_in_a_loss(w, x):
    return jnp.exp((x @ w).astype(jnp.float32)).mean()  # here


def masked_softmax(w, x):
    seen = jnp.arange(4)[:, None] > 0  # masks all of the first row
    return jax.nn.softmax(jnp.where(seen, x @ w, -jnp.inf)).var()  # here


def rsqrt_of_zero(w, x):
    h = x @ w
    return h * lax.rsqrt(jnp.square(h).mean(axis=-1, keepdims=True))  # here


def sqrt_at_zero(w, x):
    return jnp.sqrt(jnp.abs(x @ w))  # here


def behind_a_good_mask(w, x):
    p = jax.nn.softmax(jnp.where(jnp.eye(4, 8) > 0, x @ w, -jnp.inf))
    return (p * 300) @ (w * 300)  # here


def large_gradient(w, x):
    return (x @ w).astype(jnp.float32).sum() * 1e6  # here


# Programs that overflow inside loops, branches and remat.


def step(c, w):
    return c @ w @ w  # here


def in_nested_scans(w, x):
    def outer(c, i):
        body = lambda c, j: (step(c, w * (1 + 299 * (i * j == 2)).astype(w.dtype)), j)  # noqa: E731
        return lax.scan(body, c, jnp.arange(3))

    return lax.scan(outer, x, jnp.arange(2))[0]


def in_remat(w, x):
    return jax.checkpoint(step)(x, w * 300)


def in_cond(w, x):
    return lax.cond(x[0, 0] > 0, step, lambda c, w: c, x, w * 300)


def in_while(w, x):
    body = lambda c: (c[0] + 1, step(c[1], 2 * lax.stop_gradient(w)))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 9, body, (0, x))[1] @ w


# The iterations in which a program overflows.
INSIDE = {
    in_nested_scans: ("iteration 1 of 2 of a scan", "iteration 2 of 3 of a scan"),
    in_remat: (),
    in_cond: (),
    in_while: ("iteration 7 of a while loop",),
}

# A program, factors of w and x, words of the operation, the pass, words of the advice.
PROGRAMS = {
    "attention logit": (attention_logit, 1, 100, "matmul", "f", "1/sqrt"),
    "log(0)": (log_of_zero, 1, 1, "a logarithm", "f", "log_softmax"),
    "0/0": (zero_by_zero, 1, 0, "a quotient", "f", "by zero"),
    "NaN in the data": (data, 1, np.nan, "args/0", "i", "check the data"),
    "NaN in the params": (data, np.nan, 1, "params", "i", "checkpoint"),
    "exp in a loss": (exp_in_a_loss, 100, 1, "an exponential", "f", "maximum first"),
    "softmax of all -inf": (masked_softmax, 1, 1, "difference", "f", "row is masked"),
    "a norm's rsqrt(0)": (rsqrt_of_zero, 1, 0, "square root", "f", "epsilon"),
    "sqrt'(0)": (sqrt_at_zero, 1, 0, "quotient", "b", "epsilon inside"),
    "a gradient": (large_gradient, 1, 1, "matmul|product|cast", "b", "mean of the lo"),
    "behind a good mask": (behind_a_good_mask, 1, 1, "matmul", "f", "65504"),
}


WAYS = (("raw", "O1"), ("raw", "O2"), ("NNX", "O2"))


def total(x):
    return x.astype(jnp.float32).sum()


def located(way, fn, w, x):
    return run(locate, *way, total, lambda p, x: fn(p["w"], x), {"w": w}, x)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", PROGRAMS)
def test_locate_finds_the_culprit(name):
    fn, w, x, words, phase, advice = PROGRAMS[name]
    turn = list(PROGRAMS).index(name)
    for way in (WAYS[turn % 3], WAYS[(turn + 1) % 3]):
        found = located(way, fn, EYE * w if w == w else EYE + w, ONES * x)
        text = str(found)
        assert any(word in found.operation for word in words.split("|")), text
        assert found.phase.startswith(phase) and advice in found.advice, text
        assert found.params == ("w",) and "1 of 1 are not finite\n" in text
        assert text.count("\n") < 20
        if phase == "i":
            assert found.source == found.primitive == ""
            continue
        assert found.source in lines_of(fn) and found.source in text.replace("\n", "")
        assert found.module == ""
        assert found.result is not None and found.result.infs + found.result.nans > 0


@pytest.mark.slow
@pytest.mark.parametrize("fn", INSIDE)
def test_locate_looks_inside_loops_and_calls(fn):
    for way in WAYS:
        found = located(way, fn, EYE, ONES)
        text = str(found)
        assert (found.loops, found.phase) == (INSIDE[fn], "forward"), text
        assert found.source in lines_of(step), text
        assert found.operation == "a matmul", text


@pytest.mark.slow
def test_shard_map_is_one_operation_and_vmap_looks_inside():
    def local(w, x):
        there = lax.axis_index("data") == 5
        w = w * jnp.where(there, 300, 1).astype("f2")
        h = step(x - lax.pmean(x, "data") + 1, w)
        return lax.psum(h.astype(jnp.float32).mean(), "data")

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    whole = jax.shard_map(lambda w, x: local(w * 300, x), mesh=mesh, **specs)
    assert located(WAYS[1], whole, EYE, ONES).primitive == "shard_map"
    mapped = jax.vmap(local, (None, 0), axis_name="data")
    found = located(WAYS[1], mapped, EYE, np.tile(ONES, (8, 1, 1)))
    assert found.source in lines_of(step) and found.primitive == "dot_general"
    assert found.result.infs == 32 and found.result.shape == (8, 4, 8)


def test_an_infinity_does_not_explain_a_nan():
    def loss(params, x, best):
        h = x * params["a"]["w"][0] * 0
        return total(jnp.minimum(h / h, best))  # here

    best = np.full((4, 8), np.inf, np.float32)
    found = locate(loss)(params_state("O0"), ONES, best)
    assert (found.primitive, found.source) == ("div", lines_of(loss)[0]), found


def params_state(level="O2", **options):
    params = {"a": {"w": jnp.asarray(EYE)}, "b": {"w": jnp.asarray(EYE)}}
    return make(level, params, **options)


def two_layers(params, x, *, power=1):
    h = (x.astype(params["a"]["w"].dtype) @ params["a"]["w"]) ** power
    return total(h @ params["b"]["w"])


def test_only_the_loss_scale_is_too_high():
    begun = dict.fromkeys(("init_scale", "max_scale"), 2.0**30)
    rule = jamp.DynamicLossScale(**begun)
    for scale, says in ((rule, "falls by itself"), (2.0**30, 'loss_scale="dynamic"')):
        found = locate(two_layers)(params_state(loss_scale=scale), ONES)
        assert (found.phase, found.scale, found.loss) == ("backward", 2.0**30, 32)
        assert "Only the loss scale" in found.advice and says in found.advice


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_locate_changes_nothing_at_any_level(level):
    state = params_state(level)
    before = jax.tree.map(np.array, state)
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        found = locate(two_layers)(state, ONES)
    assert found.finite is (level != "O2") or found.phase == "backward"
    assert not found.finite or str(found).startswith("All is finite: the loss is 32")
    found = locate(two_layers)(state, 2 * ONES, power=200)
    assert (found.phase, found.params) == ("forward", ("a/w", "b/w")), found
    assert found.operation == "a power x ** 200", found
    jax.tree.map(np.testing.assert_array_equal, before, state)


def test_check_names_the_culprit():
    state = make("O2", {"w": jnp.asarray(EYE)}, loss_scale="dynamic")
    loss_fn = lambda p: total(log_of_zero(p["w"], ONES))  # noqa: E731
    step = jax.jit(jamp.scaled_grad(loss_fn))
    for _ in range(2):
        state = state.apply_gradients(grads=step(state))
    culprit = lambda: locate(loss_fn)(state)  # noqa: E731
    assert jamp.check(state, 3, locate=culprit) is None
    with pytest.raises(FloatingPointError) as error:
        jamp.check(state, 2, locate=culprit)
    text = str(error.value)
    assert text.startswith("Loss 0 skipped 2 steps in a row, and its scale is 16384")
    assert "a logarithm" in text and lines_of(log_of_zero)[0] in text.replace("\n", "")
    with pytest.raises(FloatingPointError, match=r"locate\(loss_fn\)\(state"):
        jamp.check(state, 2)


def test_locate_refuses_bad_arguments():
    state = params_state()
    with pytest.raises(TypeError, match="outside of jit, with the state and the batch"):
        jax.jit(lambda s, x: locate(two_layers)(s, x))(state, ONES)
    with pytest.raises(TypeError, match="the AmpState .* got dict"):
        locate(two_layers)(state.params, ONES)
    model = NNX(data, {"w": EYE})
    with pytest.raises(TypeError, match="got NNX for the optimizer"):
        jamp.nnx.pure(lambda model: model, model, model)


def test_groups_and_losses():
    params = {"a": jnp.asarray(300 * EYE), "b": jnp.asarray(300 * EYE)}
    state = make("O2", params, {"a": SGD, "b": SGD}, num_losses=2)
    loss = lambda params: total(params["a"] @ params["b"])  # noqa: E731
    found = locate(loss, loss_id=1, wrt="b")(state)
    assert (found.total, found.params, found.loss) == (1, ("",), np.inf)
