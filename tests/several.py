"""States of several models, as `oracles.several` describes them, and their step."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

import jamp
from tests.oracles import loss_scale, several as oracle
from tests.states import wide, with_scales

LEAVES = ("w0", "w1")
WINDOW = 3
FP32 = (np.float32, np.float32)


class Case(NamedTuple):
    """A setup, and the container of its groups: None where there is one."""

    setup: oracle.Setup
    pack: Any = None


NAMES = "dge"  # JAX sorts them


def _named(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=False))


def _case(*setup: Any, pack: Any = None) -> Case:
    return Case(oracle.Setup(*setup), pack)


# Those of two losses are named as in apex, tests/L0/run_amp/
# test_multiple_models_optimizers_losses.py; the others are ours.
ONE, APART = ((0, 1),), ((0,), (1,))
CASES = {
    "2 models, 1 loss, 1 optimizer": _case(ONE, ONE, ((0,),)),
    "2 models, 2 losses, 1 optimizer": _case(ONE, APART, ((0,), (0,))),
    "3 models, 2 losses, 1 optimizer": _case(
        ((0, 1, 2),), ((0, 2), (1, 2)), ((0,), (0,)), (0.25, 0.25, 0.125), (0.5,)
    ),
    "2 models, 2 losses, 2 optimizers": _case(APART, APART, APART, pack=list),
    "3 models, 2 losses, 2 optimizers": _case(
        ((0, 1), (2,)), ((0, 1), (2, 1)), ((0,), (0, 1)), pack=tuple
    ),
    "2 models, 1 loss, 2 optimizers": _case(APART, ONE, ONE, pack=_named),
    # The first loss sees two models and trains one, as that of a GAN's generator.
    "3 models, 3 losses, 3 optimizers": _case(
        ((0,), (1,), (2,)), ((0, 1), (1, 2), (2, 0)), ((0,), (1, 2), (2,)), pack=_named
    ),
}


def groups(container: Any, case: Case) -> list[Any]:
    """The entries of a container of groups, in the order of the setup."""
    return [container] if case.pack is None else [container[k] for k in keys(case)]


def keys(case: Case) -> list[Any]:
    count = len(case.setup.groups)
    return list(NAMES[:count] if case.pack is _named else range(count))


def params(case: Case, dtypes: Sequence[Any] = FP32) -> Any:
    """The oracle's first weights, in the container."""
    w = oracle.weights(case.setup.models)
    trees = [
        {f"m{m}": _as_model(w[m], dtypes) for m in models}
        for models in case.setup.groups
    ]
    return trees[0] if case.pack is None else case.pack(trees)


def _as_model(w: np.ndarray, dtypes: Sequence[Any]) -> Any:
    pairs = zip(LEAVES, w, dtypes, strict=True)
    return {leaf: jnp.asarray(x.astype(t)) for leaf, x, t in pairs}


@functools.cache
def _sgd(rates: tuple[tuple[str, float], ...], momentum: float) -> Any:
    """SGD whose models have learning rates of their own, as torch's param groups."""
    txs = {name: optax.sgd(rate, momentum) for name, rate in rates}
    return optax.partition(txs, {name: name for name in txs})


def _optimizers(case: Case) -> Any:
    """One per group, in the container."""
    groups, _, _, rates, momentum = case.setup
    txs = [
        _sgd(tuple((f"m{m}", rates[m]) for m in models), momentum[g])
        for g, models in enumerate(groups)
    ]
    return txs[0] if case.pack is None else case.pack(txs)


def scaling(case: Case, shared: bool) -> oracle.Scaling:
    """As apex's tests: the scales begin at 4, 16 and so on; or one is shared."""
    losses = range(len(case.setup.losses))
    first = (4.0,) if shared else tuple(4.0 ** (i + 1) for i in losses)
    rule = loss_scale.Rule(init_scale=4.0, window=WINDOW)
    return oracle.Scaling(rule, first, tuple(0 if shared else i for i in losses))


def begin(case: Case, scales: oracle.Scaling, level: str, tree: Any, **kwargs) -> Any:
    """The state before the first step, its scales those of the oracle."""
    rule = jamp.DynamicLossScale(scales.rule.init_scale, window=scales.rule.window)
    kwargs = {"loss_scale": rule} | kwargs
    state = jamp.initialize(
        tree,
        _optimizers(case),
        level,
        num_losses=len(scales.first),
        verbosity=0,
        **kwargs,
    )
    if kwargs["loss_scale"] is not rule:
        return state
    return with_scales(state, *scales.first)


# A gradient to spoil: in an iteration, the backward pass of a loss, a model, a leaf.
type Inf = tuple[int, int, int, int]

ITERATIONS = 3
# Whatever the case, so that all share the programs of a batch.
BATCH = 32


def spoilings(setup: oracle.Setup) -> list[tuple[Inf, ...]]:
    """None; in either iteration, each loss, its models, and both leaves; several."""
    single = [
        (i, loss, m, leaf)
        for i in (0, 1)
        for loss, models in enumerate(setup.losses)
        for m in models
        for leaf in (0, 1)
    ]
    last = len(setup.losses) - 1
    first, other = (0, 0, setup.losses[0][0], 0), setup.losses[last][0]
    always = [
        (i, loss, models[0], 1)
        for i in range(ITERATIONS)
        for loss, models in enumerate(setup.losses)
    ]
    both = [(first, (1, last, other, 1)), (first, (0, last, other, 1))]
    every = [(), *((x,) for x in single), *both, tuple(always)]
    return every + [()] * (BATCH - len(every))


