"""jamp.nnx: levels, casts, the atomic skip, and NNX's own transformations."""

import copy
import functools
import inspect
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
from jamp.nnx import _initialize, _scaled_grad
from tests.bits import assert_same_bits, copy as copied

pytestmark = pytest.mark.standard_promotion  # Flax's layers promote

LEVELS = {
    "O0": None,
    "O1": None,
    "O2": jnp.float16,
    "O3": jnp.float16,
    "O4": None,
    "O5": jnp.bfloat16,
}
ADAM = optax.adam(1e-2)  # one, so that what is compiled is shared
RANDOM = np.random.default_rng(0)
X = np.float32(RANDOM.normal(size=(8, 6, 6, 1)))
Y = np.arange(8) % 3


class CNN(nnx.Module):
    """A convolution, a BatchNorm and dropout, and a head."""

    def __init__(self, rngs, rate=0.0):
        self.conv = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.conv(x)))
        return self.head(self.dropout(x.mean((1, 2))))


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), use_bias=False, name="conv")(x)
        x = nn.BatchNorm(False, momentum=0.9, name="bn")(x)
        return nn.Dense(3, name="head")(nn.relu(x).mean((1, 2)))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(model, x, y):
    return cross_entropy(model(x), y)


def train_step(model, optimizer, x, y):
    loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x, y)
    optimizer.update(model, grads)
    return loss


jitted = nnx.jit(train_step)


def make(level, model=None, tx=None, **options):
    model = CNN(nnx.Rngs(0)) if model is None else model
    tx = ADAM if tx is None else tx
    return jamp.nnx.initialize(model, tx, level, verbosity=0, **options)


def everything(model, optimizer):
    """All arrays of both, on the host."""
    return copied(nnx.as_pure((nnx.state(model), nnx.state(optimizer))))


def dtypes(model, what=nnx.Param):
    tree = nnx.to_pure_dict(nnx.state(model, what))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x.dtype for path, x in leaves}


@pytest.mark.parametrize("level", LEVELS)
def test_params_are_cast_by_their_modules_class(level):
    model, _ = make(level)
    half = LEVELS[level] or jnp.float32
    kept = half if level == "O3" else jnp.float32
    for path, dtype in dtypes(model).items():
        assert dtype == (kept if "bn" in path else half), path
    assert set(dtypes(model, nnx.BatchStat).values()) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("level", LEVELS)
def test_logits_come_out_in_float32_and_products_run_in_half(level):
    model, _ = make(level)
    half = {"O1": jnp.float16, "O4": jnp.bfloat16}.get(level, LEVELS[level])
    run = jax.make_jaxpr(lambda model, x: model(x), return_shape=True)
    text, logits = run(model, X)
    assert logits.dtype == jnp.float32
    products = [
        line
        for line in str(text).splitlines()
        if "conv_general" in line or "dot_gen" in line
    ]
    name = {None: "f32", jnp.float16: "f16", jnp.bfloat16: "bf16"}[half]
    assert len(products) == 2
    assert all(f":{name}[" in line.split("=")[0] for line in products), products


def test_running_statistics_do_not_go_through_half():
    model, _ = make("O2")
    model.bn.mean[...] = jnp.full(4, 1.0002, jnp.float32)  # half has no such number
    model.bn.var[...] = jnp.full(4, 3.0001, jnp.float32)
    view = nnx.view(model, use_running_average=True)
    zero = np.zeros((1, 6, 6, 4), np.float16)
    got = view.bn(zero)
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got[0, 0, 0], np.float16(-1.0002 / 3.0001**0.5))
    model(X)
    assert model.bn.mean[...].dtype == jnp.float32


@functools.cache
def linen_variables():
    return jax.jit(LinenCNN().init)(jax.random.key(0), X)


