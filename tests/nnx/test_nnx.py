"""Test jamp.nnx: levels, the atomic skip, NNX's transformations and filters."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits
from tests.support.programs import products

pytestmark = pytest.mark.standard_promotion  # Flax's layers promote

X = np.float32(np.random.default_rng(0).normal(size=(4, 2, 6)))
INF = np.float32(np.inf)
ADAM = optax.adam(1e-2)  # one object, so that tests share programs
LOW = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**10)}  # skips no first step


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(6, 4, (3,), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.conv(x)))
        return self.head(self.dropout(x.mean(1)))


@functools.cache
def original(kind):
    return kind(nnx.Rngs(0))


def cnn():
    return copy.deepcopy(original(CNN))


def linear(seed=0, **options):
    return nnx.Linear(6, 3, rngs=nnx.Rngs(seed), **options)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def train_step(model, optimizer, x):
    loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x)
    optimizer.update(model, grads)
    return loss


jitted = nnx.jit(train_step, donate_argnums=(0, 1))  # the two may share no array


def grads_of(loss, *args, **options):
    return nnx.jit(jamp.nnx.scaled_grad(loss, **options))(*args)


def make(level="O2", model=None, tx=ADAM, **options):
    model = cnn() if model is None else model
    return jamp.nnx.initialize(model, tx, level, verbosity=0, **options)


def start(**options):
    return make(model=linear(), **options)


@functools.cache
def ready():
    """Returns a model and its optimizer, for calls that change neither."""
    return start()


def arrays(node, which=...):
    """Copies the arrays of a node to the host."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    tree = nnx.to_pure_dict(nnx.state(node, which))
    host = lambda x: np.array(jax.random.key_data(x) if is_key(x) else x)  # noqa: E731
    return jax.tree.map(host, tree)


def forward_of(optimizer):
    return jamp.nnx.cast_forward(lambda model, x: model(x), optimizer)


def dtypes(model, which=nnx.Param):
    leaves = jax.tree.leaves_with_path(arrays(model, which))
    return {jax.tree_util.keystr(path): str(x.dtype) for path, x in leaves}


# The dtypes of params, of a BatchNorm's params, and of the operands of matmuls.
LEVELS = {
    "O0": ("float32", "float32", "float32"),
    "O1": ("float32", "float32", "float16"),
    "O2": ("float16", "float32", "float16"),
    "O3": ("float16", "float16", "float16"),
    "O4": ("float32", "float32", "bfloat16"),
    "O5": ("bfloat16", "float32", "bfloat16"),
}


@pytest.mark.parametrize("level", LEVELS)
def test_params_norms_and_matmuls_have_the_dtypes_of_the_level(level):
    param, norm, product = LEVELS[level]
    model, optimizer = make(level)
    forward = forward_of(optimizer)
    for path, dtype in dtypes(model).items():
        assert dtype == (norm if "bn" in path else param), path
    assert set(dtypes(model, nnx.BatchStat).values()) == {"float32"}
    found = products(forward, model, X)
    assert [(p.lhs, p.rhs) for p in found] == 2 * [(product, product)]
    assert jax.eval_shape(forward, model, X).dtype == "float32"


def test_overrides_reach_the_modules():
    model, optimizer = make(keep_fp32="head", cast_model_outputs=jnp.bfloat16)
    forward = forward_of(optimizer)
    assert dtypes(model)["['head']['kernel']"] == "float32"
    found = products(forward, model, X)
    assert [p.lhs for p in found] == ["float16", "float32"]
    assert jax.eval_shape(forward, model, X).dtype == "bfloat16"
    assert dtypes(make(model=linear(), tx=None))["['kernel']"] == "float16"
    model, optimizer = make("O0", linear(dtype=jnp.float16))
    assert products(forward_of(optimizer), model, X)[0].lhs == "float32"


def test_a_skip_keeps_every_bit_but_the_scale():
    model, optimizer = make()
    jitted(model, optimizer, X)
    before = arrays((model, optimizer))
    jitted(model, optimizer, X * INF)
    after = arrays((model, optimizer))
    assert (after[1].pop("skipped_steps"), before[1].pop("skipped_steps")) == (1, 0)
    for tree in (before, after):  # fields that change
        del tree[1]["loss_scales"], tree[1]["last_step_skipped"]
    assert_same_bits(after, before)
    assert optimizer.loss_scale == 2.0**15
    jitted(model, optimizer, X)
    assert optimizer.step.get_value() == model.dropout.rngs.count[...] == 2


