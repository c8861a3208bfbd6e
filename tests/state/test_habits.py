"""Test habits of published Flax, optax and pmap scripts at O2."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.dynamic_scale import DynamicScale

import jamp
import jamp.nnx
from tests.support.states import State

pytestmark = pytest.mark.standard_promotion  # as in the scripts

RATE, LOW = 0.25, {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**8)}
SGD = optax.sgd(RATE)
W, V = np.float32([[0.5], [-0.25]]), np.float32([[-1.0], [0.75]])
X = np.float32([[1.0, 0.5], [-0.5, 1.0], [0.25, -1.0], [1.0, 1.0]])
Y = np.float32([[1.0], [0.5], [-1.0], [0.0]])


def descend(w=W, steps=2):
    """Returns the weights after gradient descent on the squared error, in float64."""
    w = np.asarray(w, np.float64)
    for _ in range(steps):
        grad = 2 * X.T @ (X @ w - Y) / len(X)
        w = w - RATE * grad
    return w


def mean_square(predictions, y):
    return ((predictions - y) ** 2).mean()


MODEL = nn.Dense(1, use_bias=False)


def make(w=W, tx=SGD, level="O2", **kwargs):
    options = {"apply_fn": MODEL.apply, "verbosity": 0, "state_class": State}
    options |= LOW | kwargs
    return jamp.initialize({"kernel": jnp.asarray(w)}, tx, level, **options)


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
    xs, ys = (np.stack([a] * jax.local_device_count()) for a in (X, Y))
    for _ in range(2):
        state, _ = jitted(state, xs, ys)
    return jax_utils.unreplicate(state), descend()


def ensemble():
    states = jax.vmap(make)(jnp.stack([V, W]))
    after = jax.vmap(two_steps)(states)
    np.testing.assert_allclose(wide(after)[0], descend(V), atol=1e-3)
    return jax.tree.map(lambda x: x[1], after), descend()


def dynamic_scale():
    state, scale = make(), DynamicScale(scale=2.0**8)
    for _ in range(2):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(state.params)
        after = state.apply_gradients(grads=grads)
        old, new = ((s.params, s.opt_state) for s in (state, after))
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        state = after.replace(params=params, opt_state=opt_state)
    return state, descend()


def make_nnx(tx=SGD, **kwargs):
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.asarray(W))
    return jamp.nnx.initialize(model, tx, "O2", verbosity=0, **(LOW | kwargs))


def nnx_loss(model, x=X, y=Y):
    return mean_square(model(x), y)


def nnx_scanned():
    model, optimizer = make_nnx()

    @nnx.scan(in_axes=(nnx.Carry, None, None, 0, 0), out_axes=nnx.Carry)
    def add(total, model, optimizer, x, y):
        grads = jamp.nnx.scaled_grad(nnx_loss)(model, optimizer, x, y)
        return jax.tree.map(jnp.add, total, grads)

    @nnx.jit
    def train_step(model, optimizer, xs, ys):
        zeros = jax.tree.map(
            jnp.zeros_like, jamp.master_params(optimizer.amp_state(model))
        )
        total = add(zeros, model, optimizer, xs, ys)
        optimizer.update(model, jax.tree.map(lambda g: g / len(xs), total))

    train_step(model, optimizer, X.reshape(2, 2, 2), Y.reshape(2, 2, 1))
    return optimizer.amp_state(model), descend(steps=1)


def other_tx(level="O2", **kwargs):
    """Sets a rate whose steps are below half an ulp of the half weight."""
    slow = optax.sgd(1e-5)
    state = make(level=level, **kwargs).replace(tx=slow)
    state = state.replace(tx=state.tx, apply_fn=MODEL.apply)
    assert state.apply_fn == make(level=level, **kwargs).apply_fn
    expected = make(tx=slow, level=level, **kwargs)
    assert jax.tree.structure(two_steps(state)) == jax.tree.structure(expected)
    return two_steps(state), wide(two_steps(expected))


def looks_ahead():
    state = jax.jit(step)(make(slow={"kernel": W}))[0]
    slow = optax.incremental_update(jamp.master_params(state), state.slow, 0.5)
    state = state.replace(params=slow, slow=slow)
    state = jax.jit(step, donate_argnums=0)(state)[0]
    return state, descend((W + descend(steps=1)) / 2, steps=1)


@jax.custom_vjp
def clip_gradient(x, limit):
    del limit
    return x


clip_gradient.defvjp(
    lambda x, limit: (x, limit),
    lambda limit, g: (jnp.clip(g, -limit, limit).astype(g.dtype), None),
)


def clips_cotangents():
    state = make()

    def loss_fn(params):
        limit = jamp.scale_loss(jnp.float32(0.25), state)
        return mean_square(
            clip_gradient(state.apply_fn({"params": params}, X), limit), Y
        )

    state = state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))
    cotangents = np.clip(2 * (X @ W - Y) / len(X), -0.25, 0.25)
    assert (abs(cotangents) == 0.25).any()
    return state, W - RATE * X.T @ cotangents


RIGHT = {
    "a limit for cotangents in a `custom_vjp`": clips_cotangents,
    "`optax.lookahead`, by a field": looks_ahead,
    "`state.replace(tx=..., apply_fn=...)`": other_tx,
    "`pmap`, `jax_utils.replicate`": pmapped,
    "`vmap` over an ensemble": ensemble,
    "a `DynamicScale` block": dynamic_scale,
    "a sum in `nnx.scan`": nnx_scanned,
}


def wide(state):
    return np.asarray(jamp.master_params(state)["kernel"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from pmap
@pytest.mark.parametrize("habit", RIGHT)
def test_what_is_right(habit):
    state, expected = RIGHT[habit]()
    np.testing.assert_allclose(wide(state), expected, atol=2e-3)
    half = np.asarray(state.params["kernel"])
    assert half.dtype == np.float16 and (half == wide(state).astype(half.dtype)).all()


def test_replacing_tx_keeps_the_masters():
    """The masters may be remainders or belong to several groups."""
    state, expected = other_tx("O5", store_remainder=True, loss_scale=None)
    np.testing.assert_array_equal(wide(state), expected)
    weights = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = jamp.initialize(weights, dict.fromkeys("ab", SGD), "O2", verbosity=0)
    slow = {"b": SGD, "a": optax.sgd(1e-5)}  # keys in another order
    grads = jax.tree.map(jnp.ones_like, jamp.master_params(state))
    state = state.replace(tx=slow).apply_gradients(grads=grads)
    masters = jamp.master_params(state)
    np.testing.assert_allclose(masters["a"], 1 - 1e-5, rtol=1e-7)
    np.testing.assert_allclose(masters["b"], 1 - RATE, rtol=1e-6)
    with pytest.raises(ValueError, match=r"the groups \['a', 'b'\]: it takes one"):
        state.replace(tx=SGD)


# Errors, which say what to write, and the calls that raise them.
RAISES = {
    r"TypeError: AmpState.create cannot.*`jamp\.initialize\(params, tx, opt_level": (
        lambda: jamp.AmpState.create(apply_fn=MODEL.apply, params=W, tx=SGD)
    ),
    r"TypeError.*the scale is in loss_scales: write .*_replace\(scale=.*128\.0": (
        lambda: make().replace(loss_scale=128.0)
    ),
    r"TypeError.*masters and inner_state.*`state\.opt_state\.inner_state\[0\]`": (
        lambda: make(tx=optax.adam(0.1)).opt_state[0].mu
    ),
    r"AttributeError.*no 'hyperparams'.*`optax\.tree\.get\(state, 'hyperparams'\)": (
        lambda: make(tx=optax.adam(0.1)).opt_state.hyperparams
    ),
    r"TypeError.*'learning_rate'\. It belongs in tx, as in .*1e-3\)`\.$": (
        lambda: make(learning_rate=1e-3)
    ),
    r"TypeError.*'dtype'\. The opt level sets the dtypes; cast_model_type=": (
        lambda: make(dtype=jnp.float16)
    ),
    r"TypeError.*'learning_rate'\. It belongs in tx": (
        lambda: make_nnx(learning_rate=1e-3)
    ),
    r"TypeError: params and tx are swapped: write `jamp\.initialize\(params, tx": (
        lambda: jamp.initialize(SGD, {"w": W})
    ),
    r"TypeError: params and tx are swapped": (
        lambda: jamp.initialize([SGD, SGD], [{"w": W}, {"w": W}])
    ),
    r"TypeError: params are an optax transformation: write `jamp\.initialize\(par": (
        lambda: jamp.initialize(SGD)
    ),
    r"TypeError: jamp\.check got a traced state.* cannot run inside jit.*the host": (
        lambda: jax.jit(lambda state: jamp.check(state))(make())
    ),
    r"TypeError: jamp\.diagnostics\.locate has no has_aux: it recognizes.*, aux\)": (
        lambda: jamp.diagnostics.locate(loss_fn, has_aux=True)(make())
    ),
    r"TypeError: jamp\.diagnostics\.compare has no has_aux.*compare\(loss_fn, .O0": (
        lambda: jamp.diagnostics.compare(loss_fn, "O0", has_aux=True)(make())
    ),
    r"TypeError: jamp\.master_params\(state\) takes the AmpState.*got dict": (
        lambda: jamp.master_params(make().params)
    ),
    r"TypeError: jamp\.cast_model\(tree, dtype\).*got a State: pass state\.params": (
        lambda: jamp.cast_model(make(), jnp.float16)
    ),
    r"TypeError: .*got 'O2': write `jamp\.Properties\.from_opt_level\('O2'\)`": (
        lambda: jamp.cast_forward(MODEL.apply, "O2")
    ),
    r"TypeError.*cond branches|true_fun and false_fun": (
        lambda: optax.value_and_grad_from_state(lambda p: loss_fn(p).astype("float32"))(
            make(tx=optax.lbfgs()).params, state=make(tx=optax.lbfgs()).opt_state
        )
    ),
    r"AttributeError: 'dict' object has no attribute 'fast'": (
        lambda: step(make(tx=optax.lookahead(SGD, 5, 0.5)))
    ),
    r"TypeError.*load_params\(state\.params, reset_optimizer=True\)": (
        lambda: step(make().replace(opt_state=SGD.init({"kernel": W})))
    ),
    r"TypeError.*`state\.apply_gradients\(grads=grads\)`": (
        lambda: make().tx.update({"kernel": W}, make())
    ),
    r"TypeError.*'State' has no len": (
        lambda: optax.adam(0.1).update({"kernel": W}, make())
    ),
    r"scaled_grad.* no argnums.*first argument": (
        lambda: jamp.scaled_grad(loss_fn, argnums=0)
    ),
    r"TypeError.*no argnums.*first argument": (
        lambda: jamp.nnx.scaled_grad(loss_fn, argnums=0)
    ),
    r"TypeError.*Write `scaled_value_and_grad\(loss_fn\)\(state": (
        lambda: jamp.scaled_value_and_grad(loss_fn, make())
    ),
    r"TypeError.*Write `scaled_grad\(loss_fn\)\(state": (
        lambda: jamp.scaled_grad(loss_fn, make())
    ),
    "TypeError.*got Linear. For NNX, write `jamp.nnx.scaled_grad": (
        lambda: jamp.scaled_grad(loss_fn)(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), X)
    ),
    "BoolConv.*jamp traces loss_fn, as jax.jit does": (
        lambda: jamp.scaled_grad(lambda p: 1.0 if loss_fn(p) > 5 else 0.0)(make())
    ),
    "jamp traces loss_fn, as jax.jit does": (
        lambda: jamp.scaled_grad(lambda p: float(loss_fn(p)))(make())
    ),
    r"ValueError.*`loss, grads = jamp\.scaled_value_and_grad": (
        lambda: make().apply_gradients(
            grads=jamp.scaled_value_and_grad(loss_fn)(make())[0]
        )
    ),
    r"TypeError.*'value_fn'.*update_args.*jamp\.closure\(loss_fn\)\(state": (
        lambda: step(make(tx=optax.lbfgs()))
    ),
    r"TypeError: params is an nnx\.Module, a Linear\. .*jamp\.nnx\.initialize": (
        lambda: jamp.initialize(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), SGD)
    ),
    r"ValueError: params hold no arrays: got \{\}\. Pass the params, `model\.init": (
        lambda: (
            [
                pytest.raises(ValueError, jamp.initialize, tree, SGD)
                for tree in (None, ())
            ]
            and jamp.initialize({}, SGD)
        )
    ),
    r"TypeError.*_fn\(\{kernel: float16\[2, 1\]\}, \{kernel.*The first argument": (
        lambda: jamp.scaled_grad(loss_fn)(make(), make().params, X, Y)
    ),
    r"TypeError.*optimizer\.tx": (
        lambda: make_nnx(tx=nnx.Optimizer(make_nnx()[0], SGD, wrt=nnx.Param))
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the shape of a dict
@pytest.mark.parametrize("message", RAISES)
def test_what_raises(message):
    errors = TypeError, ValueError, IndexError, AttributeError
    with pytest.raises(errors) as error:
        RAISES[message]()
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert re.search(message, f"{error.type.__name__}: {said}", re.DOTALL)


# Habits that jamp does not notice, and their results.


def own_updates():
    """Steps half params by updates below half an ulp."""
    state = make(np.ones((2, 1), np.float32), level="O5", loss_scale=None)
    updates = {"kernel": jnp.full((2, 1), -1e-4)}
    for _ in range(100):
        state = state.replace(params=optax.apply_updates(state.params, updates))
    right = make(np.ones((2, 1), np.float32), level="O5", loss_scale=None)
    for _ in range(100):
        wide = optax.apply_updates(jamp.master_params(right), updates)
        right = right.replace(params=wide)
    np.testing.assert_allclose(jamp.master_params(right)["kernel"], 0.99, rtol=1e-5)
    return jamp.master_params(state)["kernel"], np.ones((2, 1))


def scaled_and_not_unscaled():
    state = make(level="O1", loss_scale=8.0)

    def loss(params):
        out = state.apply_fn({"params": params}, X)
        return jamp.scale_loss(mean_square(out, Y), state)

    state = state.apply_gradients(grads=jax.grad(loss)(state.params))
    return wide(state), W + 8 * (descend(steps=1) - W)


def unscaled_again_by_hand():
    state = make(loss_scale=8.0)
    grads = jamp.scaled_grad(loss_fn)(state)
    grads = jax.tree.map(lambda g: g / state.loss_scale, grads)
    return wide(state.apply_gradients(grads=grads)), W + (descend(steps=1) - W) / 8


def scaled_again_by_hand():
    state = make(loss_scale=8.0)
    grads = jamp.scaled_grad(lambda p: loss_fn(p) * state.loss_scale)(state)
    return wide(state.apply_gradients(grads=grads)), W + 8 * (descend(steps=1) - W)


def unscaled_in_another_jit():
    state = make(loss_scale=8.0)
    grads = jax.jit(jamp.scaled_grad(loss_fn))(state)
    grads = jax.jit(jamp.unscale)(grads, state)
    return wide(state.apply_gradients(grads=grads)), W + (descend(steps=1) - W) / 8


def field_set_after_the_step():
    state = make(batch_stats={"mean": jnp.zeros(2)})
    new = {"mean": jnp.full(2, jnp.inf)}
    bad = {"kernel": np.full((2, 1), np.inf, np.float32)}
    after = state.apply_gradients(grads=bad).replace(batch_stats=new)
    assert after.last_step_skipped
    right = state.apply_gradients(grads=bad, batch_stats=new)
    np.testing.assert_array_equal(right.batch_stats["mean"], 0)
    return after.batch_stats["mean"], np.full(2, np.inf)


def float16_layers():
    found = []
    for level, scale in (("O4", None), ("O5", None), ("O6", None), ("O5", "dynamic")):
        model = nn.Dense(1, use_bias=False, dtype=jnp.float16)
        state = make(level=level, loss_scale=scale, apply_fn=model.apply)

        def loss(params, apply_fn=state.apply_fn):
            return 1e-9 * apply_fn({"params": params}, X).astype(jnp.float32).mean()

        found.append(jamp.scaled_grad(loss)(state)["kernel"] * 1e9)
    wanted = X.mean(0)[:, None]
    return np.stack(found), np.stack([0 * wanted] * 3 + [wanted])


def without_a_scale():
    """Differentiates a loss with a cotangent below float16's smallest number."""
    state = make(level="O1", loss_scale=2.0**16)

    def loss(params):
        return 1e-9 * jamp.autocast(MODEL.apply)({"params": params}, X).sum()

    scaled = jamp.scaled_grad(loss)(state)["kernel"]
    np.testing.assert_allclose(scaled, 1e-9 * X.sum(0)[:, None], rtol=1e-2)
    return jax.grad(loss)(state.params)["kernel"], np.zeros((2, 1))


