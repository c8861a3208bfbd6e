"""Test several models, optimizers and losses exactly, like apex's own test."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.extend.core import jaxpr_as_fun

import jamp
from tests.oracles import loss_scale
from tests.support.bits import assert_same_bits
from tests.support.states import like, make, wide, with_scales


class Setup(NamedTuple):
    """The models of each group and of each loss, and the groups that a loss trains.

    `pack` makes the container of groups, or is None for a single group.
    """

    groups: tuple[str, ...]
    losses: tuple[str, ...]
    covers: tuple[tuple[int, ...], ...]
    pack: Any = None

    @property
    def keys(self) -> Sequence[Any]:
        return NAMES if self.pack is named else range(len(self.groups))

    def packed(self, values: list[Any]) -> Any:
        return values[0] if self.pack is None else self.pack(values)

    def of(self, tree: Any) -> list[Any]:
        """Returns the groups of a container."""
        return [tree] if self.pack is None else [tree[key] for key in self.keys]


NAMES = "dge"  # JAX sorts names


def named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=True))


# The cases of two losses have the names of apex's tests/L0/run_amp/
# test_multiple_models_optimizers_losses.py.
CASES = {
    "2 models, 2 losses, 1 optimizer": Setup(("ab",), ("a", "b"), ((0,), (0,))),
    "2 models, 2 losses, 2 optimizers": Setup(
        ("a", "b"), ("a", "b"), ((0,), (1,)), list
    ),
    "3 models, 2 losses, 2 optimizers": Setup(
        ("ab", "c"), ("ab", "cb"), ((0,), (0, 1)), tuple
    ),
    # The first loss sees two models and trains one, like a GAN's generator.
    "3 models, 3 losses, 3 optimizers": Setup(
        ("a", "b", "c"), ("ab", "bc", "ca"), ((0,), (1, 2), (2,)), named
    ),
}
RATES, MOMENTUM = (0.25, 0.5, 0.125), (0.125, 0.25, 0.5)  # one per group
RULE = loss_scale.Rule(init_scale=4.0, window=3)
# Each model has a half and a float32 weight where the level casts.
KEEP = {level: {"keep_fp32": "w0"} for level in ("O2", "O5")}
LEVELS = ("O2", "O0", "O5", "O1", "O5")


def weights(setup: Setup) -> dict[str, np.ndarray]:
    """Returns w0 and w1 of apex's `MyModel(u)` for u = 1, 2, ..."""
    grid = np.array([[0.0, 1.0], [1.0, 2.0]])
    return {m: grid + 1 + i for i, m in enumerate("".join(setup.groups))}


def first_scales(setup: Setup, shared: bool) -> list[float]:
    """Returns the scales of apex's tests: 4, 16 and so on, or one shared."""
    return [4.0] if shared else [4.0 ** (i + 1) for i in range(len(setup.losses))]


def plain_run(setup: Setup, shared: bool, overflows: np.ndarray) -> Iterator[Any]:
    """Trains in float64 without the skipped steps, and counts.

    `overflows` holds a flag per iteration and loss. A group skips if a loss that covers
    it overflows. Yields weights, traces, the counts of each group, and scales.
    """
    w, ids = weights(setup), [0 if shared else i for i in range(len(setup.losses))]
    trace = {m: np.zeros((2, 2)) for m in w}
    start = loss_scale.init(RULE)
    scales = [dataclasses.replace(start, scale=x) for x in first_scales(setup, shared)]
    counts, step = [0] * len(setup.groups), 0
    for bad in overflows:
        old, w, last = w, dict(w), []
        for g, models in enumerate(setup.groups):
            covering = [i for i, covered in enumerate(setup.covers) if g in covered]
            last.append(any(bad[covering]))
            counts[g] += last[g]
            for m in () if last[g] else models:
                slope = sum(gradient(setup.losses[i], m, old) for i in covering)
                trace[m] = MOMENTUM[g] * trace[m] + slope
                w[m] = old[m] - RATES[g] * trace[m]
        step += not all(last)
        skips, scales = [s.consecutive_skips for s in scales], [*scales]
        for i, overflowed in zip(ids, bad, strict=True):  # each pass moves its scale
            scales[i] = loss_scale.update(RULE, scales[i], not overflowed)
        overflowed = [any(bad[np.equal(ids, i)]) for i in range(len(scales))]
        skips = [n + 1 if x else 0 for n, x in zip(skips, overflowed, strict=True)]
        pairs = zip(scales, skips, strict=True)
        scales = [dataclasses.replace(s, consecutive_skips=n) for s, n in pairs]
        yield w, dict(trace), (step, [*counts], last), scales


