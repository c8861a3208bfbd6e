"""Every fused optimizer with every option, against its float64 oracle, for 20 steps.

The numbers are chosen so that each option matters: rates and decays are large, and eps
is a thousandth of a gradient, so that even where it stands in a formula is seen.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp import optimizers as jo
from pallas_kernels import Weight
from tests.bits import assert_same_bits
from tests.mixed_leaves import (
    BACKENDS,
    BF16,
    F16,
    F32,
    FAST,
    KINDS,
    Kind,
    Leaves,
    assert_rounded,
    fifty_five,
    fifty_five_for_kernels,
    four,
    grouped,
    params_of,
    value,
    weight,
    weights_of,
)
from tests.oracles.fused_adagrad import fused_adagrad
from tests.oracles.fused_adam import fused_adam
from tests.oracles.fused_lamb import fused_lamb
from tests.oracles.fused_novograd import fused_novograd
from tests.oracles.fused_sgd import fused_sgd
from tests.oracles.larc import larc
from tests.oracles.steps import Result

STEPS = 20
# Steps that find inf, the first and the last one among them: rules for the first step
# are for the first that is taken.
SKIPPED = (0, 1, 7, 19)

# Each of 20 steps may lose a unit in the last place of a float32 of about one.
TOLERANCE = STEPS * 2.0**-23
# A half parameter without a master is rounded at each step, by half a unit at most.
ROUNDING = {F16: STEPS * 2.0**-11, BF16: STEPS * 2.0**-8}


class Schedule(NamedTuple):
    """A learning rate for both sides, which depends on the count of steps before."""

    start: float

    def __call__(self, count: Any) -> Any:
        if isinstance(count, int):
            return self.start / (1 + 0.1 * count)
        assert (count.dtype, count.shape) == (jnp.int32, ())
        return self.start / (1 + 0.1 * count.astype(F32))


class Case(NamedTuple):
    """One optimizer with its options; `clip` is a share of the largest global norm."""

    name: str
    options: dict[str, Any]
    clip: float | None = None

    def on(self, leaves: Leaves) -> dict[str, Any]:
        """The options for these leaves, whose gradients are about one."""
        if self.clip is None:
            return self.options
        elements = sum(np.prod(shape) for shape, _ in leaves)
        return self.options | {"max_grad_norm": float(self.clip * elements**0.5)}


SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adam": (jo.fused_adam, fused_adam),
    "sgd": (jo.fused_sgd, fused_sgd),
    "lamb": (jo.fused_lamb, fused_lamb),
    "novograd": (jo.fused_novograd, fused_novograd),
    "adagrad": (jo.fused_adagrad, fused_adagrad),
}
MOMENTS = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 1e-3}


def adam(clip: float | None = None, **options: Any) -> Case:
    return Case("adam", MOMENTS | {"weight_decay": 0.1} | options, clip)


def sgd(**options: Any) -> Case:
    return Case("sgd", {"learning_rate": 0.05} | options)


def lamb(clip: float | None = 0.5, **options: Any) -> Case:
    common = MOMENTS | {"weight_decay": 0.1, "max_grad_norm": None}
    return Case("lamb", common | options, clip)


def novograd(**options: Any) -> Case:
    common = MOMENTS | {"weight_decay": 0.1, "eps": 0.1}  # norms are large
    return Case("novograd", common | options)


def adagrad(**options: Any) -> Case:
    common = {"learning_rate": 0.1, "eps": 1e-2, "weight_decay": 0.1}
    return Case("adagrad", common | options)


# Each option at least once, and what each does to the others' formulas.
CASES = {
    "adam_clip": adam(0.5),
    "adam_l2": adam(adam_w_mode=False),
    "adam_no_correction": adam(bias_correction=False),
    "adam_legacy": adam(legacy=True),
    "adam_legacy_inside": adam(legacy=True, eps_inside_sqrt=True),
    "adam_legacy_clip": adam(0.5, legacy=True),
    "sgd": sgd(),
    "sgd_decay": sgd(weight_decay=0.1, learning_rate=Schedule(0.05)),
    "sgd_dampening_decay": sgd(momentum=0.8, dampening=0.3, weight_decay=0.1),
    "sgd_nesterov_decay": sgd(momentum=0.8, nesterov=True, weight_decay=0.1),
    "sgd_decay_after": sgd(momentum=0.8, weight_decay=0.1, wd_after_momentum=True),
    "sgd_decay_after_nesterov": sgd(
        momentum=0.8, nesterov=True, weight_decay=0.1, wd_after_momentum=True
    ),
    "lamb_clip": lamb(),
    "lamb_l2": lamb(adam_w_mode=False),
    "lamb_no_correction": lamb(bias_correction=False),
    "lamb_no_averaging": lamb(grad_averaging=False),
    "lamb_no_decay": lamb(weight_decay=0.0),
    "lamb_nvlamb_no_decay": lamb(weight_decay=0.0, use_nvlamb=True),
    "novograd": novograd(),
    "novograd_no_correction": novograd(bias_correction=False),
    "novograd_inside": novograd(reg_inside_moment=True),
    "novograd_no_averaging": novograd(grad_averaging=False),
    "novograd_inf": novograd(norm_type="inf", learning_rate=Schedule(0.05)),
    "novograd_init_zero": novograd(init_zero=True),
    "adagrad": adagrad(),
    "adagrad_w": adagrad(adagrad_w_mode=True),
}
COMBINED = {
    "adam_clip_0": adam(max_grad_norm=0.0),
    "adam_clip_l2": adam(0.5, adam_w_mode=False),
    "adam_no_correction_l2": adam(bias_correction=False, adam_w_mode=False),
    "adam_no_decay": adam(weight_decay=0.0),
    "adam_schedule": adam(learning_rate=Schedule(0.05)),
    "adam_legacy_no_correction": adam(legacy=True, bias_correction=False),
    "sgd_momentum": sgd(momentum=0.8),
    "sgd_dampening": sgd(momentum=0.8, dampening=0.3),
    "sgd_nesterov": sgd(momentum=0.8, nesterov=True),
    "sgd_plain_decay_after": sgd(weight_decay=0.1, wd_after_momentum=True),
    "sgd_dampening_decay_after": sgd(
        momentum=0.8, dampening=0.3, weight_decay=0.1, wd_after_momentum=True
    ),
    "lamb_clip_0": lamb(None, max_grad_norm=0),
    "lamb_nvlamb": lamb(use_nvlamb=True, learning_rate=Schedule(0.05)),
    "lamb_nvlamb_l2": lamb(weight_decay=0.0, use_nvlamb=True, adam_w_mode=False),
    "novograd_no_averaging_inside": novograd(
        grad_averaging=False, reg_inside_moment=True
    ),
    "novograd_inf_init_zero": novograd(norm_type="inf", init_zero=True),
    "novograd_no_decay": novograd(weight_decay=0.0),
    "adagrad_no_decay": adagrad(weight_decay=0.0, learning_rate=Schedule(0.1)),
}
ALL = CASES | COMBINED
# For many leaves: as much at once as goes together.
BUSY = {
    "adam": adam(0.5, learning_rate=Schedule(0.05)),
    "sgd": sgd(momentum=0.8, dampening=0.3, weight_decay=0.1),
    "lamb": lamb(learning_rate=Schedule(0.05)),
    "novograd": novograd(reg_inside_moment=True),
    "adagrad": adagrad(adagrad_w_mode=True, learning_rate=Schedule(0.1)),
}


class Problem(NamedTuple):
    """Leaves with their start and the gradients of each step, times `grad_scale`."""

    kinds: list[Kind]
    weights: list[Weight]
    grads: list[list[np.ndarray]]
    grad_scale: float | None
    skip: list[bool]


def problem(
    leaves: Leaves,
    grad_scale: float | None = None,
    skips: tuple[int, ...] = (),
    steps: int = STEPS,
) -> Problem:
    """Gradients are normal, and a tenth of that at odd steps: too small to be clipped.

    Of eleven leaves the second never has a gradient, and the third starts at zero.
    """
    rng = np.random.default_rng(len(leaves))
    weights = [
        weight(np.where(k % 11 == 2, 0, rng.normal(size=shape)), kind)
        for k, (shape, kind) in enumerate(leaves)
    ]
    grads = []
    for t in range(steps):
        size = (0.1 if t % 2 else 1.0) * (1.0 if grad_scale is None else grad_scale)
        now = []
        for k, (shape, kind) in enumerate(leaves):
            g = rng.normal(size=shape) * size * (k % 11 != 1)
            now.append(np.asarray(g, np.float32).astype(kind.grads))
        if t in skips:
            now = [np.full_like(g, np.nan if t % 2 else np.inf) for g in now]
        grads.append(now)
    skip = [t in skips for t in range(steps)]
    return Problem([kind for _, kind in leaves], weights, grads, grad_scale, skip)


def expected(oracle: Any, problem: Problem, **options: Any) -> list[Result]:
    return list(
        oracle(
            [value(w) for w in problem.weights],
            problem.grads,
            grad_scale=1.0 if problem.grad_scale is None else problem.grad_scale,
            skip=problem.skip,
            **options,
        )
    )


# One program, where each array of zeros would be one.
@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def init(tx, params):
    return tx.init(params)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def apply(tx, grads, state, weights, **kwargs):
    return tx.apply(grads, state, weights, **kwargs)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def update(tx, grads, state, weights, **kwargs):
    """By optax's contract: updates, in float32, are what to add."""
    params = params_of(weights)
    updates, state = tx.update(grads, state, params, **kwargs)

    def add(p, u):
        assert (u.dtype, u.shape) == (F32, p.shape)
        return Weight((p.astype(F32) + u).astype(p.dtype))

    return jax.tree.map(add, params, updates), state