def guard_of_the_norm():
    """Leaves the scale where it is, and hides NaN."""
    state, bad = make(loss_scale=None), X.copy()
    bad[0, 0] = np.inf
    grads = jamp.scaled_grad(loss_fn)(state, bad)
    finite = jnp.isfinite(optax.tree.norm(grads))
    steps = lambda s: s.apply_gradients(grads=grads)  # noqa: E731
    after = jax.lax.cond(finite, steps, lambda s: s, state)
    assert (after.step, after.skipped_steps) == (0, 0)
    g, norm = grads["kernel"], optax.tree.norm(grads)
    hidden = [jnp.nan_to_num(g), jnp.where(g > 0, g, 0), jnp.where(norm < 100, g, 0)]
    hidden.append(jax.jit(lambda g: g * (abs(g) < 100))(g))
    assert all(jnp.isfinite(x).all() for x in hidden)
    kept = g * jnp.minimum(1, 100 / norm), jax.jit(lambda g, n: g * (n < 100))(g, norm)
    assert all(jnp.isnan(x).all() for x in kept)
    return after.loss_scale, state.loss_scale


def half_accumulation():
    add = lambda total, g: total + g.astype(total.dtype)  # noqa: E731
    total = {"kernel": jnp.ones((2, 1), jnp.bfloat16)}
    for _ in range(100):
        total = jax.tree.map(add, total, {"kernel": jnp.full((2, 1), 1e-3)})
    return total["kernel"].astype("float32"), np.ones((2, 1))


