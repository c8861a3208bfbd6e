"""Where the fused optimizers coincide with optax's, at each of twenty steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jamp import optimizers as jo
from jamp.optimizers import fused_adagrad, fused_sgd, larc

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


NUMBERS = {"b1": B1, "b2": B2, "eps": EPS}
adam = functools.partial(jo.fused_adam, **NUMBERS)
lamb = functools.partial(jo.fused_lamb, **NUMBERS, weight_decay=0.0, max_grad_norm=None)
novograd = functools.partial(
    jo.fused_novograd,
    **(NUMBERS | WD),
    reg_inside_moment=True,
    grad_averaging=False,
    bias_correction=False,
)
their_adam = functools.partial(optax.adam, **NUMBERS)
their_adamw = functools.partial(optax.adamw, **NUMBERS)
their_lamb = functools.partial(optax.lamb, **NUMBERS)
their_novograd = optax.novograd(L, **NUMBERS, **WD)
their_adagrad = functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=0.0)
their_lars = functools.partial(
    optax.lars, weight_decay=0.0, trust_coefficient=0.02, eps=1e-8, momentum=M
)


def decayed(tx, mask=None):
    return optax.chain(optax.add_decayed_weights(**WD, mask=mask), tx)


DAMPENED = optax.scale_by_schedule(lambda c: jnp.where(c == 0, 1, 1 - 0.3))
CLIPPED = optax.clip_by_global_norm(CLIP)

# Schedules, masks and clipping at one each.
EQUAL = {
    "adamw": (adam(S, **MASKED), their_adamw(S, **MASKED)),
    "adam l2": (adam(L, adam_w_mode=False, **MASKED), decayed(their_adam(L), MASK)),
    "legacy without eps": (adam(L, eps=0, legacy=True), their_adam(L, eps=0)),
    "nesterov": (
        fused_sgd(S, M, nesterov=True, **MASKED),
        decayed(optax.sgd(S, M, nesterov=True), MASK),
    ),
    "dampening": (
        fused_sgd(L, M, dampening=0.3, **WD),
        optax.chain(optax.add_decayed_weights(**WD), DAMPENED, optax.sgd(L, M)),
    ),
    "lamb": (
        lamb(S, max_grad_norm=CLIP, **WD),
        optax.chain(CLIPPED, their_lamb(S, **WD)),
    ),
    "nvlamb": (lamb(L, use_nvlamb=True, **MASKED), their_lamb(L, **MASKED)),
    "novograd": (novograd(L), their_novograd),
    "adagrad": (fused_adagrad(S, 0.0), their_adagrad(S)),
    "lars": (
        larc(optax.sgd(L, M, nesterov=True), clip=False),
        their_lars(L, nesterov=True),
    ),
    "trust ratio": (
        larc(optax.adam(S), clip=False),
        optax.chain(optax.scale_by_trust_ratio(0.0, 0.02, 1e-8), optax.adam(S)),
    ),
}


@pytest.mark.parametrize("row", EQUAL)
def test_they_coincide(row):
    assert apart(*EQUAL[row]) < 1e-4