def largest_error(got: Any, want: Any) -> float:
    """In units of one, or of what is expected if that is more."""
    got, want = np.float64(got), np.float64(want)
    assert got.shape == want.shape
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(got - want) / (1 + np.abs(want)))
    return np.max(error, initial=0)


def assert_close(weights: Any, state: Any, want: Result, kinds: list[Kind]) -> None:
    found = weights_of(weights)
    trees = {"params": ([value(w) for w in found], want.params)}
    for name, expected in want.state.items():
        got = getattr(state, name)
        if name == "count":
            assert got == expected
        elif expected is None:
            assert got is None
        elif name != "inner_state":  # of LARC; its parameters tell
            got = jax.tree.leaves(got)
            assert all(x.dtype == F32 for x in got)
            trees[name] = got, expected
    for name, (got, expected) in trees.items():
        for k, (x, y, kind) in enumerate(zip(got, expected, kinds, strict=True)):
            half = kind.weights == "half"
            error, limit = largest_error(x, y), ROUNDING[kind.dtype] if half else 0
            assert error <= TOLERANCE + limit, (name, k, kind, np.shape(y))
    for w in found:
        assert_rounded(w)


def assert_follows(tx, problem: Problem, results: list[Result], step=apply) -> None:
    """`tx` does at each step what the oracle did; a skipped step keeps every bit."""
    weights = grouped(problem.weights)
    state = init(tx, params_of(weights))
    kwargs: dict[str, Any] = {}
    if problem.grad_scale is not None:
        kwargs["grad_scale"] = jnp.float32(problem.grad_scale)
    for grads, skips, want in zip(problem.grads, problem.skip, results, strict=True):
        if any(problem.skip):
            kwargs["found_inf"] = np.array(skips)
        before = weights, state
        weights, state = step(tx, grouped(grads), state, weights, **kwargs)
        if skips:
            assert_same_bits((weights, state), before)
        assert_close(weights, state, want, problem.kinds)


