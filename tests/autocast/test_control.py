"""Test how users steer autocast: marks, lists, regions and registered functions."""

import functools
import gc
import pickle
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jamp
from tests.policy.forward_models import products
from tests.support.constructs import AROUND

X = jnp.eye(4)
HALF, FLOAT = "float16,float16", "float32,float32"
LISTS = jamp.AutocastLists()
INSIDE = 5  # most seconds that one thread waits for the other


def found(fn, **options):
    return products(jamp.autocast(fn, **options), X)


def product(x):
    return x @ x


@pytest.mark.parametrize("name", ["plain", "jit", "scan", "cond"])
def test_marks_reach_into_jit_and_control_flow(name):
    inner = AROUND[name](product)
    marked = jamp.float_function(inner)
    assert found(lambda x: marked(x) @ x) == [FLOAT, HALF]

    def disabled(x):
        with jamp.disable_casts():
            y = inner(x)
        return y @ x

    assert found(disabled) == [FLOAT, HALF]
    # The mark does not stick to the jitted function.
    assert found(lambda x: inner(x)) == [HALF]


def test_disable_casts_nests_and_survives_exceptions():
    def fn(x):
        with jamp.disable_casts():
            with jamp.disable_casts():
                y = x @ x
            y = y @ x
        with pytest.raises(KeyError), jamp.disable_casts():
            raise KeyError
        return y @ x

    assert found(fn) == [FLOAT, FLOAT, HALF]


def test_a_half_function_runs_in_half_what_the_lists_keep_in_float32():
    exponential = jamp.half_function(jnp.exp)
    # exp(12) = 162754.79 is inf in float16.
    assert exponential.__name__ == "exp"
    fns = jamp.autocast(exponential), jamp.autocast(jnp.exp), exponential
    assert [bool(jnp.isinf(fn(jnp.float32(12)))) for fn in fns] == [True, False, False]
    softmax, logits = jax.nn.log_softmax, jnp.array([0.0, 1e-4])  # the lists name it
    in_half = jamp.autocast(jamp.half_function(softmax))(logits)
    assert in_half[0] != jamp.autocast(softmax)(logits)[0]


def algorithm(dtype, count=1):
    return lax.DotAlgorithm(dtype, dtype, jnp.float32, count, count, count)


PRESETS = lax.DotAlgorithmPreset
PRECISIONS = {
    FLOAT: [
        *("highest", "float32", lax.Precision.HIGHEST, ("default", "highest")),
        *("F32_F32_F32", "TF32_TF32_F32", PRESETS.BF16_BF16_F32_X6),
        *(algorithm(jnp.float32), algorithm(jnp.bfloat16, 3)),
    ],
    HALF: [
        *(None, "default", "high", "tensorfloat32", lax.Precision.DEFAULT),
        *(PRESETS.DEFAULT, PRESETS.F16_F16_F32, algorithm(jnp.float16)),
    ],
}


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(p, expected) for expected, ps in PRECISIONS.items() for p in ps],
    ids=lambda p: None if p in PRECISIONS else str(p).replace(" ", ""),
)
def test_precision_selects_the_dtype_of_a_matmul(precision, expected):
    wish = functools.partial(jnp.matmul, precision=precision)
    assert found(lambda x: wish(x, x) @ x) == [expected, HALF]
    if isinstance(precision, str):
        with jax.default_matmul_precision(precision):
            assert found(product) == [expected]


def test_precision_selects_the_dtype_of_other_products():
    for fn in (
        lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME", "highest"),
        lambda x: lax.ragged_dot(x, x[None], jnp.array([4]), precision="highest"),
        jax.grad(lambda x: jnp.matmul(x, x, precision="highest").sum()),
    ):
        operations = [op for op in jamp.explain(fn)(X).operations if op.flops]
        assert {(op.dtype, op.why) for op in operations} == {("float32", "precision")}


NET = LISTS.with_region("net", "float32")
OF_PRODUCT = LISTS.with_function("product", "half")
highest = functools.partial(jnp.matmul, X, precision="highest")
wide = functools.partial(jnp.matmul, X, preferred_element_type="float64")
promoted = jamp.promote_function(product)


