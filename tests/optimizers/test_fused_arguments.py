"""What the fused optimizers are given: masks, numbers out of range, leaves, devices."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import pallas_kernels
from jamp import optimizers as jo
from pallas_kernels import _run
from tests.optimizers.fused import BARE, assert_close, fresh, update

REFUSED = (TypeError, ValueError)
PLAIN = jo.fused_sgd(0.1)

# Masks of weight decay

PARAMS = {
    "dense": {"b": jnp.asarray([2.0, 1.0]), "w": jnp.asarray([1.0, -3.0])},
    "gain": jnp.asarray([[3.0, -1.0]]),
}
DECAYING = (*BARE, "larc", "larc_fused")
each_decaying = pytest.mark.parametrize("name", DECAYING)
# All fused optimizers look at masks and at trees in one place, and LARC in its own.
each_place = pytest.mark.parametrize("name", ["sgd", "larc"])


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


def first_update(tx, params=PARAMS):
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]


def only_vectors(params):
    return jax.tree.map(lambda p: p.ndim == 1, params)


@each_decaying
def test_a_mask_says_which_leaves_decay(name):
    all_decay = first_update(decaying(name, True))
    none_decays = first_update(decaying(name, weight_decay=0.0))
    expected = {"dense": all_decay["dense"], "gain": none_decays["gain"]}
    assert_close(first_update(decaying(name)), all_decay)
    assert_close(first_update(decaying(name, {"dense": True, "gain": False})), expected)
    for a, b in zip(*map(jax.tree.leaves, (all_decay, none_decays)), strict=True):
        assert (np.abs(a - b) > 1e-4).any()
    if name in ("sgd", "larc"):
        prefix = {"dense": True, "gain": np.False_}
        whole = {"dense": {"b": True, "w": True}, "gain": False}
        for mask in (whole, prefix, only_vectors, lambda params: prefix):
            assert_close(first_update(decaying(name, mask)), expected)
        assert_close(first_update(decaying(name, False)), none_decays)


@each_place
@pytest.mark.parametrize(
    "mask, text",
    [
        ({"dense": True}, "mask must be a tree"),
        ([True, False], "mask must be a tree"),
        (lambda params: {"dense": True}, "mask must be a tree"),
        ({"dense": 1, "gain": True}, "mask.*bool"),
        (lambda params: {"dense": 1, "gain": True}, "mask.*bool"),
    ],
)
def test_a_mask_has_the_structure_of_the_params_and_holds_bools(name, mask, text):
    with pytest.raises(REFUSED, match=text):
        first_update(decaying(name, mask))


@pytest.mark.parametrize("name", [*BARE, "larc_fused"])
def test_equal_hyperparameters_make_equal_transformations(name):
    """So that a state, which holds them, goes through jit without another trace."""
    mask = {"dense": {"b": False}, "gain": True}
    a, b = decaying(name, mask), decaying(name, mask)
    assert a == b and hash(a) == hash(b)
    others = [decaying(name, m) for m in ({"dense": {"b": True}, "gain": True}, None)]
    others += [decaying(name, {"dense": {"c": False}, "gain": True})]
    others += [decaying(x, mask) for x in (*BARE, "larc_fused") if x != name]
    others += [decaying(name, mask, 0.5), jo.larc(a, 0.1)]
    assert a not in others
    assert decaying(name, only_vectors) == decaying(name, only_vectors)


# Numbers: traced zeros, those out of range, and options that exclude each other


FACTORIES = {name: getattr(jo, f"fused_{name}") for name in BARE}
FACTORIES["larc"] = functools.partial(jo.larc, PLAIN)
# Factory, further options, and what the error says: the name and the value.
ERRORS = [
    *((f, {"learning_rate": -0.25}, r"learning.rate.*-0\.25") for f in ("sgd", "larc")),
    *(
        (f, {"learning_rate": None}, "rate must be a number, got None")
        for f in ("sgd", "adam")
    ),
    *((f, {"weight_decay": -0.5}, r"weight.decay.*-0\.5") for f in ("sgd", "larc")),
    *((f, {"eps": -1e-8}, "eps.*-1e-08") for f in FACTORIES if f != "sgd"),
    *(
        (f, {beta: 1.0}, rf"{beta}.*1.0")
        for f in ("adam", "lamb", "novograd")
        for beta in ("b1", "b2")
    ),
    ("sgd", {"momentum": -0.5}, r"(?i)momentum.*-0\.5"),
    ("sgd", {"dampening": -0.5}, r"dampening.*-0\.5"),
    ("sgd", {"nesterov": True}, "(?i)nesterov.*momentum"),
    ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "dampening"),
    ("adam", {"eps_inside_sqrt": True}, "legacy"),
    ("adam", {"legacy": True, "adam_w_mode": False}, "adam_w_mode"),
    ("larc", {"trust_coefficient": -1.0}, "trust_coefficient.*-1"),
    *(("novograd", {"norm_type": x}, "norm_type") for x in (1, "l2", None)),
    ("adam", {"backend": "cuda"}, "backend.*'cuda'"),
    ("adam", {"eps": True}, "eps must be a number, got True"),
    ("sgd", {"momentum": "0.9"}, "momentum must be a number, got '0.9'"),
    ("sgd", {"momentum": None}, "momentum must be a number, got None"),
    ("adam", {"b1": (0.9, 0.999)}, r"b1 must be a number, got \(0.9, 0.999\)"),
    ("larc", {"learning_rate": np.ones(2)}, r"learning_rate must be a number, got arr"),
    ("lamb", {"amsgrad": True}, "FusedLAMB does not support the AMSGrad variant."),
]


@pytest.mark.parametrize("factory, options, text", ERRORS, ids=str)
def test_options_that_make_no_sense_are_an_error(factory, options, text):
    with pytest.raises((*REFUSED, RuntimeError), match=text):
        FACTORIES[factory](**({"learning_rate": 0.1} | options))


SCALE = jamp.DynamicLossScale().init()
TWO = jnp.zeros(2)
# An optimizer, what makes its state, further arguments, and what the error says.
MISTAKEN = [
    (PLAIN, PLAIN, {"grad_scale": SCALE}, "grad_scale must be a number.*its `scale`"),
    (PLAIN, PLAIN, {"found_inf": TWO > 0}, "found_inf must be a number, got"),
    (FACTORIES["larc"](), FACTORIES["larc"](), {"found_inf": TWO}, "found_inf must be"),
    (jo.fused_sgd(lambda count: TWO), PLAIN, {}, "what the schedule returns must be"),
    (jo.fused_adam(0.1), PLAIN, {}, "must be a FusedAdamState, got a FusedSGDState"),
    (jo.fused_adam(0.1), optax.adam(0.1), {}, "must be a FusedAdamState, got a tuple"),
    (jo.fused_sgd(0.1, 0.9), PLAIN, {}, "made without momentum"),
]


@pytest.mark.parametrize("tx, other, arguments, text", MISTAKEN)
def test_an_update_refuses_what_is_of_another_kind(tx, other, arguments, text):
    """Of several numbers each leaf would have its own, and skip by itself."""
    with pytest.raises(REFUSED, match=text):
        tx.update(PARAMS, other.init(PARAMS), PARAMS, **arguments)


def test_moments_of_other_params_are_an_error():
    tx = jo.fused_adam(0.1)
    state = tx.init(PARAMS | {"gain": jnp.ones((1, 1))})
    with pytest.raises(ValueError, match=r"mu`\['gain'\] has shape \(1, 1\)"):
        tx.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match=r"mu` have no leaf at \['gain'\]"):
        tx.update(PARAMS, tx.init({"dense": PARAMS["dense"]}), PARAMS)


@pytest.mark.parametrize("factory", [jo.fused_adam, jo.fused_lamb])
def test_a_norm_of_0_clips_nothing_and_a_negative_one_is_an_error(factory):
    with pytest.raises(ValueError, match="max_grad_norm.*-1"):
        factory(0.1, max_grad_norm=-1.0)
    unclipped = first_update(factory(0.1, max_grad_norm=None))
    assert_close(first_update(factory(0.1, max_grad_norm=0)), unclipped)
    # Which makes an array of it.
    injected = optax.inject_hyperparams(factory)(0.1, max_grad_norm=0.0)
    assert_close(first_update(injected), unclipped)


def test_names_of_the_largest_norm():
    euclidean, *largest = (
        first_update(jo.fused_novograd(0.1, norm_type=x))["dense"]["w"]
        for x in (2, "inf", 0, jnp.inf)
    )
    for got in largest:
        np.testing.assert_array_equal(got, largest[0])
        assert (got != euclidean).all()


def test_what_larc_wraps():
    for bad in (optax.sgd, nn.Dense(2)):  # which has an `init`
        with pytest.raises(TypeError, match="(?i)transformation"):
            jo.larc(bad, 0.1)
    with pytest.raises(ValueError, match="(?i)learning.rate"):
        jo.larc(optax.sgd(0.1))
    got = first_update(jo.larc(optax.sgd(0.1), clip=False))
    assert_close(got, first_update(jo.larc(optax.sgd(0.1), 7.0, clip=False)))


@each_place
def test_gradients_of_another_tree_or_no_params_are_an_error(name):
    tx = decaying(name)
    state = tx.init(PARAMS)
    wrong = PARAMS["dense"] | {"w": jnp.ones(1)}  # would broadcast
    for bad in ({"dense": wrong}, {"more": jnp.ones(2)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            tx.update(PARAMS | bad, state, PARAMS)
    with pytest.raises(ValueError, match=f"{name} needs the params"):
        tx.update(PARAMS, state)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_leaves_that_are_not_real_are_an_error_with_the_path(dtype):
    params = {"layer": [{"w": jnp.ones(2)}, {"odd": jnp.ones(2, dtype)}]}
    with pytest.raises(TypeError, match=r"params\W+layer\W+1\W+odd"):
        PLAIN.init(params)
    floats = {"layer": [{"w": jnp.ones(2)}, {"odd": jnp.ones(2)}]}
    with pytest.raises(TypeError, match=r"gradients\W+layer\W+1\W+odd"):
        PLAIN.update(params, PLAIN.init(floats), floats)


@pytest.mark.parametrize("name", ["adam", "lamb", "larc"])
@pytest.mark.parametrize(
    "params", [{}, {"a": None}, jnp.ones(()), jnp.ones((0, 3))], ids=str
)
def test_trees_of_nothing_and_of_one_leaf(name, params):
    # optax.multi_transform makes the former, for a label that no leaf has.
    tx = decaying(name)
    updates, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert optax.tree.get_all_with_path(state, "count")[0][1] == 1


# By kind, the platform and the compute capability, of which Mosaic compiles for some.
DEVICES = {
    "NVIDIA H100 80GB HBM3": ("gpu", "9.0"),
    "NVIDIA GB200": ("gpu", "10.0"),
    "NVIDIA A100-SXM4-80GB": ("gpu", "8.0"),
    "AMD Instinct MI210": ("gpu", "gfx90a"),
    "TPU v5 lite": ("tpu", None),
    "cpu": ("cpu", None),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_the_device_is_asked_before_the_compiler(kind, monkeypatch):
    platform, capability = DEVICES[kind]
    supported = capability in ("9.0", "10.0")
    assert _run._is_supported_kind(kind) == supported  # by its name alone
    fake = SimpleNamespace(device_kind=kind, platform=platform)
    if capability is not None:
        fake.compute_capability = capability
    monkeypatch.setattr(_run.jax, "local_devices", lambda *a, **k: [fake])
    pallas_kernels.check_device("interpret")
    if supported:
        pallas_kernels.check_device("mosaic")
    else:
        with pytest.raises(pallas_kernels.BackendError, match=kind):
            pallas_kernels.check_device("mosaic")


@pytest.mark.parametrize("name", [*BARE, "larc_sgd"])
def test_backends(name):
    def backed(backend):
        if name == "larc_sgd":
            return jo.larc(jo.fused_sgd(0.1, backend=backend))
        return fresh(name, backend=backend)

    params = {"w": jnp.ones(128)}  # enough for a kernel
    state = backed("xla").init(params)
    for call in (backed("mosaic").update, functools.partial(update, backed("mosaic"))):
        with pytest.raises(pallas_kernels.BackendError, match="(?s)mosaic.*cpu"):
            call(params, state, params)
    assert backed("mosaic") != backed("xla")
    with pytest.raises(ValueError, match="('xla', 'mosaic', 'interpret').*'auto'"):
        fresh("adam", backend="auto")
    programs = [
        str(jax.make_jaxpr(backed(backend).update)(params, state, params))
        for backend in ("xla", "interpret")
    ]
    assert ["axis_index" in x for x in programs] == [False, True]
