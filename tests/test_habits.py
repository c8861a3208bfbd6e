"""The habits of plain Flax, optax and pmap, as published scripts have them, at O2.

The table of docs/habits.md has a line for each. What is right ends, by linear
regression and gradient descent, where float64 does.
"""

import functools
import pathlib
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils, nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from jax import lax

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


def donated():
    jitted = jax.jit(step, donate_argnums=0)
    return jitted(jitted(make())[0])[0], descend()


def scanned():
    run = jax.jit(lambda state: lax.scan(lambda s, _: step(s), state, length=2))
    return run(make())[0], descend()


def pmapped():
    jitted = jax.pmap(functools.partial(step, axis_name="batch"), axis_name="batch")
    state = jax_utils.replicate(make())
    for _ in range(2):
        state, _ = jitted(state, X[None], Y[None])
    return jax_utils.unreplicate(state), descend()


def shard_mapped():
    mesh = jax.make_mesh((1,), ("batch",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("batch"), jax.P("batch"))}
    fn = functools.partial(step, axis_name="batch")
    run = jax.jit(jax.shard_map(fn, mesh=mesh, out_specs=jax.P(), **specs))
    return run(run(make(), X, Y)[0], X, Y)[0], descend()


def ensemble():
    states = jax.vmap(make)(jnp.stack([V, W]))
    after = jax.vmap(two_steps)(states)
    np.testing.assert_allclose(wide(after)[0], descend(V)[-1], atol=1e-3)
    return jax.tree.map(lambda x: x[1], after), descend()


def params_replaced():
    return two_steps(two_steps(make()).replace(params={"kernel": V})), descend(V)


def both_replaced():
    state = make(tx=optax.sgd(RATE, momentum=0.5))
    after = two_steps(state)
    after = after.replace(params=state.params, opt_state=state.opt_state)
    return step(after)[0], descend(steps=1)


def optimizer_begun_anew():
    state = two_steps(make(tx=optax.sgd(RATE, momentum=0.5)))
    after, _ = step(state.load_params(state.params, reset_optimizer=True))
    return after, descend(wide(state), steps=1)


def half_loaded():
    checkpoint = {"kernel": jnp.asarray(V, jnp.bfloat16)}  # V has few digits
    return two_steps(make().replace(params=checkpoint)), descend(V)


def accumulated_in_a_loop():
    state = make()
    grads = sum(jamp.scaled_grad(loss_fn)(state, *batch) for batch in HALVES)
    return state.apply_gradients(grads=grads / 2), descend(steps=1)


def accumulated_in_a_scan():
    @jax.jit
    def run(state, xs, ys):
        def add(total, batch):
            return total + jamp.scaled_grad(loss_fn)(state, *batch), None

        total, _ = lax.scan(add, jamp.zero_grads(state), (xs, ys))
        return state.apply_gradients(grads=total / len(xs))

    return run(make(), X.reshape(2, 2, 2), Y.reshape(2, 2, 1)), descend(steps=1)


def multi_steps():
    state = make(tx=optax.MultiSteps(SGD, 2).gradient_transformation())
    for batch in HALVES:
        state, _ = step(state, *batch)
    return state, descend(steps=1)


def clipped_inside():
    tx = optax.chain(optax.clip_by_global_norm(0.5), SGD)
    return two_steps(make(tx=tx)), descend(clip=0.5)


def clipped_between():
    state = make()
    for _ in range(2):
        grads = jamp.scaled_grad(loss_fn)(state)
        state = state.apply_gradients(grads=grads.clip_by_global_norm(0.5))
    return state, descend(clip=0.5)


def dynamic_scale():
    state, scale = make(), DynamicScale(scale=2.0**8)
    for _ in range(2):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(state.params)
        after = state.apply_gradients(grads=grads)
        old, new = ((s.params, s.opt_state) for s in (state, after))
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        state = after.replace(params=params, opt_state=opt_state)
    return state, descend()


def hyperparameters_read():
    schedule = optax.constant_schedule(RATE)
    state = two_steps(make(tx=optax.inject_hyperparams(optax.sgd)(schedule)))
    assert optax.tree.get(state, "hyperparams")["learning_rate"] == RATE
    assert state.opt_state.inner_state.hyperparams["learning_rate"] == RATE
    return state, descend()