def gradient(ring: str, model: str, w: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the gradient for one model: w0 meets the w1 of the next model."""
    if model not in ring:
        return np.zeros((2, 2))
    at = ring.index(model)
    return np.stack([w[ring[(at + 1) % len(ring)]][1], w[ring[at - 1]][0]])


def begin(setup: Setup, shared: bool, level: str) -> Any:
    w = jax.tree.map(jnp.float32, weights(setup))
    groups = [{m: {"w0": w[m][0], "w1": w[m][1]} for m in g} for g in setup.groups]
    options = zip(RATES, MOMENTUM, groups, strict=False)
    txs = [optax.sgd(rate, momentum) for rate, momentum, _ in options]
    first = first_scales(setup, shared)
    kwargs = KEEP.get(level, {}) | {"num_losses": len(first), "verbosity": 0}
    kwargs["loss_scale"] = jamp.DynamicLossScale(RULE.init_scale, window=RULE.window)
    state = jamp.initialize(setup.packed(groups), setup.packed(txs), level, **kwargs)
    return with_scales(state, *first)


def step_of(setup: Setup, shared: bool) -> Any:
    """Returns a step. It adds `bad` of each loss to a gradient of its first model."""

    def loss_fn(params, ring, bad):
        models = {k: model for group in setup.of(params) for k, model in group.items()}
        pairs = zip(ring, ring[1:] + ring[0], strict=True)
        joined = ((wide(models[a]["w0"]), wide(models[b]["w1"])) for a, b in pairs)
        total = sum((x * y).sum() for x, y in joined)
        return total + wide(models[ring[0]]["w1"])[1] * bad

    def step(state, bad):
        grads, ids = [], [0 if shared else i for i in range(len(setup.losses))]
        for i, ring in enumerate(setup.losses):
            covered = tuple(setup.keys[g] for g in setup.covers[i])
            # `wrt` may be None for all groups, one key, or several.
            wrt = {1: covered[0], len(setup.groups): None}.get(len(covered), covered)
            backward = jamp.scaled_grad(loss_fn, loss_id=ids[i], wrt=wrt)
            tree = backward(state, ring, bad[i])
            if wrt == covered[0]:
                tree = [tree if key == wrt else None for key in setup.keys]
                tree = setup.packed(tree)
            grads.append(tree)
        return state.apply_gradients(grads=grads, loss_id=ids)

    return step


def assert_state(state: Any, results: list[Any], setup: Setup) -> None:
    """Checks a batch of states against their plain runs."""
    w, trace, counted, scales = zip(*results, strict=True)
    steps, skipped, last = zip(*counted, strict=True)
    masters, moments = jamp.master_params(state), state.opt_state
    if setup.pack is not None:
        assert {*map(type, (moments, state.skipped_steps))} == {type(state.params)}
    groups = zip(*map(setup.of, (state.params, masters, moments)), strict=True)
    for params, masters, opt_state in groups:
        trees = params, masters, optax.tree.get(opt_state, "trace")
        for tree, wanted in zip(trees, (w, w, trace), strict=True):
            for model, leaves in tree.items():
                for i, leaf in enumerate(("w0", "w1")):
                    x = np.stack([run[model][i] for run in wanted])
                    x = x.astype(leaves[leaf].dtype)
                    np.testing.assert_array_equal(leaves[leaf], x, strict=True)
    np.testing.assert_array_equal(state.step, steps)
    got = np.stack(setup.of(state.skipped_steps), 1)
    np.testing.assert_array_equal(got, skipped)
    got = np.stack(setup.of(state.last_step_skipped), 1)
    np.testing.assert_array_equal(got, last)
    for i, scale in enumerate(state.loss_scales):
        # apex's tolerance continues below 0 with the same meaning.
        for name in ("scale", "unskipped", "consecutive_skips"):
            wanted = [getattr(run[i], name) for run in scales]
            np.testing.assert_array_equal(getattr(scale, name), wanted, name)


# A trace takes seconds, so each case has one level. test_amp_state covers all levels.
TURNS = zip(itertools.product(CASES, (False, True)), itertools.cycle(LEVELS))


@pytest.mark.parametrize(
    "name, shared, level", [(*case, level) for case, level in TURNS]
)
def test_skipped_steps_are_left_out_of_a_plain_run(name, shared, level):
    """Tests all combinations of losses that overflow in the first two iterations."""
    setup = CASES[name]
    losses = len(setup.losses)
    flags = np.array(list(itertools.product((False, True), repeat=2 * losses)))
    flags = flags.reshape(-1, 2, losses)[:, (0, 1, 0)]
    bad = np.where(flags, np.float32([np.inf, np.nan, -np.inf])[:losses], np.float32(0))
    runs = [list(plain_run(setup, shared, x)) for x in flags]
    state, batch = begin(setup, shared, level), len(flags)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)
    # Runs operation by operation, because compiling the trace takes longer.
    step = jax.vmap(step_of(setup, shared))
    run = jaxpr_as_fun(jax.make_jaxpr(step)(state, bad[:, 0]))
    for i in range(3):
        out = run(*jax.tree.leaves(state), jnp.asarray(bad[:, i]))
        state = jax.tree.unflatten(jax.tree.structure(state), out)
        assert_state(state, [steps[i] for steps in runs], setup)


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
    # float16 cannot hold 2049.
    for leaf in after.params.values():
        assert (np.float32(leaf) == -(2.0**-11)).all()


def slope(p, x):
    """Returns a loss whose gradient is `x`, for one group or several."""
    return sum((wide(w) * x).sum() for w in jax.tree.leaves(p))


def test_wrt_names_groups_whose_keys_are_tuples():
    keys, tx = [("a", 1), ("a", 2), ("b",)], optax.sgd(1.0)
    tree = {"w": jnp.ones(2, jnp.float32)}
    state = make("O2", dict.fromkeys(keys, tree), dict.fromkeys(keys, tx))
    one = jamp.scaled_grad(slope, wrt=("a", 1))(state, 0.5)
    assert_same_bits(one, like(tree, 0.5))
    for wrt in ([("a", 1), ("b",)], (("a", 1), ("b",))):
        both = jamp.scaled_grad(slope, wrt=wrt)(state, 0.5)
        assert_same_bits(both, {k: like(tree, 0.5) for k in wrt})
    state = state.apply_gradients(grads={("a", 1): one})
    assert [float(state.params[k]["w"][0]) for k in keys] == [0.5, 1, 1]
    with pytest.raises(ValueError, match=r"'a' is not one of the groups"):
        jamp.scaled_grad(slope, wrt=("a", 3))(state, 0.5)


def test_a_group_that_no_loss_covers_remembers_its_skip():
    tree, tx = {"w": jnp.full(2, 8.0, jnp.float32)}, optax.sgd(1.0)
    state = make("O2", [tree, tree], [tx, tx])
    for group, x in ((1, jnp.inf), (0, 2.0**-9), (0, 2.0**-9)):
        grads = jamp.scaled_grad(lambda p, k, x: slope(p[k], x), wrt=[group])
        state = state.apply_gradients(grads=grads(state, group, x))
    assert [int(n) for n in state.skipped_steps] == [0, 1]
    assert [bool(b) for b in state.last_step_skipped] == [False, True]
    assert (state.step, state.loss_scales[0].consecutive_skips) == (2, 0)
    # apply_gradients takes one plain tree per group.
    assert state.apply_gradients(grads=[like(tree, 0.5)] * 2).step == 3


@jax.jit
def step_of_losses(state, slopes):
    """Steps with losses that share a scale or have one each."""
    shared = len(state.loss_scales) == 1
    ids = [0 if shared else i for i in range(len(slopes))]
    pairs = zip(ids, slopes, strict=True)
    grads = [jamp.scaled_grad(slope, loss_id=i)(state, x) for i, x in pairs]
    return state.apply_gradients(grads=grads, loss_id=ids)


# The number of losses, the window, and whether they share a scale, which starts at 4.
# Then, for each step, the losses that overflow, and the scale and count of each scale.
WINDOWS = [
    (2, 4, True, [((), 4, 2), ((), 8, 0), ((), 8, 2), ((), 16, 0)]),
    # It grows amid a step.
    (2, 3, True, [((), 4, 2), ((), 8, 1), ((), 16, 0), ((), 16, 2)]),
    (2, 1, True, [((), 16, 0), ((), 64, 0)]),  # grows twice per step
    (3, 4, True, [((), 4, 3), ((), 8, 2), ((), 16, 1), ((), 32, 0)]),
    (2, 3, True, [((), 4, 2), ((0,), 2, 1), ((), 4, 0)]),
    (2, 3, True, [((), 4, 2), ((1,), 4, 0), ((), 4, 2)]),  # overflows after it grew
    (2, 3, True, [((), 4, 2), ((0, 1), 1, 0), ((), 1, 2)]),
    (2, 3, False, [((), 4, 1, 4, 1), ((1,), 4, 2, 2, 0), ((), 8, 0, 2, 1)]),
]


def losses_on(losses, shared=True, **kwargs):
    tree = {"w": jnp.full(2, 8.0, jnp.float32)}
    return make(tree=tree, num_losses=1 if shared else losses, **kwargs)


@pytest.mark.parametrize("losses, window, shared, steps", WINDOWS)
def test_a_window_counts_backward_passes(losses, window, shared, steps):
    # apex_semantics 4.5: with k losses on one scale, a window takes window / k steps.
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


@pytest.mark.parametrize("bad, moves", [(None, True), ("a", False), ("b", False)])
def test_a_field_moves_if_all_groups_of_the_call_are_clean(bad, moves):
    """A field may have the keys of all groups, or of some."""
    tree, tx = {"w": jnp.ones(2)}, optax.sgd(1.0)
    fields = {"own": {"a": jnp.int32(0), "b": jnp.int32(0)}, "ema": jnp.zeros(())}
    state = make("O2", {"a": tree, "b": tree}, {"a": tx, "b": tx}, **fields)
    new = {"own": {"a": jnp.int32(1), "b": jnp.int32(2)}, "ema": jnp.ones(())}
    grads = {k: like(tree, np.inf if k == bad else 0.5) for k in "ab"}
    both = grads, {"b": grads["b"]}
    after = state.apply_gradients(grads=both, loss_id=(0, 0), **new)
    assert (after.own, after.ema) == ((new["own"], 1) if moves else (fields["own"], 0))
    # A call without a group also moves its entry.
    after = state.apply_gradients(grads={"b": like(tree, 0.5)}, **new)
    assert (after.own, after.ema) == (new["own"], 1)


def test_a_frozen_dict_keeps_its_type_so_that_a_scan_can_carry_it():
    tree, tx = {"w": jnp.ones(2)}, optax.sgd(1.0)
    state = make("O2", FrozenDict(b=tree, a=tree), FrozenDict(b=tx, a=tx))

    def step(state, _):
        return state.apply_gradients(grads={"b": like(state.params["b"], 0.25)}), None

    after, _ = jax.lax.scan(step, state, length=2)
    assert after.params["b"]["w"][0] == 0.5 and after.params["a"]["w"][0] == 1
    assert jax.tree.structure(after) == jax.tree.structure(state)
