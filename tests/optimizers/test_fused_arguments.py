"""Test the fused optimizers' masks, numbers, options, leaves and devices."""

import contextlib
import functools
import pickle
import re
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
from tests.optimizers.fused import BARE, fresh, update
from tests.support.bits import assert_rounded_alike as assert_close

REFUSED = (TypeError, ValueError)
PLAIN = jo.fused_sgd(0.1)

PARAMS = {
    "dense": {"b": jnp.asarray([2.0, 1.0]), "w": jnp.asarray([1.0, -3.0])},
    "gain": jnp.asarray([[3.0, -1.0]]),
}


def decaying(name, mask=None, weight_decay=0.25):
    """Returns an optimizer with weight decay, which `mask` selects."""
    if name == "larc_fused":
        inner = jo.fused_sgd(0.1, weight_decay=weight_decay, mask=mask)
        return jo.larc(inner)
    if name == "larc":
        return jo.larc(optax.sgd(0.1), 0.1, weight_decay=weight_decay, mask=mask)
    return fresh(name, learning_rate=0.1, weight_decay=weight_decay, mask=mask)


def first_update(tx, params=PARAMS):
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]


@pytest.mark.parametrize("name", ["sgd", "larc", "larc_fused"])
def test_a_mask_says_which_leaves_decay(name):
    all_decay = first_update(decaying(name))
    none_decays = first_update(decaying(name, weight_decay=0.0))
    expected = {"dense": all_decay["dense"], "gain": none_decays["gain"]}
    for a, b in zip(*map(jax.tree.leaves, (all_decay, none_decays)), strict=True):
        assert (np.abs(a - b) > 1e-4).any()
    prefix = {"dense": True, "gain": np.False_}
    whole = {"dense": {"b": True, "w": True}, "gain": False}
    for mask in (whole, prefix, lambda params: whole, lambda params: prefix):
        assert_close(first_update(decaying(name, mask)), expected)
    assert_close(first_update(decaying(name, True)), all_decay)
    assert_close(first_update(decaying(name, False)), none_decays)


BAD_MASKS = [
    ({"dense": True}, "mask must be a tree"),
    ([True, False], "mask must be a tree"),
    ({"dense": 1, "gain": True}, "mask.*bool"),
]


@pytest.mark.parametrize("name", ["sgd", "larc"])  # each has its own check
@pytest.mark.parametrize("mask, text", BAD_MASKS)
def test_a_mask_is_a_tree_of_bools(name, mask, text):
    for given in (mask, lambda params: mask):
        with pytest.raises(REFUSED, match=text):
            first_update(decaying(name, given))


@pytest.mark.parametrize("name", [*BARE, "larc_fused"])
def test_equal_hyperparameters_make_equal_transformations(name):
    """A state holds its optimizer, so an unequal one would make jit trace again."""
    mask = {"dense": {"b": False}, "gain": True}
    a, b = decaying(name, mask), decaying(name, mask)
    for same in (b, pickle.loads(pickle.dumps(a))):
        assert a == same and hash(a) == hash(same)
    others = [decaying(name, m) for m in ({"dense": {"b": True}, "gain": True}, None)]
    others += [decaying(name, {"dense": {"c": False}, "gain": True})]
    others += [decaying(x, mask) for x in (*BARE, "larc_fused") if x != name]
    others += [decaying(name, mask, 0.5), jo.larc(a, 0.1)]
    assert a not in others
    assert decaying(name, len) == decaying(name, len)  # functions compare by identity


FACTORIES = {name: getattr(jo, f"fused_{name}") for name in BARE}
FACTORIES["larc"] = functools.partial(jo.larc, PLAIN)
NUMBERS = {
    "sgd": "learning_rate weight_decay momentum dampening",
    "adam": "b1 b2 eps max_grad_norm",
    "lamb": "b1 b2 eps max_grad_norm",
    "novograd": "b1 b2 eps",
    "adagrad": "eps",
    "larc": "learning_rate weight_decay eps trust_coefficient",
}


@pytest.mark.parametrize("factory", NUMBERS)
def test_hyperparameters_are_numbers_in_their_range(factory):
    for name in NUMBERS[factory].split():
        for bad in [-0.5, True, "0.9", (0.9, 0.5)] + [1.0] * name.startswith("b"):
            with pytest.raises(REFUSED, match=f"{name}.*{re.escape(str(bad))}"):
                FACTORIES[factory](**({"learning_rate": 0.1} | {name: bad}))


ERRORS = [
    ("sgd", {"learning_rate": None}, "rate must be a number, got None"),
    ("sgd", {"momentum": None}, "momentum must be a number, got None"),
    ("sgd", {"nesterov": True}, "(?i)nesterov.*momentum"),
    ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "dampening"),
    ("adam", {"eps_inside_sqrt": True}, "legacy"),
    ("adam", {"legacy": True, "adam_w_mode": False}, "adam_w_mode"),
    *(("novograd", {"norm_type": x}, "norm_type") for x in (1, "l2", None)),
    *(
        ("adam", {"moment_dtype": x}, "moment_dtype must be 'float32'")
        for x in ("float16", "nonsense", None)
    ),
    ("adam", {"backend": "auto"}, "'xla', 'mosaic', 'interpret'.*'auto'"),
    ("larc", {"learning_rate": np.ones(2)}, "learning_rate must be a number, got arr"),
    ("lamb", {"amsgrad": True}, "unexpected keyword argument 'amsgrad'"),
]


@pytest.mark.parametrize("factory, options, text", ERRORS, ids=str)
def test_contradictory_options_are_an_error(factory, options, text):
    with pytest.raises((*REFUSED, RuntimeError), match=text):
        FACTORIES[factory](**({"learning_rate": 0.1} | options))


