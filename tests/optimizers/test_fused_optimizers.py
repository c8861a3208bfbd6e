"""Test 20 steps of every fused optimizer and option against its float64 oracle."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jamp import optimizers as jo
from tests.optimizers.fused import each_bare
from tests.optimizers.fused_steps import (
    F32,
    KINDS,
    SKIPPED,
    TOLERANCE,
    Problem,
    check,
    four,
    grouped,
    problem,
    weight,
)
from tests.oracles import fused as oracles


class Schedule(NamedTuple):
    """A learning rate for both sides, which depends on the number of past steps."""

    start: float

    def __call__(self, count: Any) -> Any:
        if isinstance(count, int):
            return self.start / (1 + 0.1 * count)
        assert (count.dtype, count.shape) == (jnp.int32, ())
        return self.start / (1 + 0.1 * count.astype(F32))


class Case(NamedTuple):
    """An optimizer with its options. `clip` is a fraction of the largest norm."""

    name: str
    options: dict[str, Any]
    clip: float | None = None

    def on(self, given: Problem) -> dict[str, Any]:
        """Returns the options for these leaves, whose gradients are about one."""
        if self.clip is None:
            return self.options
        elements = sum(w.param.size for w in given.weights)
        return self.options | {"max_grad_norm": float(self.clip * elements**0.5)}


def sides(name: str) -> tuple[Any, Any]:
    """Returns jamp's optimizer and the oracle."""
    return getattr(jo, f"fused_{name}"), getattr(oracles, f"fused_{name}")


MOMENTS = {"learning_rate": 0.05, "b1": 0.8, "b2": 0.95, "eps": 1e-3}
WD = {"weight_decay": 0.1}
COMMON = {
    "adam": MOMENTS | WD,
    "lamb": MOMENTS | WD | {"max_grad_norm": None},
    "novograd": MOMENTS | WD | {"eps": 0.1},  # norms are large
    "adagrad": WD | {"learning_rate": 0.1, "eps": 1e-2},
}


def case(name: str, clip: float | None = None, **options: Any) -> Case:
    return Case(name, COMMON[name] | options, clip)


def sgd(momentum: float = 0.0, **options: Any) -> Case:
    return Case("sgd", {"learning_rate": 0.05, "momentum": momentum} | options)


adam, lamb, novograd, adagrad = (functools.partial(case, name) for name in COMMON)
# Each option occurs at least once, also where it changes another option's formula.
CASES = {
    "adam_clip": adam(0.5),
    "adam_l2": adam(0.5, adam_w_mode=False, learning_rate=Schedule(0.05)),
    "adam_no_correction": adam(bias_correction=False, weight_decay=0.0),
    "adam_legacy": adam(legacy=True, bias_correction=False),
    "adam_legacy_inside": adam(0.5, legacy=True, eps_inside_sqrt=True),
    "sgd": sgd(),
    "sgd_decay": sgd(**WD | {"learning_rate": Schedule(0.05)}),
    "sgd_dampening_decay": sgd(0.8, dampening=0.3, **WD),
    "sgd_nesterov_decay": sgd(0.8, nesterov=True, **WD),
    "sgd_decay_after": sgd(0.8, wd_after_momentum=True, **WD),
    "sgd_after_nesterov": sgd(0.8, nesterov=True, wd_after_momentum=True, **WD),
    "lamb_clip": lamb(0.5),
    "lamb_l2": lamb(0.5, adam_w_mode=False, bias_correction=False),
    "lamb_no_averaging": lamb(0.5, grad_averaging=False),
    "lamb_no_decay": lamb(0.5, weight_decay=0.0),
    "lamb_nvlamb_no_decay": lamb(0.5, weight_decay=0.0, use_nvlamb=True),
    "novograd": novograd(),
    "novograd_no_correction": novograd(bias_correction=False),
    "novograd_inside": novograd(reg_inside_moment=True),
    "novograd_no_averaging": novograd(grad_averaging=False),
    "novograd_inf": novograd(norm_type="inf", learning_rate=Schedule(0.05)),
    "novograd_init_zero": novograd(init_zero=True, weight_decay=0.0),
    "adagrad": adagrad(),
    "adagrad_w": adagrad(adagrad_w_mode=True),
    "lamb_clip_0": lamb(None, max_grad_norm=0),
    "lamb_nvlamb": lamb(0.5, use_nvlamb=True, learning_rate=Schedule(0.05)),
}


