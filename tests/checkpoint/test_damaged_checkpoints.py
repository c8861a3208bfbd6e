"""Test that damaged checkpoints raise an error with the path, or load exactly."""

import copy
import functools
import operator
import pathlib
import pickle
import re

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import jamp
from tests.support.bits import assert_same_bits
from tests.support.states import like, make

pytestmark = pytest.mark.standard_promotion  # for optax.adam

TREE = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.full(2, 0.1)}}
RULE = jamp.DynamicLossScale(hysteresis=2)


def begin():
    state = make("O2", TREE, optax.adam(1e-2), loss_scale=RULE, ema=jnp.zeros(2))
    return state.apply_gradients(grads=like(TREE, 1.0))


STATE = begin()
BEFORE = jax.tree.map(jnp.copy, STATE)
PORTABLE = jax.tree.map(np.asarray, jamp.to_checkpoint(STATE))
OWN = jax.tree.map(np.asarray, serialization.to_state_dict(STATE))
# A tree, the function that reads it, and the function that writes it.
FORMS = {
    "to_checkpoint": (PORTABLE, jamp.from_checkpoint, jamp.to_checkpoint),
    "state": (OWN, serialization.from_state_dict, serialization.to_state_dict),
}
SCALES = ("loss_scale", "scale")
COUNTS = ("unskipped", "hysteresis", "consecutive_skips", "step", "skipped_steps")
ODD = (None, "", b"x", True, -1, 3, 1e-300, 1e39, float("nan"), 1j, [], {}, [[1], 2])


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [pair for key, x in tree.items() for pair in leaves(x, (*path, key))]


def put(tree, path, value):
    functools.reduce(operator.getitem, path[:-1], tree)[path[-1]] = value


def other_value(rng, x):
    if not x.ndim and x.dtype != bool and rng.random() < 0.5:
        wild = [0, -1, 2.0**-130, 2.0**127, np.nan, np.inf, -np.inf, 99]
        with np.errstate(all="ignore"):
            return np.asarray(wild[rng.integers(len(wild))]).astype(x.dtype)
    bits = bytearray(x.tobytes())
    at = rng.integers(8 * len(bits))
    bits[at // 8] ^= 1 << (at % 8)
    if x.dtype == bool:
        return ~x
    return np.frombuffer(bytes(bits), x.dtype).reshape(x.shape)


def damaged(rng, tree):
    """Returns a copy with one damage, and its path."""
    tree = copy.deepcopy(tree)
    places = [(path, x) for path, x in leaves(tree) if x is not None]
    path, x = places[rng.integers(len(places))]
    kind = rng.integers(7)
    if kind < 3:
        put(tree, path, other_value(rng, x))
    elif kind == 3:
        put(tree, path, ODD[rng.integers(len(ODD))])
    elif kind == 4:
        dtypes = np.float16, np.float32, np.int32, np.float64, bool, "S4", object
        with np.errstate(all="ignore"):
            put(tree, path, x.astype(dtypes[rng.integers(len(dtypes))]))
    elif kind == 5:
        put(tree, path, x[None] if rng.random() < 0.5 else x.ravel()[:1])
    else:
        *folders, last = path[: rng.integers(len(path)) + 1]
        parent = functools.reduce(operator.getitem, folders, tree)
        value = parent.pop(last)
        if rng.random() < 0.5:
            parent[last + "'"] = value
    return tree, path


def is_sound(path, x):
    """Returns whether training can reach a value."""
    if path[-1] in SCALES:
        return np.isfinite(x) and 2.0**-126 <= x <= 2.0**126
    if path[-1] in COUNTS:
        return x >= 0
    return path[-1] != "version" or x == 1


def assert_whole(tree, restored):
    """Checks that the state has every leaf of the checkpoint, bit for bit."""
    after = dict(leaves(jax.tree.map(np.asarray, restored)))
    for path, x in leaves(tree):
        if path[-1] in ("version", "opt_level") or x is None:
            continue
        assert is_sound(path, x), path
        same = np.asarray(x, after[path].dtype).tobytes() == after[path].tobytes()
        assert same or path[-1] == "dynamic", path


def outcome(form, broken):
    """Returns the error, or checks the restored state."""
    _, read, write = FORMS[form]
    try:
        restored = read(STATE, broken)
    except (ValueError, TypeError) as error:
        return error
    if form == "state" or broken["loss_scaler0"]["dynamic"]:
        assert_whole(broken, write(restored))
    return None


@pytest.mark.parametrize("form", FORMS)
def test_damaged_trees_raise_or_load_exactly(form):
    whole = 0
    for seed in range(250):
        broken, path = damaged(np.random.default_rng(seed), FORMS[form][0])
        error = outcome(form, broken)
        whole += error is None
        if error is not None:
            named = [name for name in path if re.search(rf"\b{name}\b", str(error))]
            assert named, (seed, path, str(error))
    assert_same_bits(STATE, BEFORE)
    assert 25 < whole < 175


def test_check_finds_a_bad_value_that_orbax_restored():
    bad = STATE.loss_scales[0]._replace(scale=jnp.float32(np.nan))
    found = STATE.replace(loss_scales=(bad,))  # Orbax checks no values
    with pytest.raises(ValueError, match="loss_scales/0/scale` must be a finite"):
        jamp.check(found)
    with pytest.raises(ValueError, match="loss_scaler0/loss_scale` must be a finite"):
        jamp.from_checkpoint(STATE, found)
    jamp.check(STATE)


class Hostile:
    """An object that creates a file when unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (pathlib.Path.touch, (self.mark,))


def put_in_every_file(state, folder, data):
    """Restores with Orbax a checkpoint in which each file is `data`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "0", state)
        checkpointer.wait_until_finished()
        for path in (folder / "0").rglob("*"):
            if path.is_file():
                path.write_bytes(data)
        return checkpointer.restore(folder / "0", state)


def packed(leaf):
    return msgpack.packb({"params": {"dense": {"kernel": leaf}}})


# Functions that read a file or its content.
DOORS = {
    "msgpack": lambda data, _: serialization.from_bytes(STATE, data),
    "a leaf of msgpack": lambda data, _: serialization.from_bytes(STATE, packed(data)),
    "an array of objects": lambda data, _: serialization.from_bytes(
        STATE, packed(msgpack.ExtType(1, msgpack.packb(((1,), "object", data))))
    ),
    "Orbax": lambda data, folder: put_in_every_file(STATE, folder, data),
}


@pytest.mark.parametrize("door", DOORS)
def test_loading_never_unpickles(door, tmp_path):
    mark = tmp_path / "mark"
    data = pickle.dumps(Hostile(mark))
    with pytest.raises(Exception):  # noqa: B017, the type depends on the reader
        DOORS[door](data, tmp_path)
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists()