def own_step_by_tx():
    state = make()
    grads = {"kernel": jnp.full((2, 1), jnp.nan)}
    updates, _ = state.tx.update(grads, state.opt_state, state.params)
    return updates["kernel"], np.full((2, 1), np.nan)


def resumes_at_step():
    state, bad = make(), X.copy()
    bad[0, 0] = np.inf
    for x in (X, bad, X):
        state, _ = step(state, x)
    assert int(state.step + state.skipped_steps) == 3
    return int(state.step), 2


def statistics_of_half():
    x = jnp.full(70_000, 0.5, jnp.float16)
    np.testing.assert_allclose(jnp.mean(x), 0.5)
    assert jnp.isinf(optax.tree.norm({"w": 600 * x[:200]}))
    return jnp.sum(x) / x.size, 0.0


def moving_half_averages():
    target, state = make(level="O5", loss_scale=None), make(V, level="O5")
    for _ in range(3):
        params = optax.incremental_update(state.params, target.params, 1e-4)
        target = target.replace(params=params)
    found = wide(target)
    right = jamp.incremental_update(state, make(level="O5", loss_scale=None), 1e-2)
    assert (wide(right) != W).all()
    return found, W


def model_apply_by_hand():
    """Finds the dtypes of the matmuls under your own `jax.grad`."""
    found = []
    for apply_fn in (MODEL.apply, make(level="O4", loss_scale=None).apply_fn):
        program = jax.make_jaxpr(apply_fn)({"params": {"kernel": W}}, X)
        found.append("bf16" in str(program))
    return found, [False, True]


