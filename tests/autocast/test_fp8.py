"""Test fp8 matmuls: which ones, their accuracy, and JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from jamp._core import devices
from jamp._fp8.quantized import Of, quantize
from tests.oracles import fp8 as oracle
from tests.support.constructs import AROUND, custom_vjp, repeat
from tests.support.near import distance
from tests.support.programs import equations, walk
from tests.support.states import make

pytestmark = pytest.mark.standard_promotion

N, ROWS = 64, 32
ALL = jamp.Fp8(smallest=1)
BF16 = jnp.bfloat16


def normal(seed, *shape):
    """Draws normal numbers that bfloat16 holds exactly."""
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, BF16).astype(jnp.float32)


def weights(*names):
    return {name: normal(i, N, N) / 8 for i, name in enumerate(names)}


def state_of(params, level="O6", fp8=ALL, **options):
    return make(level, params, fp8=fp8, **options)


def forward_of(state, fn):
    """Returns `fn` under the policy of a state."""
    return jamp.cast_forward(fn, state.properties)


def operand_dtypes(eqn):
    return [str(v.aval.dtype) for v in eqn.invars]


def in_fp8(fn, *args):
    """Counts the matmuls in fp8."""
    found = equations(fn, ["dot_general"], *args)
    return sum("float8_e4m3fn" in operand_dtypes(e) for e in found)


def why(fn, state, *args):
    """Returns the reason for each forward matmul's dtype, in order."""
    found = jamp.explain(fn)(state, *args).operations
    return [op.why for op in found if op.flops and op.why != "derivative"]


def layers(params, x, then=lambda y: y):
    """Multiplies `x` by `w`, applies `then`, and multiplies by `last`."""
    first = x * params["one"]  # an activation, because it depends on a param
    return then(first @ params["w"]) @ params["last"]


def params_of_layers(*names):
    return weights("w", "last", *names) | {"one": jnp.ones(())}


def layer_of(x, w, g, **options):
    """Returns a matmul and both gradients for the cotangent `g`."""
    params = {"one": jnp.ones(()), "w": w, "last": jnp.eye(w.shape[1])}
    state = state_of(params, **options)

    def loss_fn(params, x):
        out = layers(params, x)
        return (out * g).sum(), out

    (_, y), grads = jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state, x)
    forward = forward_of(state, loss_fn)
    of_x = jax.grad(lambda x: forward(state.params, x)[0])(x)
    return {"y": y, "x": of_x, "w": grads["w"]}


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_a_product_and_its_gradients_have_the_digits_of_fp8(size):
    x, g = normal(0, ROWS, N), normal(1, ROWS, N)
    w = (normal(2, N, N) * size).astype(BF16).astype(jnp.float32)
    got, exact = layer_of(x, w, g), {"y": x @ w, "x": g @ w.T, "w": x.T @ g}
    most = {"y": 0.06, "x": 0.12, "w": 0.12}
    for name, expected in oracle.product(x, w, g).items():
        assert distance(got[name], expected) <= 2**-7, name
        assert 0.01 <= distance(got[name], exact[name]) <= most[name], name


@pytest.mark.parametrize("of", list(Of))
@pytest.mark.parametrize("size", [0.0, 1.0, 1e-30, 1e-6, 1e4, 1e38])
def test_quantized_arrays_have_the_bits_of_the_formats(of, size):
    form = oracle.E5M2 if of is Of.COTANGENT else oracle.E4M3
    # Tops of 1.75 to 2 would exceed 448 with one more power of two.
    for top in np.exp2(np.linspace(-1, 1, 33, dtype=np.float32)):
        x = np.float32(np.random.default_rng(0).uniform(-0.4, 0.4, 512))
        x = jnp.asarray(np.append(x, top) * np.float32(size)).astype(BF16)
        x8, exponent = quantize(x, of)
        assert 2.0 ** -float(exponent) == oracle.scale(x, form)
        found = np.float64(x8) * 2.0 ** float(exponent)
        np.testing.assert_array_equal(found, oracle.quantized(x, form))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("where", "meets"), [("x", "yw"), ("w", "yx"), ("g", "xw")])
