"""Products in fp8: which, their digits, and what JAX does with them."""

import functools
from unittest import mock

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from jamp._fp8 import plan
from jamp._fp8.quantized import Of, quantize
from tests.autocast.constructs import custom_vjp
from tests.oracles import fp8 as oracle
from tests.support.programs import walk

pytestmark = pytest.mark.standard_promotion

N, ROWS = 64, 32
ALL = jamp.Fp8(smallest=1)
QUIET = {"tx": optax.sgd(0.1), "verbosity": 0}
BF16 = jnp.bfloat16


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def distance(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def weights(*names):
    return {name: normal(i, N, N) / 8 for i, name in enumerate(names)}


def state_of(params, level="O6", fp8=ALL, **options):
    return jamp.initialize(params, opt_level=level, fp8=fp8, **QUIET, **options)


def counted(fn, *args):
    """How many products a program has, by the dtypes of their operands."""
    found = {}
    for eqn in walk(jax.make_jaxpr(fn)(*args).jaxpr):
        if eqn.primitive.name == "dot_general":
            names = tuple(str(v.aval.dtype).removeprefix("float8_") for v in eqn.invars)
            found[names] = found.get(names, 0) + 1
    return found


def in_fp8(fn, *args):
    found = counted(fn, *args)
    return sum(n for names, n in found.items() if "e4m3fn" in names)


# ---- digits


def layers(params, x, then=lambda y: y):
    """A product whose operand is `x`, as `then` makes its result go on."""
    first = x * params["one"]  # an activation: a param is in it
    return then(first @ params["w"]) @ params["last"]


def layer_of(x, w, g, fp8=ALL, **options):
    """A product and its gradients, at O6: `g` is the cotangent of its result."""
    params = {"one": jnp.ones(()), "w": w, "last": jnp.eye(w.shape[1])}
    state = state_of(params, fp8=fp8, **options)

    def loss_fn(params, x, shift):
        out = layers(params, x, lambda y: y + shift)
        return (out * g).sum(), out

    def run(params, x, shift):
        return jamp.scaled_value_and_grad(loss_fn, has_aux=True)(
            state.replace(params=params), x, shift
        )

    shift = jnp.zeros_like(g)
    (_, y), grads = run(state.params, x, shift)
    of_x = jax.grad(lambda x: loss_of(state, loss_fn, x, shift))(x)
    return {"y": y, "x": of_x, "w": grads["w"]}


def loss_of(state, loss_fn, *args):
    forward = jamp.cast_forward(loss_fn, state.properties)
    return forward(state.params, *args)[0]


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_a_product_and_its_gradients_have_the_digits_of_fp8(size):
    half = lambda seed, *shape: normal(seed, *shape).astype(BF16).astype(jnp.float32)  # noqa: E731
    x, g = half(0, ROWS, N), half(1, ROWS, N)
    w = (normal(2, N, N) * size).astype(BF16).astype(jnp.float32)
    got, exact = layer_of(x, w, g), {"y": x @ w, "x": g @ w.T, "w": x.T @ g}
    most = {"y": 0.06, "x": 0.12, "w": 0.12}
    for name, expected in oracle.product(x, w, g).items():
        assert distance(got[name], expected) <= 2**-7, name
        assert 0.01 <= distance(got[name], exact[name]) <= most[name], name


@pytest.mark.parametrize("of", list(Of))
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-6, 1e4, 1e38])
def test_what_is_quantized_has_the_bits_of_the_formats(of, size):
    form = oracle.E5M2 if of is Of.COTANGENT else oracle.E4M3
    # From 448 to 512, 1.75 to 2: where one more power of two would be too large.
    tops = np.exp2(np.linspace(-1, 1, 33, dtype=np.float32))
    for top in tops:
        x = np.float32(np.random.default_rng(0).uniform(-0.4, 0.4, 512))
        x = jnp.asarray(np.append(x, top) * np.float32(size)).astype(BF16)
        x8, exponent = quantize(x, of)
        assert 2.0 ** -float(exponent) == oracle.scale(x, form)
        found = np.float64(x8) * 2.0 ** float(exponent)
        np.testing.assert_array_equal(found, oracle.quantized(x, form))


