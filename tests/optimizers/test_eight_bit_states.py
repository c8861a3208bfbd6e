"""Test states whose moments have 8 bits: checkpoints, shardings, and all doors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import PartitionSpec as P

import jamp
import jamp.nnx
from jamp import optimizers as jo
from jamp.optimizers import _codes
from tests.devices.eight_devices import mesh_of, misplaced, placed
from tests.support.bits import assert_rounded_alike, assert_same_bits
from tests.support.programs import FAST
from tests.support.states import assert_skipped

pytestmark = pytest.mark.standard_promotion  # optax promotes

ADAM = functools.partial(jo.fused_adam, 2.0**-6, b1=0.5, b2=0.75)
EIGHT = ADAM(moment_dtype="8bit")
LION = optax.lion(2.0**-6)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
DOORS = {
    "fused": EIGHT,
    "momentum": jo.fused_sgd(0.1, 0.5, moment_dtype="8bit"),
    "lion": jo.eight_bit(LION),
    "adam": jo.eight_bit(optax.adamw(1e-2, b1=0.5, b2=0.75)),
}
NAMES = ("mu", "nu", "trace")
each_door = pytest.mark.parametrize("door", DOORS)


def tree(seed=0, shapes=None):
    """Returns numbers with few bits, so that arithmetic is exact in every fusion."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 512), "b": (7,)} if shapes is None else shapes
    return {
        name: np.float32(rng.normal(size=shape).astype(jnp.bfloat16))
        for name, shape in shapes.items()
    }


def initialize(tx, params=None, level="O5", **options):
    params = tree() if params is None else params
    options = {"loss_scale": 1.0, "verbosity": 0} | options
    return jamp.initialize(params, tx, level, **options)


@functools.partial(jax.jit, compiler_options=FAST)
def step(state, grads):
    return state.apply_gradients(grads=grads)


def stepped(state, steps=2, shapes=None):
    for seed in range(steps):
        state = step(state, tree(seed + 1, shapes))
    return state


@each_door
def test_a_nan_gradient_changes_nothing(door):
    rule = jamp.StaticLossScale(1.0, check=True)
    state = stepped(initialize(DOORS[door], loss_scale=rule), 1)
    bad = tree(5)
    bad["w"][3, 7] = np.nan
    assert_skipped(step(state, bad), state)


LEAVES = {
    "both": ((32, 512), P("data", "model")),
    "cut": ((16, 512), P(None, ("data", "model"))),  # its shards cut its two blocks
    "flat": ((8192,), P(("data", "model"))),
    "rows": ((64, 128), P("data")),
    "small": ((32, 8), P("data")),
}
SHAPES, SPECS = ({k: row[i] for k, row in LEAVES.items()} for i in range(2))


def moments(state):
    """Returns the moments of a state by name."""
    found = [optax.tree.get_all_with_path(state.opt_state, n) for n in NAMES]
    return {name: x for name, pairs in zip(NAMES, found, strict=True) for _, x in pairs}


@pytest.mark.slow
@pytest.mark.eight_devices
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@each_door
def test_the_bits_are_equal_under_every_sharding(door, kind):
    params, mesh = tree(0, SHAPES), mesh_of(kind)
    init = functools.partial(initialize, DOORS[door])
    wanted = jax.device_get(moments(stepped(init(params), 2, SHAPES)))
    with jax.set_mesh(mesh):
        for start in (init, jax.jit(init)):
            state = start(placed(params, mesh, SPECS))
            where = jax.tree.map(lambda x: x.sharding, state)
            for moment in moments(state).values():
                codes = {k: getattr(x, "codes", x) for k, x in moment.items()}
                assert not misplaced(codes, {k: where.params[k] for k in codes})
            for seed in (1, 2):
                state = step(state, placed(tree(seed, SHAPES), mesh, SPECS))
            assert not misplaced(state, where)
            assert_same_bits(jax.device_get(moments(state)), wanted)


def test_blocks_are_sharded_unless_a_shard_cuts_one():
    mesh = mesh_of("Auto")
    state = initialize(EIGHT, placed(tree(0, SHAPES), mesh, SPECS))
    scales = {k: x.scales for k, x in moments(state)["nu"].items() if k != "small"}
    parts = {k: x.sharding.devices_indices_map(x.shape) for k, x in scales.items()}
    shards = {k: len({*map(str, places.values())}) for k, places in parts.items()}
    assert shards == {"both": 8, "cut": 1, "flat": 8, "rows": 4}


@each_door
def test_states_are_donated_extended_and_loaded(door):
    tx = DOORS[door]
    donating = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    state = initialize(tx, keep_fp32="b")
    old = jax.tree.leaves(state.opt_state)
    state = donating(state, tree(1))
    assert all(x.is_deleted() for x in old)
    more = state.add_params({"new": jnp.ones((64, 64))})
    both = dict(jax.tree.leaves_with_path(more.opt_state))
    for path, x in jax.tree.leaves_with_path(state.opt_state):
        assert_same_bits(both[path], x)
    stepped_more = step(more, tree(2) | {"new": np.ones((64, 64), np.float32)})
    assert jax.tree.structure(stepped_more) == jax.tree.structure(more)
    loaded = state.load_params(tree(3))
    assert_same_bits(loaded.opt_state.inner_state, state.opt_state.inner_state)
    fresh = state.load_params(tree(3), reset_optimizer=True)
    assert_same_bits(fresh.opt_state.inner_state, initialize(tx).opt_state.inner_state)