def masked(form: str, leaves: Leaves) -> tuple[Any, list[bool]]:
    """A mask in one of the forms that optax takes; and for the oracle, by leaf."""
    match form:
        case "tree":
            decays = [k % 3 > 0 for k in range(len(leaves))]
            return grouped(decays), decays
        case "prefix":
            of_a = len(grouped(leaves)["a"])
            decays = [k >= of_a for k in range(len(leaves))]
            return {"a": False, "b": True}, decays
        case "callable":
            decays = [len(shape) > 0 for shape, _ in leaves]
            return lambda tree: jax.tree.map(lambda x: x.ndim > 0, tree), decays
    raise AssertionError(form)


def check(
    case: Case,
    leaves: Leaves,
    backend: str,
    step: Any = apply,
    mask: str | None = None,
    **kwargs: Any,
) -> None:
    ours, oracle = SIDES[case.name]
    options, given = case.on(leaves), problem(leaves, **kwargs)
    mask, decays = (None, None) if mask is None else masked(mask, leaves)
    results = expected(oracle, given, **options, decays=decays)
    tx = ours(**options, mask=mask, backend=backend)
    assert_follows(tx, given, results, step)


@pytest.mark.parametrize("name", ALL)
def test_four_leaves(name):
    turn = list(ALL).index(name)
    check(ALL[name], four(turn), "xla", grad_scale=1000.0, skips=SKIPPED)


