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

from jamp import optimizers as jo
from jamp.optimizers import fused_adagrad, fused_adam, fused_sgd, larc

pytestmark = pytest.mark.standard_promotion  # optax's transformations promote

STEPS = 20
L, B1, B2, EPS, M, CLIP = 0.05, 0.8, 0.95, 1e-6, 0.9, 0.5
MASK = [True, False]
WD = {"weight_decay": 0.1}
MASKED = WD | {"mask": MASK}


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


# Ours, with these hyperparameters and no clipping


def adam(rate=L, eps=EPS, clip=None, **options):
    return fused_adam(rate, B1, B2, eps, max_grad_norm=clip, **options)


def lamb(rate=L, clip=None, **options):
    options = {"weight_decay": 0.0} | options
    return jo.fused_lamb(rate, B1, B2, EPS, max_grad_norm=clip, **options)


AS_IN_OPTAX = {
    "reg_inside_moment": True,
    "grad_averaging": False,
    "bias_correction": False,
}


def novograd(rate=L, **changes):
    return jo.fused_novograd(rate, B1, B2, EPS, **(WD | AS_IN_OPTAX | changes))


# optax's


def their_adam(rate=L, eps=EPS, **options):
    return optax.adam(rate, B1, B2, eps, **options)


def their_adamw(rate=L, eps=EPS, **options):
    return optax.adamw(rate, B1, B2, eps, **options)


def their_lamb(rate=L, **options):
    return optax.lamb(rate, B1, B2, EPS, **options)


def their_novograd(rate=L):
    return optax.novograd(rate, B1, B2, EPS, **WD)


def their_adagrad(rate=L, eps=0.0):
    return optax.adagrad(rate, initial_accumulator_value=0.0, eps=eps)


def their_lars(rate=L, trust=0.02, momentum=M, **options):
    options = {"weight_decay": 0.0, "momentum": momentum} | options
    return optax.lars(rate, trust_coefficient=trust, eps=1e-8, **options)


def decayed(tx, mask=None):
    return optax.chain(optax.add_decayed_weights(**WD, mask=mask), tx)


def clipped(*txs, norm=CLIP):
    return optax.chain(optax.clip_by_global_norm(norm), *txs)


def by_rate(*txs, rate=L):
    return optax.chain(*txs, optax.scale_by_learning_rate(rate))


def by_trust(tx):
    return optax.chain(optax.scale_by_trust_ratio(0.0, 0.02, 1e-8), tx)


DECAY, SOME_DECAY = (optax.add_decayed_weights(**x) for x in (WD, MASKED))
SCALE = optax.scale_by_adam(B1, B2, EPS)
RATIO = optax.scale_by_trust_ratio()
DAMPENED = optax.scale_by_schedule(lambda c: jnp.where(c == 0, 1, 1 - 0.3))