@pytest.mark.slow
@each_door
def test_a_resumed_run_has_the_same_bits(door, tmp_path):
    state = stepped(initialize(DOORS[door]))
    wanted, fresh = step(state, tree(7)), initialize(DOORS[door], tree(9))
    binary = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_same_bits(step(binary, tree(7)), wanted)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "saved", jamp.to_checkpoint(state))
        saver.wait_until_finished()
        like = jax.eval_shape(jamp.to_checkpoint, state)
        restored = saver.restore(tmp_path / "saved", like)
    assert_same_bits(step(jamp.from_checkpoint(fresh, restored), tree(7)), wanted)


def wide(state):
    """Returns Adam's or SGD's moments of `w` in float32."""
    _, inner = state.opt_state.inner_state
    leaf = {k: v["w"] for k, v in inner._asdict().items() if k != "count"}
    return {k: np.float32(x) for k, x in _codes.widened(leaf).items()}


SGD = functools.partial(jo.fused_sgd, 0.1, 0.5)


@pytest.mark.parametrize("make", [ADAM, SGD], ids=["adam", "sgd"])
def test_moment_dtype_may_change_at_a_checkpoint(make):
    states = {}
    for dtype in ("float32", "bfloat16", "8bit"):
        tx = optax.chain(optax.identity(), make(moment_dtype=dtype))
        states[dtype] = stepped(initialize(tx))
    for before, state in states.items():
        for after, like in states.items():
            moved = jamp.from_checkpoint(like, jamp.to_checkpoint(state))
            dtypes = [jax.tree.map(lambda x: x.dtype, x) for x in (moved, like)]
            assert dtypes[0] == dtypes[1]
            old, new = wide(state), wide(moved)
            if after in (before, "float32"):
                assert_same_bits(new, old)
            for name in old:
                near = {"float32": 0, "bfloat16": 2**-8, "8bit": 0.09}[after]
                large = abs(old[name]) > 0.01 * abs(old[name]).max()
                rtol = near * (1 if name != "nu" else 1.1)
                np.testing.assert_allclose(new[name][large], old[name][large], rtol)
            step(moved, tree(8))


def test_groups_round_independently():
    one = tree()
    grads = {"x": tree(1), "y": tree(1)}
    state = initialize({"x": EIGHT, "y": EIGHT}, {"x": one, "y": one})
    state = step(step(state, grads), grads)
    x, y = (state.opt_state[k].inner_state for k in "xy")
    assert_same_bits(x.nu["w"].scales, y.nu["w"].scales)
    assert (x.nu["w"].codes != y.nu["w"].codes).any()
    assert (x.mu["w"] != y.mu["w"]).any()


@pytest.mark.slow
def test_states_map_over_an_axis_and_work_in_nnx():
    init = lambda w: initialize(EIGHT, {"w": w})  # noqa: E731
    w = jnp.asarray(np.stack([tree(k)["w"] for k in range(3)]))
    many, grads = jax.vmap(init)(w), {"w": tree(5)["w"]}
    mapped = jax.vmap(step, (0, None))(many, grads)
    for k in range(3):
        one = jax.tree.map(lambda x, k=k: x[k], mapped)
        assert_rounded_alike(one, step(init(w[k]), grads))

    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    model, optimizer = jamp.nnx.initialize(model, EIGHT, "O5", verbosity=0)

    @nnx.jit
    def train(model, optimizer, x):
        loss_fn = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()  # noqa: E731
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x)
        optimizer.update(model, grads)
        return loss

    losses = [train(model, optimizer, jnp.ones((4, 64))) for _ in range(4)]
    assert losses[-1] < losses[0]
    nu = nnx.state(optimizer)["opt_state"]["inner_state"]["nu"]["kernel"]
    assert nu["codes"][...].dtype == jnp.uint8


# Any optax transformation


LABELS = {"w": "adam", "b": "sgd"}
EACH = {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, 0.9)}
ANY = {
    "adamw": optax.adamw(1e-2),
    "lion": LION,
    "muon": optax.contrib.muon(1e-2),
    "chain": CHAIN,
    "multi_transform": optax.multi_transform(EACH, LABELS),
    "adagrad": optax.adagrad(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "injected": optax.inject_hyperparams(optax.adam)(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY)
def test_any_transformation_steps_alike_and_holds_fewer_bytes(name):
    plain, tx, params = ANY[name], jo.eight_bit(ANY[name]), tree()
    params = {k: jnp.asarray(x) for k, x in params.items()}
    states = [plain.init(params), tx.init(params)]
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), states[1])
    updates = [None, None]
    for seed in range(1, 11):
        for i, t in enumerate((plain, tx)):
            updates[i], states[i] = jax.jit(t.update)(tree(seed), states[i], params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), states[1]) == shapes
    wanted, found = updates
    error = jnp.sqrt(((found["w"] - wanted["w"]) ** 2).mean())
    size = jnp.sqrt((wanted["w"] ** 2).mean())
    # Lion takes the sign of a first moment, so small ones flip.
    assert error < (0.3 if name == "lion" else 0.13) * size
    held = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in states]
    most = 0.75 if name == "schedule_free" else 0.26  # `z` stays
    assert held[1] < most * held[0]
    assert tx == jo.eight_bit(ANY[name]) and hash(tx) == hash(jo.eight_bit(ANY[name]))