def test_zeros_stay_zeros():
    x8, exponent = quantize(jnp.zeros((4, 4), BF16), Of.INPUT)
    assert not np.float32(x8).any() and exponent == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_what_is_not_finite_goes_through(bad, where):
    given = {"x": normal(0, ROWS, N), "w": normal(1, N, N), "g": normal(2, ROWS, N)}
    given[where] = given[where].at[1, 2].set(bad)
    with np.errstate(all="ignore"):
        got = layer_of(**given)
    meets = {"x": "y w", "w": "y x", "g": "x w"}[where].split()
    for name in meets:
        assert not np.isfinite(np.asarray(got[name])).all(), name


def test_float16_does_not_overflow_before_the_scale():
    x = jnp.full((ROWS, N), 4.0)
    got = layer_of(x, jnp.full((N, N), 4.0), jnp.ones((ROWS, N)), level="O2")
    np.testing.assert_array_equal(np.asarray(got["y"]), 16.0 * N)


# ---- which products


def transformer(params, x):
    h = jnp.tanh(x @ params["in"])
    q, k, v = (h @ params[name] for name in "qkv")
    h = h + jax.nn.softmax(q @ k.T) @ v @ params["out"]
    logits = h @ params["head"]
    return -jax.nn.log_softmax(logits)[:, 0].mean()


TRANSFORMER, X = weights("in", *"qkv", "out", "head"), normal(9, ROWS, N)


def why(fn, state, *args):
    """Why each forward product is as it is, by line and in order."""
    found = jamp.explain(fn)(state, *args).operations
    return [op.why for op in found if op.flops and op.why != "derivative"]


def test_explain_says_fp8_or_half_and_why():
    fp8, weight, last = "fp8", "fp8 weight", "fp8 last"
    assert why(transformer, state_of(TRANSFORMER), X) == [
        *("fp8 input", fp8, fp8, fp8, weight, weight, fp8, last)
    ]
    shown = str(jamp.explain(transformer)(state_of(TRANSFORMER), X))
    assert "fp8" in shown and "computed in float32: dot_general" not in shown
    few = state_of(TRANSFORMER, fp8=jamp.Fp8(keep=["^[qk]$"], smallest=1))
    assert why(transformer, few, X)[1:4] == ["fp8 kept", "fp8 kept", fp8]
    default = state_of(TRANSFORMER, fp8=None)
    assert set(why(transformer, default, X)) == {
        *("fp8 input", "fp8 small", weight, last)
    }


def test_the_roofline_is_where_the_docstring_says():
    def whys(n, rows=2**20, readers=1):
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
        params = {"one": shape(), "w": shape(n, n), "last": shape(n, 1)}

        def fn(params, x):
            first = x * params["one"]
            ys = [jnp.tanh(first @ params["w"]) for _ in range(readers)]
            return (sum(ys) @ params["last"]).sum()

        init = functools.partial(jamp.initialize, opt_level="O6", **QUIET)
        return why(fn, jax.eval_shape(init, params), shape(rows, n))[0]

    assert whys(850) == "fp8" and whys(800) == "fp8 small"
    assert whys(700, readers=3) == "fp8"
    assert whys(4096, rows=64) == "fp8 small"


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5", "O6"])
def test_wherever_products_run_in_half(level):
    state = state_of(TRANSFORMER, level, loss_scale=1.0)
    step = jamp.scaled_value_and_grad(transformer)
    # q, k, v and out, forward; of each, two more backward.
    assert in_fp8(step, state, X) == 12
    plain = state_of(TRANSFORMER, level, fp8=False, loss_scale=1.0)
    assert in_fp8(step, plain, X) == 0
    (loss, grads), (expected, plain_grads) = step(state, X), step(plain, X)
    assert 0 < abs(float(loss - expected)) <= 0.01 * float(expected)
    for name, grad in plain_grads.items():
        assert distance(grads[name], grad) <= 0.12, name


def test_gradients_of_weights_may_stay_half():
    state = state_of(TRANSFORMER, fp8=jamp.Fp8(grad_weight=False, smallest=1))
    assert in_fp8(jamp.scaled_value_and_grad(transformer), state, X) == 8