def hyperparameters_set():
    state = make(tx=optax.inject_hyperparams(optax.sgd)(7.0))
    return two_steps(optax.tree.set(state, learning_rate=jnp.float32(RATE))), descend()


def saved_by_orbax(path):
    state, _ = step(make())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(path / "state", make())
    return step(state)[0], descend()


class Mine(jamp.AmpState):
    batch_stats: Any
    name: str = train_state.struct.field(pytree_node=False)


def subclassed():
    state = make(batch_stats={"n": jnp.zeros(())}, name="run", state_class=Mine)
    for _ in range(2):
        _, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        stats = {"n": state.batch_stats["n"] + 1}
        state = state.apply_gradients(grads=grads, batch_stats=stats)
    assert isinstance(state, Mine) and state.batch_stats["n"] == 2
    return state, descend()


def frozen():
    txs, labels = {"rest": SGD, "frozen": optax.set_to_zero()}, {"kernel": "frozen"}
    tx = optax.multi_transform(txs, labels)
    state = two_steps(make(tx=tx))
    assert (np.asarray(state.params["kernel"]) == W).all()
    return state, descend(frozen=True)


def averaged():
    @jax.jit
    def averaging_step(state, x):
        state, _ = step(state, x)
        rate = jnp.where(state.last_step_skipped, 0.0, 0.5)
        masters = jamp.master_params(state)
        return state.replace(ema=optax.incremental_update(masters, state.ema, rate))

    state = make(ema={"kernel": jnp.asarray(W)})
    for x in (X, X * np.inf, X):
        state = averaging_step(state, x)
    first, second, third = descend()
    ema = state.replace(params=state.ema)
    outputs = ema.apply_fn({"params": ema.params}, X)
    expected = first / 4 + second / 4 + third / 2
    np.testing.assert_allclose(outputs, X @ expected, atol=5e-3)
    np.testing.assert_allclose(state.ema["kernel"], expected, atol=1e-3)
    return state, descend()


def lora():
    params = {"a": jnp.ones((2, 1)), "b": jnp.zeros((1, 1))}
    base = jamp.cast_model({"kernel": jnp.asarray(W)}, jnp.float16)
    state = jamp.initialize(params, SGD, "O2", verbosity=0, **LOW)

    def loss(params, base):
        low_rank = jnp.asarray(params["a"] @ params["b"], jnp.float32)
        return mean_square(X @ (base["kernel"].astype(jnp.float32) + low_rank), Y)

    a, b = np.ones((2, 1)), np.zeros((1, 1))
    for _ in range(2):
        state = state.apply_gradients(grads=jamp.scaled_grad(loss)(state, base))
        grad = 2 * X.T @ (X @ (W + a @ b) - Y) / len(X)
        a, b = a - RATE * grad @ b.T, b - RATE * a.T @ grad
    masters = jamp.master_params(state)
    np.testing.assert_allclose(masters["a"], a, atol=2e-3)
    np.testing.assert_allclose(masters["b"], b, atol=2e-3)
    return make(), descend(steps=0)


def new_head():
    def both_loss(params):
        head = params["head"].astype(jnp.float32).sum()
        return loss_fn({"kernel": params["kernel"]}) + head

    state = step(make())[0].add_params({"head": jnp.ones(2)})
    state = state.apply_gradients(grads=jamp.scaled_grad(both_loss)(state))
    assert jamp.master_params(state)["head"].tolist() == [1 - RATE, 1 - RATE]
    return state, descend()


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


def nnx_attention():
    attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    attention, optimizer = jamp.nnx.initialize(attention, SGD, "O2", verbosity=0, **LOW)

    @nnx.jit
    def train_step(attention, optimizer):
        loss = lambda attention: (attention(jnp.ones((2, 3, 4))) ** 2).mean()  # noqa: E731
        optimizer.update(attention, jamp.nnx.scaled_grad(loss)(attention, optimizer))

    train_step(attention, optimizer)
    assert optimizer.step.get_value() == 1
    return make(), descend(steps=0)


def nnx_loaded():
    model, optimizer = make_nnx()
    nnx.update(model, {"kernel": nnx.Param(jnp.asarray(V))})
    optimizer.load_params(model)
    optimizer.update(model, jamp.nnx.scaled_grad(nnx_loss)(model, optimizer))
    return optimizer.amp_state(model), descend(V, steps=1)


