"""The habits of plain Flax, optax and pmap, as published scripts have them, at O2.

The table of docs/habits.md has a line for each. What is right ends, by linear
regression and gradient descent, where float64 does; or another test holds it.
"""

import functools
import pathlib
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale

import jamp
import jamp.nnx

pytestmark = pytest.mark.standard_promotion  # as in the scripts

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "habits.md").read_text()
RATE, LOW = 0.25, {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**8)}
SGD = optax.sgd(RATE)
W, V = np.float32([[0.5], [-0.25]]), np.float32([[-1.0], [0.75]])
X = np.float32([[1.0, 0.5], [-0.5, 1.0], [0.25, -1.0], [1.0, 1.0]])
Y = np.float32([[1.0], [0.5], [-1.0], [0.0]])
HALVES = list(zip(np.split(X, 2), np.split(Y, 2), strict=True))


def descend(w=W, steps=2, clip=np.inf, batches=((X, Y),), frozen=False):
    """Gradient descent on the mean squared error, in float64; every point of it."""
    points = [np.asarray(w, np.float64)]
    for _ in range(0 if frozen else steps):
        grads = [2 * x.T @ (x @ points[-1] - y) / len(x) for x, y in batches]
        grad = np.mean(grads, axis=0)
        grad = grad * min(1, clip / np.linalg.norm(grad))
        points.append(points[-1] - RATE * grad)
    return points


def mean_square(predictions, y):
    return ((predictions - y) ** 2).mean()


# Linen

MODEL = nn.Dense(1, use_bias=False)


def make(w=W, tx=SGD, **kwargs):
    options = {"apply_fn": MODEL.apply, "verbosity": 0} | LOW | kwargs
    return jamp.initialize({"kernel": jnp.asarray(w)}, tx, "O2", **options)


def loss_fn(params, x=X, y=Y):
    return mean_square(MODEL.apply({"params": params}, x), y)


def step(state, x=X, y=Y, **options):
    loss, grads = jamp.scaled_value_and_grad(loss_fn, **options)(state, x, y)
    return state.apply_gradients(grads=grads), loss


def two_steps(state):
    return jax.jit(step)(jax.jit(step)(state)[0])[0]


def pmapped():
    jitted = jax.pmap(functools.partial(step, axis_name="batch"), axis_name="batch")
    state = jax_utils.replicate(make())
    for _ in range(2):
        state, _ = jitted(state, X[None], Y[None])
    return jax_utils.unreplicate(state), descend()


def ensemble():
    states = jax.vmap(make)(jnp.stack([V, W]))
    after = jax.vmap(two_steps)(states)
    np.testing.assert_allclose(wide(after)[0], descend(V)[-1], atol=1e-3)
    return jax.tree.map(lambda x: x[1], after), descend()


def clipped_inside():
    tx = optax.chain(optax.clip_by_global_norm(0.5), SGD)
    return two_steps(make(tx=tx)), descend(clip=0.5)


def dynamic_scale():
    state, scale = make(), DynamicScale(scale=2.0**8)
    for _ in range(2):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(state.params)
        after = state.apply_gradients(grads=grads)
        old, new = ((s.params, s.opt_state) for s in (state, after))
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        state = after.replace(params=params, opt_state=opt_state)
    return state, descend()


def frozen():
    txs, labels = {"rest": SGD, "frozen": optax.set_to_zero()}, {"kernel": "frozen"}
    tx = optax.multi_transform(txs, labels)
    state = two_steps(make(tx=tx))
    assert (np.asarray(state.params["kernel"]) == W).all()
    return state, descend(frozen=True)


def left_in_at_float32():
    state = make(loss_scale=1)
    for _ in range(2):
        _, grads = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads)
    return state, descend()


# NNX


def make_nnx(tx=SGD, **kwargs):
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.asarray(W))
    return jamp.nnx.initialize(model, tx, "O2", verbosity=0, **(LOW | kwargs))


def nnx_loss(model, x=X, y=Y):
    return mean_square(model(x), y)