def test_exempt_moments_stay_and_a_fused_optimizer_keeps_its_pass():
    params, given = tree(), {"exempt": ["^w$"]}
    for inner in (optax.adam(1e-2), jo.fused_adam(1e-2)):
        state = jo.eight_bit(inner, **given).init(params)
        assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32
        assert optax.tree.get(state, "nu")["b"].dtype == jnp.bfloat16
    assert jo.eight_bit(jo.fused_adam(1e-2)) == jo.fused_adam(1e-2, moment_dtype="8bit")
    mixed = jo.eight_bit(optax.adam(1e-2), lambda path, x: x.ndim < 2)
    state = mixed.init(params)
    assert isinstance(optax.tree.get(state, "nu")["w"], jo.EightBit)
    assert optax.tree.get(state, "nu")["b"].dtype == jnp.float32
    named = jo.eight_bit(optax.adan(1e-2), first=("m", "v", "g"), second=("n",))
    inner = named.init(params).inner_state[0]
    assert all(isinstance(getattr(inner, x)["w"], jo.EightBit) for x in "mvng")
    assert inner.n["w"].codes.dtype == jnp.uint8 != inner.v["w"].codes.dtype


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_decay_clipping_and_other_options_step_alike(momentum):
    options = {"weight_decay": 0.5, "learning_rate": 2.0**-6}
    sgd = functools.partial(jo.fused_sgd, momentum=momentum, nesterov=momentum > 0)
    adam = functools.partial(jo.fused_adam, adam_w_mode=False, max_grad_norm=1.0)
    for make in (sgd, adam, jo.fused_lamb):
        updates = []
        for dtype in ("float32", "8bit"):
            tx, params = make(moment_dtype=dtype, **options), tree()
            state = tx.init(params)
            for seed in range(1, 6):
                step = jax.jit(functools.partial(tx.update, grad_scale=4.0))
                new, state = step(tree(seed), state, params)
            updates.append(np.float32(new["w"]))
        error = np.sqrt(np.mean((updates[0] - updates[1]) ** 2))
        assert error <= 0.1 * np.sqrt(np.mean(updates[0] ** 2))


COMPLEX = {"w": jnp.ones((64, 64), jnp.complex64)}
GENERIC = jo.eight_bit(optax.adam(0.1))
ERRORS = [
    (lambda: jo.eight_bit(0.1), "optax transformation"),
    (lambda: jo.eight_bit(optax.sgd(0.1)).init(tree()), "no state.*'mu'.*first="),
    (lambda: jo.eight_bit(optax.adam(0.1), "typo").init(tree()), "'typo' matches no"),
    (lambda: jo.eight_bit(jo.fused_adam(), "typo").init(tree()), "'typo' matches no"),
    (lambda: jo.eight_bit(optax.adam(0.1), "(").init(tree()), "not a regex"),
    (lambda: GENERIC.init(COMPLEX), r"params\['w'\] is complex64"),
    (lambda: EIGHT.init(COMPLEX), "complex64"),
    (lambda: ADAM(moment_dtype="8bit", backend="mosaic"), "needs backend='xla'"),
    (
        lambda: EIGHT.replace(backend="interpret"),
        "needs backend='xla', got 'interpret'",
    ),
    (lambda: jo.fused_adagrad(moment_dtype="8bit"), "'bfloat16', got '8bit'"),
    (lambda: jo.fused_novograd(moment_dtype="8bit"), "'bfloat16', got '8bit'"),
    (lambda: jo.eight_bit(jo.fused_adagrad()), "'bfloat16', got '8bit'"),
    (lambda: ADAM(moment_dtype="4bit"), "'bfloat16', or '8bit', got '4bit'"),
    (lambda: ADAM().update(tree(), EIGHT.init(tree()), tree()), "`init` of this opti"),
]


@pytest.mark.parametrize("call, words", ERRORS)
def test_what_cannot_have_8_bits_is_an_error(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_float64_params_are_an_error():
    with jax.enable_x64(True):
        params = {"w": jnp.ones((64, 64), jnp.float64)}
        for tx in (EIGHT, jo.eight_bit(optax.adam(1e-2))):
            with pytest.raises(TypeError, match=r"params\['w'\] is float64.*8 bits"):
                tx.init(params)
        grads = jax.tree.map(jnp.float64, tree())
        params = jax.tree.map(jnp.asarray, tree())
        updates, _ = EIGHT.update(grads, EIGHT.init(params), params)
        assert updates["w"].dtype == jnp.float32
