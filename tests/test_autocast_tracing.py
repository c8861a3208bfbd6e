"""Functions that are replaced while autocast traces: for its thread, no longer."""

import threading
import types

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.forward_models import products

X = jnp.eye(4)
HALF, FLOAT = "float16,float16", "float32,float32"
LISTS = jamp.AutocastLists()
INSIDE = 5  # seconds that one thread waits for the other, at most


def found(fn, **options):
    return products(jamp.autocast(fn, **options), X)


def product(x):
    return x @ x


@pytest.fixture
def module():
    return types.SimpleNamespace(product=product)


def calls(module):
    """What looks a function up where the lists have it."""
    return lambda x: module.product(x) @ x


@pytest.fixture
def lists(module):
    return LISTS.register_float_function(module, "product")


def test_of_one_function_registered_twice_the_last_decides(module, lists):
    half = LISTS.register_half_function(module, "product")
    last = half.register_float_function(module, "product")
    assert found(calls(module), lists=last) == [FLOAT, HALF]
    last = lists.register_half_function(module, "product")
    assert found(calls(module), lists=last) == [HALF, HALF]
    assert module.product is product


def test_an_inner_autocast_has_its_own_and_leaves_the_outer_one_its(module, lists):
    inner = jamp.autocast(calls(module))  # without lists

    def fn(x):
        y = jamp.autocast(calls(module), lists=lists)(x)
        return inner(y) + module.product(x)

    assert found(fn, lists=lists) == [FLOAT, HALF, HALF, HALF, FLOAT]
    assert module.product is product


def test_the_original_is_back_after_the_last_of_two_threads(module, lists):
    """The first to begin is the first to end, while the other is still tracing."""
    entered = {name: threading.Event() for name in ("first", "second")}
    left, results = threading.Event(), {}

    def trace(name, wait):
        def fn(x):
            entered[name].set()
            assert wait.wait(INSIDE)
            return calls(module)(x)

        results[name] = found(fn, lists=lists)
        left.set()

    first = threading.Thread(target=trace, args=("first", entered["second"]))
    second = threading.Thread(target=trace, args=("second", left))
    first.start()
    assert entered["first"].wait(INSIDE)
    assert module.product is not product
    second.start()
    # A thread that does not trace gets what does nothing, in its programs neither.
    assert "jamp" not in str(
        jax.make_jaxpr(calls(module))(X).pretty_print(name_stack=True)
    )
    for thread in (first, second):
        thread.join(INSIDE)
    assert results == {"first": [FLOAT, HALF], "second": [FLOAT, HALF]}
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


def test_what_somebody_else_sets_meanwhile_stays(module, lists):

    def fn(x):
        module.product = jnp.sin
        return module.product(x)

    jamp.autocast(fn, lists=lists)(X)
    assert module.product is jnp.sin


def test_traces_of_jitted_functions_are_kept_apart(module, lists):
    """JAX keeps the trace of a jitted function: one without marks, and one with."""
    traced = []

    @jax.jit
    def jitted(x):
        traced.append(x)
        return calls(module)(x)

    for _ in range(2):
        assert found(lambda x: jitted(x)) == [HALF, HALF]
        assert found(lambda x: jitted(x), lists=lists) == [FLOAT, HALF]
        jitted(X)
    assert len(traced) == 3  # the third is that without autocast


class Base:
    def method(self, x):
        return x @ x

    @staticmethod
    def static(x):
        return x @ x

    @classmethod
    def of_class(cls, x):
        return x @ x


class Derived(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Derived])
@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_methods_are_replaced_and_put_back_as_they_were(owner, name):
    before = dict(vars(owner))
    lists = LISTS.register_float_function(owner, name)
    assert found(lambda x: getattr(owner(), name)(x), lists=lists) == [FLOAT]
    assert dict(vars(owner)) == before


def test_objects_that_are_called_keep_what_else_they_have():
    """`jnp.add` has `reduce`, a jitted function `lower`."""
    lists = LISTS.register_float_function(jnp, "add")
    lists = lists.register_float_function(jnp, "tanh")
    add, tanh = jnp.add, jnp.tanh

    def fn(x):
        assert jnp.add is not add and jnp.tanh is not tanh
        jnp.tanh.lower(X)
        return jnp.add(x @ x, jnp.add.reduce(x))

    ops = jamp.explain(fn, lists=lists)(X).operations
    assert [op.dtype for op in ops if op.primitive == "add"] == ["float32"]
    assert jnp.add is add and jnp.tanh is tanh


def test_a_function_is_replaced_by_the_same_one_each_time(module, lists):
    """It may be an argument that JAX compares, such as a static one."""
    seen = []

    def fn(x):
        seen.append(module.product)
        return x

    for _ in range(2):
        jamp.autocast(fn, lists=lists)(X)
    assert seen[0] is seen[1] is not product
