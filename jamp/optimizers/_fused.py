"""From a rule over lists of leaves to an optax transformation, and to one pass.

A rule is a frozen dataclass of hyperparameters that steps lists of leaves with kernels.
`FusedTransformation` is the optax transformation of a rule: `update` adds, as optax
wants it; `apply` writes weights, masters and half copies in one pass.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jamp._core.dtypes import is_castable
from jamp._core.tree import check_like
from pallas_kernels import (
    Options,
    Weight,
    check_backend,
    found_inf as found_inf_of,
)

type ScalarOrSchedule = float | Array | Callable[[Array], Any]


class Rule(Protocol):
    """An optimizer: its hyperparameters, and what it does to lists of leaves."""

    @property
    def mask(self) -> Any:
        """Which leaves decay."""
        ...

    @property
    def backend(self) -> str:
        """Where to run."""
        ...

    @property
    def shardings(self) -> Any:
        """Per leaf a NamedSharding, for a mesh of Auto axes; or None."""
        ...

    def init(self, params: PyTree) -> Any:
        """The state for `params`: a NamedTuple of `count` and trees like `params`."""
        ...

    def step(
        self,
        weights: Sequence[Weight],
        grads: Sequence[Array],
        state: Any,
        decays: Sequence[bool],
        options: Options,
    ) -> tuple[list[Any], Any]:
        """Steps leaves; `state` has lists of leaves for trees.

        Returns:
            New weights, or with `options.only_updates` what to add to them; and the
            state, with the old count.
        """
        ...


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also step weights in one pass."""

    @property
    def rule(self) -> Any:
        """The hyperparameters, a frozen dataclass."""
        return self.init.rule  # pyright: ignore[reportAttributeAccessIssue]

    def replace(self, **changes: Any) -> Self:
        """The same optimizer with other hyperparameters."""
        return fused(dataclasses.replace(self.rule, **changes))  # pyright: ignore[reportReturnType]

    def all_finite(self, grads: PyTree) -> Bool[Array, ""]:
        """Whether no gradient is inf or NaN, shape (), bool."""
        options = Options(backend=self.rule.backend, shardings=self.rule.shardings)
        return ~found_inf_of(jax.tree.leaves(grads), options=options)

    def apply(
        self,
        grads: PyTree,
        state: Any,
        weights: PyTree,
        *,
        grad_scale: ArrayLike | None = None,
        found_inf: ArrayLike | None = None,
    ) -> tuple[PyTree, Any]:
        """Steps weights in place, in one pass over each leaf.

        Args:
            grads: gradients of any float dtype, times `grad_scale`.
            state: what `init` or the last step returned.
            weights: a tree like `grads` of `pallas_kernels.Weight`.
            grad_scale: what to divide the gradients by, shape ().
            found_inf: if not zero, all bits stay, shape ().

        Returns:
            New weights and state.
        """
        return _apply(self.rule, grads, state, weights, grad_scale, found_inf, False)


def fused(rule: Rule) -> FusedTransformation:
    """The transformation of a rule; equal rules give equal transformations."""
    check_backend(rule.backend)
    return FusedTransformation(_Init(rule), _Update(rule))


@dataclasses.dataclass(frozen=True)
class _Init:
    rule: Any

    def __call__(self, params: PyTree) -> Any:
        _check_leaves(params, "params")
        return self.rule.init(params)


