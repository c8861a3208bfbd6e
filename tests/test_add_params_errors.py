"""state.add_params: what it refuses."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.bits import assert_same_bits, copy

LEAF = {"v": jnp.ones(2, jnp.float32)}
SGD = optax.sgd(1.0)


def begin(tree, tx=SGD, **fields):
    return jamp.initialize(tree, tx, "O0", verbosity=0, **fields)


def one(tx=SGD, **fields):
    return begin({"body": {"w": LEAF["v"]}, "norm": {"scale": LEAF["v"]}}, tx, **fields)


def two(pack=dict):
    trees, txs = {"a": LEAF, "b": LEAF}, {"a": SGD, "b": SGD}
    if pack is list:
        trees, txs = list(trees.values()), list(txs.values())
    return begin(trees, txs)


def flat():
    """An optimizer that keeps all moments in one vector."""
    total = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    return optax.GradientTransformation(
        lambda params: {"moments": jnp.zeros(total(params), jnp.float32)},
        lambda updates, state, params=None: (updates, state),
    )


HALF = {"head": {"v": jnp.ones(2, jnp.float16)}}
FP8 = {"params": LEAF, "_overwrite_with_gradient": {}}
WRAPPED = jamp.master_weights(SGD)
NORM = ({"norm": {"scale": LEAF["v"]}},)
# The state, what add_params is given, the error, and words that it says.
REFUSED = [
    (one, NORM, ValueError, "'norm'.*'scale'.* is there already"),
    (one, ({"norm": {"scale": LEAF}},), ValueError, "'norm'.*'scale'.* is there alrea"),
    (one, ({"body": LEAF["v"]},), ValueError, "'body'.* is there already"),
    (one, (HALF,), ValueError, r"params\['head'\]\['v'\].*float16"),
    (one, ([LEAF["v"]],), TypeError, "merges a mapping.* got list for .* dict"),
    (one, ({"v": object()},), TypeError, "v"),
    (one, (LEAF, SGD), TypeError, "the state has one group"),
    (lambda: begin(LEAF["v"]), (LEAF,), TypeError, "merges a mapping.* got dict"),
    (lambda: begin(LEAF, None), (LEAF,), TypeError, "The state has no optimizer"),
    (lambda: one(flat()), (LEAF,), ValueError, "not kept per param at .*moments"),
    (lambda: begin(FP8), (LEAF,), ValueError, r"are collections: .* got \['v'\]"),
    (two, ({"c": LEAF},), TypeError, "several groups: .* dict.*tx=None"),
    (two, ({"c": LEAF}, SGD), TypeError, "several groups: .* dict.*tx=Gradient"),
    (two, ([LEAF], [SGD]), TypeError, "several groups: .* dict.*got list"),
    (lambda: two(list), ((LEAF,), (SGD,)), TypeError, "groups: .* list.*got tuple"),
    (lambda: two(list), ([LEAF, LEAF], [SGD]), ValueError, "length"),
    (two, ({"c": LEAF}, {"d": SGD}), ValueError, "c"),
    (two, ({"b": LEAF}, {"b": SGD}), ValueError, "has a group 'b' already"),
    (two, ({"c": HALF}, {"c": SGD}), ValueError, r"\['c'\]\['head'\]\['v'\]"),
    (two, ({"c": LEAF}, {"c": WRAPPED}), ValueError, "master_weights"),
    (two, ({"c": LEAF}, {"c": 1e-3}), TypeError, "0.001"),
]


@pytest.mark.message
@pytest.mark.parametrize("make_state, args, error, words", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    make_state, args, error, words
):
    state = make_state()
    before = copy(state)
    with pytest.raises(error, match=f"(?s){words}"):
        state.add_params(*args)
    assert_same_bits(copy(state), before)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="'statz', but .*'stats'"):
        one(stats=LEAF).add_params({"head": LEAF}, statz=LEAF)
    with pytest.raises(ValueError, match="stats.* is there already"):
        one(stats=LEAF).add_params({"head": LEAF}, stats=LEAF)