def test_an_operand_of_several_products_is_quantized_once():
    step = jamp.scaled_value_and_grad(transformer)
    program = jax.make_jaxpr(step)(state_of(TRANSFORMER), X).jaxpr
    of = [e.params["of"] for e in walk(program) if e.primitive.name == "quantize"]
    # h for q, k and v, and the attention for out; four weights.
    assert (of.count(Of.INPUT), of.count(Of.WEIGHT)) == (2, 4)


UNLIKE = {  # and why, as `explain` says
    "highest": ("precision", lambda x, w: jnp.matmul(x, w, precision="highest")),
    "its own dtype": (
        "no float32",
        lambda x, w: (x.astype(BF16) @ w.astype(BF16)).astype(x.dtype),
    ),
    "batched": (
        "fp8 weight",
        lambda x, w: jnp.einsum("bi,bij->bj", x, w * jnp.ones((ROWS, 1, 1))),
    ),
    "two weights": ("fp8 weight", lambda x, w: x + (w @ w)[:ROWS]),
    "ragged": (
        "fp8 weight",
        lambda x, w: jax.lax.ragged_dot(x, w[None], jnp.asarray([ROWS])),
    ),
    "convolution": (
        "fp8 weight",
        lambda x, w: jax.lax.conv_general_dilated(
            x[None], w[None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )[0],
    ),
    "in half": ("region", lambda x, w: jamp.half_function(jnp.matmul)(x, w)),
    "in float32": ("region", lambda x, w: jamp.float_function(jnp.matmul)(x, w)),
    "left out": ("fp8 disabled", lambda x, w: jamp.disable_fp8()(jnp.matmul)(x, w)),
    "custom_vjp": ("fp8 derivative", lambda x, w: custom(x, w)),
    "custom_jvp": ("fp8 derivative", lambda x, w: custom_forward(x, w)),
}


ORDERS = {
    "top_k": lambda r: jax.lax.top_k(jax.nn.softmax(r), 2)[0],
    "argmax": lambda r: jax.nn.one_hot(r.argmax(-1), N),
    "argmin": lambda r: jax.nn.one_hot((-r).argmin(-1), N),
    "sort": lambda r: jnp.sort(jax.nn.sigmoid(r) + jnp.arange(N)),
    "argsort": lambda r: jnp.take_along_axis(r, jnp.argsort(r), -1),
    "approx_max_k": lambda r: jax.lax.approx_max_k(r, 2)[0],
}
INSIDE = {
    "cast": lambda f: lambda r: f(r.astype(BF16).reshape(-1, N).astype(r.dtype)),
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda r: jax.vmap(f)(r[None])[0],
    "scan": lambda f: lambda r: jax.lax.scan(lambda c, r: (c, f(r)), 0, r[None])[1][0],
    "carry": lambda f: (
        lambda r: jax.lax.scan(lambda c, _: (c * 2, f(c)), r, length=2)[1][0]
    ),
    "cond": lambda f: lambda r: jax.lax.cond(r[0, 0] > 0, f, f, r),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=jax.make_mesh((1,), ("d",)), in_specs=P(), out_specs=P()
    ),
    "custom_vjp": lambda f: custom_vjp(f, lambda r: (f(r), r), lambda r, g: (r,)),
}
ROUTERS = {name: (f, "jit") for name, f in ORDERS.items()}
ROUTERS |= {name: (ORDERS["top_k"], name) for name in INSIDE}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_product_whose_results_are_ordered_stays_in_half(name):
    """A router in fp8 sent 7 % of the tokens to other experts."""
    order, where = ROUTERS[name]

    def fn(params, x):
        h = jnp.tanh(x * params["one"] @ params["w"])
        gates = INSIDE[where](order)(h @ params["router"])
        h = jnp.tanh(h @ params["v"]) * gates.sum(-1, keepdims=True)
        return (h @ params["last"]).sum()

    params = weights("w", "router", "v", "last") | {"one": jnp.ones(())}
    assert why(fn, state_of(params), X) == ["fp8", "fp8 order", "fp8", "fp8 last"]