def nnx_metrics():
    model, optimizer = make_nnx()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def train_step(model, optimizer, metrics):
        loss, grads = jamp.nnx.scaled_value_and_grad(nnx_loss)(model, optimizer)
        optimizer.update(model, grads)
        metrics.update(loss=loss)

    for _ in range(2):
        train_step(model, optimizer, metrics)
    losses = [((X @ w - Y) ** 2).mean() for w in descend()[:2]]
    np.testing.assert_allclose(metrics.compute()["loss"], np.mean(losses), rtol=5e-3)
    return optimizer.amp_state(model), descend()


def nnx_accumulated():
    model, optimizer = make_nnx()
    grads = sum(jamp.nnx.scaled_grad(nnx_loss)(model, optimizer, *b) for b in HALVES)
    optimizer.update(model, grads / 2)
    return optimizer.amp_state(model), descend(steps=1)


def nnx_scanned():
    model, optimizer = make_nnx()

    @nnx.scan(in_axes=(nnx.Carry, None, None, 0, 0), out_axes=nnx.Carry)
    def add(total, model, optimizer, x, y):
        return total + jamp.nnx.scaled_grad(nnx_loss)(model, optimizer, x, y)

    @nnx.jit
    def train_step(model, optimizer, xs, ys):
        zeros = jamp.zero_grads(optimizer.amp_state(model))
        total = add(zeros, model, optimizer, xs, ys)
        optimizer.update(model, total / len(xs))

    train_step(model, optimizer, X.reshape(2, 2, 2), Y.reshape(2, 2, 1))
    return optimizer.amp_state(model), descend(steps=1)


RIGHT = {
    "`pmap`, `jax_utils.replicate`": pmapped,
    "`vmap` over an ensemble": ensemble,
    "clip inside of `tx`": clipped_inside,
    "a `DynamicScale` block": dynamic_scale,
    "freeze by `optax.set_to_zero`": frozen,
    "`jax.value_and_grad` left in, at scale 1": left_in_at_float32,
    "`nnx.MultiMetric`": nnx_metrics,
    "accumulate in NNX": nnx_accumulated,
    "accumulate in `nnx.scan`": nnx_scanned,
}


def wide(state):
    return np.asarray(jamp.master_params(state)["kernel"])


@pytest.mark.parametrize("habit", RIGHT)
def test_what_is_right(habit, tmp_path):
    run = RIGHT[habit]
    with warnings.catch_warnings():  # pmap warns of itself
        warnings.simplefilter("ignore", DeprecationWarning)
        state, points = run(tmp_path) if "path" in run.__code__.co_varnames else run()
    np.testing.assert_allclose(wide(state), points[-1], atol=2e-3)
    half = np.asarray(state.params["kernel"])
    assert half.dtype == np.float16 and (half == wide(state).astype(half.dtype)).all()


def scaled():
    return jamp.scaled_grad(loss_fn)(make())


def created(kind):
    return kind.create(apply_fn=MODEL.apply, params={"kernel": jnp.asarray(W)}, tx=SGD)


def nnx_split():
    graphdef, params = nnx.split(make_nnx()[0])
    jamp.nnx.scaled_grad(nnx_loss)(params, make_nnx()[1])


# What to write is in the message; the error.
RAISES = {
    "`TrainState.apply_gradients(grads=grads)`": (
        lambda: created(train_state.TrainState).apply_gradients(grads=scaled()),
        "TypeError.*AmpState.apply_gradients",
    ),
    "`TrainState.create`": (
        lambda: created(jamp.AmpState),
        r"TypeError.*jamp\.initialize\(params, tx, opt_level",
    ),
    "`state.replace(opt_state=tx.init(params))`": (
        lambda: step(make().replace(opt_state=SGD.init({"kernel": W}))),
        r"TypeError.*load_params\(state\.params, reset_optimizer=True\)",
    ),
    "`state.opt_state.hyperparams`": (
        lambda: (
            make(tx=optax.inject_hyperparams(optax.sgd)(RATE)).opt_state.hyperparams
        ),
        r"AttributeError.*optax\.tree\.get\(state, name\)",
    ),
    "`nnx.split`, then `scaled_grad` of the parts": (
        nnx_split,
        r"TypeError.*nnx\.merge\(graphdef",
    ),
    "an `nnx.Optimizer` as `tx`": (
        lambda: make_nnx(tx=nnx.Optimizer(make_nnx()[0], SGD, wrt=nnx.Param)),
        r"TypeError.*optimizer\.tx",
    ),
}


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
@pytest.mark.parametrize("habit", RAISES)
def test_what_raises(habit):
    call, message = RAISES[habit]
    with pytest.raises((TypeError, ValueError, AttributeError)) as error:
        call()
    assert re.search(message, f"{error.type.__name__}: {error.value}", re.DOTALL)