@pytest.mark.parametrize("name", CASES)
def test_one_leaf_in_a_kernel(name):
    turn = list(CASES).index(name)
    leaves = [((128,), KINDS[turn % len(KINDS)])]
    check(CASES[name], leaves, "interpret", grad_scale=1024.0, skips=SKIPPED)


@pytest.mark.parametrize("name", BUSY)
def test_two_leaves_through_optax(name):
    leaves = [((129,), KINDS[0]), ((5,), KINDS[3])]
    check(BUSY[name], leaves, "xla", update)


@pytest.mark.parametrize("name", ["adam", "novograd"])
def test_one_leaf_through_optax_in_a_kernel(name):
    check(BUSY[name], [((129,), KINDS[0])], "interpret", update)


# XLA is what every optimizer runs on, and masks cost nothing there.
@pytest.mark.parametrize("name", BUSY)
def test_55_leaves(name):
    mask = ["tree", "prefix", "callable"][list(BUSY).index(name) % 3]
    leaves = fifty_five()
    check(BUSY[name], leaves, "xla", mask=mask, grad_scale=1024.0, skips=SKIPPED)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_55_leaves_in_kernels(name):
    leaves, skips = fifty_five_for_kernels(), SKIPPED[:3]
    # For how leaves share kernels. Twenty steps have a test each of the above.
    steps = max(skips) + 1
    kwargs = {"grad_scale": 1024.0, "skips": skips, "steps": steps}
    check(BUSY[name], leaves, "interpret", **kwargs)


@pytest.mark.parametrize("name", SIDES)
def test_defaults(name):
    ours, oracle = [inspect.signature(side).parameters for side in SIDES[name]]
    assert {k for k in ours if k in oracle} >= {"learning_rate", "weight_decay"}
    for k in set(ours) & set(oracle):
        assert ours[k].default == oracle[k].default, k


@pytest.mark.parametrize("clip", [False, True])
def test_larc(clip):
    leaves = [(shape, KINDS[k]) for k, shape in [(0, (3, 50)), (3, (5,)), (7, (2,))]]
    given = problem(leaves, grad_scale=1000.0, skips=SKIPPED)
    common = {"learning_rate": 0.05, "momentum": 0.8}
    # The factor is above the learning rate at small gradients, and below it at others.
    mine = {"trust_coefficient": 0.2, "clip": clip, "eps": 0.1}
    inner = functools.partial(fused_sgd, momentum=0.8)
    results = expected(
        larc, given, inner=inner, learning_rate=0.05, weight_decay=0.1, **mine
    )
    tx = jo.larc(jo.fused_sgd(**common, weight_decay=0.1), **mine)
    assert_follows(tx, given, results, update)


