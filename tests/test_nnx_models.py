"""jamp.nnx under NNX's transformations, and with its layers, filters and saves."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx
from tests.bits import assert_same_bits, copy

pytestmark = pytest.mark.standard_promotion  # Flax's layers promote

X = np.float32(np.random.default_rng(0).normal(size=(4, 5, 6)))
TX = optax.sgd(0.01, momentum=0.9)  # one, so that what is compiled is shared
INF = np.float32(np.inf)
LOW = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**10)}  # no skip at first


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(6, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.b = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.bn(self.a(x)))))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def train_step(model, optimizer, x):
    loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x)
    optimizer.update(model, grads)
    return loss


jitted = nnx.jit(train_step)


def make(level="O2", model=None, tx=None, **options):
    model = Net(nnx.Rngs(0)) if model is None else model
    tx = TX if tx is None else tx
    if level in ("O1", "O2"):
        options = LOW | options
    return jamp.nnx.initialize(model, tx, level, verbosity=0, **options)


def arrays(*nodes):
    """The arrays of nodes, on the host; keys as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    tree = nnx.as_pure(tuple(nnx.state(node) for node in nodes))
    return copy(
        jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    )


# ---- transformations ------------------------------------------------------------
def test_no_array_is_there_twice_so_both_can_be_donated():
    model, optimizer = make()
    leaves = jax.tree.leaves(nnx.as_pure((nnx.state(model), nnx.state(optimizer))))
    plain = [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert len({x.unsafe_buffer_pointer() for x in plain}) == len(plain)
    nnx.jit(train_step, donate_argnums=(0, 1))(model, optimizer, X)
    assert optimizer.step.get_value() == 1


def test_cached_partial_steps_and_skips():
    model, optimizer = make()
    step = nnx.cached_partial(jitted, model, optimizer)
    step(X)
    before = arrays(model)
    step(X * INF)
    assert_same_bits(arrays(model), before)
    assert (optimizer.step.get_value(), optimizer.skipped_steps.get_value()) == (1, 1)


def test_members_of_an_ensemble_skip_alone():
    @nnx.vmap
    def begin(key):
        return make(model=nnx.BatchNorm(6, rngs=nnx.Rngs(key)))

    model, optimizer = begin(jax.random.split(jax.random.key(0), 3))
    nnx.jit(nnx.vmap(train_step))(model, optimizer, np.stack([X, X * INF, X]))
    assert optimizer.skipped_steps.get_value().tolist() == [0, 1, 0]
    assert optimizer.loss_scale.tolist() == [1024, 512, 1024]
    assert (model.mean[...] != 0).any(-1).tolist() == [True, False, True]


def test_scan_over_steps_is_a_loop_of_steps():
    looped, scanned = make(), make()
    xs = np.stack([X, X * INF, X, X])

    @nnx.jit
    def run(both, xs):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(both, x):
            return both, train_step(*both, x)

        return body(both, xs)[1]

    losses = run(scanned, xs)
    np.testing.assert_array_equal(losses, [jitted(*looped, x) for x in xs])
    assert_same_bits(arrays(*scanned), arrays(*looped))


def test_a_redone_batch_writes_its_statistics_once():
    high = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**24)}
    (model, optimizer), (other, other_optimizer) = make(**high), make()

    @nnx.jit
    def step(model, optimizer, x):
        of = jamp.nnx.scaled_value_and_grad(loss_fn, redo_on_overflow=12)
        loss, grads = of(model, optimizer, x)
        optimizer.update(model, grads)
        return loss

    loss = step(model, optimizer, X)
    np.testing.assert_allclose(loss, jitted(other, other_optimizer, X), rtol=1e-3)
    assert (optimizer.step.get_value(), model.dropout.rngs.count[...]) == (1, 1)
    assert optimizer.loss_scale < 2.0**24
    np.testing.assert_allclose(model.bn.mean[...], other.bn.mean[...], rtol=1e-4)
    before = arrays(model)
    step(model, optimizer, X * INF)
    assert_same_bits(arrays(model), before)


def test_shard_map_averages_over_its_axis():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, batch = jax.P(), jax.P("batch")
    mapped, expected = (make(model=nnx.Linear(6, 2, rngs=nnx.Rngs(0))) for _ in "ab")

    @nnx.jit
    @nnx.shard_map(mesh=mesh, in_specs=(whole, whole, batch), out_specs=whole)
    def step(model, optimizer, x):
        of = jamp.nnx.scaled_grad(loss_fn, axis_name="batch")
        optimizer.update(model, of(model, optimizer, x))

    step(*mapped, X)
    jitted(*expected, X)
    assert mapped[1].step.get_value() == 1
    np.testing.assert_allclose(
        mapped[0].kernel[...], expected[0].kernel[...], atol=1e-3
    )


def test_views_share_the_variables_and_evaluate():
    model, optimizer = make()
    jitted(model, optimizer, X)
    mean = np.array(model.bn.mean[...])
    view = nnx.view(model, deterministic=True, use_running_average=True)
    assert view(X).dtype == jnp.float32
    np.testing.assert_array_equal(model.bn.mean[...], mean)
    model.eval()
    np.testing.assert_array_equal(view(X), model(X))
    training = nnx.view(model, deterministic=False, use_running_average=False)
    jitted(training, optimizer, X)
    assert (model.bn.mean[...] != mean).any()


# ---- layers -----------------------------------------------------------------------
def norms(rngs):
    options = {"use_bias": False, "use_scale": False, "rngs": rngs}
    return nnx.Sequential(
        nnx.GroupNorm(6, num_groups=2, **options),
        nnx.LayerNorm(6, **options),
        nnx.BatchNorm(6, **options),
        nnx.RMSNorm(6, rngs=rngs),
        nnx.Linear(6, 2, rngs=rngs),
    )