ADAM, LARC = jo.fused_adam(0.1), jo.larc(PLAIN)
TWO = jnp.zeros(2)
BROADCAST = PARAMS["dense"] | {"w": jnp.ones(1)}


def mistake(text, tx=PLAIN, of=None, grads=PARAMS, params=PARAMS, **arguments):
    """Returns the arguments of an update that must raise an error with `text`."""
    state = tx.init(PARAMS) if of is None else of
    return pytest.param(tx, (grads, state, params), arguments, text, id=text)


MISTAKES = [
    mistake(
        "grad_scale must be a number, got LossScaleState",
        grad_scale=jamp.DynamicLossScale().init(),
    ),
    mistake("found_inf must be a number, got", found_inf=TWO > 0),
    mistake("found_inf must be", LARC, found_inf=TWO),
    mistake("the result of the schedule must be", jo.fused_sgd(lambda count: TWO)),
    mistake("must be a FusedAdamState, got a FusedSGD", ADAM, PLAIN.init(PARAMS)),
    mistake("a FusedAdamState, got a tuple", ADAM, optax.adam(0.1).init(PARAMS)),
    mistake("made without momentum", jo.fused_sgd(0.1, 0.9), PLAIN.init(PARAMS)),
    mistake(
        r"mu`\['gain'\] has shape \(1, 1\)",
        *(ADAM, ADAM.init(PARAMS | {"gain": jnp.ones((1, 1))})),
    ),
    mistake(
        r"mu` have no leaf at \['gain'\]",
        *(ADAM, ADAM.init({"dense": PARAMS["dense"]})),
    ),
]
for name, tx in {"sgd": PLAIN, "larc": LARC}.items():
    MISTAKES += [
        mistake("dense", tx, grads=PARAMS | {"dense": BROADCAST}),
        mistake("more", tx, grads=PARAMS | {"more": jnp.ones(2)}),
        mistake(f"{name} needs the params", tx, params=None),
    ]


@pytest.mark.parametrize("tx, trees, arguments, text", MISTAKES)
def test_an_update_refuses_other_states_trees_and_numbers(tx, trees, arguments, text):
    with pytest.raises(REFUSED, match=text):
        tx.update(*trees, **arguments)


@pytest.mark.parametrize("factory", [jo.fused_adam, jo.fused_lamb])
def test_a_norm_of_0_clips_nothing(factory):
    unclipped = first_update(factory(0.1, max_grad_norm=None))
    assert_close(first_update(factory(0.1, max_grad_norm=0)), unclipped)
    # inject_hyperparams makes it an array.
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


def test_larc_wraps_only_transformations():
    for bad in (optax.sgd, nn.Dense(2)):  # a module has an `init`
        with pytest.raises(TypeError, match="(?i)transformation"):
            jo.larc(bad, 0.1)
    with pytest.raises(ValueError, match="(?i)learning.rate"):
        jo.larc(optax.sgd(0.1))
    got = first_update(jo.larc(optax.sgd(0.1), clip=False))
    assert_close(got, first_update(jo.larc(optax.sgd(0.1), 7.0, clip=False)))


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
def test_empty_trees_and_single_leaves(name, params):
    # optax.multi_transform makes an empty tree for a label that no leaf has.
    tx = decaying(name)
    updates, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert optax.tree.get_all_with_path(state, "count")[0][1] == 1


# The platform and the compute capability. Mosaic compiles for 9.0 and 10.0.
DEVICES = {
    "NVIDIA H100 80GB HBM3": ("gpu", "9.0"),
    "NVIDIA GB200": ("gpu", "10.0"),
    "NVIDIA A100-SXM4-80GB": ("gpu", "8.0"),
    "AMD Instinct MI210": ("gpu", "gfx90a"),
    "TPU v5 lite": ("tpu", None),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_the_device_is_asked_before_the_compiler(kind, monkeypatch):
    platform, capability = DEVICES[kind]
    supported = capability in ("9.0", "10.0")
    assert _run._is_supported_kind(kind) == supported  # knows only the name
    asked = {"compute_capability": capability} if capability else {}
    fake = SimpleNamespace(device_kind=kind, platform=platform, **asked)
    monkeypatch.setattr(_run.jax, "local_devices", lambda *a, **k: [fake])
    pallas_kernels.check_device("interpret")
    refused = pytest.raises(pallas_kernels.BackendError, match=kind)
    with contextlib.nullcontext() if supported else refused:
        pallas_kernels.check_device("mosaic")


@pytest.mark.parametrize("name", [*BARE, "larc_sgd"])
def test_backends(name):
    def backed(backend):
        if name == "larc_sgd":
            return jo.larc(jo.fused_sgd(0.1, backend=backend))
        return fresh(name, backend=backend)

    params = {"w": jnp.ones(128)}  # large enough for a kernel
    state = backed("xla").init(params)
    for call in (backed("mosaic").update, functools.partial(update, backed("mosaic"))):
        with pytest.raises(pallas_kernels.BackendError, match="(?s)mosaic.*cpu"):
            call(params, state, params)
    assert backed("mosaic") != backed("xla")
    for backend, in_kernels in (("xla", False), ("interpret", True)):
        program = jax.make_jaxpr(backed(backend).update)(params, state, params)
        assert ("axis_index" in str(program)) == in_kernels


def test_a_state_without_a_number_per_leaf_is_refused():
    tx, params = jo.fused_novograd(0.1), {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"`state.nu` have no leaf at \['b'\]"):
        tx.update(params, state._replace(nu={"a": state.nu["a"]}), params)
