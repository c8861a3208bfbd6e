"""Several models, optimizers and losses, exactly: after apex's own test of them."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from tests.oracles import loss_scale, several as oracle
from tests.oracles.several import Setup
from tests.states import like, make, wide, with_scales

LEAVES, NAMES = ("w0", "w1"), "dge"  # JAX sorts names


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=False))


# Those of two losses are named as in apex, tests/L0/run_amp/
# test_multiple_models_optimizers_losses.py; the others are ours.
ONE, APART = ((0, 1),), ((0,), (1,))
CASES = {
    "2 models, 2 losses, 1 optimizer": Setup(ONE, APART, ((0,), (0,))),
    "2 models, 2 losses, 2 optimizers": Setup(APART, APART, APART, list),
    "3 models, 2 losses, 2 optimizers": Setup(
        ((0, 1), (2,)), ((0, 1), (2, 1)), ((0,), (0, 1)), tuple
    ),
    # The first loss sees two models and trains one, as that of a GAN's generator.
    "3 models, 3 losses, 3 optimizers": Setup(
        ((0,), (1,), (2,)), ((0, 1), (1, 2), (2, 0)), ((0,), (1, 2), (2,)), _named
    ),
}


def keys(setup: Setup) -> list[Any]:
    count = len(setup.groups)
    return list(NAMES[:count] if setup.pack is _named else range(count))


def _packed(setup: Setup, values: list[Any]) -> Any:
    return values[0] if setup.pack is None else setup.pack(values)


def scaling(setup: Setup, shared: bool) -> oracle.Scaling:
    """As apex's tests: the scales begin at 4, 16 and so on; or one is shared."""
    losses = range(len(setup.losses))
    first = (4.0,) if shared else tuple(4.0 ** (i + 1) for i in losses)
    rule = loss_scale.Rule(init_scale=4.0, window=3)
    return oracle.Scaling(rule, first, tuple(0 if shared else i for i in losses))


def begin(name: str, shared: bool, level: str, **kwargs) -> Any:
    """The state before the first step: the oracle's weights and scales."""
    setup, (rule, first, _) = CASES[name], scaling(CASES[name], shared)
    w, trees = jnp.float32(oracle.weights(setup.models)), []
    for models in setup.groups:
        columns = {f"m{m}": zip(LEAVES, w[m], strict=True) for m in models}
        trees.append({name: dict(column) for name, column in columns.items()})
    options = zip(oracle.LEARNING_RATES, oracle.MOMENTUM, trees, strict=False)
    txs = [optax.sgd(rate, momentum) for rate, momentum, _ in options]
    kwargs["loss_scale"] = jamp.DynamicLossScale(rule.init_scale, window=rule.window)
    kwargs |= {"num_losses": len(first), "verbosity": 0}
    tree, txs = _packed(setup, trees), _packed(setup, txs)
    return with_scales(jamp.initialize(tree, txs, level, **kwargs), *first)


# A gradient to spoil: in an iteration, the backward pass of a loss, a model, a leaf.
type Inf = tuple[int, int, int, int]

ITERATIONS = 3
# Whatever the case, so that all share the programs of a batch.
BATCH = 32


def spoilings(setup: Setup) -> list[tuple[Inf, ...]]:
    """None; in either iteration, each loss, its models, and both leaves; several."""
    pairs = [(loss, m) for loss, models in enumerate(setup.losses) for m in models]
    single = [((i, *pair, leaf),) for i in (0, 1) for pair in pairs for leaf in (0, 1)]
    last = len(setup.losses) - 1
    first, other = (0, 0, setup.losses[0][0], 0), setup.losses[last][0]
    heads = [(loss, models[0]) for loss, models in enumerate(setup.losses)]
    always = tuple((i, *pair, 1) for i in range(ITERATIONS) for pair in heads)
    both = [(first, (1, last, other, 1)), (first, (0, last, other, 1))]
    every = [(), *single, *both, always]
    return every + [()] * (BATCH - len(every))


def spoil(setup: Setup, infs: Sequence[Inf]) -> np.ndarray:
    """What is added to the gradients, shaped (iterations, losses, models, 2, 2)."""
    x = np.zeros((ITERATIONS, len(setup.losses), setup.models, 2, 2), np.float32)
    for n, (i, loss, m, leaf) in enumerate(infs):
        x[i, loss, m, leaf, n % 2] = (np.inf, -np.inf, np.nan)[(i + m + leaf) % 3]
    return x


def by_model(tree: Any) -> dict[str, Any]:
    """The models in the containers that `wrt` and `pack` make, by name."""
    if isinstance(tree, Mapping) and all(key.startswith("m") for key in tree):
        return dict(tree)
    entries = tree.values() if isinstance(tree, Mapping) else tree
    return functools.reduce(operator.or_, map(by_model, entries))