@pytest.mark.parametrize("level", LEVELS)
def test_linen_and_nnx_train_alike(level):
    linen, variables = LinenCNN(), linen_variables()
    model = CNN(nnx.Rngs(0))
    for name, values in variables["params"].items():
        for leaf, value in values.items():
            getattr(getattr(model, name), leaf)[...] = value
    model, optimizer = make(level, model)
    state = jamp.initialize(
        variables["params"],
        ADAM,
        level,
        apply_fn=linen.apply,
        batch_stats=variables["batch_stats"],
        verbosity=0,
    )

    @jax.jit
    def linen_step(state, x, y):
        def linen_loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, x, mutable=["batch_stats"])
            return cross_entropy(logits, y), new["batch_stats"]

        (loss, stats), grads = jamp.scaled_value_and_grad(linen_loss, has_aux=True)(
            state
        )
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    for i in range(20):
        x = X * np.float32(np.inf) if i == 5 and level in ("O1", "O2") else X
        state, expected = linen_step(state, x, Y)
        loss = jitted(model, optimizer, x, Y)
        np.testing.assert_allclose(loss, expected, rtol=2e-3)
    assert optimizer.step.get_value() == state.step
    np.testing.assert_array_equal(optimizer.loss_scale, state.loss_scale)
    np.testing.assert_allclose(
        model.bn.mean[...], state.batch_stats["bn"]["mean"], atol=2e-3
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skip_keeps_every_bit_but_the_scale(level, bad):
    model, optimizer = make(level, CNN(nnx.Rngs(0), rate=0.5))
    jitted(model, optimizer, X, Y)
    before = everything(model, optimizer)
    count = model.dropout.rngs.count[...]
    jitted(model, optimizer, X * np.float32(bad), Y)
    after = everything(model, optimizer)
    assert model.dropout.rngs.count[...] == count
    assert_same_bits(after[0], before[0])
    moved = {"loss_scales", "skipped_steps", "last_step_skipped"}
    for name in set(before[1]) - moved:
        assert_same_bits(after[1][name], before[1][name])
    assert optimizer.skipped_steps.get_value() == 1
    assert optimizer.loss_scale == 2.0**15
    jitted(model, optimizer, X, Y)
    assert optimizer.step.get_value() == 2
    assert model.dropout.rngs.count[...] == count + 1


def test_step_2_does_not_trace_again():
    traces = []

    def counted(model, x, y):
        traces.append(1)
        return loss_fn(model, x, y)

    @nnx.jit
    def step(model, optimizer, x, y):
        grads = jamp.nnx.scaled_grad(counted)(model, optimizer, x, y)
        optimizer.update(model, grads)

    tx = optax.adam(1e-2)
    for seed in range(2):
        model, optimizer = make("O2", CNN(nnx.Rngs(seed)), tx)
        for _ in range(2):
            step(model, optimizer, X, Y)
    assert len(traces) == 1


def test_masters_step_where_half_would_not():
    model, optimizer = make("O2", tx=optax.sgd(2.0**-12))
    before = optimizer.master_params(model)["head"]["bias"]
    model.head.bias[...] = jnp.ones(3, jnp.float16)
    optimizer.opt_state.masters["head"]["bias"].set_value(jnp.ones(3))
    grads = jax.tree.map(
        lambda p: jnp.ones(p.shape), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    optimizer.update(model, grads)
    after = optimizer.master_params(model)["head"]["bias"]
    np.testing.assert_array_equal(after, np.full(3, 1 - 2.0**-12))
    np.testing.assert_array_equal(model.head.bias[...], np.ones(3, np.float16))
    assert before.dtype == jnp.float32


def test_gradients_of_nnx_grad_are_taken_as_unscaled():
    model, optimizer = make("O0", tx=optax.sgd(0.5))
    twin, twin_optimizer = make("O0", tx=optax.sgd(0.5))
    optimizer.update(model, nnx.jit(nnx.grad(loss_fn))(model, X, Y))
    jitted(twin, twin_optimizer, X, Y)
    for a, b in zip(
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(twin, nnx.Param))),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---- NNX's transformations and filters -------------------------------------------
class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(self.norm(x)))


