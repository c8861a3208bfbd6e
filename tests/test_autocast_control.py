"""How the user steers autocast: marks, lists, regions, and the front end's options."""

import pickle
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.forward_models import products

X = jnp.eye(4)
HALF, FLOAT = "float16,float16", "float32,float32"


def found(fn, **options):
    return products(jamp.autocast(fn, **options), X)


def in_a_scan(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


def in_a_cond(fn):
    return lambda x: jax.lax.cond(x.sum() > 0, fn, lambda y: y, x)


WRAPS = {"plain": lambda f: f, "jit": jax.jit, "scan": in_a_scan, "cond": in_a_cond}


def product(x):
    return x @ x


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_float_function_runs_its_products_in_float32(wrap):
    marked = jamp.float_function(wrap(product))
    assert found(lambda x: marked(x) @ x) == [FLOAT, HALF]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_casts_are_disabled_inside_whatever_is_called_there(wrap):
    inner = wrap(product)

    def fn(x):
        with jamp.disable_casts():
            y = inner(x)
        return y @ x

    assert found(fn) == [FLOAT, HALF]
    # The same jitted function, outside again: the mark does not stick to it.
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
    # exp(12) = 162754.79 is inf in float16, and the result says so.
    assert jamp.autocast(exponential)(jnp.float32(12)) == jnp.inf
    assert jnp.isfinite(jamp.autocast(jnp.exp)(jnp.float32(12)))
    assert jnp.isfinite(exponential(jnp.float32(12)))  # without autocast: nothing


def test_a_half_function_outweighs_a_function_list():
    softmax = jamp.half_function(jax.nn.log_softmax)
    logits = jnp.array([0.0, 1e-4])
    assert (
        jamp.autocast(softmax)(logits)[0]
        != jamp.autocast(jax.nn.log_softmax)(logits)[0]
    )


def test_a_promote_function_multiplies_in_its_operands_dtype():
    promoted = jamp.promote_function(lambda a, b: a @ b)
    assert found(lambda x: promoted(x, x)) == [FLOAT]
    assert found(lambda x: promoted(x @ x, x @ x)) == [HALF, HALF, HALF]


def test_marks_keep_name_and_signature():
    assert jamp.float_function(product).__name__ == "product"


def test_registered_functions_are_marked_while_a_program_is_traced():
    module = types.SimpleNamespace(product=product)
    lists = jamp.AutocastLists().register_float_function(module, "product")

    def fn(x):
        return module.product(x) @ x

    assert found(fn, lists=lists) == [FLOAT, HALF]
    assert module.product is product
    assert found(fn) == [HALF, HALF]


def test_a_registration_ends_with_an_exception():
    module = types.SimpleNamespace(product=product)
    lists = jamp.AutocastLists().register_half_function(module, "product")

    def fn(x):
        raise KeyError

    with pytest.raises(KeyError):
        jamp.autocast(fn, lists=lists)(X)
    assert module.product is product


@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_registering_what_is_not_there_names_it(kind):
    register = getattr(jamp.AutocastLists(), f"register_{kind}_function")
    with pytest.raises(ValueError, match="No function named 'nothing' in module"):
        register(jnp, "nothing")


def test_a_region_by_name_scope():
    lists = jamp.AutocastLists().with_region("head", "float32")

    def fn(x):
        with jax.named_scope("head"):
            y = x @ x
        return y @ x

    assert found(fn, lists=lists) == [FLOAT, HALF]


def test_a_region_by_flax_path_and_the_last_that_matches():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.Dense(4, name="body")(x))

    model = Net()
    variables = model.init(jax.random.key(0), X)
    lists = (
        jamp.AutocastLists().with_region("Net", "float32").with_region("body", "half")
    )
    assert found(lambda x: model.apply(variables, x), lists=lists) == [HALF, FLOAT]


def test_a_region_may_return_to_the_table():
    lists = jamp.AutocastLists().with_region("net", "float32")
    lists = lists.with_region("net/head", "default")

    def fn(x):
        with jax.named_scope("net"):
            y = x @ x
            with jax.named_scope("head"):
                return y @ x

    assert found(fn, lists=lists) == [FLOAT, HALF]


def test_a_primitive_and_a_function_by_name():
    lists = jamp.AutocastLists().with_primitive("dot_general", "float32")
    assert found(product, lists=lists) == [FLOAT]

    @jax.jit
    def careful(x):
        return x @ x

    lists = jamp.AutocastLists().with_function("careful", "float32")
    assert found(lambda x: careful(x) @ x, lists=lists) == [FLOAT, HALF]


def test_lists_are_values():
    lists = jamp.AutocastLists().with_region("a", "half").with_primitive("exp", "half")
    assert lists == pickle.loads(pickle.dumps(lists)) and hash(lists) == hash(lists)
    assert jamp.AutocastLists() == jamp.AutocastLists()
    with pytest.raises(ValueError, match="'quarter'"):
        lists.with_region("a", "quarter")


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"promote": "wide"}], ids=str
)
def test_bad_options_are_named(options):
    (value,) = options.values()
    with pytest.raises(ValueError, match=value):
        jamp.autocast(product, **options)


def test_o1_takes_lists_and_promotion():
    lists = jamp.AutocastLists().with_primitive("dot_general", "float32")
    state = jamp.initialize(X, optax.sgd(0.1), lists=lists, verbosity=0)
    assert products(jamp.scaled_grad(lambda w: (w @ w).mean()), state)[0] == FLOAT
    assert (
        jamp.Properties.from_opt_level("O4", promote="narrowest").promote == "narrowest"
    )


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_other_levels_have_nothing_to_steer(level):
    with pytest.raises(
        jamp.OptLevelError, match=f"(?s)lists.*{level}.*promote.*{level}"
    ):
        jamp.Properties.from_opt_level(
            level, lists=jamp.AutocastLists(), promote="narrowest"
        )
    with pytest.raises(jamp.OptLevelError, match="AutocastLists"):
        jamp.Properties.from_opt_level("O1", lists={"exp": "half"})