def in_scopes(x):
    with jax.named_scope("net"):
        with jax.named_scope("head"):
            y = jax.jit(product)(x)
        return y @ x


# Lists, and the dtypes that they give the matmuls in `net/head` and in `net`. The last
# matching entry decides, whatever its kind.
IN_SCOPES = {
    "scope": (LISTS.with_region("head", "float32"), [FLOAT, HALF]),
    "outer": (NET, [FLOAT, FLOAT]),
    "last": (NET.with_region("head", "half"), [HALF, FLOAT]),
    "default": (NET.with_region("net/head", "default"), [HALF, FLOAT]),
    "primitive": (LISTS.with_primitive("dot_general", "float32"), [FLOAT, FLOAT]),
    "primitive last": (NET.with_primitive("dot_general", "half"), [HALF, HALF]),
    "function": (LISTS.with_function("product", "float32"), [FLOAT, HALF]),
    "function last": (NET.with_function("product", "half"), [HALF, FLOAT]),
    "region last": (OF_PRODUCT.with_region("", "float32"), [FLOAT, FLOAT]),
}
OTHERS = {
    "promote": (LISTS, [FLOAT, HALF, HALF], lambda x: promoted(promoted(x) @ x)),
    "half and float32": (LISTS, [HALF], lambda x: lax.dot(x.astype("float16"), x)),
    "float64": (LISTS, [FLOAT], lambda x: wide(x).astype("float32")),
    "mark, wish": (LISTS, [HALF], jamp.half_function(highest)),
    "region, wish": (LISTS.with_region("", "half"), [HALF], highest),
}


@pytest.mark.parametrize("name", IN_SCOPES | OTHERS)
def test_which_rule_decides(name):
    lists, expected, fn = (*(IN_SCOPES | OTHERS)[name], in_scopes)[:3]
    with jax.enable_x64(name == "float64"):
        assert found(fn, lists=lists) == expected