@pytest.mark.parametrize("name", ["adam", "lamb", "novograd"])
def test_corrections_are_exact_to_float32(name):
    # In float32, 1 - 0.999 has an error of 1e-5. At a rate of 1 it would be seen.
    ours, oracle = SIDES[name]
    options = (
        {"learning_rate": 1.0, "init_zero": True}
        if name == "novograd"
        else {"learning_rate": 1.0}
    )
    params, grads = [np.full(3, 0.5)], [[np.float32([1.0, -2.0, 0.5])]] * 3
    tx = ours(**options)
    weights = [Weight(jnp.asarray(params[0], F32))]
    state = tx.init(params_of(weights))
    for now, want in zip(grads, oracle(params, grads, **options), strict=True):
        weights, state = apply(tx, [jnp.asarray(now[0])], state, weights)
        error = largest_error(value(weights[0]), want.params[0])
        assert error <= 4 * 2.0**-23


def test_the_older_clip_adds_a_millionth_to_the_norm():
    options = {"learning_rate": 1.0, "eps": 1e-6, "max_grad_norm": 5e-6, "legacy": True}
    params, grads = [np.ones(1)], [np.float32([1e-5])]
    weights = [Weight(jnp.ones(1))]
    tx = jo.fused_adam(**options)
    state = tx.init(params_of(weights))
    weights, _ = apply(tx, [jnp.asarray(grads[0])], state, weights)
    want = next(fused_adam(params, [grads], **options)).params[0]
    assert largest_error(value(weights[0]), want) <= TOLERANCE


# Around the largest finite number of each half dtype, and of what rounds to it.
EDGES = [(F16, 65000.0, 600.0), (BF16, 3.38e38, 0.03e38)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_half_cannot_hold_saturates(backend):
    kinds = [k for k in KINDS if k.weights != "own" and k.grads != F32]
    weights, grads, steps = [], [], {}
    for kind in kinds:
        start, steps[kind] = next((x, step) for d, x, step in EDGES if d == kind.dtype)
        signs = np.float32([1, -1, 1] + [0] * 125)
        weights.append(weight(start * signs, kind))
        grads.append(jnp.asarray(-signs, F32).at[2].set(jnp.nan) * steps[kind])
    tx = jo.fused_sgd(1.0, backend=backend)
    state = tx.init(params_of(weights))
    weights, _ = apply(tx, grads, state, weights)
    for kind, w in zip(kinds, weights, strict=True):
        largest = float(jnp.finfo(kind.dtype).max)
        half = np.float64(w.param)
        expected = np.float64([largest, -largest, np.nan])
        np.testing.assert_array_equal(half[:3], expected, err_msg=str(kind))
        if kind.weights == "copied":  # the master goes on
            assert value(w)[0] == np.float32(value(w)[0]) > largest
            assert np.isnan(value(w)[2])
        if kind.weights == "split":
            assert np.isfinite(value(w)[0])
            assert np.isnan(value(w)[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["adam_clip", "adam_legacy_clip", "lamb_clip"])
def test_nobody_looks_for_inf_and_clipping_is_as_on_the_page(name, bad):
    """A NaN in one gradient, or inf, without `found_inf`: as in the oracle."""
    leaves = [((3,), KINDS[0]), ((2, 2), KINDS[0])]
    given = problem(leaves)
    given.grads[0][0][1] = bad
    case = ALL[name]
    ours, oracle = SIDES[case.name]
    options = case.on(leaves) | {"max_grad_norm": 0.5}
    given = given._replace(grads=given.grads[:2], skip=given.skip[:2])
    with np.errstate(invalid="ignore"):
        results = expected(oracle, given, **options)
    assert_follows(ours(**options), given, results)