def rollout_outside():
    """Finds the ratios of PPO with an unchanged policy."""
    keys = jax.random.split(jax.random.key(0), 3)
    model, states = nn.Dense(6), 8 * jax.random.normal(keys[0], (64, 32))
    params = model.init(keys[1], states)["params"]
    options = {"apply_fn": model.apply, "verbosity": 0}
    state = jamp.initialize(params, optax.sgd(0.1), "O4", **options)
    inside = jax.nn.log_softmax(state.apply_fn({"params": params}, states))
    outside = jax.nn.log_softmax(model.apply({"params": params}, states))
    now = lambda p: jax.nn.log_softmax(state.apply_fn({"params": p}, states))  # noqa: E731
    loss = lambda p: jnp.exp(now(p) - inside).mean()  # noqa: E731
    np.testing.assert_allclose(jamp.scaled_value_and_grad(loss)(state)[0], 1, 1e-6)
    ratio = jnp.exp(inside - outside)
    return abs(ratio - 1).max() > 0.02, True


UNNOTICED = {
    "`jax.value_and_grad` at O1": without_a_scale,
    "a guard of your own, and what hides NaN": guard_of_the_norm,
    "accumulation in half": half_accumulation,
    "`state.tx.update`": own_step_by_tx,
    "`start = int(state.step)`": resumes_at_step,
    "statistics of half params": statistics_of_half,
    "half averages": moving_half_averages,
    "`model.apply` under your own `jax.grad`": model_apply_by_hand,
    "a rollout outside of the level": rollout_outside,
    "`optax.apply_updates(state.params, updates)`": own_updates,
    "`scale_loss` without `unscale`": scaled_and_not_unscaled,
    "`g / state.loss_scale` after `scaled_grad`": unscaled_again_by_hand,
    "`loss * state.loss_scale` in the loss": scaled_again_by_hand,
    "`unscale` in another `jit`": unscaled_in_another_jit,
    "`apply_gradients(grads=g).replace(batch_stats=...)`": field_set_after_the_step,
    "`dtype=jnp.float16` without a dynamic scale": float16_layers,
}


@pytest.mark.parametrize("habit", UNNOTICED)
def test_what_is_not_noticed(habit):
    found, expected = UNNOTICED[habit]()
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-3)


def nnx_grad_left_in():
    model, optimizer = make_nnx()
    optimizer.update(model, nnx.grad(nnx_loss)(model))


def reads_a_model_from_outside():
    model, optimizer = make_nnx()
    jamp.nnx.scaled_grad(lambda _: nnx_loss(model))(model, optimizer)


@pytest.mark.parametrize(
    "habit, message",
    [
        (nnx_grad_left_in, "jamp.scaled_grad"),
        (reads_a_model_from_outside, "does not depend on the params"),
    ],
)
def test_what_warns(habit, message):
    """States warn in test_host, test_scaled_grad and test_average."""
    with pytest.warns(UserWarning, match=message):
        habit()
