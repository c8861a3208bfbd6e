"""`History` and `SkipLog`: what a run skipped, and that nobody waits for it."""

import csv
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jamp
import jamp.nnx
from jamp.diagnostics import History, SkipLog
from tests import h200

N = 40  # leaves: more than a word has bits
NAMES = [f"w{i:02}" for i in range(N)]


def begin(**options):
    params = {name: jnp.ones(2) for name in NAMES}
    options = {"loss_scale": jamp.DynamicLossScale(2.0**10), **options}
    return jamp.initialize(params, optax.sgd(0.0), "O2", verbosity=0, **options)


def loss_fn(params, x):
    """Its gradients are `x`, one number for each leaf."""
    pairs = zip(jax.tree.leaves(params), x, strict=True)
    return sum((p.astype(jnp.float32).sum() * g for p, g in pairs), jnp.float32(0))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(state, log, x):
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
    log = log.add(state, loss, grads)
    return state.apply_gradients(grads=grads), log, loss


def run(*bad, size=16, history=None):
    """Steps in which some leaves overflow: by a number for each, or none."""
    state = begin()
    log = SkipLog.of(state, size)
    for places in bad:
        x = np.ones(N, np.float32)
        x[list(places)] = 1e4
        state, log, loss = step(state, log, x)
        if history is not None:
            history.record(state, loss=loss)
    return state, log


def test_the_last_skips_are_kept_with_their_leaves():
    skips = [(), (0,), (31, 32), (), (39,), tuple(range(N))]
    _, log = run(*skips)
    found = log.skips()
    expected = [(1, 2.0**10, (0,)), (1, 2.0**9, (31, 32)), (2, 2.0**8, (39,))]
    expected.append((2, 2.0**7, tuple(range(N))))
    assert [(s.step, s.scale, s.params) for s in found] == [
        (step, scale, tuple(NAMES[i] for i in places))
        for step, scale, places in expected
    ]
    assert found[0].loss == 2 * (N - 1) + 2e4
    _, log = run(*skips, size=3)
    assert int(log.count) == 4 and log.skips() == found[1:]
    assert run((), ())[1].skips() == []


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_a_log_moves_no_more_bytes():
    model = nn.Sequential([nn.Dense(1024) for _ in range(4)])
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    options = {"apply_fn": model.apply, "verbosity": 0}
    start = functools.partial(jamp.initialize, tx=optax.adam(1e-3), **options)
    state = jax.eval_shape(lambda p: start(p, opt_level="O2"), params)
    log = jax.eval_shape(SkipLog.of, state)

    def step(state, log, x):
        def loss_fn(params, x):
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        log = None if log is None else log.add(state, loss, grads)
        return state.apply_gradients(grads=grads), log, loss

    off, on = (
        h200.compile_step(step, state, this, x, donate=(0, 1)) for this in (None, log)
    )
    assert off.traffic <= on.traffic <= 1.001 * off.traffic
    assert on.temp <= 1.01 * off.temp


def test_rows_writers_and_files(tmp_path):
    calls, tags = [], []

    class Board:
        def add_scalar(self, tag, value, step):
            tags.append((tag, value, step))

    history = History(every=2, writers=[lambda row, step: calls.append(row), Board()])
    run((), (), (3,), (), (4,), history=history)
    expected = [
        {"call": 1, "step": 1, "skipped": 0, "loss_scale": 1024.0, "loss": 2.0 * N},
        {"call": 3, "step": 2, "skipped": 1, "loss_scale": 512.0, "loss": 20078.0},
        {"call": 5, "step": 3, "skipped": 2, "loss_scale": 256.0, "loss": 20078.0},
    ]
    assert history.rows() == expected
    assert calls == [{f"amp/{k}": v for k, v in row.items()} for row in expected]
    assert ("amp/loss_scale", 512.0, 3) in tags and len(tags) == 15
    history.to_csv(tmp_path / "run.csv")
    read = csv.DictReader((tmp_path / "run.csv").read_text().splitlines())
    assert [{k: float(v) for k, v in row.items()} for row in read] == expected


def test_a_log_of_nnx():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.0), "O2", verbosity=0)
    log = SkipLog.of(optimizer.amp_state(model))

    @nnx.jit
    def step(model, optimizer, log, x):
        loss_fn = lambda model: model.bias[...].sum() * x  # noqa: E731
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer)
        log = log.add(optimizer, loss, grads)
        optimizer.update(model, grads)
        return log

    for x in (0.5, 2.0, 1.0):
        log = step(model, optimizer, log, x)
    assert log.skips() == [(1, 0.0, 2.0**16, ("bias",))] and int(log.count) == 1


def test_several_losses_groups_and_nnx():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = {"a": optax.sgd(1.0), "b": optax.sgd(1.0)}
    state = jamp.initialize(params, tx, "O2", num_losses=2, verbosity=0)
    history = History()
    history.record(state)
    scales = {"loss_scale_0": 65536.0, "loss_scale_1": 65536.0}
    assert history.rows() == [{"call": 1, "step": 0, "skipped": 0, **scales}]
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    _, optimizer = jamp.nnx.initialize(model, optax.sgd(1.0), "O2", verbosity=0)
    history = History()
    history.record(optimizer)
    assert history.rows()[0]["loss_scale"] == 65536.0