class Scanned(nnx.Module):
    """Three blocks under vmap, scan and remat."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return Block(rngs)

        self.blocks = blocks(rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block, x):
            return block(x)

        return self.head(run(self.blocks, x.mean((1, 3))))


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 6, rngs=rngs)
        self.second = self.first
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(nnx.relu(self.first(x.mean((1, 3))))))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 4, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x[..., 0])[:, -1])


FASTER = optax.adam(3e-2)


@functools.cache
def after_eight_steps(kind, level):
    model, optimizer = make(level, kind(nnx.Rngs(0)), tx=FASTER)
    for _ in range(8):
        loss = jitted(model, optimizer, X, Y)
    return loss, model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", [Scanned, Shared, Recurrent])
def test_models_of_every_shape_train(kind, level):
    loss, model, optimizer = after_eight_steps(kind, level)
    expected, *_ = after_eight_steps(kind, "O0")
    assert optimizer.skipped_steps.get_value() <= 3
    if optimizer.skipped_steps.get_value() == 0:
        np.testing.assert_allclose(loss, expected, rtol=0.05)
    logits = jax.eval_shape(lambda model, x: model(x), model, X)
    assert logits.dtype == jnp.float32


def test_shared_params_have_one_master():
    model, optimizer = make("O2", Shared(nnx.Rngs(0)))
    assert model.first is model.second
    assert len(jax.tree.leaves(nnx.as_pure(optimizer.opt_state.masters))) == 4


class WithLoRA(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.LoRALinear(6, 3, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.base(x.mean((1, 3)))


def test_wrt_trains_lora_and_leaves_the_base_in_half():
    model, optimizer = make("O2", WithLoRA(nnx.Rngs(0)), wrt=nnx.LoRAParam)
    base = np.array(model.base.kernel[...])
    assert base.dtype == np.float16
    before = np.array(model.base.lora.lora_b[...])
    jitted(model, optimizer, X, Y)
    np.testing.assert_array_equal(model.base.kernel[...], base)
    assert (np.array(model.base.lora.lora_b[...]) != before).any()
    masters = jax.tree.leaves(nnx.as_pure(optimizer.opt_state.masters))
    assert len(masters) == 2


def test_keep_fp32_keeps_a_head_in_float32():
    model, _ = make("O2", keep_fp32="head")
    assert dtypes(model)["['head']['kernel']"] == jnp.float32
    assert model.head(jnp.ones((1, 4), jnp.float16)).dtype == jnp.float32


PRINTED = """\
Optimizer(
  opt_level: O2
  params: 102 float16, 16 float32
  loss_scale: (65536.0, 32768.0)
  step: 1
  skipped_steps: {'D': 0, 'G': 1}
  last_step_skipped: {'D': False, 'G': True}
)"""


def test_several_models_and_losses_skip_by_themselves():
    models = {"G": CNN(nnx.Rngs(0)), "D": CNN(nnx.Rngs(1))}
    models, optimizer = jamp.nnx.initialize(
        models,
        {"G": optax.adam(1e-2), "D": optax.sgd(0.1)},
        "O2",
        num_losses=2,
        verbosity=0,
    )

    printed = []

    @nnx.jit
    def step(models, optimizer, x, bad):
        printed.append(str(optimizer))
        of = jamp.nnx.scaled_grad
        d = of(lambda m, x: loss_fn(m["D"], x, Y), loss_id=0, wrt="D")
        g = of(lambda m, x: loss_fn(m["G"], x, Y), loss_id=1, wrt="G")
        grads = d(models, optimizer, x), g(models, optimizer, bad)
        optimizer.update(models, grads)

    before = copied(nnx.to_pure_dict(nnx.state(models["G"])))
    step(models, optimizer, X, X * np.float32(np.inf))
    assert_same_bits(copied(nnx.to_pure_dict(nnx.state(models["G"]))), before)
    assert nnx.as_pure(optimizer.skipped_steps) == {"D": 0, "G": 1}
    assert [float(s) for s in optimizer.loss_scale] == [2.0**16, 2.0**15]
    assert repr(optimizer) == PRINTED
    assert "  step: int32[]\n" in printed[0]
    jax.tree.map(lambda x: x.delete(), nnx.as_pure(nnx.state(optimizer)))
    assert str(optimizer) == printed[0]


# ---- autocast -------------------------------------------------------------------
def test_autocast_writes_what_the_model_writes_and_leaks_nothing():
    plain, model = CNN(nnx.Rngs(0), rate=0.5), CNN(nnx.Rngs(0), rate=0.5)
    expected = plain(X)
    with jax.checking_leaks():
        got = jamp.nnx.autocast(lambda model, x: model(x))(model, X)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=2e-2)
    np.testing.assert_allclose(model.bn.mean[...], plain.bn.mean[...], atol=1e-3)
    assert (np.array(model.bn.mean[...]) != 0).all()
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 1


# ---- copies and checkpoints -------------------------------------------------------
def test_pickle_deepcopy_clone_and_merge_keep_the_policy():
    model, _ = make("O2")
    expected = model(X)
    for twin in (
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        nnx.clone(model),
        nnx.merge(*nnx.split(model)),
    ):
        assert isinstance(twin, CNN)
        assert type(twin) is type(model)
        np.testing.assert_array_equal(twin(X), expected)
        assert twin(X).dtype == jnp.float32


@pytest.mark.parametrize("to", ["O2", "O5", "O0"])
def test_a_checkpoint_goes_to_any_level_and_on(to):
    model, optimizer = make("O2")
    jitted(model, optimizer, X, Y)
    checkpoint = copied(jamp.to_checkpoint(optimizer.amp_state(model)))
    again, other = make(to, CNN(nnx.Rngs(5)))
    state = jamp.from_checkpoint(other.amp_state(again), checkpoint)
    other.load(again, state)
    assert_same_bits(
        copied(other.master_params(again)), copied(optimizer.master_params(model))
    )
    nnx.update(again, nnx.state(model, nnx.Not(nnx.Param)))
    if to == "O2":
        jitted(model, optimizer, X, Y)
        jitted(again, other, X, Y)
        assert_same_bits(everything(again, other), everything(model, optimizer))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_model_of_other_leaves_than_the_optimizers_is_refused(wrap):
    model, optimizer = make("O2", Shared(nnx.Rngs(0)))
    others = {
        "float32.*expected float16": Shared(nnx.Rngs(0)),  # was not initialized
        "got bfloat16.*expected float16": make("O5", Shared(nnx.Rngs(0)))[0],
        r"\['first'\]\['bias'\]: got none": make("O2", WithLoRA(nnx.Rngs(0)))[0],
    }
    for message, other in others.items():
        before = copied(nnx.to_pure_dict(nnx.state(other)))
        with pytest.raises(ValueError, match=f"not the one of this.*{message}"):
            wrap(train_step)(other, optimizer, X, Y)
        assert_same_bits(copied(nnx.to_pure_dict(nnx.state(other))), before)
    grads = jamp.nnx.scaled_grad(loss_fn)(model, optimizer, X, Y)
    with pytest.raises(ValueError, match="expected float16.*what one call of"):
        optimizer.update(Shared(nnx.Rngs(0)), grads)
    wrap(train_step)(nnx.clone(model), optimizer, X, Y)
    assert optimizer.step.get_value() == 1


# ---- errors ------------------------------------------------------------------------
def test_a_model_goes_through_initialize_once():
    model, _ = make("O2")
    with pytest.raises(ValueError, match="already, at O2"):
        make("O2", model)


def test_half_params_are_refused():
    model = CNN(nnx.Rngs(0))
    model.head.kernel.set_value(model.head.kernel[...].astype(jnp.float16))
    with pytest.raises(ValueError, match="head.*float16"):
        make("O2", model)


def test_variables_that_the_loss_makes_are_named():
    class Noting(CNN):
        def __call__(self, x):
            self.mean = nnx.Intermediate(x.mean())
            return super().__call__(x)

    model, optimizer = make("O2", Noting(nnx.Rngs(0)))
    with pytest.raises(ValueError, match="nnx.pop"):
        train_step(model, optimizer, X, Y)


@pytest.mark.parametrize("bad", [None, 3, optax.sgd(1.0)], ids=["None", "3", "tx"])
def test_what_is_no_optimizer_is_refused(bad):
    model, _ = make("O2")
    with pytest.raises(TypeError, match="jamp.nnx.initialize"):
        train_step(model, bad, X, Y)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="nnx.Module"):
        jamp.nnx.initialize(3, optax.sgd(1.0))
    with pytest.raises(TypeError, match="no nnx.Module"):
        jamp.nnx.initialize([3], [optax.sgd(1.0)])
    with pytest.raises(TypeError, match="has no apply_fn"):
        make("O2", apply_fn=len)


@pytest.mark.parametrize("one_tx", [False, True])
def test_models_that_share_a_variable_are_refused(one_tx):
    a, b = Shared(nnx.Rngs(0)), Shared(nnx.Rngs(1))
    b.head = a.head
    tx = optax.sgd(1.0) if one_tx else {"a": optax.sgd(1.0), "b": optax.sgd(1.0)}
    with pytest.raises(ValueError, match="share a Variable, a/head.* and b/head"):
        jamp.nnx.initialize({"a": a, "b": b}, tx, "O2", verbosity=0)
    assert a.head.kernel[...].dtype == jnp.float32  # untouched


def test_what_a_loss_writes_into_trained_variables_is_dropped():
    def writing(model, x, y):
        model.head.bias[...] = model.head.bias[...] + 1
        return loss_fn(model, x, y)

    model, optimizer = make("O2")
    before = np.array(model.head.bias[...])
    jamp.nnx.scaled_grad(writing)(model, optimizer, X, Y)
    np.testing.assert_array_equal(model.head.bias[...], before)


def test_the_types_name_the_keywords_that_go_on_to_jamp():
    for fn, options, own in (
        (jamp.initialize, _initialize.Options, {"apply_fn", "state_class"}),
        (jamp.scaled_value_and_grad, _scaled_grad.Options, {"has_aux"}),
    ):
        params = inspect.signature(fn).parameters.values()
        names = {p.name for p in params if p.kind is p.KEYWORD_ONLY}
        assert options.__annotations__.keys() == names - own


# ---- what the second pair of eyes found ----------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_that_writes_nothing_may_be_closed_over(level):
    model, _ = make(level, Shared(nnx.Rngs(0)))
    expected = model(X)
    np.testing.assert_allclose(jax.jit(lambda x: model(x))(X), expected, atol=1e-3)
    assert jax.grad(lambda x: model(x).sum())(X).shape == X.shape


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_linen_models_go_through_the_bridge(level):
    model = nnx.bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(X)
    model, optimizer = make(level, model)
    assert model(X).dtype == jnp.float32
    loss, grads = jamp.nnx.scaled_value_and_grad(lambda m, x: (m(x) ** 2).mean())(
        model, optimizer, X
    )
    optimizer.update(model, grads)
    assert optimizer.step.get_value() == 1


def test_a_batchnorm_behind_the_bridge_stays_in_float32():
    model = nnx.bridge.ToNNX(LinenCNN(), rngs=nnx.Rngs(0)).lazy_init(X)
    model, optimizer = make("O2", model)
    for path, dtype in dtypes(model).items():
        assert dtype == (jnp.float32 if "bn" in path else jnp.float16), path


class Outside(nnx.Module):
    """Its keys come with the call."""

    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.linear(self.dropout(x.mean((1, 3)), rngs=rngs))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_objects_among_the_arguments_keep_what_is_written(level):
    model, optimizer = make(level, Outside(nnx.Rngs(0)))
    rngs, teacher = nnx.Rngs(5), CNN(nnx.Rngs(1))
    model(X, rngs=rngs)
    assert rngs.default.count[...] == 1

    def distill(model, teacher, x, rngs):
        return ((model(x, rngs=rngs) - teacher(x)) ** 2).mean()

    grads = jamp.nnx.scaled_grad(distill)(model, optimizer, teacher, X, rngs)
    optimizer.update(model, grads)
    assert rngs.default.count[...] == 2
    assert (np.array(teacher.bn.mean[...]) != 0).all()
    assert teacher.conv.kernel[...].dtype == jnp.float32


def test_the_class_of_a_model_makes_models_without_policy():
    model, _ = make("O2")
    fresh = type(model)(nnx.Rngs(1))
    assert type(fresh) is CNN
    assert set(dtypes(fresh).values()) == {jnp.dtype(jnp.float32)}
    again, _ = make("O5", fresh)
    assert dtypes(again)["['head']['kernel']"] == jnp.bfloat16


def test_autocast_names_variables_that_a_function_makes():
    def noting(model, x):
        model.note = nnx.Intermediate(x.mean())
        return model(x)

    with pytest.raises(ValueError, match="added or removed Variables.*note"):
        jamp.nnx.autocast(noting)(CNN(nnx.Rngs(0)), X)


def test_an_argument_that_shares_variables_with_the_model_is_refused():
    model, optimizer = make("O2")
    twin = CNN(nnx.Rngs(1))
    twin.head = model.head
    for other in (model, twin):
        with pytest.raises(ValueError, match="shares the Variable .*nnx.clone"):
            jamp.nnx.scaled_grad(lambda m, t, x: (m(x) - t(x)).mean())(
                model, optimizer, other, X
            )


def test_a_variable_among_the_arguments_keeps_what_is_written():
    model, optimizer = make("O2")
    calls = nnx.Variable(jnp.zeros(()))

    def counting(model, x, y, calls):
        calls[...] += 1
        return loss_fn(model, x, y)

    jamp.nnx.scaled_grad(counting)(model, optimizer, X, Y, calls)
    assert calls[...] == 1