def test_products_are_looked_up_in_time_linear_in_depth(monkeypatch):
    """Each product looked for its operand's readers in the whole program."""
    counted = mock.Mock(wraps=plan.weight_of)
    monkeypatch.setattr(plan, "weight_of", counted)

    def lookups(depth):
        def fn(params, x):
            for _ in range(depth):
                x = jnp.tanh(x @ params["w"])
            return (x @ params["w"]).sum()

        counted.reset_mock()
        jax.make_jaxpr(jamp.scaled_grad(fn))(state_of(weights("w")), X)
        return counted.call_count

    assert lookups(20) <= 2.1 * lookups(10)


def test_nested_loops_are_read_once_for_each_use(monkeypatch):
    counted = mock.Mock(wraps=plan._uses_by_operation)
    monkeypatch.setattr(plan, "_uses_by_operation", counted)

    def nested(depth):
        if not depth:
            return lambda x, w: x @ w
        inner = nested(depth - 1)
        body = lambda w: lambda c, _: ((inner(c[0], w), c[0] * 2), None)  # noqa: E731
        return lambda x, w: jax.lax.scan(body(w), (x, x), length=2)[0][1]

    def reads(depth):
        fn = lambda params, x: nested(depth)(x, params["w"]).sum()  # noqa: E731
        counted.reset_mock()
        jax.make_jaxpr(jamp.scaled_grad(fn))(state_of(weights("w")), X)
        return counted.call_count

    assert reads(8) <= 3 * reads(4)


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (2 * g @ kept[1].T, kept[0].T @ g)
)


@jax.custom_jvp
def custom_forward(x, w):
    return x @ w


custom_forward.defjvp(
    lambda x, t: (x[0] @ x[1], 2 * t[0] @ x[1] + x[0] @ t[1]),
)


@pytest.mark.parametrize("name", UNLIKE)
def test_what_stays_as_it_is(name):
    reason, product = UNLIKE[name]

    def fn(params, x):
        return layers(params, x, lambda y: product(y, params["v"])).sum()

    params = weights("w", "v", "last") | {"one": jnp.ones(())}
    step = jamp.scaled_value_and_grad(fn)
    # Only the product by `w`, and its gradients: another comes after it.
    assert in_fp8(step, state_of(params), X) == 3
    assert why(fn, state_of(params), X) == ["fp8", reason, "fp8 last"]


@pytest.mark.parametrize("function", [custom, custom_forward])
def test_a_derivative_of_the_users_is_half_and_theirs(function):
    params = weights("w", "v", "last") | {"one": jnp.ones(())}
    state = state_of(params)

    def fn(params, x, function=function):
        return layers(params, x, lambda y: function(y, params["v"])).sum()

    step = jamp.scaled_value_and_grad(fn)
    (loss, grads), (plain, expected) = (
        step(state, X, fn) for fn in (function, jamp.disable_fp8()(jnp.matmul))
    )
    assert loss == plain
    # It doubles the gradient of what it is given.
    for name, times in {"w": 2, "v": 1, "last": 1}.items():
        assert distance(grads[name], times * expected[name]) <= 2**-7, name


def test_disable_fp8_around_a_call():
    state = jamp.initialize(
        TRANSFORMER, opt_level="O6", fp8=ALL, apply_fn=transformer, **QUIET
    )
    evaluate = lambda state, x: state.apply_fn(state.params, x)  # noqa: E731
    assert in_fp8(evaluate, state, X) == 4
    assert in_fp8(jamp.disable_fp8()(evaluate), state, X) == 0
    evaluate = jax.jit(evaluate)
    first = evaluate(state, X)
    with jamp.disable_fp8():
        second = evaluate(state, X)  # traced again
    options = {"opt_level": "O5", "apply_fn": transformer, **QUIET}
    assert first != second == evaluate(jamp.initialize(TRANSFORMER, **options), X)


# ---- what JAX does with programs


def block(h, w):
    return h + jnp.tanh(h @ w)


def stack(params, x, step=block, wrap=lambda f: f):
    h, _ = jax.lax.scan(wrap(lambda h, w: (step(h, w), None)), x, params["stack"])
    return jnp.square(h @ params["head"]).mean()


def unrolled(params, x):
    for w in params["stack"]:
        x = block(x, w)
    return jnp.square(x @ params["head"]).mean()