def check_case(
    case: Case,
    given: Problem,
    decays: list[bool] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    ours, oracle = sides(case.name)
    options = case.on(given)
    mask = None if decays is None else grouped(decays)
    tx = ours(**options, mask=mask)
    wanted = functools.partial(oracle, **options, decays=decays)
    check(tx, wanted, given, tolerance=tolerance)


SCALED = {"grad_scale": 1000.0, "skips": SKIPPED}


@pytest.mark.parametrize("name", CASES)
def test_four_leaves(name):
    turn = list(CASES).index(name)
    decays = [True, True, False, True]
    check_case(CASES[name], problem(four(turn), **SCALED), decays=decays)


@each_bare
def test_defaults(name):
    ours, oracle = [inspect.signature(side).parameters for side in sides(name)]
    assert {k for k in ours if k in oracle} >= {"learning_rate", "weight_decay"}
    for k in set(ours) & set(oracle):
        assert ours[k].default == oracle[k].default, k


RATE = {"learning_rate": 1.0}
LEGACY = RATE | {"eps": 1e-6, "max_grad_norm": 5e-6, "legacy": True}
SIGNS = [[1.0, -2.0, 0.5]]
EXACT = {
    # In float32, 1 - 0.999 has an error of 1e-5, which a rate of 1 would show.
    "correction of adam": (adam(**RATE, b2=0.999), SIGNS),
    "correction of lamb": (lamb(0.5, **RATE, b2=0.999), SIGNS),
    "correction of novograd": (novograd(**RATE, b2=0.999, init_zero=True), SIGNS),
    "a millionth in the older clip": (Case("adam", LEGACY), [[1e-5]]),
} | {
    # The optimizer does not check for inf, and clips as docs/optimizers.md says.
    f"{bad} in {name}": (CASES[name]._replace(clip=0.3), [[bad, 1.0, -0.5], [1.0, 1.0]])
    for name in ("adam_clip", "adam_legacy_inside", "lamb_clip")
    for bad in (np.nan, np.inf)
}


@pytest.mark.parametrize("row", EXACT)
def test_the_first_steps_are_exact(row):
    case, grads = EXACT[row]
    leaves = [((len(g),), KINDS[0]) for g in grads]
    first = [np.float32(g) for g in grads]
    steps = [first, *[[np.nan_to_num(g, nan=1, posinf=1) for g in first]] * 2]
    weights = [weight(np.full(*shape, 0.5), kind) for shape, kind in leaves]
    given = Problem(KINDS[:1] * len(grads), weights, steps)
    check_case(case, given, tolerance=4 * 2.0**-23)


# The oracles agree with optax for twenty steps where optax has the same optimizer.
MASK, S = [True, False], Schedule(0.05)
NUMBERS = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
DECAYED = NUMBERS | WD
NOVOGRAD = {"reg_inside_moment": True, "grad_averaging": False}
NESTEROV = {"momentum": 0.9, "nesterov": True}
TRUST = {"trust_coefficient": 0.02, "eps": 1e-8}
decay = optax.add_decayed_weights(**WD, mask=MASK)
clip = optax.clip_by_global_norm(0.5)
dampen = optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1, 1 - 0.3))
ratio = optax.scale_by_trust_ratio(0.0, **TRUST)
MASKED = DECAYED | {"decays": MASK}
NO_CLIP = {"clip": False, "inner": oracles.fused_adam}
# An oracle, its options, and optax's transformation.
EQUAL = {
    "adamw": ("fused_adam", MASKED, optax.adamw(S, mask=MASK, **DECAYED)),
    "adam l2": (
        *("fused_adam", MASKED | {"adam_w_mode": False}),
        optax.chain(decay, optax.adam(S, **NUMBERS)),
    ),
    "nesterov": (
        *("fused_sgd", NESTEROV | WD | {"decays": MASK}),
        optax.chain(decay, optax.sgd(S, **NESTEROV)),
    ),
    "dampening": (
        *("fused_sgd", {"momentum": 0.9, "dampening": 0.3}),
        optax.chain(dampen, optax.sgd(S, 0.9)),
    ),
    "nvlamb": (
        *("fused_lamb", MASKED | {"use_nvlamb": True, "max_grad_norm": 0.5}),
        optax.chain(clip, optax.lamb(S, mask=MASK, **DECAYED)),
    ),
    "novograd": (
        *("fused_novograd", DECAYED | NOVOGRAD | {"bias_correction": False}),
        optax.novograd(S, **DECAYED),
    ),
    "adagrad": ("fused_adagrad", {"eps": 0.0}, optax.adagrad(S, 0.0, eps=0.0)),
    "trust ratio": ("larc", NO_CLIP, optax.chain(ratio, optax.adam(S))),
}


@pytest.mark.standard_promotion  # optax's transformations promote
@pytest.mark.parametrize("row", EQUAL)
def test_they_coincide(row):
    (name, options, theirs), rng = EQUAL[row], np.random.default_rng(0)
    params = [np.float32(rng.normal(size=shape)) for shape in [(3, 4), ()]]
    # No gradient is near 0, where eps=0 divides 0 by 0.
    shapes = [(20, 3, 4), (20,)]
    sizes = [rng.uniform(0.2, 1.0, s) * rng.choice([-1.0, 1.0], s) for s in shapes]
    grads = [np.float32(x) for x in sizes]

    def step(carry, grads):
        params, state = carry
        updates, state = theirs.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = [jnp.asarray(p) for p in params]
    run = jax.jit(lambda p, g: lax.scan(step, (p, theirs.init(p)), g)[1])
    found = run(start, grads)
    wanted = getattr(oracles, name)(
        params, zip(*grads, strict=True), **{"learning_rate": S} | options
    )
    for t, want in enumerate(wanted):
        for x, y in zip(found, want.params, strict=True):
            np.testing.assert_allclose(x[t], y, 1e-4, 1e-5)