RIGHT = {
    "donate the state": donated,
    "`lax.scan` over steps": scanned,
    "`pmap`, `jax_utils.replicate`": pmapped,
    "`shard_map`": shard_mapped,
    "`vmap` over an ensemble": ensemble,
    "`state.replace(params=...)`": params_replaced,
    "`state.replace(params=..., opt_state=...)`": both_replaced,
    "reset the optimizer": optimizer_begun_anew,
    "load half params": half_loaded,
    "accumulate in a loop": accumulated_in_a_loop,
    "accumulate in a scan": accumulated_in_a_scan,
    "`optax.MultiSteps`": multi_steps,
    "clip inside of `tx`": clipped_inside,
    "clip between gradients and step": clipped_between,
    "a `DynamicScale` block": dynamic_scale,
    "read a hyperparameter": hyperparameters_read,
    "set a hyperparameter": hyperparameters_set,
    "save the whole state by Orbax": saved_by_orbax,
    "a subclass of `TrainState`": subclassed,
    "freeze by `optax.set_to_zero`": frozen,
    "an average of the params": averaged,
    "LoRA": lora,
    "a new head": new_head,
    "`jax.value_and_grad` left in, at scale 1": left_in_at_float32,
    "`nnx.MultiMetric`": nnx_metrics,
    "accumulate in NNX": nnx_accumulated,
    "accumulate in `nnx.scan`": nnx_scanned,
    "`nnx.update(model, ...)`": nnx_loaded,
    "`nnx.MultiHeadAttention`": nnx_attention,
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


def pmean_left_in():
    mean = jax.vmap(lambda grads: lax.pmean(grads, "i"), axis_name="i")
    mean(jax.tree.map(lambda x: x[None], scaled()))


def nnx_split():
    graphdef, params = nnx.split(make_nnx()[0])
    jamp.nnx.scaled_grad(nnx_loss)(params, make_nnx()[1])


# What to write is in the message; the error.
RAISES = {
    "`lax.pmean(grads)` left in": (pmean_left_in, r"TypeError.*\.pmean\(axis\)"),
    "`optax.global_norm(grads)`": (
        lambda: jax.jit(optax.global_norm)(scaled()),
        r"TypeError.*\.global_norm\(\)",
    ),
    "`jax.tree.map(jnp.add, grads, more)`": (
        lambda: jax.tree.map(jnp.add, scaled(), scaled()),
        "TypeError.*pass them whole",
    ),
    "`tx.update(grads, ...)`": (
        lambda: optax.clip(1.0).update(scaled(), optax.EmptyState()),
        r"TypeError.*\.map\(fn\)",
    ),
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
    "other shapes in `replace(params=...)`": (
        lambda: make().replace(params={"kernel": jnp.ones((2, 3))}),
        r"ValueError.*\['kernel'\] has shape \(2, 3\), expected \(2, 1\)",
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


def left_in():
    state = make()
    state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def nnx_grad_left_in():
    model, optimizer = make_nnx()
    optimizer.update(model, nnx.grad(nnx_loss)(model))


def nnx_merged():
    model, optimizer = make_nnx()
    graphdef, params = nnx.split(model)
    grads = jax.grad(lambda params: nnx_loss(nnx.merge(graphdef, params)))(params)
    optimizer.update(model, grads)


WARNS = {
    "`jax.value_and_grad` left in": (left_in, "jamp.scaled_grad"),
    "`nnx.value_and_grad` left in": (nnx_grad_left_in, "jamp.scaled_grad"),
    "`nnx.split`, then `jax.value_and_grad`": (nnx_merged, "jamp.scaled_grad"),
    "a loss in half": (
        lambda: jamp.scaled_grad(lambda p: jnp.float16(loss_fn(p)))(make()),
        "Compute the loss in float32",
    ),
}


@pytest.mark.parametrize("habit", WARNS)
def test_what_warns(habit):
    call, message = WARNS[habit]
    with pytest.warns(jamp.PrecisionWarning, match=message):
        call()


def test_the_page_has_a_line_for_each():
    rows = re.findall(r"^\| (.+?) \| (right|raises|warns) \|", PAGE, re.MULTILINE)
    tables = {"right": RIGHT, "raises": RAISES, "warns": WARNS}
    assert sorted(rows) == sorted((h, kind) for kind, t in tables.items() for h in t)