STACK = {"stack": normal(0, 3, N, N) / 8, "head": normal(1, N, N) / 8}
WRAPS = {
    "scan": lambda f: f,
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "vmap": lambda f: lambda h, w: jax.vmap(f, (0, None))(h, w),
}


@pytest.mark.parametrize("name", WRAPS)
def test_in_a_scan_each_layer_has_its_own_scale(name):
    # Weights of very different sizes: one scale for all would flush the small to zero.
    sizes = jnp.asarray([1.0, 1e-9, 1e-3])[:, None, None]
    params = STACK | {"stack": STACK["stack"] * sizes}
    fn = functools.partial(stack, wrap=WRAPS[name])
    state = state_of(params)
    loss, grads = jax.jit(jamp.scaled_value_and_grad(fn))(state, X)
    expected, plain = jamp.scaled_value_and_grad(unrolled)(
        state_of(params, fp8=False), X
    )
    assert distance(loss, expected) <= 0.02
    for i in range(1, 3):
        assert distance(grads["stack"][i], plain["stack"][i]) <= 0.12
    # In the first layer the input is what the scan carries, as in those after it.
    assert in_fp8(jamp.scaled_value_and_grad(fn), state, X) >= 3


@pytest.mark.parametrize("name", sorted(WRAPS.keys() - {"vmap"}))
def test_a_weight_that_a_scan_shares_is_quantized_once(name):
    xs, gs = normal(0, 3, ROWS, N).astype(BF16), normal(1, 3, ROWS, N).astype(BF16)
    xs, gs = xs.astype(jnp.float32), gs.astype(jnp.float32)
    params = {"one": jnp.ones(()), "w": normal(2, N, N), "last": jnp.eye(N)}
    # With params in float32 gradients are as they were summed.
    state = state_of(params, level="O4")

    def loss_fn(params, batches, scan=jax.lax.scan):
        def add(loss, batch):
            y = layers(params, batch[0])
            return loss + (y * batch[1]).sum(), y

        return scan(WRAPS[name](add), jnp.zeros(()), batches)

    def one_by_one(add, loss, batches):
        ys = [add(loss, batch)[1] for batch in zip(*batches, strict=True)]
        return loss, jnp.stack(ys)

    step = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (_, ys), grads = step(state, (xs, gs))
    unrolled = functools.partial(loss_fn, scan=one_by_one)
    forward = jamp.cast_forward(unrolled, state.properties)
    expected = forward(state.params, (xs, gs))[1]
    np.testing.assert_array_equal(np.asarray(ys), np.asarray(expected))
    exact = [oracle.product(x, params["w"], g) for x, g in zip(xs, gs, strict=True)]
    # Rounded to bfloat16 on each trip, it would be 2**-10 off.
    assert distance(grads["w"], sum(each["w"] for each in exact)) <= 2**-12
    program = jax.make_jaxpr(step)(state, (xs, gs)).jaxpr
    loops = [e.params["jaxpr"] for e in walk(program) if e.primitive.name == "scan"]
    of = [
        {e.params["of"] for e in walk(loop) if e.primitive.name == "quantize"}
        for loop in loops
    ]
    again = {Of.INPUT} if name == "remat" else set()
    assert of == [{Of.INPUT}, {Of.COTANGENT} | again]


@pytest.mark.parametrize("name", sorted(WRAPS.keys() - {"vmap"}))
def test_logits_in_parts_stay_half(name):
    def fn(params, x):
        h = layers(params, x)

        def add(loss, part):
            logits = part @ params["head"]
            return loss + jax.nn.logsumexp(logits, axis=-1).sum(), None

        return jax.lax.scan(WRAPS[name](add), 0.0, h.reshape(4, -1, N))[0]

    params = weights("w", "last", "head") | {"one": jnp.ones(())}
    assert why(fn, state_of(params), X)[:3] == ["fp8", "fp8", "fp8 last"]