def test_inf_and_nan_pass_through(bad, where, meets):
    given = {"x": normal(0, ROWS, N), "w": normal(1, N, N), "g": normal(2, ROWS, N)}
    given[where] = given[where].at[1, 2].set(bad)
    with np.errstate(all="ignore"):
        got = layer_of(**given)
    for name in meets:
        assert not np.isfinite(np.asarray(got[name])).all(), name


def test_float16_does_not_overflow_before_the_scale():
    x = jnp.full((ROWS, N), 4.0)
    got = layer_of(x, jnp.full((N, N), 4.0), jnp.ones((ROWS, N)), level="O2")
    np.testing.assert_array_equal(np.asarray(got["y"]), 16.0 * N)


def transformer(params, x):
    h = jnp.tanh(x @ params["in"])
    q, k, v = (h @ params[name] for name in "qkv")
    h = h + jax.nn.softmax(q @ k.T) @ v @ params["out"]
    logits = h @ params["head"]
    return -jax.nn.log_softmax(logits)[:, 0].mean()


TRANSFORMER, X = weights("in", *"qkv", "out", "head"), normal(9, ROWS, N)
STEP = jamp.scaled_value_and_grad(transformer)


def test_explain_says_fp8_or_half_and_why():
    fp8, weight, last = "fp8", "fp8 weight", "fp8 last"
    first = ["fp8 input", fp8, fp8, fp8, weight, weight, fp8, last]
    assert why(transformer, state_of(TRANSFORMER), X) == first
    shown = str(jamp.explain(transformer)(state_of(TRANSFORMER), X))
    assert "fp8" in shown and "computed in float32: dot_general" not in shown
    for keep in (["^[qk]$"], lambda path, leaf: path in ("q", "k")):
        few = state_of(TRANSFORMER, fp8=jamp.Fp8(keep=keep, smallest=1))
        assert why(transformer, few, X)[1:4] == ["fp8 kept", "fp8 kept", fp8]
    default = why(transformer, state_of(TRANSFORMER, fp8=None), X)
    assert set(default) == {"fp8 input", "fp8 small", weight, last}


def test_the_roofline_is_where_the_docstring_says():
    def first(n, rows=2**20, readers=1):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        params = {"one": shape(()), "w": shape((n, n)), "last": shape((n, 1))}

        def fn(params, x):
            first = x * params["one"]
            ys = [jnp.tanh(first @ params["w"]) for _ in range(readers)]
            return (sum(ys) @ params["last"]).sum()

        init = functools.partial(state_of, fp8=None)
        return why(fn, jax.eval_shape(init, params), shape((rows, n)))[0]

    assert first(850) == "fp8" and first(800) == "fp8 small"
    assert first(700, readers=3) == "fp8"
    assert first(4096, rows=64) == "fp8 small"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5", "O6"])
def test_wherever_products_run_in_half(level):
    state = state_of(TRANSFORMER, level, loss_scale=1.0)
    # q, k, v and out run once forward and twice backward.
    assert in_fp8(STEP, state, X) == 12
    plain = state_of(TRANSFORMER, level, fp8=False, loss_scale=1.0)
    assert in_fp8(STEP, plain, X) == 0
    (loss, grads), (expected, plain_grads) = STEP(state, X), STEP(plain, X)
    assert 0 < abs(float(loss - expected)) <= 0.01 * float(expected)
    for name, grad in plain_grads.items():
        assert distance(grads[name], grad) <= 0.12, name


def test_an_operand_of_several_products_is_quantized_once():
    found = equations(STEP, ["jamp_quantize"], state_of(TRANSFORMER), X)
    found = [e.params["of"] for e in found]
    # The inputs are h for q, k and v, and the attention for out.
    assert (found.count(Of.INPUT), found.count(Of.WEIGHT)) == (2, 4)


@pytest.mark.slow
def test_gradients_of_weights_stay_half_or_are_reduced_in_float32():
    options = jamp.Fp8(grad_weight=False, smallest=1)
    assert in_fp8(STEP, state_of(TRANSFORMER, fp8=options), X) == 8
    state = state_of(TRANSFORMER, reduce_dtype="float32")
    (_, grads), (_, expected) = STEP(state, X), STEP(state_of(TRANSFORMER), X)
    assert in_fp8(STEP, state, X) == 12
    differ = [distance(grads[name], grad) for name, grad in expected.items()]
    assert 0 < max(differ) <= 2**-8
    backward = equations(STEP, ["dot_general"], state, X)
    backward = [e for e in backward if "float8_e5m2" in operand_dtypes(e)]
    wide = [e.outvars[0].aval.dtype == jnp.float32 for e in backward]
    assert sum(wide) == 4  # gradients of the four weights