def make_step(setup: Setup, loss_ids: Sequence[int]) -> Any:
    """A step; `spoil`, (losses, models, 2, 2), is added to the gradients."""
    every = keys(setup)

    def loss_fn(p, loss, spoil):
        ms, models = setup.losses[loss], by_model(p)
        ring = zip(ms, (*ms[1:], ms[0]), strict=True)
        total = sum(
            wide(jnp.dot(wide(models[f"m{a}"]["w0"]), wide(models[f"m{b}"]["w1"])))
            for a, b in ring
        )
        for m in ms:
            for leaf, x in zip(LEAVES, spoil[m], strict=True):
                total += (wide(models[f"m{m}"][leaf]) * x).sum()
        return total

    def step(state, spoil):
        grads = []
        for loss, loss_id in enumerate(loss_ids):
            covered = tuple(every[g] for g in setup.covers[loss])
            # All three forms of `wrt`: all groups, one, and some.
            wrt = {1: covered[0], len(every): None}.get(len(covered), covered)
            backward = jamp.scaled_grad(loss_fn, loss_id=loss_id, wrt=wrt)
            tree = backward(state, loss, spoil[loss])
            if wrt == covered[0]:
                tree = _packed(setup, [tree if key == wrt else None for key in every])
            grads.append(tree)
        return state.apply_gradients(grads=grads, loss_id=loss_ids)

    return step


@functools.cache
def expected(name: str, shared: bool) -> list[list[oracle.Result]]:
    """The oracle's results, [spoiling][iteration]."""
    setup, runs = CASES[name], []
    for infs in spoilings(setup):
        overflows = [set() for _ in range(ITERATIONS)]
        for i, loss, m, _ in infs:
            if m in setup.trained(loss):
                overflows[i].add(loss)
        runs.append(list(oracle.train(setup, scaling(setup, shared), overflows)))
    return runs


def assert_models(models: Any, wanted: np.ndarray, what: str) -> None:
    """`models` by name, their leaves batched; `wanted` is (batch, models, 2, 2)."""
    for name, model in models.items():
        for i, leaf in enumerate(LEAVES):
            x = wanted[:, int(name[1:]), i].astype(model[leaf].dtype)
            got, where = np.asarray(model[leaf]), f"{what} {name} {leaf}"
            np.testing.assert_array_equal(got, x, where, strict=True)


def assert_state(state: Any, results: Sequence[oracle.Result], setup: Setup) -> None:
    """Everything in a batch of states is as the oracle says."""
    weights = np.stack([r.weights for r in results])
    trace = np.stack([r.trace for r in results])
    for g, key in enumerate(keys(setup)):
        of = (lambda tree: tree) if setup.pack is None else operator.itemgetter(key)
        momenta = optax.tree.get(of(state.opt_state), "trace")
        assert momenta.keys() == of(state.params).keys()
        assert_models(of(jamp.master_params(state)), weights, "masters")
        assert_models(of(state.params), weights, "params")
        assert_models(momenta, trace, "trace")
        for name in ("skipped_steps", "last_step_skipped"):
            wanted = [getattr(r, name)[g] for r in results]
            got = of(getattr(state, name))
            np.testing.assert_array_equal(got, wanted, f"{name} {g}")
    np.testing.assert_array_equal(state.step, [r.step for r in results])
    for i, scale in enumerate(state.loss_scales):
        # apex's tolerance goes on below 0, where it means the same.
        for name in ("scale", "unskipped", "consecutive_skips"):
            wanted = [getattr(r.scales[i], name) for r in results]
            np.testing.assert_array_equal(getattr(scale, name), wanted, name)


def assert_trains(state: Any, name: str, shared: bool) -> None:
    """Steps from a state with all spoilings at once, and compares with the oracle.

    A step is traced once, and run operation by operation: to compile it takes longer.
    """
    setup = CASES[name]
    infs = np.stack([spoil(setup, infs) for infs in spoilings(setup)])
    step = jax.vmap(make_step(setup, scaling(setup, shared).loss_ids))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape)), state)
    run = jaxpr_as_fun(jax.make_jaxpr(step)(state, infs[:, 0]))
    for i in range(ITERATIONS):
        out = run(*jax.tree.leaves(state), jnp.asarray(infs[:, i]))
        state = jax.tree.unflatten(jax.tree.structure(state), out)
        assert_state(state, [steps[i] for steps in expected(name, shared)], setup)


# So that each model has a half and a float32 weight, where the level casts.
KEEP = {level: {"keep_fp32": "w0"} for level in ("O2", "O5")}


# Everything that a state holds, after every step


