"""`jamp.explain`: what autocast decided for each operation, why, and how it says so."""

import importlib.util
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jamp
from jamp._autocast import rewrite
from jamp.diagnostics import Explanation, Operation
from tests.programs import products

F32 = jnp.float32
LISTS = jamp.AutocastLists()


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X = shape(8, 8)


def only(explanation: Explanation, primitive: str) -> Operation:
    (found,) = (op for op in explanation.operations if op.primitive == primitive)
    return found


@pytest.fixture
def unknown():
    """Lets autocast warn, and forget that it did: other tests want to see it too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jamp.AutocastWarning)
        yield
    rewrite._warn_once.cache_clear()


# ---- what runs in what, and why

mystery = Primitive("mystery")
mystery.def_abstract_eval(lambda x: x)


def product(x, w):
    return x @ w


def feeder(x, w):
    return jnp.exp(x @ w - 1.0)


def with_sums(x, w):
    return x @ w + jnp.cumsum(w, axis=0)


def with_bias(x, w):
    return x @ w + jnp.cumsum(w[0])


def with_constant(x, w):
    return x @ w + jnp.ones(8)[:, None]


def marked(x, w):
    return jamp.float_function(jnp.tanh)(x @ w)


def disabled(x, w):
    with jamp.disable_casts():
        return x @ w


def log_probabilities(x, w):
    return jax.nn.log_softmax(x @ w)


def own_bfloat16(x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.matmul(x, w, preferred_element_type=F32)


CASES = {
    "a product": (product, "dot_general", "float16 half list"),
    "a sum": (lambda x, w: x.sum(), "reduce_sum", "float32 float32 list"),
    "what a sum reads": (feeder, "sub", "float32 promote feeder"),
    "a shared copy": (lambda x, w: x @ w + x, "add", "float16 promote shared copy"),
    "half": (lambda x, w: -(x @ w), "neg", "float16 promote operands"),
    "float32": (lambda x, w: -(x + w), "neg", "float32 promote operands"),
    "both": (with_sums, "add", "float32 promote widest"),
    "a bias": (with_bias, "add", "float32 promote smaller operand"),
    "1e30": (lambda x, w: x @ w * 1e30, "mul", "float32 promote literal"),
    "a constant": (with_constant, "broadcast_in_dim", "float32 move no vote"),
    "float_function": (marked, "tanh", "float32 float32 region"),
    "disable_casts": (disabled, "dot_general", "float32 recorded region"),
    "a listed function": (log_probabilities, "exp", "float32 float32 region"),
    "recorded": (lax.nextafter, "nextafter", "float32 recorded recorded"),
    "unknown": (
        lambda x, w: mystery.bind(x @ w),
        "mystery",
        "float32 None unknown primitive",
    ),
    "integers": (lambda x, w: x.argmax() * 2, "mul", "int32 promote no float32"),
    "bfloat16": (
        lambda x, w: (x @ w).astype("bfloat16") * 2,
        "mul",
        "bfloat16 promote no float32",
    ),
    "bfloat16 by hand": (own_bfloat16, "dot_general", "bfloat16 half own dtype"),
}


@pytest.mark.parametrize("case", CASES)
def test_dtype_and_reason(case, unknown):
    fn, primitive, expected = CASES[case]
    operations = jamp.explain(fn)(X, X).operations
    found = {
        f"{op.dtype} {op.rule} {op.why}"
        for op in operations
        if op.primitive == primitive
    }
    assert found == {expected}


REASONS = {
    "a product": "Matrix units multiply half and accumulate in float32: this is the "
    "speed-up.",
    "float_function": "`float_function` or `register_float_function`.",
    "a listed function": "`log_softmax`: Each is one exponential or logarithm with its "
    "safeguard: no rounding inside.",
}


@pytest.mark.parametrize("case", REASONS)
def test_reason_is_the_one_of_the_row(case):
    fn, primitive, _ = CASES[case]
    assert only(jamp.explain(fn)(X, X), primitive).reason == REASONS[case]


def named(x, w):
    with jax.named_scope("head"):
        return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    "lists, expected",
    [
        (LISTS, "float16 operands"),
        (LISTS.with_primitive("tanh", "float32"), "float32 list"),
        (LISTS.with_region("head$", "float32"), "float32 region"),
        (LISTS.with_region("tail$", "float32"), "float16 operands"),
        (LISTS.with_region("h", "float32").with_region("$", "half"), "float16 region"),
        (LISTS.register_float_function(jnp, "tanh"), "float32 region"),
    ],
)
def test_lists_are_obeyed(lists, expected):
    op = only(jamp.explain(named, lists=lists)(X, X), "tanh")
    assert f"{op.dtype} {op.why}" == expected
    assert op.name_stack.startswith("head")


def test_reasons_of_the_users_lists():
    lists = LISTS.with_primitive("tanh", "float32")
    lists = lists.with_region("head$", "half").with_function("log_softmax", "half")

    def fn(x, w):
        return jax.nn.log_softmax(jnp.tanh(x) + named(x, w))

    explanation = jamp.explain(fn, lists=lists)(X, X)
    reasons = {
        op.reason for op in explanation.operations if op.primitive in ("tanh", "exp")
    }
    assert reasons == {
        "`lists.with_primitive('tanh', ...)`.",
        "`lists.with_region('head$', ...)`.",
        "`lists.with_function('log_softmax', ...)`.",
    }


def test_narrowest_keeps_mixed_sums_in_half():
    op = only(jamp.explain(with_sums, promote="narrowest")(X, X), "add")
    assert (op.dtype, op.why) == ("float16", "narrowest")


def test_bfloat16():
    explanation = jamp.explain(product, jnp.bfloat16)(X, X)
    assert explanation.dtype == only(explanation, "dot_general").dtype == "bfloat16"
    assert explanation.half_share == 1.0


@pytest.mark.parametrize(
    "options", [{"dtype": jnp.float32}, {"promote": "wide"}], ids=["dtype", "promote"]
)
def test_options_are_checked_at_once(options):
    with pytest.raises(ValueError, match="must be"):
        jamp.explain(product, **options)


# ---- the program


def everywhere(x, w):
    """Products in each kind of sub-program, one of them in float32."""
    x = jax.jit(jnp.matmul)(x, w)
    x = jax.checkpoint(jnp.matmul)(x, w)
    x, _ = lax.scan(lambda c, _: (c @ w, None), x, None, length=2)
    x = lax.while_loop(lambda c: (c @ w).sum() < 1, lambda c: c @ w, x)
    x = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x.T, x)
    return disabled(jax.nn.relu(x @ w), w)


def test_each_operation_is_listed_once_with_its_program():
    explanation = jamp.explain(everywhere)(X, X)
    assert [op.path for op in explanation.operations if op.flops] == [
        ("jit",),
        ("remat2",),
        ("scan",),
        ("while cond",),
        ("while body",),
        ("cond branch 1",),
        (),
        (),
    ]
    branches = [
        op.path for op in explanation.operations if "cond branch" in str(op.path)
    ]
    assert branches == [("cond branch 0",), ("cond branch 1",)]


def test_dtypes_are_those_of_the_program_that_runs():
    explained = [
        op.dtype for op in jamp.explain(everywhere)(X, X).operations if op.flops
    ]
    run = [found.lhs for found in products(jamp.autocast(everywhere), X, X)]
    assert sorted(explained) == sorted(run) == [*["float16"] * 7, "float32"]


def test_line_is_the_users():
    code = named.__code__
    explanation = jamp.explain(named)(X, X)
    for op in explanation.operations:
        assert op.source == f"{code.co_filename}:{code.co_firstlineno + 2}"


def test_operations_without_a_line_have_that_of_their_caller():
    def fn(x):
        return jnp.where(x > 0, x, 1.0)

    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    operations = jamp.explain(fn)(X).operations
    assert "select_n" in {op.primitive for op in operations if op.path}
    assert {op.source for op in operations} == {line}


def test_functions_of_jax_alone_have_no_line_of_jamp():
    operations = jamp.explain(jamp.half_function(jnp.tanh))(X).operations
    assert all("/jamp/" not in op.source for op in operations)


def test_products_in_half_need_no_warning():
    assert jamp.explain(feeder)(X, X).warnings == ()


def test_warns_of_a_product_in_float32():
    line = disabled.__code__.co_firstlineno + 2
    assert jamp.explain(everywhere)(X, X).warnings == (
        f"{__file__}:{line}: dot_general runs in float32 (region). `disable_casts`.",
    )


def test_warns_of_an_unknown_primitive(unknown):
    (warning,) = jamp.explain(mystery.bind)(X).warnings
    assert warning.startswith(f"{__file__}:") or warning.startswith("mystery")
    assert "mystery: unknown primitive. No list has it" in warning


def test_warns_of_what_it_cannot_look_into(unknown):
    def fn(x):
        return jax.pure_callback(np.tanh, X, x)

    explanation = jamp.explain(fn)(X)
    (warning,) = explanation.warnings
    assert "pure_callback: unknown primitive. No list has it" in warning
    assert only(explanation, "pure_callback").dtype == "float32"


def test_nothing_runs_and_nothing_is_compiled():
    events = []

    def note(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        huge = shape(2**25, 2**25)  # 4 PiB
        explanation = jamp.explain(jax.grad(lambda w: jnp.sin(w @ w).sum()))(huge)
        before = [event for event in events if "backend_compile" in event]
        jax.jit(lambda x: x + 1)(0)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert explanation.matmul_flops == 3 * 2 * 2**75
    assert before == []
    assert [event for event in events if "backend_compile" in event]  # it listens


def test_arrays_trees_keywords_and_static_arguments():
    def fn(params, x, *, name, scale=None):
        assert name == "tanh" and scale is None
        return {"out": x @ params["w"], "name": name}

    params = {"w": jnp.ones((8, 8)), "none": None}
    explanation = jamp.explain(fn)(params, X, name="tanh")
    assert [op.primitive for op in explanation.operations] == ["dot_general"]


# ---- its forms


def test_markdown():
    scope = LISTS.with_region("a|head", "float32")
    text = jamp.explain(named, lists=scope)(X, shape(8, 2)).to_markdown()
    table, totals, warning = text.strip().split("\n\n")
    line = named.__code__.co_firstlineno + 2
    assert table.splitlines() == [
        "| line | name stack | operation | operands | runs in | why | FLOPs | reason |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| tests/test_explain.py:{line} | head | dot_general | float32 float32 "
        "| float32 | float32 (region) | 256 | `lists.with_region('a\\|head', ...)`. |",
        f"| tests/test_explain.py:{line} | head | tanh | float32 | float32 "
        "| float32 (region) |  | `lists.with_region('a\\|head', ...)`. |",
    ]
    assert totals == (
        "2 operations; 1 matmuls and convolutions: 256 FLOPs, 0.0% in half (float16)."
    )
    assert warning.startswith(f"- {__file__}:{line}: dot_general runs in float32")


def test_markdown_indents_programs_and_counts_trips():
    text = jamp.explain(everywhere)(X, X).to_markdown()
    for cell in (
        "| scan × 2 |",
        "| · dot_general |",
        "| while × ? |",
        "| · cond: lt |",
        "| · body: dot_general |",
        "| · branch 0: transpose |",
        "| · · max |",
    ):
        assert cell in text


def test_dict_is_plain():
    explanation = jamp.explain(everywhere)(X, X)
    found = explanation.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["half_share"] == explanation.half_share
    assert len(found["operations"]) == len(explanation.operations)
    assert found["warnings"] == list(explanation.warnings)
    assert found["operations"][1] == {
        "path": ["jit"],
        "source": f"{__file__}:{everywhere.__code__.co_firstlineno + 2}",
        "name_stack": "",
        "primitive": "dot_general",
        "trips": 1,
        "in_dtypes": ["float32", "float32"],
        "dtype": "float16",
        "rule": "half",
        "why": "list",
        "reason": REASONS["a product"],
        "flops": 1024,
    }


def test_text_is_a_table_of_rich(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    text = str(jamp.explain(everywhere)(X, X))
    assert text.startswith("┏") and "\x1b" not in text
    assert (
        "8 matmuls and convolutions: 9.22e+03 FLOPs, 88.9% in half (float16)." in text
    )
    assert "disable_casts" in text


def test_text_is_markdown_without_rich(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )
    explanation = jamp.explain(product)(X, X)
    assert str(explanation) == explanation.to_markdown()
