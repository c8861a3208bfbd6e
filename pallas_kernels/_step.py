"""An optimizer step over leaves: unscale, update moments and weights, or skip."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, ArrayLike, Bool, Float

from pallas_kernels._run import Results, run
from pallas_kernels._weights import Weight, join, saturate, split_wide
from pallas_kernels._xla import Blocks, Job, bind

type Numbers = Mapping[str, Any]
type Update = Callable[[Numbers, Any, Array, Array, Blocks], tuple[Array, Blocks]]


class Options(NamedTuple):
    """What all optimizers' kernels take.

    Attributes:
        unscale: what gradients are multiplied by, shape (), float32; None for 1.
        skip: if true, nothing changes, shape (), bool; None for never.
        only_updates: whether to return what to add to the weights, in float32, and
            leave the weights.
        backend: where to run, one of `BACKENDS`.
        shardings: per leaf a NamedSharding, for a mesh of Auto axes.
    """

    unscale: Float[Array, ""] | None = None
    skip: Bool[Array, ""] | None = None
    only_updates: bool = False
    backend: str = "auto"
    shardings: Sequence[Any] | None = None


DEFAULTS = Options()


class Stepped(NamedTuple):
    """What a step gave.

    Attributes:
        weights: per leaf the new weights; with `only_updates` the updates.
        moments: by name, per leaf.
    """

    weights: list[Any]
    moments: dict[str, list[Array]]


def step(
    update: Update,
    weights: Sequence[Weight],
    grads: Sequence[Array],
    moments: Mapping[str, Sequence[Array]],
    numbers: Mapping[str, ArrayLike],
    options: Options,
    *,
    per_leaf: Mapping[str, Float[Array, " n"]] | None = None,
    tags: Sequence[Any] | None = None,
) -> Stepped:
    """Steps every leaf by `update`, in one pass.

    Args:
        update: `(numbers, tag, grad, weight, moments) -> (what to add, moments)`.
        weights: what to step.
        grads: one per weight, of its shape.
        moments: by name, one per weight, of its shape.
        numbers: for the formula.
        options: how to run.
        per_leaf: further numbers, one per leaf.
        tags: per leaf, something static for the formula.
    """
    job = Job(
        bind(_formula, update, options.only_updates),
        unread={} if options.only_updates else {"copy": _copy},
        stored=_stored,
    )
    how = {"per_leaf": per_leaf, "skip": options.skip}
    results = _run_over(job, weights, grads, moments, numbers, options, tags, **how)
    leaves = results.leaves
    if options.only_updates:
        stepped = [leaf["update"] for leaf in leaves]
    else:
        stepped = [w.written(x) for w, x in zip(weights, leaves, strict=True)]
    return Stepped(stepped, {name: [leaf[name] for leaf in leaves] for name in moments})


def measure(
    formula: Callable[[Numbers, Any, Array, Array, Blocks], Blocks],
    weights: Sequence[Weight],
    grads: Sequence[Array],
    moments: Mapping[str, Sequence[Array]],
    numbers: Mapping[str, ArrayLike],
    options: Options,
    *,
    reductions: Mapping[str, str],
    tags: Sequence[Any],
) -> dict[str, Float[Array, " n"]]:
    """Reduces what `formula` gives over each leaf, and writes nothing. See `step`."""
    job = Job(bind(_measured, formula), reductions=reductions)
    results = _run_over(job, weights, grads, moments, numbers, options, tags)
    return results.reductions


def leaf_decays(weight_decay: Any, decays: Sequence[bool] | None, n: int) -> list[bool]:
    """Per leaf whether it decays; a decay of Python's 0 costs nothing."""
    never = isinstance(weight_decay, int | float) and weight_decay == 0
    return [False] * n if never else list(decays if decays is not None else [True] * n)


def _run_over(
    job: Job,
    weights: Sequence[Weight],
    grads: Sequence[Array],
    moments: Mapping[str, Sequence[Array]],
    numbers: Mapping[str, ArrayLike],
    options: Options,
    tags: Sequence[Any] | None,
    **how: Any,
) -> Results:
    """Runs a job over weights, whose copies are left out if it does not write them."""
    leaves, kinds = [], []
    tags = [None] * len(weights) if tags is None else tags
    for k, (weight, grad, tag) in enumerate(zip(weights, grads, tags, strict=True)):
        leaf = {"grad": grad, **weight.columns}
        leaf |= {name: xs[k] for name, xs in moments.items()}
        if not job.unread:
            leaf.pop("copy", None)
        leaves.append(leaf)
        kinds.append((tag, weight.kind, weight.param.dtype))
    unscale = {} if options.unscale is None else {"unscale": options.unscale}
    return run(
        job,
        leaves,
        scalars=unscale | dict(numbers),
        tags=kinds,
        backend=options.backend,
        shardings=options.shardings,
        **how,
    )


def _formula(
    update: Update, only_updates: bool, numbers: Numbers, kind: Any, blocks: Blocks
) -> Blocks:
    numbers, tag, grad, weight, moments = _read(numbers, kind, blocks)
    delta, moments = update(numbers, tag, grad, weight, moments)
    if only_updates:
        return {"update": delta, **moments}
    return {"weight": weight + delta, **moments}


def _stored(kind: Any, results: Blocks) -> Blocks:
    """The new weights as they are kept."""
    _, storage, dtype = kind
    if storage == "copied" or "update" in results:
        return results
    new = results["weight"]
    if storage == "split":
        high, low = split_wide(new)
        return results | {"weight": high, "low": low}
    return results | {"weight": saturate(new, dtype)}


def _copy(results: Blocks, dtype: Any) -> Array:
    return saturate(results["weight"], dtype)


def _measured(
    formula: Callable[..., Blocks], numbers: Numbers, kind: Any, blocks: Blocks
) -> Blocks:
    return formula(*_read(numbers, kind, blocks))


def _read(numbers: Numbers, kind: Any, blocks: Blocks) -> tuple[Any, ...]:
    """What a formula takes: the weights joined, the gradient unscaled.

    Float64 weights, which only XLA steps, are stepped in float64.
    """
    tag, storage, _ = kind
    rest = dict(blocks)
    weight, grad = rest.pop("weight"), rest.pop("grad")
    if storage == "split":
        weight = join(weight, rest.pop("low"))
    # Norms of all leaves together are float64 where one leaf is.
    numbers = {name: x.astype(weight.dtype) for name, x in numbers.items()}
    rest = {name: x.astype(weight.dtype) for name, x in rest.items()}
    grad = grad.astype(weight.dtype)
    if "unscale" in numbers:
        grad = grad * numbers["unscale"]
    return numbers, tag, grad, weight, rest