@dataclasses.dataclass(frozen=True)
class _Update:
    rule: Any

    def __call__(
        self,
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_scale: ArrayLike | None = None,
        found_inf: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        del extra_args
        if params is None:
            raise ValueError(
                f"{self.rule.name} needs the params: call "
                "`update(grads, state, params)`."
            )
        check_like(updates, params, "updates", "they must match the params.")
        weights = jax.tree.map(lambda p: Weight(jnp.asarray(p)), params)
        return _apply(self.rule, updates, state, weights, grad_scale, found_inf, True)


def _apply(
    rule: Any,
    grads: PyTree,
    state: Any,
    weights: PyTree,
    grad_scale: ArrayLike | None,
    found_inf: ArrayLike | None,
    only_updates: bool,
) -> tuple[PyTree, Any]:
    _check_leaves(grads, "gradients")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
    weights = structure.flatten_up_to(weights)
    params = structure.unflatten([weight.param for weight in weights])
    skip = None if found_inf is None else jnp.asarray(found_inf).astype(bool)
    options = Options(
        unscale=None if grad_scale is None else _reciprocal(grad_scale),
        skip=skip,
        only_updates=only_updates,
        backend=rule.backend,
        shardings=rule.shardings,
    )
    lists = type(state)(
        state.count,
        *(None if x is None else structure.flatten_up_to(x) for x in state[1:]),
    )
    decays = leaf_decays(rule.mask, params)
    results, lists = rule.step(weights, leaves, lists, decays, options)
    count = optax.safe_increment(state.count)
    if skip is not None:
        count = jnp.where(skip, state.count, count)
    trees = (None if x is None else structure.unflatten(x) for x in lists[1:])
    return structure.unflatten(results), type(state)(count, *trees)


def rate(learning_rate: ScalarOrSchedule, count: Int[Array, ""]) -> Float[Array, ""]:
    """The learning rate of the step after `count` steps."""
    value = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(value, jnp.float32)


def correction(b: ArrayLike, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - b^t at step t = count + 1, to float32's precision.

    Not by that formula: 1 - 0.999 in float32 has an error of 1e-5.
    """
    if isinstance(b, int | float):
        log = math.log(b) if b > 0 else -math.inf
    else:
        log = jnp.log(jnp.asarray(b, jnp.float32))
    return -jnp.expm1((count.astype(jnp.float32) + 1) * log)


def zeros(params: PyTree) -> PyTree:
    """Moments: float32, like the params; float64 for float64."""

    def leaf(p):
        p = p if hasattr(p, "dtype") else jnp.asarray(p)
        return jnp.zeros_like(p, p.dtype if p.dtype == jnp.float64 else jnp.float32)

    return jax.tree.map(leaf, params)


def no_steps() -> Int[Array, ""]:
    """The count of a new state."""
    return jnp.zeros((), jnp.int32)


def check_hyperparameters(name: str, **values: Any) -> None:
    """Raises for what is no number, or out of range; arrays are not looked at.

    Numbers must not be negative, and names that begin with `b` must be below 1.
    """
    for key, value in values.items():
        if isinstance(value, bool | str):
            raise TypeError(f"{name}: {key} must be a number, got {value!r}.")
        if not is_number(value):
            continue
        if not 0 <= value < (1 if key.startswith("b") else math.inf):
            raise ValueError(f"{name}: invalid {key}: {value}.")


def clips(max_grad_norm: Any) -> bool:
    """Whether there is a norm to clip to: neither None nor Python's 0."""
    if max_grad_norm is None:
        return False
    return not (is_number(max_grad_norm) and max_grad_norm == 0)


def scaled(options: Options, factor: Array) -> Options:
    """Options under which gradients are multiplied by `factor` too."""
    unscale = 1.0 if options.unscale is None else options.unscale
    return options._replace(unscale=unscale * factor)


def is_number(x: Any) -> bool:
    """Whether `x` is a number of Python or NumPy, known now."""
    return isinstance(x, int | float | np.number)


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raises as apex does."""
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant.")


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask by value, so that a transformation with one can be hashed."""

    leaves: tuple[bool, ...]
    structure: Any

    def __call__(self, params: PyTree) -> PyTree:
        del params
        return jax.tree.unflatten(self.structure, self.leaves)


def hashable_mask(mask: Any) -> Any:
    """`mask`, which may be a tree of bools, as something that hashes."""
    if mask is None or callable(mask):
        return mask
    leaves, structure = jax.tree.flatten(mask)
    return _Mask(tuple(_checked_bool(x) for x in leaves), structure)


def _checked_bool(leaf: Any) -> bool:
    if not isinstance(leaf, bool | np.bool_):
        raise TypeError(f"mask must hold bools, got {leaf!r}.")
    return bool(leaf)


def leaf_decays(mask: Any, params: PyTree) -> list[bool]:
    """Per leaf, whether it decays."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params)
    try:
        full = jax.tree.map(lambda m, sub: jax.tree.map(lambda _: m, sub), tree, params)
    except ValueError as error:
        raise ValueError(
            f"mask must be a tree of bools like the params, or a prefix of it: {error}"
        ) from None
    return [_checked_bool(leaf) for leaf in jax.tree.leaves(full)]


def _reciprocal(scale: ArrayLike) -> Float[Array, ""]:
    return 1 / jnp.asarray(scale, jnp.float32)


def _check_leaves(tree: PyTree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and not is_castable(leaf):
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is {leaf.dtype}: fused optimizers "
                "step float16, bfloat16, float32 and float64. Use optax for the rest: "
                "optax.multi_transform."
            )
