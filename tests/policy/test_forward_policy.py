"""Test the scope of a policy: other models, nesting, exceptions, threads, options."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.policy.forward_models import (
    IMAGES,
    Headed,
    Normed,
    Witness,
    dtypes,
    forward,
    normal,
    products,
    state_of,
    under_policy,
    variables_of,
)
from tests.support.bits import assert_rounded_alike
from tests.support.models import CNN

pytestmark = pytest.mark.standard_promotion

X = normal(3, 4)
WITNESS = Witness()


@pytest.fixture(scope="module")
def state():
    """Returns a state of a Witness, which returns 2 under the policy and 4 outside."""
    return state_of(WITNESS, X)


def width_of(state, apply=WITNESS.apply):
    return jnp.max(forward(state, X, apply=apply)[1])


def width_inside(state, apply=WITNESS.apply):
    return under_policy(state, lambda: width_of(state, apply))


@pytest.mark.slow
def test_a_float32_teacher_stays_float32(state):
    # In distillation, neither the teacher's inputs nor its results are rounded.
    teacher = CNN((4,), 1, dtype=jnp.float32)
    variables = variables_of(teacher, IMAGES)
    # The teacher may be the student's module with other params, such as an average.
    copy = {"params": jamp.master_params(state)}
    for fn in (
        lambda: teacher.apply(variables, IMAGES, train=False),
        lambda: WITNESS.apply(copy, X),
        # Initialization also runs in float32.
        lambda: Normed(jnp.float32).init_with_output(jax.random.key(1), X),
    ):
        assert_rounded_alike(under_policy(state, fn), fn())


def test_the_innermost_policy_wins():
    fp16, bf16 = (state_of(WITNESS, X, level=level) for level in ("O2", "O5"))

    def inside():
        return {
            "own": width_of(fp16),
            "other's apply_fn": width_of(bf16, bf16.apply_fn),
            "other's loss": width_inside(bf16),
            "own in other's loss": under_policy(bf16, lambda: width_of(fp16)),
            "own again": under_policy(bf16, lambda: width_inside(fp16)),
            "own afterwards": width_of(fp16),
        }

    found = under_policy(fp16, inside)
    assert found == dict.fromkeys(found, 2) | {"own in other's loss": 4}
    found = products(lambda: under_policy(fp16, lambda: forward(bf16, X)))
    assert found == ["bfloat16,bfloat16"] * 2


def test_an_exception_leaves_no_patch_behind(state):
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(2, dtype=jnp.float32, name="Dense_0")(x)
            raise ZeroDivisionError

    def fail():
        return forward(state, X, apply=Broken().apply)

    def recover():
        with pytest.raises(ZeroDivisionError):
            fail()
        return width_of(state)

    with pytest.raises(ZeroDivisionError):
        under_policy(state, fail)
    assert [width_of(state), under_policy(state, recover), width_of(state)] == [4, 2, 4]


def test_threads_do_not_see_each_others_patch(state):
    entered, widths = threading.Event(), []

    def other():
        entered.wait(60)
        widths.extend([width_of(state), width_inside(state), width_of(state)])

    thread = threading.Thread(target=other)
    thread.start()

    def inside():
        before = width_of(state)
        entered.set()
        thread.join(60)
        return before, width_of(state)

    assert under_policy(state, inside) == (2, 2)
    assert widths == [4, 2, 4]


@pytest.mark.parametrize(
    "level, options",
    [(level, {"cast_model_type": False}) for level in ("O0", "O2")]
    # apex's patch_torch_functions=False turns O1 into float32 training.
    + [(level, {"patch_functions": False}) for level in ("O1", "O4")]
    + [("O2", {"enabled": False})],
)
def test_options_that_leave_the_forward_alone(level, options):
    for dtype, x in ((None, X.astype(jnp.float16)), (jnp.bfloat16, X)):
        model = Headed(dtype, dtype)
        state = state_of(model, X, level=level, **options)
        variables = {"params": state.params}
        ours, plain = map(jax.make_jaxpr, (state.apply_fn, model.apply))
        assert str(ours(variables, x)) == str(plain(variables, x))


def test_o0_takes_and_gives_float32():
    # apex casts inputs and outputs at O0. The model may still run in half.
    model = Headed(dtype=jnp.float16, head_dtype=jnp.float16)
    state, half = state_of(model, X, level="O0"), X.astype(jnp.float16)
    assert set(dtypes(state.params)) == {"float32"}
    assert forward(state, half).dtype == jnp.float32
    assert forward(state, half, apply=model.apply).dtype == jnp.float16
    found = products(lambda s: forward(s, X), state)
    assert found == ["float16,float16"] * 2  # the user set dtype=float16


@pytest.mark.parametrize("cast_model_type", [None, False])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_cast_model_outputs(level, cast_model_type):
    out = jnp.bfloat16 if level == "O2" else jnp.float16
    options = {"cast_model_type": cast_model_type, "cast_model_outputs": out}
    state = state_of(Headed(), X, level=level, **options)
    assert forward(state, X).dtype == out
    inside = lambda: forward(state, X, apply=Headed().apply)  # noqa: E731
    assert under_policy(state, inside).dtype == out