@pytest.mark.eight_devices
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map_each_device_has_its_own_scale(check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d"), "check_vma": check_vma}
    mapped = jax.shard_map(lambda h, w: h @ w, mesh=mesh, **specs)
    # With one scale for all, what is 2**-21 of the largest would be zero.
    sizes = np.repeat(np.exp2(-3.0 * np.arange(8)), ROWS)[:, None]
    rounded = lambda x: np.float32(jnp.asarray(x, BF16))  # noqa: E731
    x, g = (rounded(normal(i, 8 * ROWS, N) * sizes) for i in range(2))
    params = {"one": jnp.ones(()), "last": jnp.eye(N), "w": normal(2, N, N)}
    state = state_of(params)

    def loss_fn(params, x):
        y = mapped(x * params["one"], params["w"])
        return ((y @ params["last"]) * g).sum(), y

    step = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    assert in_fp8(step, state, x) == 3
    (_, y), grads = jax.jit(step)(state, x)
    of_x = jax.jit(jax.grad(lambda x: loss_of(state, loss_fn, x)))(x)
    w = np.float32(state.params["w"])
    parts = [np.split(a, 8) for a in (x, g, y, of_x)]
    of_w = 0
    for part_x, part_g, part_y, part_of_x in zip(*parts, strict=True):
        expected = oracle.product(part_x, w, part_g)
        assert distance(part_y, expected["y"]) <= 2**-7
        assert distance(part_of_x, expected["x"]) <= 2**-7
        of_w += expected["w"]
    assert distance(grads["w"], of_w) <= 2**-7


def test_forward_mode_is_near_that_of_half():
    def along(fp8):
        state = state_of(TRANSFORMER, fp8=fp8)
        forward = jamp.cast_forward(transformer, state.properties)
        of_params = jax.tree.map(lambda w: jnp.flip(w, 0), state.params)
        return jax.jvp(lambda p: forward(p, X), (state.params,), (of_params,))[1]

    assert 0 < abs(along(ALL) / along(False) - 1) <= 0.05


def test_under_vmap_the_batch_has_one_scale():
    state = state_of(STACK)
    forward = jamp.cast_forward(unrolled, state.properties)
    xs = jnp.stack([X, 1e-3 * X])
    each = jax.vmap(forward, (None, 0))(state.params, xs)
    expected = jnp.stack([unrolled(STACK, x) for x in xs])
    np.testing.assert_allclose(np.asarray(each), np.asarray(expected), rtol=0.1)
    grads = jax.grad(lambda p: jax.vmap(forward, (None, 0))(p, xs).sum())(state.params)
    plain = jax.grad(lambda p: sum(unrolled(p, x) for x in xs))(STACK)
    for name, grad in plain.items():
        assert distance(grads[name], grad) <= 0.12
    one = jax.vmap(jax.grad(forward), (None, 0))(state.params, xs[:1])
    alone = jax.grad(forward)(state.params, xs[0])
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.float32(a[0]), np.float32(b))


def test_a_second_derivative_is_an_error_not_zero():
    state = state_of(STACK)
    forward = jamp.cast_forward(unrolled, state.properties)

    def penalty(params):
        return jnp.square(jax.grad(forward, argnums=1)(params, X)).sum()

    with pytest.raises(NotImplementedError, match="no second derivative.*disable_fp8"):
        jax.grad(penalty)(state.params)
    with jamp.disable_fp8():
        grads = jax.grad(penalty)(state.params)
    plain = jamp.cast_forward(unrolled, state_of(STACK, fp8=False).properties)
    expected = jax.grad(lambda p: jnp.square(jax.grad(plain, argnums=1)(p, X)).sum())(
        state.params
    )
    assert distance(grads["stack"], expected["stack"]) <= 1e-6


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("of", ["w", "x"])
def test_nor_is_it_nan_where_the_cotangent_is_known(of, derivative):
    params = weights("w", "last") | {"one": jnp.ones(())}
    state = state_of(params)
    loss_fn = lambda params, x: layers(params, x).sum()  # noqa: E731
    forward = jamp.cast_forward(loss_fn, state.properties)

    def of_weight(x, w):
        return forward(state.params | {"w": w}, x)

    given = {"x": X, "w": state.params["w"]}

    def penalty(value):
        both = given | {of: value}
        first = jax.grad(of_weight, argnums=0 if of == "w" else 1)
        return first(both["x"], both["w"]).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="no second derivative.*disable_fp8"):
        derivative(penalty)(given[of])