EQUAL = {
    "adam": (fused_adam(S), optax.adam(S)),
    "adam l2 without decay": (adam(adam_w_mode=False), their_adam()),
    "adamw": (adam(S, **MASKED), their_adamw(S, **MASKED)),
    "adam l2": (adam(adam_w_mode=False, **MASKED), decayed(their_adam(), MASK)),
    "adamw clipped": (adam(clip=CLIP, **WD), clipped(their_adamw(**WD))),
    "adam l2 clipped": (
        adam(clip=CLIP, adam_w_mode=False, **WD),
        clipped(decayed(their_adam())),
    ),
    "legacy, eps=0": (adam(eps=0, legacy=True), their_adam(eps=0)),
    "legacy clipped": (adam(L, 0, CLIP, legacy=True), clipped(their_adam(eps=0))),
    "sgd": (fused_sgd(S), optax.sgd(S)),
    "momentum": (fused_sgd(S, M), optax.sgd(S, M)),
    "nesterov": (
        fused_sgd(L, M, nesterov=True, **MASKED),
        decayed(optax.sgd(L, M, nesterov=True), MASK),
    ),
    "decay after momentum": (
        fused_sgd(S, M, wd_after_momentum=True, **MASKED),
        by_rate(optax.trace(M), SOME_DECAY, rate=S),
    ),
    "dampening": (
        fused_sgd(L, M, dampening=0.3, **WD),
        optax.chain(DECAY, DAMPENED, optax.sgd(L, M)),
    ),
    "lamb": (lamb(S, **WD), their_lamb(S, **WD)),
    "nvlamb without decay": (lamb(use_nvlamb=True), their_lamb()),
    "nvlamb clipped": (
        lamb(clip=1.0, use_nvlamb=True, **MASKED),
        clipped(their_lamb(**MASKED), norm=1.0),
    ),
    "lamb without decay": (lamb(S), their_adam(S)),
    "lamb, some decay": (
        lamb(clip=CLIP, **MASKED),
        clipped(by_rate(SCALE, SOME_DECAY, optax.masked(RATIO, MASK))),
    ),
    "nvlamb l2": (
        lamb(clip=CLIP, adam_w_mode=False, use_nvlamb=True, **MASKED),
        clipped(decayed(their_lamb(), MASK)),
    ),
    "lamb without averaging": (
        lamb(clip=CLIP, grad_averaging=False, **WD),
        clipped(by_rate(SCALE, optax.scale(1 / (1 - B1)), DECAY, RATIO)),
    ),
    "nvlamb without averaging or decay": (
        lamb(grad_averaging=False, use_nvlamb=True),
        their_lamb(),
    ),
    "novograd without averaging": (novograd(S), their_novograd(S)),
    "novograd at a higher rate": (
        novograd(L / (1 - B1), grad_averaging=True),
        their_novograd(),
    ),
    "adagrad": (fused_adagrad(S, 0.0), their_adagrad(S)),
    "adagrad, default eps": (fused_adagrad(L), their_adagrad()),
    "adagrad l2": (fused_adagrad(L, 0.0, **MASKED), decayed(their_adagrad(), MASK)),
    "adagrad w": (
        fused_adagrad(S, 0.0, adagrad_w_mode=True, **MASKED),
        by_rate(optax.scale_by_rss(0.0, 0.0), SOME_DECAY, rate=S),
    ),
    "lars": (
        larc(optax.sgd(L, M, nesterov=True), clip=False),
        their_lars(nesterov=True),
    ),
    "lars without momentum": (
        larc(fused_sgd(S), clip=False),
        their_lars(S, momentum=0),
    ),
    "trust, momentum": (larc(fused_sgd(S, M), clip=False), by_trust(optax.sgd(S, M))),
    "trust, adam": (larc(optax.adam(S), clip=False), by_trust(optax.adam(S))),
    # Defaults; without momentum optax keeps a trace for 0.0, we do not.
    "optax's decay": (fused_adam(L, weight_decay=1e-4), optax.adamw(L)),
    "lamb's": (jo.fused_lamb(L), clipped(optax.lamb(L, weight_decay=0.01), norm=1)),
    "no momentum": (fused_sgd(L, 0.0), optax.sgd(L, 0.0)),
}


@pytest.mark.parametrize("row", EQUAL)
def test_they_coincide(row):
    assert apart(*EQUAL[row]) < 1e-4


DIFFERENT = {
    "adam without bias correction": (adam(bias_correction=False), their_adam()),
    "legacy with eps": (adam(eps=0.1, legacy=True), their_adam(eps=0.1)),
    "legacy with decay": (adam(eps=0, legacy=True, **WD), their_adamw(eps=0, **WD)),
    "legacy with eps inside": (
        adam(eps=0.1, legacy=True, eps_inside_sqrt=True),
        their_adam(eps=0, eps_root=0.1),
    ),
    "dampening from the first step": (
        fused_sgd(L, M, dampening=M),
        optax.chain(optax.ema(M, debias=False), optax.scale(-L)),
    ),
    "lamb without decay": (lamb(), their_lamb()),
    "lamb, some decay": (lamb(**MASKED), their_lamb(**MASKED)),
    "lamb without averaging": (lamb(grad_averaging=False, **WD), their_lamb(**WD)),
    "novograd, decay outside": (novograd(reg_inside_moment=False), their_novograd()),
    "novograd, averaging": (novograd(grad_averaging=True), their_novograd()),
    "novograd, bias correction": (novograd(bias_correction=True), their_novograd()),
    "novograd from zero": (novograd(init_zero=True), their_novograd()),
    "novograd, largest": (novograd(norm_type="inf"), their_novograd()),
    "adagrad, eps": (fused_adagrad(L, 1e-2), their_adagrad(eps=1e-2)),
    "adagrad, defaults": (fused_adagrad(L), optax.adagrad(L)),
    "lars, schedule": (
        larc(optax.sgd(S, M), clip=False, trust_coefficient=1.0),
        their_lars(S, 1.0),
    ),
    "lars, decay": (
        larc(optax.sgd(L, M), clip=False, trust_coefficient=1.0, **WD),
        their_lars(L, 1.0, **WD),
    ),
    "lars, clip": (larc(optax.sgd(L, M), L), their_lars()),
}


@pytest.mark.parametrize("row", DIFFERENT)
def test_they_differ(row):
    assert apart(*DIFFERENT[row]) > 5e-3


def test_optax_has_another_default_decay():
    assert apart(fused_adam(L), optax.adamw(L)) > 1e-6