def test_lists_are_values():
    lists = LISTS.with_region("a", "half").with_primitive("exp", "half")
    assert lists == pickle.loads(pickle.dumps(lists)) and hash(lists) == hash(lists)
    assert jamp.AutocastLists() == LISTS != lists


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: LISTS.with_region("a", "quarter"), "'quarter'"),
        (lambda: LISTS.with_primitive("scan", "half"), "'scan', which contains"),
        (lambda: LISTS.register_half_function(jnp, "none"), "no function named 'none'"),
        (lambda: LISTS.register_half_kernel(jnp, "none"), "no function named 'none'"),
        (lambda: jamp.autocast(product, dtype="float32"), "must be.*float32"),
        (lambda: jamp.autocast(product, promote="wide"), "must be.*wide"),
        (lambda: LISTS.with_region("(", "half"), "got a bad regex, '\\('"),
        (lambda: LISTS.with_primitive("exp", "fp16"), "one of 'half', .*got 'fp16'"),
        (lambda: jamp.autocast("bfloat16"), "takes a function, got 'bfloat16'"),
        (lambda: jamp.autocast(), "got no function.*not a context manager"),
        (lambda: jamp.autocast(dtype="bfloat16"), "functools.partial"),
        (lambda: jamp.autocast(product, "fp16"), "float16 or bfloat16, got 'fp16'"),
        (lambda: jamp.autocast(product, lists={}), "must be a jamp.AutocastLists"),
    ],
)
def test_bad_options_are_named(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.fixture
def module():
    return types.SimpleNamespace(product=product)


def calls(module):
    """Returns a function that looks `product` up in its module."""
    return lambda x: module.product(x) @ x


@pytest.fixture
def lists(module):
    return LISTS.register_float_function(module, "product")


def test_the_last_registration_of_a_function_decides(module, lists):
    half = LISTS.register_half_function(module, "product")
    last = half.register_float_function(module, "product")
    assert found(calls(module), lists=last) == [FLOAT, HALF]
    last = lists.register_half_function(module, "product")
    assert found(calls(module), lists=last) == [HALF, HALF]
    promoted = half.register_promote_function(module, "product")
    assert found(calls(module), lists=promoted) == [FLOAT, HALF]
    assert module.product is product


def test_the_original_returns_after_the_last_of_two_threads(module, lists):
    """The first thread ends while the second is still tracing."""
    entered = {name: threading.Event() for name in ("first", "second")}
    left, results = threading.Event(), {}

    def trace(name, wait):
        def fn(x):
            entered[name].set()
            assert wait.wait(INSIDE)
            return calls(module)(x)

        results[name] = found(fn, lists=lists)
        left.set()

    waits = {"first": entered["second"], "second": left}
    first, second = (threading.Thread(target=trace, args=x) for x in waits.items())
    first.start()
    assert entered["first"].wait(INSIDE)
    assert module.product is not product
    second.start()
    # A thread that does not trace calls the plain function.
    plain = jax.make_jaxpr(calls(module))(X)
    assert "jamp" not in plain.pretty_print(name_stack=True)
    for thread in (first, second):
        thread.join(INSIDE)
    assert results == dict.fromkeys(waits, [FLOAT, HALF])
    assert module.product is product


def test_an_exception_in_one_of_two_traces_leaves_the_other_its_marks(module, lists):

    def fails(x):
        raise KeyError

    def fn(x):
        with pytest.raises(KeyError):
            jamp.autocast(fails, lists=lists)(x)
        return calls(module)(x)

    assert found(fn, lists=lists) == [FLOAT, HALF]
    with pytest.raises(KeyError):
        jamp.autocast(fails, lists=lists)(X)
    assert module.product is product


@pytest.fixture
def classes():
    class Base:
        def method(self, x):
            return x @ x

        @functools.partial(jax.jit, static_argnums=0)
        def jitted(self, x):
            return x @ x

        static = staticmethod(product)

    class Derived(Base):
        pass

    return Base, Derived


@pytest.mark.parametrize("name", ["method", "static", "jitted"])
def test_methods_are_replaced_and_restored(classes, name):
    for owner in classes:
        before = dict(vars(owner))
        lists = LISTS.register_float_function(owner, name)
        fn = lambda x, owner=owner: getattr(owner(), name)(x)  # noqa: E731
        assert found(fn, lists=lists) == [FLOAT]
        assert dict(vars(owner)) == before


def test_an_attribute_that_a_traced_program_sets_or_deletes_stays_so(classes):
    base, derived = classes
    mine = staticmethod(lambda x: x)
    changes = {derived: lambda: setattr(derived, "static", mine)}
    changes[base] = lambda: delattr(base, "static")
    for owner, change in changes.items():
        lists = LISTS.register_float_function(owner, "static")
        jamp.autocast(lambda x, change=change: (change(), x)[1], lists=lists)(X)
    assert vars(derived)["static"] is mine and not hasattr(base, "static")


def test_registered_objects_and_policies_are_freed():
    def object_of(rule):
        owner = types.SimpleNamespace(product=lambda x: x @ x)
        lists = LISTS.register_float_function(owner, "product")
        jax.jit(jamp.autocast(lambda x: owner.product(x), lists=lists))(X)
        return weakref.ref(owner.product)

    def policy_of(level):
        def keep(*args, **params):
            return False

        loss = jax.checkpoint(lambda w: (w @ w).sum(), policy=keep)
        state = jamp.initialize(X, optax.sgd(0.1), level, verbosity=0)
        jax.make_jaxpr(jamp.scaled_grad(loss))(state)
        return weakref.ref(keep)

    refs = [object_of("float32"), policy_of("O6")]
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize(
    "scope", ["jamp_float32_block", "my_jamp_float32", "x.jamp_recorded"]
)
def test_a_users_scope_is_not_a_mark(scope):
    assert found(jax.named_scope(scope)(product)) == [HALF]


def test_a_mark_reaches_into_batched_derivatives():
    fn = jamp.float_function(product)
    mapped = jax.vmap(lambda x: jax.jvp(fn, (x,), (x,))[1])
    assert set(found(lambda x: mapped(x[None]))) == {FLOAT}
