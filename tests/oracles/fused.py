"""apex's fused optimizers, and LARC, in NumPy float64.

Sections are of apex_semantics, our notes on apex. This file imports neither JAX nor
jamp. A tree is a list of arrays. Each oracle yields a `Result` after every step,
skipped or not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np

type Leaves = Sequence[np.ndarray]
type LearningRate = float | Callable[[int], float]
type Grads = Iterable[Leaves]


class Result(NamedTuple):
    """`state` has the field names of the optimizer's own state; its trees are lists."""

    params: list[np.ndarray]
    state: dict[str, Any]


def float64(leaves: Leaves) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in leaves]


def unscaled_steps(
    grads: Iterable[Leaves], grad_scale: float, skip: Sequence[bool] | None
) -> Iterator[list[np.ndarray] | None]:
    """Yields the gradients of each step over the scale, or None for a skipped step."""
    skipped = repeat(False) if skip is None else skip
    for now, skips in zip(grads, skipped, strict=skip is not None):
        yield None if skips else [g / grad_scale for g in float64(now)]


def rate(learning_rate: LearningRate, count: int) -> float:
    """Returns the learning rate after `count` steps that were not skipped."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def norm(x: np.ndarray) -> np.float64:
    """Returns the 2-norm of one leaf, 0 if it is empty."""
    return np.linalg.norm(np.ravel(x))


def global_norm(leaves: Leaves) -> np.float64:
    """Returns the 2-norm of all leaves together."""
    return norm([norm(x) for x in leaves])


def _run(
    leaf: Callable[..., Any],
    fields: dict[str, Callable[[np.ndarray], Any]],
    params: Leaves,
    grads: Grads,
    learning_rate: LearningRate,
    weight_decay: float,
    divisor: Callable[[Leaves], Any] = lambda g: 1.0,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Steps every leaf by `leaf(t, lr, wd, g, p, *fields) -> (p, *fields)`.

    `t` counts the steps that are not skipped, from 1. `fields` create the state of a
    leaf. `divisor` maps all gradients to the number that divides them.
    """
    p = float64(params)
    state = [[make(x) for make in fields.values()] for x in p]
    wd = [weight_decay * yes for yes in decays or [True] * len(p)]
    t = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, t)
            t += 1
            by = divisor(g)
            for i, x in enumerate(g):
                p[i], *state[i] = leaf(t, lr, wd[i], x / by, p[i], *state[i])
        trees = {name: [s[k] for s in state] for k, name in enumerate(fields)}
        yield Result(list(p), {"count": t} | trees)


MOMENTS = {"mu": np.zeros_like, "nu": np.zeros_like}


def directed(t, s, m, v, b1, b2, b3, eps, bias_correction):
    """Returns Adam's direction without decay, and both moments."""
    c1 = 1 - b1**t if bias_correction else 1.0
    c2 = 1 - b2**t if bias_correction else 1.0
    m = b1 * m + b3 * s
    v = b2 * v + (1 - b2) * s * s
    return (m / c1) / (np.sqrt(v / c2) + eps), m, v


def fused_adam(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    max_grad_norm: float | None = None,
    legacy: bool = False,
    eps_inside_sqrt: bool = False,
    **how: Any,
) -> Iterator[Result]:
    """FusedAdam (section 8.3), or with `legacy` the FusedAdam of 2018 (section 8.1)."""
    assert legacy or not eps_inside_sqrt
    assert adam_w_mode or not legacy

    def clip(g):
        if not max_grad_norm:
            return 1.0
        n = global_norm(g)
        if legacy:  # NaN compares false, so it clips nothing
            by = (n + 1e-6) / max_grad_norm
            return by if by > 1 else 1.0
        # optax.clip_by_global_norm: a NaN norm makes every gradient NaN.
        return np.maximum(n, max_grad_norm) / max_grad_norm

    def leaf(t, lr, wd, g, p, m, v):
        s = g if adam_w_mode else g + wd * p
        u, m, v = directed(t, s, m, v, b1, b2, 1 - b1, eps, bias_correction)
        if legacy:
            c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
            denom = np.sqrt(v + eps) if eps_inside_sqrt else np.sqrt(v) + eps
            return p - lr * np.sqrt(c2) / c1 * (m / denom + wd * p), m, v
        return p - lr * (u + wd * p if adam_w_mode else u), m, v

    return _run(leaf, MOMENTS, params, grads, learning_rate, weight_decay, clip, **how)


def fused_sgd(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    **how: Any,
) -> Iterator[Result]:
    """FusedSGD (section 8.4). `trace` is None without momentum."""
    assert not nesterov or (momentum > 0 and dampening == 0)

    def leaf(t, lr, wd, g, p, *trace):
        d = g if wd_after_momentum else g + wd * p
        if trace:
            # Dampening starts at the second step.
            b = d if t == 1 else momentum * trace[0] + (1 - dampening) * d
            d = d + momentum * b if nesterov else b
            trace = (b,)
        if wd_after_momentum:
            d = d + wd * p
        return p - lr * d, *trace

    fields = {"trace": np.zeros_like} if momentum else {}
    steps = _run(leaf, fields, params, grads, learning_rate, weight_decay, **how)
    for p, state in steps:
        yield Result(p, {"trace": None} | state)