@pytest.mark.parametrize(
    "name, shared, level",
    [
        pytest.param(name, shared, level, id=f"{name}, {shared=}, {level}")
        for name in CASES
        for shared in (False, True)
        for level in (("O0", "O1", "O5") if "3 models" in name else ("O2",))
    ],
)
def test_skipped_steps_are_left_out_of_a_plain_run(name, shared, level):
    state = begin(name, shared, level, **KEEP.get(level, {}))
    assert_trains(state, name, shared)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_half_leaves_sum_their_losses_in_fp32_with_and_without_masters(level):
    # apex_semantics 6.4: without masters, apex sums in half.
    tree = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.float32)}
    options = {"cast_model_type": False, "allow_incoming_model_not_fp32": True}
    options |= {"loss_scale": jamp.DynamicLossScale(4.0), "verbosity": 0}
    tx = optax.sgd(2.0**-11)
    state = jamp.initialize(tree, tx, level, num_losses=2, **options)

    def loss_fn(p, x):
        return sum((w.astype(jnp.float32) * x).sum() for w in p.values())

    rows = enumerate((1.0, 2048.0))
    grads = [jamp.scaled_grad(loss_fn, loss_id=i)(state, x) for i, x in rows]
    after = state.apply_gradients(grads=grads, loss_id=(0, 1))
    # float16 knows no 2049.
    for leaf in after.params.values():
        assert (np.float32(leaf) == -(2.0**-11)).all()


# Which groups skip, and whose scale moves


def slope(p, x):
    """A loss whose gradient is `x`, for one group or several."""
    return sum((wide(w) * x).sum() for w in jax.tree.leaves(p))


def test_a_group_that_no_loss_covers_remembers_its_skip():
    tree, tx = {"w": jnp.full(2, 8.0, jnp.float32)}, optax.sgd(1.0)
    state = make("O2", [tree, tree], [tx, tx])
    for group, x in ((1, jnp.inf), (0, 2.0**-9), (0, 2.0**-9)):
        grads = jamp.scaled_grad(lambda p, k, x: slope(p[k], x), wrt=[group])
        state = state.apply_gradients(grads=grads(state, group, x))
    assert [int(n) for n in state.skipped_steps] == [0, 1]
    assert [bool(b) for b in state.last_step_skipped] == [False, True]
    assert (state.step, state.loss_scales[0].consecutive_skips) == (2, 0)
    # Plain trees, one for each group, go together.
    assert state.apply_gradients(grads=[like(tree, 0.5)] * 2).step == 3


@jax.jit
def step_of_losses(state, slopes):
    """Of losses on a scale each, or on one scale."""
    shared = len(state.loss_scales) == 1
    ids = [0 if shared else i for i in range(len(slopes))]
    pairs = zip(ids, slopes, strict=True)
    grads = [jamp.scaled_grad(slope, loss_id=i)(state, x) for i, x in pairs]
    return state.apply_gradients(grads=grads, loss_id=ids)


# By hand: losses, window, one scale or each its own; then the losses that overflow in
# each step, and scale and clean passes of each scale after it. All begin at 4.
WINDOWS = [
    (2, 4, True, [((), 4, 2), ((), 8, 0), ((), 8, 2), ((), 16, 0)]),
    (2, 3, True, [((), 4, 2), ((), 8, 1), ((), 16, 0), ((), 16, 2)]),  # amid a step
    (2, 1, True, [((), 16, 0), ((), 64, 0)]),  # twice in each
    (3, 4, True, [((), 4, 3), ((), 8, 2), ((), 16, 1), ((), 32, 0)]),
    (2, 3, True, [((), 4, 2), ((0,), 2, 1), ((), 4, 0)]),
    (2, 3, True, [((), 4, 2), ((1,), 4, 0), ((), 4, 2)]),  # after growth
    (2, 3, True, [((), 4, 2), ((0, 1), 1, 0), ((), 1, 2)]),
    (2, 3, False, [((), 4, 1, 4, 1), ((1,), 4, 2, 2, 0), ((), 8, 0, 2, 1)]),
]


def losses_on(losses, shared=True, **kwargs):
    tree = {"w": jnp.full(2, 8.0, jnp.float32)}
    return make(tree=tree, num_losses=1 if shared else losses, **kwargs)


@pytest.mark.parametrize("losses, window, shared, steps", WINDOWS)
def test_a_window_counts_backward_passes(losses, window, shared, steps):
    # apex_semantics 4.5: so with k losses on one scale it takes window / k steps.
    rule = jamp.DynamicLossScale(4.0, window=window)
    state = losses_on(losses, shared, tx=optax.sgd(0.5), loss_scale=rule)
    moved = 0
    for bad, *wanted in steps:
        slopes = [np.float32(np.inf if i in bad else 0.5) for i in range(losses)]
        state = step_of_losses(state, slopes)
        moved += not bad
        got = [x for s in state.loss_scales for x in (s.scale, s.unskipped)]
        assert got == wanted
        assert (jamp.master_params(state)["w"] == 8 - moved * losses / 4).all()
    assert (state.step, state.skipped_steps) == (moved, len(steps) - moved)


@pytest.mark.parametrize("bad", [0, 1])
def test_check_sees_one_of_two_losses_that_never_fits_their_scale(bad):
    state, slopes = losses_on(2), np.float32([0.5, 0.5])
    slopes[bad] = np.nan
    for _ in range(5):
        state = step_of_losses(state, list(slopes))
    assert (state.step, state.skipped_steps) == (0, 5)
    assert jamp.check(state, max_consecutive_skips=6) is None
    with pytest.raises(FloatingPointError):
        jamp.check(state, max_consecutive_skips=5)
