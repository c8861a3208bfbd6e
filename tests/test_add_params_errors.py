"""state.add_params: what it refuses."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.bits import assert_same_bits, copy

LEAF = {"v": jnp.ones(2, jnp.float32)}
SGD = optax.sgd(1.0)


def begin(tree, tx, **fields):
    return jamp.initialize(tree, tx, "O0", verbosity=0, **fields)


def one_group(tx=SGD, **fields):
    return begin({"body": {"w": LEAF["v"]}, "norm": {"scale": LEAF["v"]}}, tx, **fields)


def two_groups(pack=dict):
    trees, txs = {"a": LEAF, "b": LEAF}, {"a": SGD, "b": SGD}
    if pack is not dict:
        trees, txs = pack(trees.values()), pack(txs.values())
    return begin(trees, txs)


def flat():
    """An optimizer that keeps all moments in one vector."""
    total = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    return optax.GradientTransformation(
        lambda params: {"moments": jnp.zeros(total(params), jnp.float32)},
        lambda updates, state, params=None: (updates, state),
    )


HALF_LEAF = {"head": {"v": jnp.ones(2, jnp.float16)}}
# The state, what add_params is given, the error, and words that it says.
REFUSED = {
    "name exists": (
        one_group,
        ({"norm": {"scale": LEAF["v"]}},),
        ValueError,
        r"norm.*scale",
    ),
    "a leaf for a mapping": (one_group, ({"body": LEAF["v"]},), ValueError, "body"),
    "a mapping for a leaf": (
        one_group,
        ({"norm": {"scale": LEAF}},),
        ValueError,
        r"norm.*scale",
    ),
    "half": (one_group, (HALF_LEAF,), ValueError, r"params\['head'\]\['v'\].*float16"),
    "list": (one_group, ([LEAF["v"]],), TypeError, "mapping.*list"),
    "array": (one_group, (LEAF["v"],), TypeError, "mapping"),
    "a module": (one_group, ({"v": object()},), TypeError, "v"),
    "tx where there is one group": (one_group, (LEAF, SGD), TypeError, "one group"),
    "params that are an array": (
        lambda: begin(LEAF["v"], SGD),
        (LEAF,),
        TypeError,
        "mapping",
    ),
    "no optimizer": (lambda: begin(dict(LEAF), None), (LEAF,), TypeError, "optimizer"),
    "state of one piece": (lambda: one_group(flat()), (LEAF,), ValueError, "moments"),
    "no tx": (two_groups, ({"c": LEAF},), TypeError, "dict"),
    "one tx": (two_groups, ({"c": LEAF}, SGD), (TypeError, ValueError), "tx|dict"),
    "a list for a dict": (two_groups, ([LEAF], [SGD]), TypeError, "dict.*list"),
    "a tuple for a list": (
        lambda: two_groups(list),
        ((LEAF,), (SGD,)),
        TypeError,
        "list.*tuple",
    ),
    "a tx for another group": (two_groups, ({"c": LEAF}, {"d": SGD}), ValueError, "c"),
    "fewer optimizers": (
        lambda: two_groups(list),
        ([LEAF, LEAF], [SGD]),
        ValueError,
        "length",
    ),
    "group exists": (two_groups, ({"b": LEAF}, {"b": SGD}), ValueError, "'b'"),
    "half in a group": (
        two_groups,
        ({"c": HALF_LEAF}, {"c": SGD}),
        ValueError,
        r"\['c'\]\['head'\]\['v'\]",
    ),
    "a wrapped tx": (
        two_groups,
        ({"c": LEAF}, {"c": jamp.master_weights(SGD)}),
        ValueError,
        "master_weights",
    ),
    "no tx at all": (two_groups, ({"c": LEAF}, {"c": 1e-3}), TypeError, "0.001"),
}


@pytest.mark.message
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(name):
    make_state, args, error, words = REFUSED[name]
    state = make_state()
    before = copy(state)
    with pytest.raises(error, match=f"(?s){words}"):
        state.add_params(*args)
    assert_same_bits(copy(state), before)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="statz"):
        one_group(stats=LEAF).add_params({"head": LEAF}, statz=LEAF)
    with pytest.raises(ValueError, match="stats"):
        one_group(stats=LEAF).add_params({"head": LEAF}, stats=LEAF)