def test_gradients_reduced_in_float32():
    step = jamp.scaled_value_and_grad(transformer)
    state = state_of(TRANSFORMER, reduce_dtype="float32")
    plain = state_of(TRANSFORMER)
    (_, grads), (_, expected) = step(state, X), step(plain, X)
    assert in_fp8(step, state, X) == 12
    differ = [distance(grads[name], grad) for name, grad in expected.items()]
    assert 0 < max(differ) <= 2**-8
    program = jax.make_jaxpr(step)(state, X).jaxpr
    wide = [
        e.outvars[0].aval.dtype == jnp.float32
        for e in walk(program)
        if e.primitive.name == "dot_general"
        and "float8_e5m2" in [str(v.aval.dtype) for v in e.invars]
    ]
    assert sum(wide) == 4  # the gradients of the four weights


# ---- frameworks


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(N)(x))
        return nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(N, N, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(N, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.head(x)


def linen():
    return Linen().init(jax.random.key(0), X)["params"], (
        lambda params, x: Linen().apply({"params": params}, x)
    )


def haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([N, N, N, 3])(x)))
    return net.init(jax.random.key(0), X), net.apply


def equinox():
    net = eqx.nn.MLP(N, 3, N, 3, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


@pytest.mark.parametrize("make", [linen, haiku, equinox], ids=lambda f: f.__name__)
def test_models_of_others(make):
    params, apply = make()
    loss_fn = lambda params, x: jnp.square(apply(params, x)).mean()  # noqa: E731
    step = jamp.scaled_value_and_grad(loss_fn)
    state = state_of(params)
    # Two of four: the first reads the input, the last gives the output.
    assert in_fp8(step, state, X) == 6
    keep = jamp.Fp8(keep=lambda path, leaf: "1" in path, smallest=1)
    assert in_fp8(step, state_of(params, fp8=keep), X) == 3
    (loss, grads), (expected, plain) = (
        step(state, X),
        step(state_of(params, fp8=False), X),
    )
    assert distance(loss, expected) <= 0.05
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        assert distance(a, b) <= 0.3


def test_nnx():
    def trained(fp8):
        options = {"fp8": fp8, "verbosity": 0}
        model = Nnx(nnx.Rngs(0))
        model, optimizer = jamp.nnx.initialize(model, QUIET["tx"], "O6", **options)
        loss_fn = lambda model, x: jnp.square(model(x)).mean()  # noqa: E731
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, X)
        optimizer.update(model, grads)
        return loss, model(X), model

    (loss, out, model), (plain_loss, plain, _) = trained(ALL), trained(False)
    assert 0 < distance(loss, plain_loss) <= 0.05
    assert 0 < distance(out, plain) <= 0.1
    keep = jamp.Fp8(keep="layers/1", smallest=1)
    assert 0 < distance(out, trained(keep)[1]) <= 0.1
    graph, params = nnx.split(model)
    assert in_fp8(lambda p, x: nnx.merge(graph, p)(x), params, X) == 2


# ---- options


BAD = {
    "matches no leaf.*paths: head": lambda: state_of(STACK, fp8=jamp.Fp8(keep="block")),
    r"Fp8\(keep=\)='\(' is not a regex": lambda: jamp.Fp8(keep="("),
    r"Fp8\(keep=\) must be a regex, a pred": lambda: jamp.Fp8(keep=3),
    "grad_weight=.* must be a bool, not 1": lambda: jamp.Fp8(grad_weight=1),
    "smallest=.* positive integer or None, found 0": lambda: jamp.Fp8(smallest=0),
    "smallest=.*found True": lambda: jamp.Fp8(smallest=True),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_options_are_refused(words):
    with pytest.raises((TypeError, ValueError), match=words):
        BAD[words]()


def test_a_device_without_units_for_it_warns_once(monkeypatch):
    from jamp._core import devices

    class Device:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    devices._warn_of_device.cache_clear()
    with pytest.warns(jamp.UnusedOptionWarning, match="A100 has no fp8 units.*O5"):
        devices.warn_without_fp8()
    devices.warn_without_fp8()  # an error, if it warned again
    Device.compute_capability = "9.0"
    devices._warn_of_device.cache_clear()
    devices.warn_without_fp8()