def test_it_plots():
    pytest.importorskip("matplotlib")
    history = History(every=1)
    run((), (1,), (), history=history)
    figure = history.plot()
    assert [a.get_ylabel() for a in figure.axes] == list(history.rows()[0])[1:]
    assert list(figure.axes[2].lines[0].get_ydata()) == [1024.0, 512.0, 512.0]


def test_apexs_message_is_rate_limited(caplog):
    history = History(every=1)
    with caplog.at_level("WARNING", "jamp"):
        run((), *[(0,)] * 4, *[()] * 3, *[(0,)] * 5, history=history)
        history.rows()
    messages = [record.getMessage() for record in caplog.records]
    # The 1st, 2nd, 3rd, 4th and 8th of nine.
    says = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to"
    expected = [f"{says} {scale}" for scale in (512, 256, 128, 64, 4)]
    assert [m.split(" (")[0] for m in messages] == expected
    assert "(1 skipped since call 1). This is normal: the scale" in messages[0]
    assert "jamp.diagnostics.locate" in messages[0]


def messages_of(caplog, state, *bad, **options):
    """What is logged of one row before steps, which overflow or not, and one after."""
    history = History(every=1)
    caplog.clear()
    with caplog.at_level("WARNING", "jamp"):
        history.record(state)
        for overflows in bad:
            grads = {name: jnp.ones(2) for name in NAMES}
            if overflows:
                grads["w00"] = jnp.full(2, jnp.inf)
            state = state.apply_gradients(grads=grads, **options)
        history.record(state)
        history.rows()
    return [record.getMessage() for record in caplog.records]


def test_the_first_row_is_where_skips_are_counted_from(caplog):
    resumed = run((0,), (0,), (0,))[0]
    assert messages_of(caplog, resumed) == []
    (message,) = messages_of(caplog, resumed, True)
    assert "to 64 (1 skipped since call 1). This is normal" in message
    assert messages_of(caplog, begin(num_losses=2), False) == []
    (message,) = messages_of(caplog, begin(num_losses=2), True, loss_id=1)
    assert "loss scaler 1 reducing loss scale to 512 (1 skipped" in message


@pytest.mark.parametrize(
    "rule, bad, now",
    [
        (jamp.StaticLossScale(128, check=True), (True,), "128"),
        (jamp.DynamicLossScale(128.0, hysteresis=2), (True,), "128"),
        (jamp.DynamicLossScale(128.0, min_scale=128.0), (True,), "128"),
        (jamp.DynamicLossScale(128.0, window=1), (True, False, False), "256"),
    ],
)
def test_a_skip_after_which_no_scale_is_lower_is_told_too(caplog, rule, bad, now):
    (message,) = messages_of(caplog, begin(loss_scale=rule), *bad)
    assert message.startswith(
        "Gradient overflow: 1 skipped since call 1. No loss scale is lower than it was "
        f"then (now {now}). If every step is skipped, print jamp.diagnostics.locate"
    )


def test_nobody_waits():
    @jax.jit
    def slow(x):
        def body(_, x):
            return jnp.sin(x @ x)

        return lax.fori_loop(0, 300, body, x)[0, 0]

    x = jnp.ones((256, 256))
    slow.lower(x).compile()
    state, history = begin(), History(every=1)
    history.record(state, loss=jnp.float32(0))
    history.rows()
    loss = slow(x)
    history.record(state, loss=loss)
    history.record(state, loss=jnp.float32(2))
    assert not loss.is_ready() and len(history._rows) == 1
    assert [row["loss"] for row in history.rows()] == [0, loss, 2]


def test_what_they_cannot_take():
    state = begin()
    one = jamp.initialize({"w00": jnp.ones(2)}, optax.sgd(1.0), "O2", verbosity=0)
    _, grads = jamp.scaled_value_and_grad(loss_fn)(state, np.ones(N, np.float32))
    with pytest.raises(ValueError, match="`size` must be at least 1, got 0"):
        SkipLog.of(state, 0)
    with pytest.raises(ValueError, match="w01, w02, w03 differ"):
        SkipLog.of(one).add(state, jnp.float32(0), grads)
    history = History(every=np.int64(1))
    history.record(state, loss=nnx.Variable(jnp.float32(2)))
    assert history.rows()[0]["loss"] == 2
    for scalars, words in (({"step": 7}, "has .'step'. of"), ({"x": None}, "None for")):
        with pytest.raises(TypeError, match=words):
            History(every=1).record(state, **scalars)
    with pytest.raises(ValueError, match="must be an int, at least 1, got 2.5"):
        History(every=2.5)
    with pytest.raises(TypeError, match="such as wandb.log, .* got str"):
        History(writers=["tensorboard"])
    with pytest.raises(TypeError, match="AmpState of jamp.initialize, .* got dict"):
        History().record({})
    with pytest.raises(TypeError, match="got a traced value for"):
        jax.jit(lambda s: History().record(s))(state)