def test_step_2_and_a_second_model_do_not_trace_again():
    traces = []

    @nnx.jit
    def step(*args):
        traces.append(1)
        train_step(*args)

    for seed in range(2):
        both = make(model=linear(seed))
        for _ in range(2):
            step(*both, X)
    assert len(traces) == 1


@pytest.mark.slow
def test_autocast_keeps_the_models_writes_and_leaks_nothing():
    plain, model = cnn(), cnn()
    call = lambda model, x: model(x)  # noqa: E731
    expected = nnx.jit(call)(plain, X)
    with jax.checking_leaks():
        got = nnx.jit(jamp.nnx.autocast(call))(model, X)
    assert got.dtype == jnp.float32
    assert (got != expected).any()
    np.testing.assert_allclose(got, expected, atol=2e-2)
    np.testing.assert_allclose(model.bn.mean[...], plain.bn.mean[...], atol=1e-3)
    assert (model.bn.mean[...] != 0).all()
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 1


def test_other_nnx_objects_among_the_arguments_keep_writes():
    model, optimizer = make("O2", nnx.Sequential(linear(), nnx.Dropout(0.5)), **LOW)
    rngs, teacher = nnx.Rngs(5), nnx.BatchNorm(3, rngs=nnx.Rngs(1))
    calls = nnx.Variable(jnp.zeros(()))

    def distill(model, teacher, x, rngs, calls):
        calls[...] += 1
        out = model(x, rngs=rngs)
        return (teacher(out) ** 2).mean(), out

    args = model, optimizer, teacher, X, rngs, calls
    grads, aux = grads_of(distill, *args, has_aux=True)
    optimizer.update(model, grads)
    assert (rngs.default.count[...], calls[...], aux.shape) == (1, 1, (4, 2, 3))
    assert optimizer.step.get_value() == 1
    assert (teacher.mean[...] != 0).all()
    assert teacher.scale[...].dtype == jnp.float32


def test_a_write_to_params_stays_in_half_in_a_call_and_is_dropped_in_a_loss():
    class Counting(nnx.Linear):
        def __call__(self, x):
            self.bias[...] += 1
            return super().__call__(x)

    model, optimizer = make(model=Counting(6, 3, rngs=nnx.Rngs(0)))
    grads_of(loss_fn, model, optimizer, X)
    np.testing.assert_array_equal(model.bias[...], np.zeros(3))
    model(X)
    assert (model.bias[...].dtype, model.bias[...].max()) == (jnp.float16, 1)


def test_an_axis_has_one_batch_and_one_step():
    norm = nnx.BatchNorm(6, axis_name="i", momentum=0.0, rngs=nnx.Rngs(0))
    model, optimizer = make(model=norm, **LOW)

    @nnx.jit
    @nnx.vmap(in_axes=(None, None, 0), axis_name="i")
    def step(model, optimizer, x):
        grads = jamp.nnx.scaled_grad(loss_fn, axis_name="i")(model, optimizer, x)
        optimizer.update(model, grads)

    step(model, optimizer, X)
    np.testing.assert_allclose(model.mean[...], X.mean((0, 1)), atol=1e-5)
    np.testing.assert_allclose(model.var[...], X.var((0, 1)), rtol=1e-5)
    before = arrays(model)
    step(model, optimizer, np.where(np.arange(4)[:, None, None] == 2, np.inf, X))
    assert_same_bits(arrays(model), before)
    assert (optimizer.step.get_value(), optimizer.skipped_steps.get_value()) == (1, 1)


