"""Where the forward patch applies, and where it does not: scopes, caches, threads."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import (
    CASES,
    IMAGES,
    SEQUENCE,
    Case,
    Headed,
    Normed,
    Witness,
    dtypes,
    loss_of,
    normal,
    products,
    state_of,
    under_policy,
    variables_of,
)
from tests.models import CNN, MLP

pytestmark = pytest.mark.standard_promotion

X = normal(3, 4)


@pytest.fixture(scope="module")
def witness():
    """Returns `(model, state)`; the model tells 2 under the patch and 4 outside."""
    model = Witness()
    return model, state_of(model, variables_of(model, X), "O2")


def in_a_loop(apply):
    def loop(variables, x):
        def step(carry, _):
            return carry, apply(variables, x)

        _, (y, width) = jax.lax.scan(step, 0.0, None, length=1)
        return y[0], width[0]

    return loop


# All of these keep the trace of what they are given, under keys of JAX's.
CACHING = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap of jit": lambda f: jax.vmap(jax.jit(f), in_axes=(None, 0)),
    "jit of scan": lambda f: jax.jit(in_a_loop(f)),
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(f)),
}


def width_of(fn, state):
    return int(jnp.max(fn({"params": state.params}, X)[1]))


@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("transform", CACHING)
def test_no_trace_leaks_in_or_out(witness, transform, first):
    model, state = witness
    fn = CACHING[transform](model.apply)
    if first == "outside":
        assert width_of(fn, state) == 4
    assert under_policy(state, lambda: width_of(fn, state)) == 2
    assert width_of(fn, state) == 4
    assert under_policy(state, lambda: width_of(fn, state)) == 2


def test_no_trace_leaks_through_nn_jit():
    model = nn.jit(Witness)()
    state = state_of(model, variables_of(model, X), "O2")
    variables = {"params": state.params}
    widths = [model.apply(variables, X)[1], state.apply_fn(variables, X)[1]]
    widths += [model.apply(variables, X)[1], state.apply_fn(variables, X)[1]]
    assert [int(w) for w in widths] == [4, 2, 4, 2]


def test_no_trace_leaks_through_a_jitted_train_step(witness):
    model, state = witness
    forward = jax.jit(model.apply)

    @jax.jit
    def step(state):
        def loss_fn(params):
            y, width = forward({"params": params}, X)
            return jnp.mean(y), width

        (_, width), _ = jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)
        return width, forward({"params": state.params}, X)[1]

    assert [int(w) for w in step(state)] == [2, 4]
    assert width_of(forward, state) == 4


def test_an_equal_policy_does_not_retrace():
    traces = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(x.dtype)
            return nn.Dense(2)(x)

    model = Counted()
    variables = variables_of(model, X)
    state = state_of(model, variables, "O2")
    again = state.replace(apply_fn=state_of(model, variables, "O2").apply_fn)
    assert again.apply_fn is not state.apply_fn
    step = jax.jit(lambda s: s.apply_fn({"params": s.params}, X))
    traces.clear()
    step(state), step(again)
    assert traces == [jnp.float16]


def test_an_fp32_teacher_keeps_every_bit(witness):
    # Distillation: its inputs are not rounded, nor is what it computes.
    teacher = Case(CNN((4,), 1, dtype=jnp.float32), (IMAGES,))
    variables = variables_of(*teacher[:1], *teacher.inputs)

    def logits():
        return teacher.model.apply(variables, IMAGES, train=False)

    alone = logits()
    assert_same_bits(under_policy(witness[1], logits), alone)


def test_an_fp32_copy_of_the_student_stays_fp32(witness):
    # The same module object, with an average of its params for instance.
    model, state = witness
    fp32 = {"params": jamp.master_params(state)}
    alone = model.apply(fp32, X)
    assert alone[1] == 4
    assert_same_bits(under_policy(state, lambda: model.apply(fp32, X)), alone)


def test_an_fp32_teacher_inside_a_student_stays_fp32():
    # Its BatchNorm would otherwise pass for one of the student's, and give half back.
    teacher = Normed()
    frozen = variables_of(teacher, X)

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            target, width = teacher.apply(frozen, x.astype(jnp.float32), train=False)
            y, own = Witness()(x)
            return y, own, target, width

    state = state_of(Student(), variables_of(Student(), X), "O2")
    _, own, target, width = state.apply_fn({"params": state.params}, X)
    assert (own, width) == (2, 4)
    rounded = X.astype(jnp.float16).astype(jnp.float32)
    assert_same_bits(target, teacher.apply(frozen, rounded, train=False)[0])


def test_the_innermost_policy_wins():
    model = Witness()
    variables = variables_of(model, X)
    fp16, bf16 = (state_of(model, variables, level) for level in ("O2", "O5"))

    def run(state):
        return model.apply({"params": state.params}, X)

    def inside():
        return {
            "own": run(fp16)[1],
            "other's apply_fn": bf16.apply_fn({"params": bf16.params}, X)[1],
            "other's loss": under_policy(bf16, lambda: run(bf16)[1]),
            "own in other's loss": under_policy(bf16, lambda: run(fp16)[1]),
            "own again": under_policy(bf16, lambda: under_policy(fp16, inner))[1],
            "own afterwards": run(fp16)[1],
        }

    inner = lambda: run(fp16)  # noqa: E731
    widths = {name: int(w) for name, w in under_policy(fp16, inside).items()}
    assert widths == {
        "own": 2,
        "other's apply_fn": 2,
        "other's loss": 2,
        "own in other's loss": 4,
        "own again": 2,
        "own afterwards": 2,
    }
    found = products(
        lambda: under_policy(fp16, lambda: bf16.apply_fn({"params": bf16.params}, X))
    )
    assert found == ["bfloat16,bfloat16"]


@pytest.mark.parametrize("where", ["module", "loss", "init"])
def test_an_exception_leaves_no_patch_behind(witness, where):
    model, state = witness

    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x, fail=True):
            y = nn.Dense(2, dtype=jnp.float32, name="Dense_0")(x)
            if fail:
                raise ZeroDivisionError(where)
            return y

    broken = Broken()

    def fail():
        if where == "module":
            broken.apply({"params": state.params}, X)
        if where == "init":
            broken.init(jax.random.key(0), X)
        raise ZeroDivisionError(where)

    with pytest.raises(ZeroDivisionError, match=where):
        under_policy(state, fail)
    assert width_of(model.apply, state) == 4

    def recover():
        try:
            fail()
        except ZeroDivisionError:
            return model.apply({"params": state.params}, X)

    y, width = under_policy(state, recover)
    assert width == 2 and y.dtype == jnp.float32
    assert width_of(model.apply, state) == 4


def test_threads_do_not_see_each_others_patch(witness):
    model, state = witness
    entered, done = threading.Event(), threading.Event()
    widths = []

    def other():
        entered.wait(60)
        widths.append(width_of(model.apply, state))
        widths.append(under_policy(state, lambda: width_of(model.apply, state)))
        widths.append(width_of(model.apply, state))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def inside():
        before = width_of(model.apply, state)
        entered.set()
        assert done.wait(60)
        return before, width_of(model.apply, state)

    assert under_policy(state, inside) == (2, 2)
    thread.join(60)
    assert widths == [4, 2, 4]


@pytest.mark.parametrize("where", ["loss", "module"])
def test_init_under_a_policy_is_that_of_fp32(witness, where):
    model, inits = Normed(jnp.float32), []
    init = lambda: model.init_with_output(jax.random.key(1), X)  # noqa: E731
    alone = init()

    class Initializes(nn.Module):
        @nn.compact
        def __call__(self, x):
            inits.append(init())
            return nn.Dense(2)(x)

    if where == "loss":
        inits.append(under_policy(witness[1], init))
    else:
        outer = Initializes()
        state = state_of(outer, variables_of(outer, X), "O2")
        inits.clear()
        state.apply_fn({"params": state.params}, X)
    assert alone[0][1] == 4
    assert_same_bits(inits, [alone])


@pytest.mark.parametrize("name", ["cnn", "transformer", "optimized-lstm", "scan-remat"])
def test_o0_adds_nothing_to_an_fp32_model(name):
    case = CASES[name]
    variables = variables_of(case.model, *case.inputs)
    state = state_of(case.model, variables, "O0")
    plain = state.replace(apply_fn=case.model.apply)
    ours, theirs = (
        jax.make_jaxpr(
            jax.value_and_grad(loss_of(case, s, "state.apply_fn"), has_aux=True)
        )
        for s in (state, plain)
    )
    assert str(ours(state.params)) == str(theirs(state.params))
    # Nor where a loss under the policy calls the model by itself.
    off = state_of(case.model, variables, "O0", cast_model_type=False)
    ours, theirs = (
        jax.make_jaxpr(
            jamp.scaled_value_and_grad(loss_of(case, s, "model.apply"), has_aux=True)
        )
        for s in (state, off)
    )
    assert str(ours(state)) == str(theirs(off))


def test_o0_takes_and_gives_float32():
    # A model of the user's own in half still does: apex casts both ways at O0.
    model = Headed(dtype=jnp.float16, head_dtype=jnp.float16)
    variables = variables_of(model, X)
    state = state_of(model, variables, "O0")
    assert set(dtypes(state.params)) == {"float32"}
    half = {"params": state.params}, X.astype(jnp.float16)
    assert state.apply_fn(*half).dtype == jnp.float32
    assert model.apply(*half).dtype == jnp.float16
    found = products(lambda p: state.apply_fn({"params": p}, X), state.params)
    assert found == ["float16,float16"] * 2  # dtype=float16 is the user's wish


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_cast_model_outputs(witness, level):
    model, variables = Headed(), variables_of(Headed(), X)
    out = jnp.bfloat16 if level == "O2" else jnp.float16
    state = state_of(model, variables, level, cast_model_outputs=out)
    assert state.apply_fn({"params": state.params}, X).dtype == out
    apply = lambda: model.apply({"params": state.params}, X)  # noqa: E731
    assert under_policy(state, apply).dtype == out


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_cast_model_type_false_turns_casting_off(level):
    model, x = MLP((4, 2), dtype=jnp.bfloat16), X
    variables = variables_of(model, x)
    state = state_of(model, variables, level, cast_model_type=False)
    assert set(dtypes(state.params)) == {"float32"}
    ours, plain = (
        jax.make_jaxpr(fn)({"params": state.params}, x)
        for fn in (state.apply_fn, model.apply)
    )
    assert str(ours) == str(plain)
    assert state.apply_fn({"params": state.params}, x).dtype == jnp.bfloat16


def test_cast_model_outputs_alone():
    # apex wraps the forward with the output caster only.
    seen = []

    class Seen(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(x.dtype)
            return nn.Dense(2)(x)

    model = Seen()
    variables = variables_of(model, X)
    options = {"cast_model_type": False, "cast_model_outputs": jnp.float16}
    state = state_of(model, variables, "O2", **options)
    seen.clear()
    out = state.apply_fn({"params": state.params}, X)
    assert out.dtype == jnp.float16 and seen == [jnp.float32]
    expected = np.float64(X) @ np.float64(variables["params"]["Dense_0"]["kernel"])
    expected += np.float64(variables["params"]["Dense_0"]["bias"])
    # One rounding, of the sum: the inputs and the weights were not touched.
    np.testing.assert_allclose(np.float64(out), expected, rtol=2.0**-11 + 1e-5)


def test_disabled_leaves_the_forward_alone():
    model, x = Headed(), X.astype(jnp.float16)
    state = state_of(model, variables_of(model, x), "O2", enabled=False)
    ours, plain = (
        jax.make_jaxpr(fn)({"params": state.params}, x)
        for fn in (state.apply_fn, model.apply)
    )
    assert str(ours) == str(plain)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("kind", ["linen", "function"])
def test_o1_and_o4_run_the_model_under_autocast(level, kind):
    model = Headed()
    variables = variables_of(model, X)
    apply_fn = model.apply if kind == "linen" else lambda v, x: model.apply(v, x)
    state = state_of(model, variables, level, apply_fn=apply_fn, loss_scale=None)
    half = {"O1": "float16", "O4": "bfloat16"}[level]
    found = products(lambda p: state.apply_fn({"params": p}, SEQUENCE), state.params)
    assert found and set(found) == {f"{half},{half}"}
    # apex: patch_torch_functions=False turns O1 into fp32 training.
    state = state_of(model, variables, level, apply_fn=apply_fn, patch_functions=False)
    ours = jax.make_jaxpr(state.apply_fn)({"params": state.params}, SEQUENCE)
    plain = jax.make_jaxpr(model.apply)({"params": state.params}, SEQUENCE)
    assert str(ours) == str(plain)
