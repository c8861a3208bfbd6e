"""What the fused optimizers are given: masks, numbers out of range, leaves, devices."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import pallas_kernels
from jamp import optimizers as jo
from pallas_kernels import _backend
from tests.bits import assert_same_bits
from tests.fused import BARE, assert_close, each_bare, fresh, make, update

REFUSED = (TypeError, ValueError)

# Masks of weight decay

PARAMS = {
    "dense": {"b": jnp.asarray([2.0, 1.0]), "w": jnp.asarray([1.0, -3.0])},
    "gain": jnp.asarray([[3.0, -1.0]]),
}


def decaying(name, mask=None, weight_decay=0.25):
    """With a decay that `mask` applies to; LARC has one around each kind of inner."""
    if name == "larc_fused":
        inner = jo.fused_sgd(0.1, weight_decay=weight_decay, mask=mask)
        return jo.larc(inner)
    if name == "larc":
        return jo.larc(optax.sgd(0.1), 0.1, weight_decay=weight_decay, mask=mask)
    kwargs = {"learning_rate": 0.1, "weight_decay": weight_decay, "mask": mask}
    if name == "adagrad":  # its first step in L2 mode is the sign of the gradient
        kwargs["adagrad_w_mode"] = True
    return fresh(name, **kwargs)


DECAYING = (*BARE, "larc", "larc_fused")
each_decaying = pytest.mark.parametrize("name", DECAYING)


def first_update(tx, params=PARAMS):
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    return tx.update(grads, tx.init(params), params)[0]


def only_vectors(params):
    return jax.tree.map(lambda p: p.ndim == 1, params)


@each_decaying
def test_a_mask_says_which_leaves_decay(name):
    all_decay = first_update(decaying(name))
    none_decays = first_update(decaying(name, weight_decay=0.0))
    expected = {"dense": all_decay["dense"], "gain": none_decays["gain"]}
    whole = {"dense": {"b": True, "w": True}, "gain": False}
    prefix = {"dense": True, "gain": False}
    for mask in (whole, prefix, only_vectors, lambda params: prefix):
        assert_close(first_update(decaying(name, mask)), expected)
    assert_close(first_update(decaying(name, True)), all_decay)
    assert_close(first_update(decaying(name, False)), none_decays)
    for a, b in zip(*map(jax.tree.leaves, (all_decay, none_decays)), strict=True):
        assert (np.abs(a - b) > 1e-4).any()


@each_decaying
@pytest.mark.parametrize(
    "mask",
    [
        {"dense": True},
        {"dense": True, "gain": True, "more": True},
        {"dense": {"w": True}, "gain": True},
        [True, False],
        lambda params: {"dense": True},
    ],
    ids=["missing", "more", "deeper", "list", "callable"],
)
@pytest.mark.message
def test_a_mask_of_another_structure_is_an_error(name, mask):
    with pytest.raises(REFUSED, match="(?i)mask"):
        first_update(decaying(name, mask))


@each_decaying
@pytest.mark.message
def test_a_mask_holds_bools(name):
    for value in (1.0, 1, "yes", jnp.ones(2)):
        with pytest.raises(REFUSED, match="(?i)mask.*bool|bool.*mask"):
            first_update(decaying(name, {"dense": value, "gain": True}))


@each_decaying
def test_a_state_with_a_mask_goes_through_jit(name):
    # The transformation is static there, so it is hashed and compared.
    def state():
        tx = decaying(name, {"dense": {"b": False, "w": True}, "gain": False})
        return jamp.initialize(PARAMS, tx, "O0", verbosity=0)

    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return state.apply_gradients(grads=state.params)

    first = step(state())
    assert first.step == 1
    if name != "larc":  # around optax, which is equal to itself alone
        step(state())
        assert len(traces) == 1


@each_bare
def test_equal_masks_make_equal_transformations(name):
    a, b = (fresh(name, mask={"a": True, "b": [False]}) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != fresh(name, mask={"a": True, "b": [True]})
    assert a != fresh(name, mask={"a": True, "c": [False]})
    assert fresh(name, mask=only_vectors) == fresh(name, mask=only_vectors)


@pytest.mark.parametrize("nvlamb", [False, True])
def test_a_traced_decay_of_zero_is_no_decay_in_lamb(nvlamb):
    # The trust ratio is asked for by a decay that is not 0, whoever says so and when.
    def tx(weight_decay):
        return jo.fused_lamb(0.1, weight_decay=weight_decay, use_nvlamb=nvlamb)

    traced = jax.jit(lambda wd: first_update(tx(wd)))
    for value in (0.0, 0.25):
        assert_close(traced(value), first_update(tx(value)))


def test_traced_zeros_compute_what_static_ones_do():
    def run(momentum, weight_decay):
        tx = jo.fused_sgd(0.1, momentum, weight_decay=weight_decay)
        state = tx.init(PARAMS)
        for _ in range(2):
            updates, state = tx.update(PARAMS, state, PARAMS)
        return updates

    assert_close(jax.jit(run)(0.0, 0.0), run(0.0, 0.0))
    assert_close(jax.jit(run)(0.5, 0.25), run(0.5, 0.25))


# Numbers out of range, and options that exclude each other

PLAIN = jo.fused_sgd(0.1)


@pytest.mark.parametrize(
    "factory",
    [
        jo.fused_adam,
        jo.fused_sgd,
        jo.fused_lamb,
        jo.fused_novograd,
        jo.fused_adagrad,
        functools.partial(jo.larc, PLAIN),
    ],
    ids=[*BARE, "larc"],
)
@pytest.mark.message
def test_a_negative_number_is_an_error_with_its_name_and_value(factory):
    with pytest.raises(ValueError, match=r"learning.rate.*-0\.25"):
        factory(-0.25)
    with pytest.raises(ValueError, match=r"weight.decay.*-0\.5"):
        factory(0.1, weight_decay=-0.5)
    if factory is not jo.fused_sgd:
        with pytest.raises(ValueError, match=r"eps.*-1e-08"):
            factory(0.1, eps=-1e-8)


@pytest.mark.parametrize("factory", [jo.fused_adam, jo.fused_lamb, jo.fused_novograd])
@pytest.mark.parametrize("beta", ["b1", "b2"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
@pytest.mark.message
def test_a_beta_outside_of_0_and_1_is_an_error(factory, beta, value):
    with pytest.raises(ValueError, match=rf"{beta}.*{value}"):
        factory(0.1, **{beta: value})


@pytest.mark.parametrize("factory", [jo.fused_adam, jo.fused_lamb])
@pytest.mark.message
def test_a_negative_norm_to_clip_at_is_an_error(factory):
    with pytest.raises(ValueError, match="max_grad_norm.*-1"):
        factory(0.1, max_grad_norm=-1.0)
    assert_close(
        first_update(factory(0.1, max_grad_norm=0)),
        first_update(factory(0.1, max_grad_norm=None)),
    )


@pytest.mark.parametrize(
    "make_it, text",
    [
        (lambda: jo.fused_sgd(0.1, -0.5), r"(?i)momentum.*-0\.5"),
        (lambda: jo.fused_sgd(0.1, nesterov=True), "(?i)nesterov.*momentum"),
        (
            lambda: jo.fused_sgd(0.1, 0.9, nesterov=True, dampening=0.5),
            "(?i)nesterov.*dampening",
        ),
        (lambda: jo.fused_adam(eps_inside_sqrt=True), "legacy"),
        (lambda: jo.fused_adam(legacy=True, adam_w_mode=False), "adam_w_mode"),
        (lambda: jo.larc(PLAIN, trust_coefficient=-1.0), "trust_coefficient.*-1"),
        (lambda: jo.larc(optax.sgd(0.1)), "(?i)learning.rate"),
    ],
    ids="momentum nesterov dampening inside legacy trust larc".split(),
)
@pytest.mark.message
def test_options_that_make_no_sense_are_an_error(make_it, text):
    with pytest.raises(ValueError, match=text):
        make_it()


def test_larc_without_clipping_needs_no_learning_rate():
    got = first_update(jo.larc(optax.sgd(0.1), clip=False))
    assert_close(got, first_update(jo.larc(optax.sgd(0.1), 7.0, clip=False)))


@pytest.mark.message
def test_amsgrad_is_refused_in_apex_words():
    for factory, name in [
        (jo.fused_adam, "FusedAdam"),
        (jo.fused_lamb, "FusedLAMB"),
        (jo.fused_novograd, "FusedNovoGrad"),
    ]:
        text = f"{name} does not support the AMSGrad variant."
        with pytest.raises(RuntimeError, match=text):
            factory(0.1, amsgrad=True)


@pytest.mark.message
def test_norm_types():
    for value in (1, 3, "l2", -2, None):
        with pytest.raises((ValueError, RuntimeError), match="norm_type|norm"):
            jo.fused_novograd(0.1, norm_type=value)
    largest = first_update(jo.fused_novograd(0.1, norm_type="inf"))
    for value in (0, jnp.inf, float("inf")):
        got = first_update(jo.fused_novograd(0.1, norm_type=value))
        assert_same_bits(got, largest)
    euclidean = first_update(jo.fused_novograd(0.1, norm_type=2))
    assert (largest["dense"]["w"] != euclidean["dense"]["w"]).all()


@each_bare
@pytest.mark.message
def test_an_unknown_backend_is_an_error(name):
    with pytest.raises(ValueError, match="backend.*'cuda'"):
        fresh(name, backend="cuda")


@pytest.mark.parametrize("bad", [optax.sgd, 0.1, None], ids=["sgd", "0.1", "None"])
def test_larc_wraps_a_transformation(bad):
    with pytest.raises(TypeError, match="(?i)transformation"):
        jo.larc(bad, 0.1)


# Trees


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.message
def test_update_without_params_is_an_error(name):
    tx = decaying(name)
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))


@each_bare
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool_])
@pytest.mark.message
def test_leaves_that_are_not_real_are_an_error_with_the_path(name, dtype):
    params = {"layer": [{"w": jnp.ones(2)}, {"odd": jnp.ones(2, dtype)}]}
    tx = make(name)
    with pytest.raises(TypeError, match=r"layer\W+1\W+odd"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("kind", ["missing", "more", "shape"])
def test_gradients_of_another_tree_are_an_error(name, kind):
    tx = decaying(name)
    grads = {"dense": dict(PARAMS["dense"]), "gain": PARAMS["gain"]}
    if kind == "missing":
        del grads["dense"]["b"]
    elif kind == "more":
        grads["more"] = jnp.ones(2)
    else:
        grads["dense"]["w"] = jnp.ones(1)  # would broadcast
    with pytest.raises(REFUSED):
        tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize(
    "params", [{}, {"a": None}, jnp.ones(()), jnp.ones((0, 3))], ids=str
)
def test_trees_of_nothing_and_of_one_leaf(name, params):
    # optax.multi_transform makes the former, for a label that no leaf has.
    tx = decaying(name)
    updates, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert optax.tree.get_all_with_path(state, "count")[0][1] == 1


# Backends

DEVICES = [
    # Kind, platform, compute capability, and whether Mosaic can compile for it.
    ("NVIDIA H200", "gpu", "9.0", True),
    ("NVIDIA H100 80GB HBM3", "gpu", "9.0", True),
    ("NVIDIA GH200 480GB", "gpu", "9.0", True),
    ("NVIDIA B200", "gpu", "10.0", True),
    ("NVIDIA GB200", "gpu", "10.0", True),
    ("NVIDIA A100-SXM4-80GB", "gpu", "8.0", False),
    ("NVIDIA L40S", "gpu", "8.9", False),
    ("NVIDIA A10G", "gpu", "8.6", False),
    ("Tesla T4", "gpu", "7.5", False),
    ("Tesla V100-SXM2-16GB", "gpu", "7.0", False),
    ("AMD Instinct MI300X", "gpu", "gfx942", False),
    ("AMD Instinct MI210", "gpu", "gfx90a", False),
    ("TPU v5 lite", "tpu", None, False),
    ("cpu", "cpu", None, False),
]
each_device = pytest.mark.parametrize(
    "kind, platform, capability, supported", DEVICES, ids=[d[0] for d in DEVICES]
)


def device(kind, platform, capability):
    fake = SimpleNamespace(device_kind=kind, platform=platform)
    if capability is not None:
        fake.compute_capability = capability
    return fake


@each_device
def test_the_device_is_asked_before_the_compiler(
    kind, platform, capability, supported, monkeypatch
):
    fake = device(kind, platform, capability)
    monkeypatch.setattr(_backend.jax, "local_devices", lambda *a, **k: [fake])
    assert pallas_kernels.resolve("xla") == "xla"
    assert pallas_kernels.resolve("interpret") == "interpret"
    assert pallas_kernels.resolve("auto") == "xla"  # nothing is measured yet
    if supported:
        assert pallas_kernels.resolve("mosaic") == "mosaic"
    else:
        with pytest.raises(pallas_kernels.BackendError, match=kind):
            pallas_kernels.resolve("mosaic")
    # Not even a measurement brings an old device to the compiler.
    monkeypatch.setattr(_backend, "MEASURED_FASTER", frozenset([kind]))
    assert pallas_kernels.resolve("auto") == ("mosaic" if supported else "xla")


@each_device
def test_a_name_alone_says_what_a_device_can(kind, platform, capability, supported):
    del platform, capability
    assert _backend._is_supported_kind(kind) == supported


@each_bare
@pytest.mark.message
def test_mosaic_here_is_an_error_that_names_the_device(name):
    tx = fresh(name, backend="mosaic")
    with pytest.raises(pallas_kernels.BackendError, match="(?s)mosaic.*cpu"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(pallas_kernels.BackendError, match="(?s)mosaic.*cpu"):
        update(tx, PARAMS, tx.init(PARAMS), PARAMS)


@each_bare
def test_auto_is_xla_here(name):
    state = make(name).init(PARAMS)
    auto, xla = (fresh(name, backend=backend) for backend in ("auto", "xla"))
    assert auto != xla
    a, b = (jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS) for tx in (auto, xla))
    assert str(a) == str(b)
    assert "pallas_call" not in str(a)
