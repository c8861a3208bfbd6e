"""Test that `jamp.explain` lists autocast's decision and reason per operation."""

import functools
import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from jamp.diagnostics._explanation import computes, total_flops
from jamp.diagnostics._source import short_line
from tests.support.constructs import repeat
from tests.support.programs import products, walk
from tests.support.states import make

LISTS = jamp.AutocastLists()
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(20)(nn.LayerNorm()(x)))
        return jnp.exp(x + nn.Dense(32)(h))


STACK = nn.Sequential([Block() for _ in range(12)])
ROWS = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def only(explanation, primitive):
    (found,) = (op for op in explanation.operations if op.primitive == primitive)
    return found


@pytest.fixture
def unknown():
    """Ignores autocast's warnings, and clears their cache for other tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jamp.AutocastWarning)
        yield


mystery = Primitive("mystery")
mystery.def_abstract_eval(lambda x: x)


def with_sums(x, w):
    return x @ w + jnp.cumsum(w, axis=0)


def disabled(x, w):
    with jamp.disable_casts():
        return x @ w


def own_bfloat16(x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


# The dtype, rule and reason of one operation in each program.
CASES = {
    "dot_general: float16 half list": jnp.matmul,
    "reduce_sum: float32 float32 list": lambda x, w: x.sum(),
    "reduce_max: float32 promote statistic": lambda x, w: jnp.exp((x @ w).max()),
    "sub: float32 promote fusion": lambda x, w: (x @ w - 1.0) @ w,
    "sub: float32 promote smaller operand": lambda x, w: (y := x @ w) - y.mean(0),
    "add: float32 promote widest": with_sums,
    "add: float16 promote bias": lambda x, w: x @ w + w[0],
    "mul: float16 promote operands": lambda x, w: x @ w * (x > 0).astype(x.dtype),
    "select_n: float32 move fusion": lambda x, w: jnp.where(x > 0, x @ w, -jnp.inf) @ w,
    "mul: float32 promote literal": lambda x, w: x @ w * 1e30,
    "broadcast_in_dim: float32 move no vote": lambda x, w: x @ w + jnp.ones(8)[:, None],
    "tanh: float32 float32 region": jamp.float_function(lambda x, w: jnp.tanh(x @ w)),
    "dot_general: float32 recorded region": disabled,
    "tanh: float16 recorded no float32": jamp.half_kernel(lambda x, w: jnp.tanh(x)),
    "convert_element_type: float16 recorded region": (
        jamp.half_kernel(lambda x, w: x.argmax())
    ),
    "dot_general: float32 float32 precision": (
        functools.partial(jnp.matmul, precision="highest")
    ),
    "exp: float32 float32 region": lambda x, w: jax.nn.log_softmax(x @ w),
    "nextafter: float32 recorded recorded": lax.nextafter,
    "mystery: float32 None unknown primitive": lambda x, w: mystery.bind(x @ w),
    "mul: int32 promote no float32": lambda x, w: x.argmax() * 2,
    "mul: bfloat16 promote no float32": lambda x, w: (x @ w).astype("bfloat16") * 2,
    "dot_general: bfloat16 half own dtype": own_bfloat16,
}


@pytest.mark.parametrize("expected", CASES)
def test_dtype_and_reason(expected, unknown):
    primitive = expected.partition(":")[0]
    operations = jamp.explain(CASES[expected])(X, X).operations
    found = [op for op in operations if op.primitive == primitive]
    assert {f"{primitive}: {op.dtype} {op.rule} {op.why}" for op in found} == {expected}
    assert all(op.reason for op in found)


def test_without_autocast_every_operation_is_recorded():
    lists = LISTS.with_primitive("tanh", "half")
    with jamp.disable_casts():
        found = jamp.explain(lambda x: jnp.tanh(x @ x), lists=lists)(X).operations
    decided = ("float32", "recorded", "region", "It is inside `disable_casts`.")
    assert [(op.dtype, op.rule, op.why, op.reason) for op in found] == 2 * [decided]


def named(x, w):
    with jax.named_scope("head"):
        return jnp.tanh(x @ w)


def test_other_options_and_arguments():
    lists = LISTS.with_region("head", "float32")
    op, _ = jamp.explain(named, lists=lists)(X, X).operations
    assert op.reason == "`lists.with_region('head', ...)` sets its rule."
    op = only(jamp.explain(with_sums, promote="narrowest")(X, X), "add")
    assert (op.dtype, op.why) == ("float16", "narrowest")

    def sums(x):
        add = lambda c, _: (c + x @ x, None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros((8, 8)), length=2)

    op = only(jamp.explain(sums, promote="narrowest")(X), "add")
    assert (op.dtype, op.why) == ("float32", "carry")
    fn = lambda x, *, w, name: {"y": x @ w["w"], "name": name + "y"}  # noqa: E731
    explanation = jamp.explain(fn, jnp.bfloat16)(X, w={"w": jnp.eye(8)}, name="x")
    assert explanation.dtype == only(explanation, "dot_general").dtype == "bfloat16"
    assert explanation.half_share == 1.0


def everywhere(x, w):
    """Runs matmuls in each kind of sub-program, and one in float32."""
    x = jax.jit(jnp.matmul)(x, w)
    x = jax.checkpoint(jnp.matmul)(x, w)
    x = repeat(lambda c, _: c @ w, x, length=2)
    x = lax.while_loop(lambda c: (c @ w).sum() < 1, lambda c: c @ w, x)
    x = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x.T, x)
    return disabled(jax.nn.relu(x @ w), w)


def test_each_operation_is_listed_once_with_its_program():
    explanation = jamp.explain(everywhere)(X, X)
    operations, rows = explanation.operations, explanation.to_dict()
    assert json.loads(json.dumps(rows)) == rows
    found = [(row["dtype"], row["source"]) for row in rows["operations"]]
    assert found == [(op.dtype, op.source) for op in operations]
    holders = ("jit", "remat2", "scan", "while cond", "while body", "cond branch 1")
    paths = [op.path for op in operations if op.flops]
    assert paths == [*((holder,) for holder in holders), (), ()]
    branches = [op.path for op in operations if "cond branch" in str(op.path)]
    assert branches == [("cond branch 0",), ("cond branch 1",)]
    dtypes = [op.dtype for op in operations if op.flops]
    run = [found.lhs for found in products(jamp.autocast(everywhere), X, X)]
    assert sorted(dtypes) == sorted(run) == [*["float16"] * 7, "float32"]


def attention(x, w):
    p = jax.nn.softmax(x @ w)
    return jax.jit(jax.nn.gelu)(p @ w) @ jax.jit(jax.nn.gelu)(w @ p)


def test_explain_lists_the_users_operations_only():
    operations = jamp.explain(attention)(X, X).operations
    written = str(jax.make_jaxpr(jamp.autocast(attention))(*[jnp.ones((8, 8))] * 2))
    assert "remat" in written or "checkpoint" in written
    # A call without a matmul belongs to the program that calls it.
    assert {name for op in operations for name in op.path} == set()
    names = [op.primitive for op in operations]
    written = [e.primitive.name for e in walk(jax.make_jaxpr(attention)(X, X).jaxpr)]
    assert sorted(names) == sorted(name for name in written if name != "jit")
    # Both calls of the same program are listed.
    assert names.count("tanh") == 2


def test_source_lines_are_the_users():
    line = f"{__file__}:{named.__code__.co_firstlineno + 2}"
    assert {op.source for op in jamp.explain(named)(X, X).operations} == {line}

    def fn(x):
        return jnp.where(x > 0, x, 1.0)

    # Operations inside JAX's functions have the line of the caller.
    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    operations = jamp.explain(fn)(X).operations
    assert "select_n" in {op.primitive for op in operations}
    assert {op.source for op in operations} == {line}
    operations = jamp.explain(jamp.half_function(jnp.tanh))(X).operations
    assert operations and all("/jamp/" not in op.source for op in operations)


def test_explain_warns_of_float32_matmuls_and_unknown_primitives(unknown):
    assert jamp.explain(jnp.matmul)(X, X).warnings == ()
    line = disabled.__code__.co_firstlineno + 2
    waits, wide = jamp.explain(everywhere)(X, X).warnings
    assert ": while: half condition. Its condition depends on a half matmul" in waits
    place = f"{__file__}:{line}"
    reason = "dot_general runs in float32 (region). It is inside `disable_casts`."
    assert wide == f"{place}: {reason}"
    callback = jamp.explain(lambda x: jax.pure_callback(np.tanh, X, x))(X)
    assert only(callback, "pure_callback").dtype == "float32"
    assert callback.warnings == ()
    (warning,) = jamp.explain(mystery.bind)(X).warnings
    assert f"{mystery}: unknown primitive. No list contains it" in warning


def test_nothing_runs_and_nothing_is_compiled():
    events = []

    def note(event, *_, **__):
        events.append("backend_compile" in event)

    jax.monitoring.register_event_duration_secs_listener(note)
    huge = jax.ShapeDtypeStruct((2**25, 2**25), jnp.float32)  # 4 PiB
    explanation = jamp.explain(jax.grad(lambda w: jnp.sin(w @ w).sum()))(huge)
    jax.monitoring.unregister_event_duration_listener(note)
    assert total_flops(explanation.operations)[0] == 3 * 2 * 2**75
    assert events and not any(events)


def test_a_model_prints_as_a_tree():
    variables = jax.eval_shape(STACK.init, jax.random.key(0), ROWS)
    explanation = jamp.explain(STACK.apply)(variables, ROWS)
    shown = str(explanation).splitlines()
    assert sum("12 × 164 k     100%" in line for line in shown) == 1
    assert len(repr(explanation).splitlines()) == 1


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_step_at_each_level(level):
    model = nn.Dense(8, name="dense")
    params = model.init(jax.random.key(0), jnp.ones((8, 8)))["params"]
    state = make(level, params, apply_fn=model.apply)

    def loss(params, x):
        return state.apply_fn({"params": params}, x).mean(), "aux"

    explanation = jamp.explain(loss)(state, X)
    half = {"O0": "float32", "O5": "bfloat16"}.get(level, "float16")
    # Forward and backward: the input has no gradient.
    assert total_flops(explanation.operations)[0] == 2 * 1024
    assert explanation.dtype == half
    assert explanation.half_share == (level != "O0")
    assert explanation.level == level
    assert f"A step at {level}: 2 mat" in str(explanation)
    assert explanation.warnings == ()
    products = [op for op in explanation.operations if op.flops]
    assert {(op.dtype, op.module) for op in products} == {(half, "dense")}
    assert [op.phase for op in products] == ["forward", "backward"]
    if level == "O0":
        assert {op.why for op in explanation.operations if computes(op)} == {"level"}
        assert "(level)" not in str(explanation)


def with_kept(params, x):
    x = jax.checkpoint(lambda x: jnp.exp(x @ params["w"]))(x)
    x = jamp.float_function(jnp.tanh)(x @ params["kept"])
    return (x + lax.stop_gradient(X_VALUES @ X_VALUES)).sum()


X_VALUES = jnp.ones((8, 8))
# The dtype and the reason of each operation in the forward pass.
OF_A_STEP = {
    "O1": "float16 list, float32 list, float16 list, float16 list, float32 region, "
    "float32 widest, float32 list",
    "O2": "float16 list, float32 list, float32 kept, float32 region, "
    "float32 no half param, float32 operands, float32 list",
}


@pytest.mark.parametrize("level", OF_A_STEP)
def test_each_operation_of_a_step_has_its_reason(level):
    params = {"w": X_VALUES, "kept": X_VALUES}
    keep = {"keep_fp32": "kept"} if level == "O2" else {}
    lists = LISTS.with_primitive("reduce_sum", "float32")
    state = make(level, params, lists=lists, **keep)
    explanation = jamp.explain(with_kept)(state, X)
    found = [op for op in explanation.operations if computes(op)]
    assert all(op.reason for op in found)
    forward = [f"{op.dtype} {op.why}" for op in found if op.phase == "forward"]
    assert ", ".join(forward) == OF_A_STEP[level]
    backward = {op.why for op in found if op.phase == "backward"}
    assert backward <= {"derivative", "gradient"}
    reasons = {op.reason for op in found}
    assert "`lists.with_primitive('reduce_sum', ...)` sets its rule." in reasons
    assert "`float_function` or `register_float_function` marks it." in reasons
    assert "It belongs to the derivative of `exp`: Their results exceed" in str(reasons)
    kept = "Its weight is a param that this level keeps in float32."
    assert (kept in str(explanation.warnings)) == (level == "O2")
    assert "jamp_why" not in str(explanation.to_dict())
    # An operation outside modules is named by its line.
    line = f"{short_line(__file__)}:{with_kept.__code__.co_firstlineno + 1}"
    assert line in str(explanation)
    # A step has no notes after an explanation.
    step = jax.jit(jamp.scaled_value_and_grad(with_kept)).lower(state, X_VALUES)
    text = step.as_text(debug_info=True)
    assert "transpose" in text and "jamp_why" not in text


def test_arguments_go_to_the_function_that_is_returned():
    x = jnp.ones((2, 2))
    for args in ((x,), (x, x), (jnp.float16, x), ({"w": x},)):
        with pytest.raises(TypeError, match=r"Write explain\(loss_fn\)\(state, \*ar"):
            jamp.explain(jnp.matmul, *args)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def flops(fn, *args):
    return [op.flops for op in jamp.explain(fn)(*args).operations if op.flops]


def einsum(subscripts):
    return functools.partial(jnp.einsum, subscripts)


def conv(padding="VALID", stride=(1,), **options):
    options |= {"padding": padding, "window_strides": stride}
    return functools.partial(lax.conv_general_dilated, **options)


IMAGES = ("NHWC", "HWIO", "NHWC")
# Batch 4, 2 input features, 5 output features, 10 positions, a kernel of 3.
LINES = (4, 2, 10), (5, 2, 3)


@pytest.mark.parametrize(
    "fn, lhs, rhs, expected",
    [
        (einsum("bij,bjk->bik"), (3, 8, 16), (3, 16, 4), 3 * 2 * 8 * 16 * 4),
        (einsum("ij,j->i"), (8, 16), (16,), 2 * 8 * 16),
        (conv(), *LINES, 2 * 4 * 5 * 2 * (8 * 3)),
        # FLOPs on padding count.
        (conv("SAME"), *LINES, 2 * 4 * 5 * 2 * (10 * 3)),
        (conv("SAME", (2,)), *LINES, 2 * 4 * 5 * 2 * (5 * 3)),
        # 4 examples in 2 groups give 2 outputs. Each of the 6 features reads one group.
        (conv(batch_group_count=2), (4, 2, 10), (6, 2, 3), 2 * 2 * 6 * 2 * (8 * 3)),
        # 6 features in 3 groups: each of the 12 outputs reads 2 of them.
        (
            conv(stride=(1, 1), dimension_numbers=IMAGES, feature_group_count=3),
            *((2, 9, 7, 6), (3, 2, 2, 12)),
            2 * 2 * 12 * 2 * (7 * 3) * (6 * 2),
        ),
    ],
)
def test_flops_of_a_product(fn, lhs, rhs, expected):
    assert flops(fn, shape(*lhs), shape(*rhs)) == [expected]


def test_flops_of_ragged_products():
    def loss(x, w):
        return lax.ragged_dot(x, w, jnp.array([1, 3])).sum()

    # Each of 4 rows meets one of the two (8, 3) matrices, also in both derivatives.
    expected = 2 * 4 * 8 * 3
    assert flops(loss, shape(4, 8), shape(2, 8, 3)) == [expected]
    backward = flops(jax.grad(loss, argnums=(0, 1)), shape(4, 8), shape(2, 8, 3))
    assert set(backward) == {expected} and len(backward) >= 2


def test_scans_multiply_and_while_loops_do_not():
    def fn(x, w):
        body = lambda c, _: repeat(lambda c, _: c @ w, c, length=3)  # noqa: E731
        x = repeat(body, x, length=5)
        return lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    operations = jamp.explain(fn)(shape(8, 8), shape(8, 8)).operations
    found = [(op.path, op.flops) for op in operations if op.flops]
    assert found == [(("scan", "scan"), 15 * 1024), (("while body",), 1024)]


def test_share_in_half():
    fn = lambda x, w, v: jamp.float_function(jnp.matmul)(x @ w, v)  # noqa: E731
    # The half matmul has 2 * 8 * 8 * 24 FLOPs, the float32 one 2 * 8 * 24 * 2.
    found = jamp.explain(fn)(shape(8, 8), shape(8, 24), shape(24, 2))
    assert [op.flops for op in found.operations] == [3072, 768]
    assert found.half_share == 0.8
    # A product of integers has no FLOPs, and without FLOPs the share is None.
    found = jamp.explain(jnp.matmul)(*2 * [shape(8, 8, dtype=jnp.int8)])
    assert [op.flops for op in found.operations] == [None]
    assert (found.half_share, found.warnings) == (None, ())