custom = custom_vjp(
    jnp.matmul,
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (2 * g @ kept[1].T, kept[0].T @ g),
)
custom_forward = jax.custom_jvp(jnp.matmul)
custom_forward.defjvp(lambda x, t: (x[0] @ x[1], 2 * t[0] @ x[1] + x[0] @ t[1]))


def batched(x, w):
    return jnp.einsum("bi,bij->bj", x, w * jnp.ones((ROWS, 1, 1)))


def convolution(x, w):
    numbers = ("NWC", "WIO", "NWC")
    options = {"padding": "VALID", "dimension_numbers": numbers}
    return lax.conv_general_dilated(x[None], w[None], (1,), **options)[0]


UNLIKE = {  # each with its reason in `explain`
    "highest": ("precision", functools.partial(jnp.matmul, precision="highest")),
    "its own dtype": (
        "no float32",
        lambda x, w: (x.astype(BF16) @ w.astype(BF16)).astype(x.dtype),
    ),
    "batched": ("fp8 weight", batched),
    "two weights": ("fp8 weight", lambda x, w: x + (w @ w)[:ROWS]),
    "ragged": (
        "fp8 weight",
        lambda x, w: lax.ragged_dot(x, w[None], jnp.asarray([ROWS])),
    ),
    "convolution": ("fp8 weight", convolution),
    "in half": ("region", jamp.half_function(jnp.matmul)),
    "in float32": ("region", jamp.float_function(jnp.matmul)),
    "left out": ("fp8 disabled", jamp.disable_fp8()(jnp.matmul)),
    "custom_vjp": ("fp8 derivative", custom),
    "custom_jvp": ("fp8 derivative", custom_forward),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_which_products_are_not_quantized(name):
    reason, product = UNLIKE[name]

    def fn(params, x):
        return layers(params, x, lambda y: product(y, params["v"])).sum()

    state = state_of(params_of_layers("v"))
    # Only the matmul by `w` and its two gradients run in fp8.
    assert in_fp8(jamp.scaled_value_and_grad(fn), state, X) == 3
    assert why(fn, state, X) == ["fp8", reason, "fp8 last"]


ORDERS = {
    "top_k": lambda r: lax.top_k(jax.nn.softmax(r), 2)[0],
    "argmax": lambda r: jax.nn.one_hot(r.argmax(-1), N),
    "argmin": lambda r: jax.nn.one_hot((-r).argmin(-1), N),
    "sort": lambda r: jnp.sort(jax.nn.sigmoid(r) + jnp.arange(N)),
    "argsort": lambda r: jnp.take_along_axis(r, jnp.argsort(r), -1),
    "approx_max_k": lambda r: lax.approx_max_k(r, 2)[0],
}
INSIDE = AROUND | {
    "cast": lambda f: lambda r: f(r.astype(BF16).reshape(-1, N).astype(r.dtype)),
    "carry": lambda f: (
        lambda r: lax.scan(lambda c, _: (c * 2, f(c)), r, length=2)[1][0]
    ),
}
ROUTERS = {name: jax.jit(f) for name, f in ORDERS.items()}
ROUTERS |= {f"top_k in {name}": f(ORDERS["top_k"]) for name, f in INSIDE.items()}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_product_whose_results_are_ordered_stays_in_half(name):
    """In fp8, a router would send 7 % of the tokens to other experts."""

    def fn(params, x):
        h = jnp.tanh(x * params["one"] @ params["w"])
        gates = ROUTERS[name](h @ params["router"])
        h = jnp.tanh(h @ params["v"]) * gates.sum(-1, keepdims=True)
        return (h @ params["last"]).sum()

    state = state_of(params_of_layers("router", "v"))
    assert why(fn, state, X) == ["fp8", "fp8 order", "fp8", "fp8 last"]


def test_disable_fp8_around_a_call():
    state = state_of(TRANSFORMER, apply_fn=transformer)
    evaluate = lambda state, x: state.apply_fn(state.params, x)  # noqa: E731
    assert in_fp8(evaluate, state, X) == 4
    assert in_fp8(jamp.disable_fp8()(evaluate), state, X) == 0
    evaluate = jax.jit(evaluate)
    first = evaluate(state, X)
    with jamp.disable_fp8():
        second = evaluate(state, X)  # traced again
    plain = state_of(TRANSFORMER, "O5", None, apply_fn=transformer)
    assert first != second == evaluate(plain, X)


def block(h, w):
    return h + jnp.tanh(h @ w)


def stack(params, x, wrap=lambda f: f):
    h = repeat(wrap(block), x, params["stack"])
    return jnp.square(h @ params["head"]).mean()


def unrolled(params, x):
    for w in params["stack"]:
        x = block(x, w)
    return jnp.square(x @ params["head"]).mean()


STACK = {"stack": normal(0, 3, N, N) / 8, "head": normal(1, N, N) / 8}
WRAPS = {"plain": lambda f: f, "remat": jax.checkpoint, "jit": jax.jit}
IN_VMAP = {"vmap": lambda f: lambda h, w: jax.vmap(f, (0, None))(h, w)}


@pytest.mark.parametrize("wrap", (WRAPS | IN_VMAP).values(), ids=WRAPS | IN_VMAP)
def test_in_a_scan_each_layer_has_its_own_scale(wrap):
    # One scale for all layers would flush the small weights to zero.
    sizes = jnp.asarray([1.0, 1e-9, 1e-3])[:, None, None]
    params = STACK | {"stack": STACK["stack"] * sizes}
    step = jamp.scaled_value_and_grad(functools.partial(stack, wrap=wrap))
    state = state_of(params)
    loss, grads = jax.jit(step)(state, X)
    plain = state_of(params, fp8=False)
    expected, plain_grads = jamp.scaled_value_and_grad(unrolled)(plain, X)
    assert distance(loss, expected) <= 0.02
    for i in range(1, 3):
        assert distance(grads["stack"][i], plain_grads["stack"][i]) <= 0.12
    # The first layer also reads its input from the carry.
    assert in_fp8(step, state, X) >= 3


@pytest.mark.parametrize("name", WRAPS)
def test_a_weight_that_a_scan_shares_is_quantized_once(name):
    xs, gs = normal(0, 3, ROWS, N), normal(1, 3, ROWS, N)
    params = {"one": jnp.ones(()), "w": normal(2, N, N), "last": jnp.eye(N)}
    # Gradients of float32 params keep the digits of their sums.
    state = state_of(params, level="O4")

    def loss_fn(params, batches, scan=lax.scan):
        def add(loss, batch):
            y = layers(params, batch[0])
            return loss + (y * batch[1]).sum(), y

        return scan(WRAPS[name](add), jnp.zeros(()), batches)

    def one_by_one(add, loss, batches):
        ys = [add(loss, batch)[1] for batch in zip(*batches, strict=True)]
        return loss, jnp.stack(ys)

    step = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (_, ys), grads = step(state, (xs, gs))
    forward = forward_of(state, functools.partial(loss_fn, scan=one_by_one))
    expected = forward(state.params, (xs, gs))[1]
    np.testing.assert_array_equal(np.asarray(ys), np.asarray(expected))
    exact = [oracle.product(x, params["w"], g) for x, g in zip(xs, gs, strict=True)]
    # Rounding to bfloat16 in each trip would give an error of 2**-10.
    assert distance(grads["w"], sum(each["w"] for each in exact)) <= 2**-12
    scans = equations(step, ["scan"], state, (xs, gs))
    of = [
        {
            e.params["of"]
            for e in walk(scan.params["jaxpr"])
            if e.primitive.name == "jamp_quantize"
        }
        for scan in scans
    ]
    again = {Of.INPUT} if name == "remat" else set()
    assert of == [{Of.INPUT}, {Of.COTANGENT} | again]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_logits_in_parts_stay_half(wrap):
    def fn(params, x):
        h = layers(params, x)

        def add(loss, part):
            logits = part @ params["head"]
            return loss + jax.nn.logsumexp(logits, axis=-1).sum()

        return repeat(wrap(add), 0.0, h.reshape(4, -1, N))

    state = state_of(params_of_layers("head"))
    assert why(fn, state, X)[:3] == ["fp8", "fp8", "fp8 last"]


@pytest.mark.eight_devices
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map_each_device_has_its_own_scale(check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d"), "check_vma": check_vma}
    mapped = jax.shard_map(lambda h, w: h @ w, mesh=mesh, **specs)
    # With one scale for all, numbers 2**-21 times the largest would become zero.
    sizes = np.repeat(np.exp2(-3.0 * np.arange(8)), ROWS)[:, None]
    x, g = (np.float32(normal(i, 8 * ROWS, N) * sizes) for i in range(2))
    params = {"one": jnp.ones(()), "last": jnp.eye(N), "w": normal(2, N, N)}
    state = state_of(params)

    def loss_fn(params, x):
        y = mapped(x * params["one"], params["w"])
        return ((y @ params["last"]) * g).sum(), y

    step = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    assert in_fp8(step, state, x) == 3
    (_, y), grads = jax.jit(step)(state, x)
    forward = forward_of(state, loss_fn)
    of_x = jax.jit(jax.grad(lambda x: forward(state.params, x)[0]))(x)
    parts, of_w = [np.split(a, 8) for a in (x, g, y, of_x)], 0
    for part_x, part_g, part_y, part_of_x in zip(*parts, strict=True):
        expected = oracle.product(part_x, np.float32(params["w"]), part_g)
        assert distance(part_y, expected["y"]) <= 2**-7
        assert distance(part_of_x, expected["x"]) <= 2**-7
        of_w += expected["w"]
    assert distance(grads["w"], of_w) <= 2**-7


def test_forward_mode_is_close_to_half():
    def along(fp8):
        state = state_of(TRANSFORMER, fp8=fp8)
        forward = forward_of(state, transformer)
        of_params = jax.tree.map(lambda w: jnp.flip(w, 0), state.params)
        return jax.jvp(lambda p: forward(p, X), (state.params,), (of_params,))[1]

    assert 0 < abs(along(ALL) / along(False) - 1) <= 0.05


@pytest.mark.slow
def test_under_vmap_the_batch_has_one_scale():
    state = state_of(STACK)
    forward = forward_of(state, unrolled)
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
    def gradient(fp8=ALL):
        state = state_of(STACK, fp8=fp8)
        of_x = jax.grad(forward_of(state, unrolled), argnums=1)
        return jax.grad(lambda p: jnp.square(of_x(p, X)).sum())(state.params)["stack"]

    with pytest.raises(NotImplementedError, match="no second derivative.*disable_fp8"):
        gradient()
    with jamp.disable_fp8():
        assert distance(gradient(), gradient(False)) <= 1e-6


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("argnums", [0, 1])
def test_a_second_derivative_is_an_error_not_nan(argnums, derivative):
    state = state_of(params_of_layers())
    forward = forward_of(state, lambda params, x: layers(params, x).sum())
    of_other = jax.grad(lambda x, w: forward(state.params | {"w": w}, x), 1 - argnums)

    def penalty(x, w):
        return of_other(x, w).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="no second derivative.*disable_fp8"):
        derivative(penalty, argnums)(X, state.params["w"])


BAD = {
    "matches no leaf.*paths: head": lambda: state_of(STACK, fp8=jamp.Fp8(keep="block")),
    r"Fp8\(keep=\)='\(' is not a regex": lambda: jamp.Fp8(keep="("),
    r"Fp8\(keep=\) must be a regex, a pred": lambda: jamp.Fp8(keep=3),
    "grad_weight=.* must be a bool, got 1": lambda: jamp.Fp8(grad_weight=1),
    "smallest=.* positive integer or None, got 0": lambda: jamp.Fp8(smallest=0),
    "smallest=.*got True": lambda: jamp.Fp8(smallest=True),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_options_are_refused(words):
    with pytest.raises((TypeError, ValueError), match=words):
        BAD[words]()


def test_a_device_without_units_for_it_warns_once(monkeypatch):
    class Device:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    devices.warn_without_fp8.cache_clear()
    with pytest.warns(jamp.UnusedOptionWarning, match="A100 has no fp8 units.*O5"):
        devices.warn_without_fp8()
    devices.warn_without_fp8()  # a second warning would be an error
    Device.compute_capability = "9.0"
    devices.warn_without_fp8.cache_clear()
    devices.warn_without_fp8()