class Scanned(nnx.Module):
    """Three layers under vmap, scan and remat."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.blocks = blocks(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block, x):
            return x + nnx.relu(block(x))

        return run(self.blocks, x)


def test_layers_run_in_half_and_learn():
    model, optimizer = make("O1", copy.deepcopy(original(Scanned)), **LOW)
    plain = nnx.jit(lambda model, x: model(x))(original(Scanned), X)
    found = products(forward_of(optimizer), model, X)
    assert found and not any(p.is_wide for p in found)
    first, then = (jitted(model, optimizer, X) for _ in range(2))
    np.testing.assert_allclose(first, (plain**2).mean(), rtol=0.02)
    assert then < first
    assert optimizer.step.get_value() == 2


def test_linen_models_go_through_the_bridge():
    linen = nn.Sequential([nn.Dense(4), nn.BatchNorm(True)])
    model = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(X)
    model, optimizer = make(model=model, **LOW)
    assert sorted(dtypes(model).values()) == 2 * ["float16"] + 2 * ["float32"]
    assert jax.eval_shape(forward_of(optimizer), model, X).dtype == jnp.float32
    jitted(model, optimizer, X)
    assert optimizer.step.get_value() == 1


def test_params_outside_the_filter_are_cast_and_not_stepped():
    class Tuned(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(6, rngs=rngs)
            self.lora = nnx.LoRALinear(6, 3, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.lora(self.norm(x))

    def tuned(level, **options):
        return make(level, Tuned(nnx.Rngs(0)), wrt=nnx.LoRAParam, **options)

    model, optimizer = tuned("O2", keep_fp32="^norm/", **LOW)
    kept = {path for path, dtype in dtypes(model).items() if dtype == "float32"}
    assert kept == {"['norm']['scale']", "['norm']['bias']"}
    assert list(jamp.master_params(optimizer.amp_state(model))["lora"]) == ["lora"]
    before = arrays(model, nnx.Param)
    jitted(model, optimizer, X)
    after = arrays(model, nnx.Param)
    new, old = after["lora"].pop("lora"), before["lora"].pop("lora")
    assert any((new[name] != old[name]).any() for name in old)
    assert_same_bits(after, before)
    for typo in ({"keep_fp32": "nrom"}, {"fp8": jamp.Fp8(keep="nrom")}):
        with pytest.raises(ValueError, match="'nrom' matches no leaf.*norm/scale"):
            tuned("O6", **typo)


@pytest.mark.parametrize("keep", [(), "^layers/"])
def test_an_anchored_pattern_matches_paths_of_the_whole_model(keep):
    layers = [nnx.Linear(32, 32, rngs=nnx.Rngs(0)) for _ in range(3)]
    model = nnx.Sequential(layers[0], nnx.relu, layers[1], nnx.relu, layers[2])
    _, optimizer = make("O6", model, fp8=jamp.Fp8(keep=keep, smallest=32))
    graphdef, state = nnx.split(model)
    forward = forward_of(optimizer)
    loss = lambda state, x: (forward(nnx.merge(graphdef, state), x) ** 2).mean()  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(loss))(state, np.ones((64, 32), np.float32)))
    assert ("f8" in program) == (not keep)


def test_several_models_and_losses_skip_by_themselves():
    models, optimizer = make(
        model={"G": linear(0), "D": linear(1)},
        tx={"G": ADAM, "D": optax.sgd(0.1)},
        num_losses=2,
    )

    @nnx.jit
    def step(models, optimizer, x, bad):
        of = jamp.nnx.scaled_grad
        d = of(lambda m, x: loss_fn(m["D"], x), loss_id=0, wrt="D")
        g = of(lambda m, x: loss_fn(m["G"], x), loss_id=1, wrt="G")
        grads = {"D": d(models, optimizer, x)}, {"G": g(models, optimizer, bad)}
        optimizer.update(models, grads, loss_id=(0, 1))
        assert "  step: int32[], skipped: {D: int32[], G: int32[]}\n" in repr(optimizer)

    before = arrays(models["G"])
    step(models, optimizer, X, X * INF)
    assert_same_bits(arrays(models["G"]), before)
    skips = "step: 1, skipped: {D: 0, G: 1}\n  loss scale: (65536.0, 32768.0)"
    assert skips in repr(optimizer)


COPIES = {
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "split and merge": lambda model: nnx.merge(*nnx.split(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_can_be_stepped(name):
    model, optimizer = start()
    twin = COPIES[name](model)
    forward = forward_of(optimizer)
    assert type(twin) is nnx.Linear
    np.testing.assert_array_equal(forward(twin, X), forward(model, X))
    jitted(twin, optimizer, X)
    assert optimizer.step.get_value() == 1


@pytest.mark.parametrize("to", ["O2", "O5"])
def test_a_checkpoint_loads_at_any_level(to):
    model, optimizer = make(**LOW)
    jitted(model, optimizer, X)
    checkpoint = jamp.to_checkpoint(optimizer.amp_state(model))
    again, other = make(to, CNN(nnx.Rngs(5)), **(LOW if to == "O2" else {}))
    other.load(again, jamp.from_checkpoint(other.amp_state(again), checkpoint))
    assert_same_bits(
        jamp.master_params(other.amp_state(again)),
        jamp.master_params(optimizer.amp_state(model)),
    )
    nnx.update(again, nnx.state(model, nnx.Not(nnx.Param)))
    if to == "O2":
        assert_same_bits(arrays((again, other)), arrays((model, optimizer)))


def noting(model, x):
    model.note = nnx.Intermediate(x.mean())
    return loss_fn(model, x)


# Calls with a model and its optimizer, by the error that each raises.
BAD_CALLS = {
    "removed Variables: .*'note'.*nnx.pop": lambda m, o: grads_of(noting, m, o, X),
    "added or removed Variables": lambda m, o: jamp.nnx.autocast(noting)(linear(), X),
    r"\['bias'\] with dtype float16, expected": (
        lambda m, o: make(model=linear(param_dtype=jnp.float16))
    ),
    "got 3. After": lambda m, o: make(model=3),
    "dict of them, got 3 at 0": lambda m, o: make(model=[3], tx=[ADAM]),
    "unknown keyword 'apply_fn'": lambda m, o: start(apply_fn=len),
    "unknown keyword 'ema'": lambda m, o: start(ema=jnp.ones(2)),
    "keyword 'loss_sale'. Did you mean 'loss_scale'": lambda m, o: start(loss_sale=1),
    r"got State.*nnx.merge\(graphdef, ": lambda m, o: train_step(nnx.state(m), o, X),
    "got GraphDef.*nnx.merge": lambda m, o: make(model=nnx.split(linear())),
    r"takes the model first": lambda m, o: o.update(arrays(m), m),
    r"the model first: write": lambda m, o: o.update([nnx.state(m)], [m]),
    r"optimizer.update\(model, grads\)": lambda m, o: o.update(nnx.state(m)),
    "got NoneType for the optimizer": lambda m, o: train_step(m, None, X),
    r"nnx.scaled_grad\(loss_fn\) takes .* got NoneType": (
        lambda m, o: grads_of(loss_fn, m, None, X)
    ),
    "nnx.pure takes .* got int": lambda m, o: jamp.nnx.pure(loss_fn, m, 3),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_errors_name_the_mistake(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD_CALLS[message](*ready())


@pytest.mark.parametrize("tx", [ADAM, {"a": ADAM, "b": ADAM}], ids=["one", "two"])
def test_models_that_share_a_variable_are_refused_unchanged(tx):
    first, shared, last = (linear(seed) for seed in range(3))
    models = {"a": nnx.List([first, shared]), "b": nnx.List([last, shared])}
    with pytest.raises(ValueError, match="'a' and 'b' share the Variable 1/bias"):
        make(model=models, tx=tx)
    assert set(dtypes(models).values()) == {"float32"}


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_model_with_other_leaves_is_refused(wrap):
    model, optimizer = start()
    others = {
        "float32.*expected float16": linear(),  # not initialized
        "has dtype bfloat16, expected float16": make("O5", linear())[0],
        r"\['bias'\] is missing": make(model=linear(use_bias=False))[0],
    }
    for message, other in others.items():
        before = arrays(other)
        with pytest.raises(ValueError, match=f"not belong to this.*{message}"):
            wrap(train_step)(other, optimizer, X)
        assert_same_bits(arrays(other), before)
    grads = grads_of(loss_fn, model, optimizer, X)
    with pytest.raises(ValueError, match="expected float16.*that one call of"):
        optimizer.update(linear(), grads)


def test_an_argument_that_shares_variables_with_the_model_is_refused():
    model, optimizer = ready()
    twin = nnx.List([linear(), model])
    for other in (model, twin):
        with pytest.raises(ValueError, match="shares the Variable .*nnx.clone"):
            grads_of(lambda m, t: m(X) - t(X), model, optimizer, other)


def test_masters_follow_a_clip_inside_of_the_step():
    model, optimizer = jamp.nnx.initialize(linear(), optax.sgd(0.1), "O5", verbosity=0)

    @nnx.jit
    def step(model, optimizer):
        train_step(model, optimizer, X[0])
        clipped = jax.tree.map(lambda w: w.clip(-0.01, 0.01), nnx.state(model))
        nnx.update(model, clipped)
        optimizer.load_params(model)

    for _ in range(2):
        step(model, optimizer)
    masters = jamp.master_params(optimizer.amp_state(model))["kernel"]
    assert_same_bits(masters.astype(jnp.bfloat16), model.kernel[...])
    assert abs(masters).max() <= 0.0101  # rounded to bfloat16(0.01)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_integer_params_are_kept(level):
    class Counting(nnx.Linear):
        def __init__(self, rngs):
            super().__init__(6, 3, rngs=rngs)
            self.table = nnx.Param(jnp.arange(3))

    model, optimizer = make(level, Counting(nnx.Rngs(0)), **LOW)
    jitted(model, optimizer, X)
    optimizer.load_params(model)
    jitted(model, optimizer, X)
    assert optimizer.step.get_value() == 2
    np.testing.assert_array_equal(model.table[...], np.arange(3))
