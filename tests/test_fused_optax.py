"""Where the fused optimizers coincide with optax's, and where they do not.

The docstrings of `jamp.optimizers` state these rows. Equal means equal parameters, to
float32's rounding, after each of twenty steps; different means apart by 1/200.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jamp.optimizers import (
    fused_adagrad,
    fused_adam,
    fused_lamb,
    fused_novograd,
    fused_sgd,
    larc,
)

pytestmark = pytest.mark.standard_promotion  # optax's transformations promote

STEPS = 20
L, B1, B2, EPS, WD, M, CLIP, TC = 0.05, 0.8, 0.95, 1e-6, 0.1, 0.9, 0.5, 0.02
MASK = [True, False]


def S(count):
    """A schedule."""
    return L / (1 + 0.3 * count)


def apart(ours, theirs):
    """How far the parameters get apart, in relation to their size."""
    rng = np.random.default_rng(0)
    shapes = [(3, 4), ()]
    params = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    # Away from 0, where eps=0 divides 0 by 0.
    sizes = [rng.uniform(0.2, 1.0, size=(STEPS, *s)) for s in shapes]
    signs = [rng.choice([-1.0, 1.0], size=(STEPS, *s)) for s in shapes]
    grads = [jnp.asarray(a * b, jnp.float32) for a, b in zip(sizes, signs, strict=True)]

    def step(carry, grads):
        new = []
        for tx, (params, state) in zip((ours, theirs), carry, strict=True):
            updates, state = tx.update(grads, state, params)
            new.append((optax.apply_updates(params, updates), state))
        return new, [params for params, _ in new]

    carry = [(params, tx.init(params)) for tx in (ours, theirs)]
    _, histories = jax.jit(lambda c: lax.scan(step, c, grads))(carry)
    return max(
        np.max(np.abs(a - b) / np.maximum(np.abs(b), 0.1))
        for a, b in zip(*histories, strict=True)
    )


def decayed(tx, mask=None):
    return optax.chain(optax.add_decayed_weights(WD, mask), tx)


def clipped(*txs):
    return optax.chain(optax.clip_by_global_norm(CLIP), *txs)


def by_rate(*txs, rate=L):
    return optax.chain(*txs, optax.scale_by_learning_rate(rate))


ADAM = (L, B1, B2, EPS)
SCALE = optax.scale_by_adam(B1, B2, EPS)
RATIO = optax.scale_by_trust_ratio()
DECAY = optax.add_decayed_weights
SUMS = optax.scale_by_rss(0.0, 0.0)


def adagrad(rate):
    return optax.adagrad(rate, initial_accumulator_value=0.0, eps=0.0)


EQUAL = {
    # fused_adam
    "adam": (fused_adam(S), optax.adam(S)),
    "adam l2 without decay": (fused_adam(*ADAM, adam_w_mode=False), optax.adam(*ADAM)),
    "adamw": (
        fused_adam(S, B1, B2, EPS, weight_decay=WD, mask=MASK),
        optax.adamw(S, B1, B2, EPS, weight_decay=WD, mask=MASK),
    ),
    "adam l2": (
        fused_adam(*ADAM, weight_decay=WD, adam_w_mode=False, mask=MASK),
        decayed(optax.adam(*ADAM), MASK),
    ),
    "adamw clipped": (
        fused_adam(*ADAM, weight_decay=WD, max_grad_norm=CLIP),
        clipped(optax.adamw(*ADAM, weight_decay=WD)),
    ),
    "adam l2 clipped": (
        fused_adam(*ADAM, weight_decay=WD, max_grad_norm=CLIP, adam_w_mode=False),
        clipped(decayed(optax.adam(*ADAM))),
    ),
    "legacy, eps=0": (fused_adam(L, B1, B2, 0, legacy=True), optax.adam(L, B1, B2, 0)),
    "legacy clipped, almost": (
        fused_adam(L, B1, B2, 0, legacy=True, max_grad_norm=CLIP),
        clipped(optax.adam(L, B1, B2, 0)),
    ),
    # fused_sgd
    "sgd": (fused_sgd(S), optax.sgd(S)),
    "momentum": (fused_sgd(S, M), optax.sgd(S, M)),
    "nesterov": (
        fused_sgd(L, M, nesterov=True, weight_decay=WD, mask=MASK),
        decayed(optax.sgd(L, M, nesterov=True), MASK),
    ),
    "decay after momentum": (
        fused_sgd(S, M, weight_decay=WD, wd_after_momentum=True, mask=MASK),
        by_rate(optax.trace(M), DECAY(WD, MASK), rate=S),
    ),
    "dampening": (
        fused_sgd(L, M, dampening=0.3, weight_decay=WD),
        optax.chain(
            DECAY(WD),
            optax.scale_by_schedule(lambda c: jnp.where(c == 0, 1, 1 - 0.3)),
            optax.sgd(L, M),
        ),
    ),
    # fused_lamb
    "lamb": (
        fused_lamb(S, B1, B2, EPS, weight_decay=WD, max_grad_norm=None),
        optax.lamb(S, B1, B2, EPS, weight_decay=WD),
    ),
    "nvlamb without decay": (
        fused_lamb(*ADAM, weight_decay=0, max_grad_norm=None, use_nvlamb=True),
        optax.lamb(*ADAM),
    ),
    "nvlamb clipped": (
        fused_lamb(*ADAM, weight_decay=WD, mask=MASK, use_nvlamb=True),
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.lamb(*ADAM, weight_decay=WD, mask=MASK),
        ),
    ),
    "lamb without decay": (
        fused_lamb(S, B1, B2, EPS, weight_decay=0, max_grad_norm=None),
        optax.adam(S, B1, B2, EPS),
    ),
    "lamb, some decay": (
        fused_lamb(*ADAM, weight_decay=WD, mask=MASK, max_grad_norm=CLIP),
        clipped(by_rate(SCALE, DECAY(WD, MASK), optax.masked(RATIO, MASK))),
    ),
    "nvlamb l2": (
        fused_lamb(
            *ADAM,
            weight_decay=WD,
            mask=MASK,
            max_grad_norm=CLIP,
            adam_w_mode=False,
            use_nvlamb=True,
        ),
        clipped(decayed(optax.lamb(*ADAM), MASK)),
    ),
    "lamb without averaging": (
        fused_lamb(*ADAM, weight_decay=WD, max_grad_norm=CLIP, grad_averaging=False),
        clipped(by_rate(SCALE, optax.scale(1 / (1 - B1)), DECAY(WD), RATIO)),
    ),
    "nvlamb without averaging or decay": (
        fused_lamb(
            *ADAM,
            weight_decay=0,
            max_grad_norm=None,
            grad_averaging=False,
            use_nvlamb=True,
        ),
        optax.lamb(*ADAM),
    ),
    # fused_novograd
    "novograd without averaging": (
        fused_novograd(
            S,
            B1,
            B2,
            EPS,
            weight_decay=WD,
            reg_inside_moment=True,
            grad_averaging=False,
            bias_correction=False,
        ),
        optax.novograd(S, B1, B2, EPS, weight_decay=WD),
    ),
    "novograd at a higher rate": (
        fused_novograd(
            L / (1 - B1),
            B1,
            B2,
            EPS,
            weight_decay=WD,
            reg_inside_moment=True,
            bias_correction=False,
        ),
        optax.novograd(L, B1, B2, EPS, weight_decay=WD),
    ),
    # fused_adagrad
    "adagrad": (fused_adagrad(S, 0.0), adagrad(S)),
    "adagrad, default eps": (fused_adagrad(L), adagrad(L)),
    "adagrad l2": (
        fused_adagrad(L, 0.0, weight_decay=WD, mask=MASK),
        decayed(adagrad(L), MASK),
    ),
    "adagrad w": (
        fused_adagrad(S, 0.0, weight_decay=WD, mask=MASK, adagrad_w_mode=True),
        by_rate(SUMS, DECAY(WD, MASK), rate=S),
    ),
    # larc
    "lars": (
        larc(optax.sgd(L, M, nesterov=True), clip=False),
        optax.lars(L, 0.0, trust_coefficient=TC, eps=1e-8, momentum=M, nesterov=True),
    ),
    "lars, schedule without momentum": (
        larc(fused_sgd(S), clip=False),
        optax.lars(S, 0.0, trust_coefficient=TC, eps=1e-8, momentum=0.0),
    ),
    "trust ratio, then momentum": (
        larc(fused_sgd(S, M), clip=False),
        optax.chain(
            optax.scale_by_trust_ratio(trust_coefficient=TC, eps=1e-8), optax.sgd(S, M)
        ),
    ),
    "trust ratio, then adam": (
        larc(optax.adam(S), clip=False),
        optax.chain(
            optax.scale_by_trust_ratio(trust_coefficient=TC, eps=1e-8), optax.adam(S)
        ),
    ),
}


@pytest.mark.parametrize("row", EQUAL)
def test_they_coincide(row):
    assert apart(*EQUAL[row]) < 1e-4


NOVOGRAD = {
    "reg_inside_moment": True,
    "grad_averaging": False,
    "bias_correction": False,
}


def novograd(**changes):
    ours = fused_novograd(*ADAM, weight_decay=WD, **(NOVOGRAD | changes))
    return ours, optax.novograd(*ADAM, weight_decay=WD)


DIFFERENT = {
    "adam without bias correction": (
        fused_adam(*ADAM, bias_correction=False),
        optax.adam(*ADAM),
    ),
    "legacy with eps": (
        fused_adam(L, B1, B2, 0.1, legacy=True),
        optax.adam(L, B1, B2, 0.1),
    ),
    "legacy with decay": (
        fused_adam(L, B1, B2, 0, legacy=True, weight_decay=WD),
        optax.adamw(L, B1, B2, 0, weight_decay=WD),
    ),
    "legacy with eps inside": (
        fused_adam(L, B1, B2, 0.1, legacy=True, eps_inside_sqrt=True),
        optax.adam(L, B1, B2, 0, eps_root=0.1),
    ),
    "dampening from the first step": (
        fused_sgd(L, M, dampening=M),
        optax.chain(optax.ema(M, debias=False), optax.scale(-L)),
    ),
    "lamb without decay": (
        fused_lamb(*ADAM, weight_decay=0, max_grad_norm=None),
        optax.lamb(*ADAM),
    ),
    "lamb, some decay": (
        fused_lamb(*ADAM, weight_decay=WD, mask=MASK, max_grad_norm=None),
        optax.lamb(*ADAM, weight_decay=WD, mask=MASK),
    ),
    "lamb without averaging": (
        fused_lamb(*ADAM, weight_decay=WD, max_grad_norm=None, grad_averaging=False),
        optax.lamb(*ADAM, weight_decay=WD),
    ),
    "novograd, decay outside": novograd(reg_inside_moment=False),
    "novograd, averaging": novograd(grad_averaging=True),
    "novograd, bias correction": novograd(bias_correction=True),
    "novograd from zero": novograd(init_zero=True),
    "novograd, largest": novograd(norm_type="inf"),
    "adagrad, eps": (
        fused_adagrad(L, 1e-2),
        optax.adagrad(L, initial_accumulator_value=0.0, eps=1e-2),
    ),
    "adagrad, defaults": (fused_adagrad(L), optax.adagrad(L)),
    "lars, schedule": (
        larc(optax.sgd(S, M), clip=False, trust_coefficient=1.0),
        optax.lars(S, 0.0, trust_coefficient=1.0, eps=1e-8, momentum=M),
    ),
    "lars, decay": (
        larc(optax.sgd(L, M), clip=False, trust_coefficient=1.0, weight_decay=WD),
        optax.lars(L, WD, trust_coefficient=1.0, eps=1e-8, momentum=M),
    ),
    "lars, clip": (
        larc(optax.sgd(L, M), L),
        optax.lars(L, 0.0, trust_coefficient=TC, eps=1e-8, momentum=M),
    ),
}


@pytest.mark.parametrize("row", DIFFERENT)
def test_they_differ(row):
    assert apart(*DIFFERENT[row]) > 5e-3


def test_defaults_of_optax_that_are_ours_too():
    # And those that are not: optax.lamb has neither decay nor a clip, novograd other
    # betas, adagrad a sum that starts at 0.1.
    assert apart(fused_adam(L), optax.adamw(L)) > 1e-6
    assert apart(fused_adam(L, weight_decay=1e-4), optax.adamw(L)) < 1e-4
    lamb = optax.chain(optax.clip_by_global_norm(1), optax.lamb(L, weight_decay=0.01))
    assert apart(fused_lamb(L), lamb) < 1e-4


def test_momentum_without_a_trace():
    # A zero momentum is none: optax keeps a trace for 0.0, we do not.
    assert fused_sgd(L, 0.0).init([jnp.ones(2)]).trace is None
    assert apart(fused_sgd(L, 0.0), optax.sgd(L, 0.0)) < 1e-4