def spoil(setup: oracle.Setup, infs: Sequence[Inf]) -> np.ndarray:
    """What is added to the gradients, shaped (iterations, losses, models, 2, 2)."""
    x = np.zeros((ITERATIONS, len(setup.losses), setup.models, 2, 2), np.float32)
    for n, (i, loss, m, leaf) in enumerate(infs):
        x[i, loss, m, leaf, n % 2] = (np.inf, -np.inf, np.nan)[(i + m + leaf) % 3]
    return x


def overflows(setup: oracle.Setup, infs: Sequence[Inf]) -> list[set[int]]:
    """The losses that overflow in each iteration: in a model that they train."""
    found = [set() for _ in range(ITERATIONS)]
    for i, loss, m, _ in infs:
        if m in setup.trained(loss):
            found[i].add(loss)
    return found


def by_model(tree: Any) -> dict[str, Any]:
    """The models in the containers that `wrt` and `pack` make, by name."""
    if isinstance(tree, Mapping) and all(key.startswith("m") for key in tree):
        return dict(tree)
    entries = tree.values() if isinstance(tree, Mapping) else tree
    return functools.reduce(operator.or_, map(by_model, entries))


def make_step(case: Case, loss_ids: Sequence[int]) -> Any:
    """A step; `spoil`, (losses, models, 2, 2), is added to the gradients."""
    setup, every = case.setup, keys(case)

    def loss_fn(p, loss, spoil):
        models = by_model(p)
        ring = [models[f"m{m}"] for m in setup.losses[loss]]
        products = [
            jnp.dot(wide(a["w0"]), wide(b["w1"]))
            for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        ]
        added = [
            (wide(models[f"m{m}"][leaf]) * spoil[m, i]).sum()
            for m in setup.losses[loss]
            for i, leaf in enumerate(LEAVES)
        ]
        return sum(map(wide, products + added))

    def step(state, spoil):
        grads = []
        for loss, loss_id in enumerate(loss_ids):
            covered = tuple(every[g] for g in setup.covers[loss])
            # All three forms of `wrt`: all groups, one, and some.
            wrt = {1: covered[0], len(every): None}.get(len(covered), covered)
            backward = jamp.scaled_grad(loss_fn, loss_id=loss_id, wrt=wrt)
            grads.append(backward(state, loss, spoil[loss]))
        return state.apply_gradients(grads=grads)

    return step


def batch[T](state: T) -> T:
    """The state, once for each spoiling."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape)), state)


def batched(step: Any, state: Any, spoil: np.ndarray) -> Any:
    """`step` for a batch of states, traced once, and run operation by operation.

    Compiling a step takes several times as long as this does.
    """
    run = jaxpr_as_fun(jax.make_jaxpr(jax.vmap(step))(state, spoil))

    def call(state, spoil):
        out = run(*jax.tree.leaves(state), jnp.asarray(spoil))
        return jax.tree.unflatten(jax.tree.structure(state), out)

    return call


@functools.cache
def expected(name: str, shared: bool) -> list[list[oracle.Result]]:
    """The oracle's results, [spoiling][iteration]."""
    setup, scales = CASES[name].setup, scaling(CASES[name], shared)
    return [
        list(oracle.train(setup, scales, overflows(setup, infs)))
        for infs in spoilings(setup)
    ]


def traces(opt_state: Any) -> dict[str, Any]:
    """SGD's momenta by model, out of `optax.partition`."""
    found = {}
    for _, tree in optax.tree.get_all_with_path(opt_state, "trace"):
        found |= {k: m for k, m in tree.items() if not isinstance(m, optax.MaskedNode)}
    return found


def assert_models(models: Any, wanted: np.ndarray, what: str) -> None:
    """`models` by name, their leaves batched; `wanted` is (batch, models, 2, 2)."""
    for name, model in models.items():
        for i, leaf in enumerate(LEAVES):
            x = wanted[:, int(name[1:]), i].astype(model[leaf].dtype)
            got, where = np.asarray(model[leaf]), f"{what} {name} {leaf}"
            np.testing.assert_array_equal(got, x, where, strict=True)


def assert_state(state: Any, results: Sequence[oracle.Result], case: Case) -> None:
    """Everything in a batch of states is as the oracle says."""
    weights = np.stack([r.weights for r in results])
    trace = np.stack([r.trace for r in results])
    counters = ("skipped_steps", "last_step_skipped")
    trees = (jamp.master_params(state), state.params, state.opt_state)
    trees += tuple(getattr(state, name) for name in counters)
    every = zip(*(groups(tree, case) for tree in trees), strict=True)
    for g, (masters, params, opt_state, *counts) in enumerate(every):
        assert_models(masters, weights, "masters")
        assert_models(params, weights, "params")
        momenta = traces(opt_state)
        assert momenta.keys() == params.keys()
        assert_models(momenta, trace, "trace")
        for name, got in zip(counters, counts, strict=True):
            wanted = [getattr(r, name)[g] for r in results]
            np.testing.assert_array_equal(got, wanted, f"{name} {g}")
    np.testing.assert_array_equal(state.step, [r.step for r in results])
    for i, scale in enumerate(state.loss_scales):
        # apex's tolerance goes on below 0, where it means the same.
        for name in ("scale", "unskipped", "consecutive_skips"):
            wanted = [getattr(r.scales[i], name) for r in results]
            np.testing.assert_array_equal(getattr(scale, name), wanted, name)


def assert_trains(state: Any, name: str, shared: bool) -> None:
    """Steps from a state with all spoilings at once, and compares with the oracle."""
    case = CASES[name]
    infs = np.stack([spoil(case.setup, infs) for infs in spoilings(case.setup)])
    state = batch(state)
    step = make_step(case, scaling(case, shared).loss_ids)
    step = batched(step, state, infs[:, 0])
    for i in range(ITERATIONS):
        state = step(state, infs[:, i])
        assert_state(state, [steps[i] for steps in expected(name, shared)], case)