LAYERS = {
    "gru": lambda r: nnx.RNN(nnx.GRUCell(6, 4, rngs=r)),
    "norms": norms,
    "attention": lambda r: nnx.MultiHeadAttention(2, 6, decode=False, rngs=r),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_run_in_half_and_step(layer):
    level = "O5" if layer == "attention" else "O2"  # XLA's CPU: no f16 attention
    model, optimizer = make(level, LAYERS[layer](nnx.Rngs(0)))
    expected = nnx.jit(loss_fn)(LAYERS[layer](nnx.Rngs(0)), X)
    text = str(jax.make_jaxpr(lambda model, x: model(x))(model, X))
    np.testing.assert_allclose(jitted(model, optimizer, X), expected, rtol=0.02)
    assert optimizer.step.get_value() == 1
    products = [s for s in text.splitlines() if "dot_general[" in s or "conv_gen" in s]
    half = [s for s in products if "f16[" in s.split("=")[0]]
    # The scores of attention are float32, by its own choice.
    assert len(products) - len(half) == (layer == "attention")


class Raw(nnx.Module):
    """Params without a dtype field, and Variables that are no floats."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs(), (6, 2)))
        self.ids = nnx.Param(jnp.arange(2))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rngs = rngs

    def __call__(self, x):
        self.calls[...] += 1
        assert x.dtype == self.kernel.dtype
        return jnp.dot(x, self.kernel) + self.ids


def test_a_module_of_raw_params_gets_half_and_keeps_its_integers_and_keys():
    model, optimizer = make(model=Raw(nnx.Rngs(0)))
    key = jax.random.key_data(model.rngs.default.key[...])
    jitted(model, optimizer, X)
    assert model.calls[...] == 1
    assert model.ids.dtype == model.calls.dtype == jnp.int32
    np.testing.assert_array_equal(jax.random.key_data(model.rngs.default.key[...]), key)


# ---- filters, containers and overrides ------------------------------------------
@pytest.mark.parametrize(
    "wrt",
    [
        (nnx.LoRAParam, nnx.PathContains("b")),
        lambda path, v: isinstance(v, nnx.Param) and "b" in path,
    ],
    ids=["tuple", "function"],
)
def test_what_the_filter_leaves_out_is_cast_and_stays(wrt):
    model, optimizer = make(wrt=wrt)
    assert model.a.kernel.dtype == model.b.kernel.dtype == jnp.float16
    assert model.bn.scale.dtype == jnp.float32
    before = arrays(model.a, model.b)
    jitted(model, optimizer, X)
    assert_same_bits(arrays(model.a), before[:1])
    assert (arrays(model.b)[0]["kernel"] != before[1]["kernel"]).any()
    assert set(optimizer.master_params(model)) == {"b"}


def test_one_optimizer_of_two_models_skips_both():
    models = {key: nnx.BatchNorm(6, rngs=nnx.Rngs(0)) for key in "ab"}
    models, optimizer = make("O2", models)

    @nnx.jit
    def step(models, optimizer, x, bad):
        loss = lambda m: loss_fn(m["a"], x) + loss_fn(m["b"], bad)  # noqa: E731
        optimizer.update(models, jamp.nnx.scaled_grad(loss)(models, optimizer))

    before = arrays(*models.values())
    step(models, optimizer, X, X * INF)
    assert_same_bits(arrays(*models.values()), before)
    step(models, optimizer, X, X)
    assert (optimizer.step.get_value(), optimizer.skipped_steps.get_value()) == (1, 1)


def test_static_scale_that_checks_and_outputs_in_half():
    model, optimizer = make(
        model=nnx.Linear(6, 2, rngs=nnx.Rngs(0)),
        loss_scale=jamp.StaticLossScale(128.0, check=True),
        cast_model_outputs=jnp.bfloat16,
    )
    assert model(X).dtype == jnp.bfloat16
    before = arrays(model)
    loss = lambda model, x: loss_fn(model, x).astype(jnp.float32)  # noqa: E731
    of = jamp.nnx.scaled_grad(loss)
    optimizer.update(model, of(model, optimizer, X * INF))
    assert_same_bits(arrays(model), before)
    assert (optimizer.skipped_steps.get_value(), optimizer.loss_scale) == (1, 128)


def test_a_teacher_in_the_loss_stays_in_float32():
    model, optimizer = make(model=nnx.Linear(6, 2, rngs=nnx.Rngs(0)))
    teacher = nnx.Linear(6, 2, rngs=nnx.Rngs(1))

    def products(model, optimizer, x):
        loss = lambda model, x: ((model(x) - teacher(x)) ** 2).mean()  # noqa: E731
        return jamp.nnx.scaled_value_and_grad(loss)(model, optimizer, x)[0]

    text = str(jax.make_jaxpr(products)(model, optimizer, X)).splitlines()
    found = [line.split("=")[0] for line in text if "dot_general[" in line]
    assert ["f16" in line for line in found] == [True, False, True]


def test_flax_bytes_of_both_go_on_as_before():
    (model, optimizer), (other, again) = make(), make(model=Net(nnx.Rngs(9)))
    jitted(model, optimizer, X)
    saved = flax.serialization.to_bytes(nnx.to_pure_dict(nnx.state(optimizer)))
    state = nnx.state(again)
    pure = flax.serialization.from_bytes(nnx.to_pure_dict(state), saved)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(again, state)
    nnx.update(other, nnx.state(model))
    for both in ((model, optimizer), (other, again)):
        jitted(*both, X)
    assert_same_bits(arrays(model, optimizer), arrays(other, again))