def nnx_grad_left_in():
    model, optimizer = make_nnx()
    optimizer.update(model, nnx.grad(nnx_loss)(model))


def nnx_merged():
    model, optimizer = make_nnx()
    graphdef, params = nnx.split(model)
    grads = jax.grad(lambda params: nnx_loss(nnx.merge(graphdef, params)))(params)
    optimizer.update(model, grads)


WARNS = {
    "`nnx.value_and_grad` left in": nnx_grad_left_in,
    "`nnx.split`, then `jax.value_and_grad`": nnx_merged,
}


@pytest.mark.parametrize("habit", WARNS)
def test_what_warns(habit):
    with pytest.warns(jamp.PrecisionWarning, match="jamp.scaled_grad"):
        WARNS[habit]()


ELSEWHERE = """
donate the state: faults fault
`lax.scan` over steps: amp_state counters_over_a_run_of_clean_and_bad_steps
`shard_map`: many_devices a_mesh_trains_as_one_device_does
`state.replace(params=...)`: load_params what_is_loaded_stays_in_the_dtypes_of_the_level
load half params: load_params what_is_loaded_stays_in_the_dtypes_of_the_level
`state.replace(params=..., opt_state=...)`: load_params
    params_beside_an_opt_state_and_shapes_are_set_as_given
other shapes in `replace(params=...)`: load_params
    other_trees_are_errors_with_the_path
reset the optimizer: load_params
    the_optimizer_begins_anew_at_the_masters_of_the_same_params
accumulate in a loop: accumulation
    micro_batches_step_once_by_their_mean_or_not_at_all
accumulate in a scan: accumulation
    micro_batches_step_once_by_their_mean_or_not_at_all
`optax.MultiSteps`: accumulation multi_steps_drops_the_micro_batch_that_overflowed
clip between gradients and step: sealed_grads clipping_is_that_of_float64
save the whole state by Orbax: checkpoint
    all_states_come_back_through_orbax_and_typed_keys_too
a subclass of `TrainState`: amp_state
    a_declared_field_moves_with_a_step_and_not_with_a_skip
read a hyperparameter: master_weights
    functions_of_optax_visit_masters_and_moments_and_no_counter
set a hyperparameter: master_weights
    functions_of_optax_visit_masters_and_moments_and_no_counter
`jax.value_and_grad` left in: sealed_grads
    half_gradients_of_nobody_under_a_dynamic_scale_warn
a loss in half: scaled_grad a_loss_in_half_warns_and_is_multiplied_in_fp32
an average of the params: docs page_runs_and_prints_what_it_shows
LoRA: docs page_runs_and_prints_what_it_shows
a new head: add_params old_bits_stay_and_new_params_begin_afresh
`nnx.update(model, ...)`: load_params nnx_params_are_loaded_in_place
`nnx.MultiHeadAttention`: forward_programs nnx_attention_runs_at_o2_on_the_cpu
`lax.pmean(grads)` left in: sealed_grads the_error_says_what_to_write
`optax.global_norm(grads)`: sealed_grads the_error_says_what_to_write
`jax.tree.map(jnp.add, grads, more)`: sealed_grads the_error_says_what_to_write
`tx.update(grads, ...)`: sealed_grads the_error_says_what_to_write
"""


def test_the_page_has_a_line_for_each():
    rows = re.findall(r"^\| (.+?) \| (?:right|raises|warns) \|", PAGE, re.MULTILINE)
    elsewhere = re.findall(r"^(\S.*): (\w+)\s+(\w+)$", ELSEWHERE, re.MULTILINE)
    here = [*RIGHT, *RAISES, *WARNS]
    assert sorted(rows) == sorted(here + [habit for habit, _, _ in elsewhere])
    for habit, file, name in elsewhere:
        source = pathlib.Path(__file__).with_name(f"test_{file}.py").read_text()
        assert f"\ndef test_{name}(" in source, habit