def fused_lamb(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float | None = 1.0,
    use_nvlamb: bool = False,
    **how: Any,
) -> Iterator[Result]:
    """FusedLAMB (section 8.5)."""
    b3 = 1 - b1 if grad_averaging else 1.0

    def clip(g):
        n = global_norm(g)
        # A NaN compares false, so it clips nothing.
        return n / max_grad_norm if max_grad_norm and n > max_grad_norm else 1.0

    def leaf(t, lr, wd, g, p, m, v):
        s = g if adam_w_mode else g + wd * p
        u, m, v = directed(t, s, m, v, b1, b2, b3, eps, bias_correction)
        u = u + wd * p if adam_w_mode else u
        has_ratio = (use_nvlamb or wd != 0) and norm(p) != 0 and norm(u) != 0
        return p - (lr * norm(p) / norm(u) if has_ratio else lr) * u, m, v

    return _run(leaf, MOMENTS, params, grads, learning_rate, weight_decay, clip, **how)


def fused_novograd(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: Literal[2, "inf"] = 2,
    init_zero: bool = False,
    **how: Any,
) -> Iterator[Result]:
    """FusedNovoGrad (section 8.6). `nu` has one norm per leaf, not squared."""
    assert norm_type in (2, "inf")
    b3 = 1 - b1 if grad_averaging else 1.0

    def leaf(t, lr, wd, g, p, m, n):
        c1 = 1 - b1**t if bias_correction else 1.0
        c2_root = np.sqrt(1 - b2**t) if bias_correction else 1.0
        now = norm(g) if norm_type == 2 else np.max(np.abs(g), initial=0)
        if t == 1 and not init_zero:
            n = now
        if norm_type == 2:
            n = np.sqrt(b2 * n**2 + (1 - b2) * now**2)
        else:
            n = b2 * n + (1 - b2) * now
        d = n / c2_root + eps
        if reg_inside_moment:
            m = b1 * m + b3 * (g / d + wd * p)
            return p - lr * (m / c1), m, n
        m = b1 * m + b3 * g
        return p - lr * ((m / c1) / d + wd * p), m, n

    fields = {"mu": np.zeros_like, "nu": lambda p: 0.0}
    return _run(leaf, fields, params, grads, learning_rate, weight_decay, **how)


def fused_adagrad(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w_mode: bool = False,
    **how: Any,
) -> Iterator[Result]:
    """FusedAdagrad (section 8.7)."""

    def leaf(t, lr, wd, g, p, h):
        s = g if adagrad_w_mode else g + wd * p
        h = h + s * s
        u = s / (np.sqrt(h) + eps)
        return p - lr * (u + wd * p if adagrad_w_mode else u), h

    fields = {"sum_of_squares": np.zeros_like}
    return _run(leaf, fields, params, grads, learning_rate, weight_decay, **how)


def larc(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: LearningRate,
    trust_coefficient: float = 0.02,
    clip: bool = True,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    inner: Callable[..., Iterator[Result]] = fused_sgd,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """LARC (section 8.8) around any oracle, which gets the same learning rate.

    `inner` has no decay; bind its other options by functools.partial.
    """
    p = float64(params)
    wd = [weight_decay * yes for yes in decays or [True] * len(p)]
    count = 0

    def adapt(p, g, wd, lr):
        if norm(p) == 0 or norm(g) == 0:
            return g  # unchanged
        a = trust_coefficient * norm(p) / (norm(g) + norm(p) * wd + eps)
        if clip:
            a = a / max(a, lr)  # min(a / lr, 1), and 1 where lr is 0
        return (g + wd * p) * a

    def adapted() -> Iterator[list[np.ndarray] | None]:
        # `inner` requests a step's gradients after it yields the previous params.
        nonlocal count
        for g in unscaled_steps(grads, grad_scale, skip):
            if g is not None:
                lr = rate(learning_rate, count)
                count += 1
                g = [adapt(*x, lr) for x in zip(p, g, wd, strict=True)]
            yield g

    for p, state in inner(params, adapted(), learning_rate=learning_rate, skip=skip):
        yield Result(list(p), {"count": count, "inner_state": state})


def adam(params: Leaves, grads: Grads, **options: Any) -> Iterator[list[np.ndarray]]:
    """Returns the parameters after each step."""
    return (result.params for result in fused_adam(params, grads, **options))


def momentum(
    params: Leaves, grads: Grads, *, learning_rate: float, decay: float, storage: type
) -> Iterator[list[np.ndarray]]:
    """Heavy ball, which rounds parameters to `storage` after each step."""
    p = float64(params)
    m = [np.zeros_like(x) for x in p]
    for now in map(float64, grads):
        m = [decay * old + g for old, g in zip(m, now, strict=True)]
        p = [x - learning_rate * step for x, step in zip(p, m, strict=True)]
        p = [x.astype(storage).astype(np.float64) for x in p]
        yield p
