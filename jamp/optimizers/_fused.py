"""From a rule over lists of leaves to an optax transformation, and to one pass.

A rule is a frozen dataclass of hyperparameters that steps lists of leaves with kernels.
`FusedTransformation` is the optax transformation of a rule: `update` adds, as optax
wants it; `apply` writes weights, masters and half params in one pass.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jamp._core.dtypes import is_castable
from jamp._core.tree import check_like
from jamp.optimizers._transformation import Transformation
from pallas_kernels import (
    Blocks,
    Leaves,
    Numbers,
    Options,
    Weight,
    check_backend,
    found_inf as found_inf_of,
    l2norm,
    step,
)

# Of all fused optimizers; `below` names what else is one.
_NUMBERS = ("learning_rate", "weight_decay", "max_grad_norm")

# Numbers of each leaf for a formula, and what else the state holds of leaves.
type Measures = tuple[dict[str, ArrayLike], dict[str, list[Array]]]
type Mask = PyTree | Callable[[PyTree], PyTree] | None
type ScalarOrSchedule = float | Array | Callable[[Array], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedRule:
    """The hyperparameters that all fused optimizers have, and how they step trees.

    Attributes:
        learning_rate: a number, or a schedule of the count of steps.
        weight_decay: of the leaves that decay.
        mask: which leaves decay.
        backend: where to run.
        shardings: per leaf a NamedSharding, for a mesh of Auto axes; or None.
        bias_correction: whether `correction` is not 1.
        max_grad_norm: the largest norm of all gradients together; None for any.
    """

    name: ClassVar[str]
    state: ClassVar[Any]  # a NamedTuple of `count`, and trees like the params by name
    below: ClassVar[Mapping[str, float]]  # the limit of each number; all begin at 0

    learning_rate: ScalarOrSchedule
    weight_decay: ArrayLike
    mask: Mask
    backend: str
    shardings: Any = None
    bias_correction: bool = False
    max_grad_norm: ArrayLike | None = None
    amsgrad: dataclasses.InitVar[bool] = False

    def __post_init__(self, amsgrad: bool):
        if amsgrad:  # as apex does
            name = type(self).__name__
            raise RuntimeError(f"{name} does not support the AMSGrad variant.")
        check_backend(self.backend)
        object.__setattr__(self, "mask", hashable_mask(self.mask))
        unlimited = dict.fromkeys(_NUMBERS, math.inf)
        check_numbers(self.name, unlimited | dict(self.below), self)

    def first_state(self, params: PyTree) -> Any:
        """The state for `params`: no steps, and zeros."""
        return self.state(no_steps(), *(zeros(params) for _ in self.state._fields[1:]))

    @property
    def static(self) -> Self:
        """The rule without its numbers, which may be traced.

        Rules that differ in their numbers alone run the same compiled formula.
        """
        rule = copy.copy(self)
        for name in (*_NUMBERS, *self.below, "mask", "shardings"):
            object.__setattr__(rule, name, None)
        return rule

    def numbers(self, count: Int[Array, ""]) -> dict[str, ArrayLike]:
        """What `formula` takes of the hyperparameters after `count` steps, by name."""
        raise NotImplementedError

    def formula(
        self, s: Numbers, decays: bool, g: Array, w: Array, moments: Blocks
    ) -> tuple[Array, Blocks]:
        """What to add to a weight, and new moments: see `pallas_kernels.Rule`.

        Numbers are in `s`: of the rule it asks only what is static.
        """
        raise NotImplementedError

    def measure(
        self,
        leaves: Leaves,
        count: Int[Array, ""],
        numbers: dict[str, ArrayLike],
        options: Options,
    ) -> Measures:
        """What a step needs to know of each leaf first.

        Returns:
            Further numbers for the formula, one per leaf; and by name what the state
            holds of a leaf that is no moment.
        """
        del leaves, count, numbers, options
        return {}, {}

    def rate(self, count: Int[Array, ""]) -> Float[Array, ""]:
        """The learning rate of the step after `count` steps."""
        rate = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)

    def correction(self, b: ArrayLike, count: Int[Array, ""]) -> Array | float:
        """1 - b^t at step t = count + 1, to float32's precision.

        Not by that formula: 1 - 0.999 in float32 has an error of 1e-5. 1 for a rule
        that corrects nothing.
        """
        if not self.bias_correction:
            return 1.0
        if isinstance(b, int | float):
            log = math.log(b) if b > 0 else -math.inf
        else:
            log = jnp.log(jnp.asarray(b, jnp.float32))
        return -jnp.expm1((count.astype(jnp.float32) + 1) * log)

    def clipped(self, options: Options, grads: Sequence[Array]) -> Options:
        """Options under which gradients are clipped by a factor of their norm.

        A largest norm of 0 clips nothing: an array of 0 too, which is what
        `optax.inject_hyperparams` makes of it.
        """
        most: Any = self.max_grad_norm
        if is_number(most) and most == 0:
            return options
        factor = self.clip_factor(l2norm(grads, options=options).norm, most)
        if not is_number(most):
            factor = jnp.where(most == 0, 1, factor)
        unscale = 1.0 if options.unscale is None else options.unscale
        return options._replace(unscale=unscale * factor)

    def clip_factor(self, norm: Float[Array, ""], most: ArrayLike) -> Array:
        """What gradients of a norm are multiplied by, for one of `most`."""
        raise NotImplementedError

    def init(self, params: PyTree) -> Any:
        """optax's `init`."""
        _check_leaves(params, "params")
        return self.first_state(params)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        grad_scale: ArrayLike | None = None,
        found_inf: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        """optax's `update`."""
        del extra_args
        if params is None:
            raise ValueError(
                f"{self.name} needs the params: call `update(grads, state, params)`."
            )
        _check_leaves(updates, "gradients")
        check_like(updates, params, "updates", "they must match the params.")
        weights = jax.tree.map(lambda p: Weight(jnp.asarray(p)), params)
        scaling = {"grad_scale": grad_scale, "found_inf": found_inf}
        return self.apply(updates, state, weights, **scaling, only_updates=True)

    def apply(
        self,
        grads: PyTree,
        state: PyTree,
        weights: PyTree,
        *,
        grad_scale: ArrayLike | None = None,
        found_inf: ArrayLike | None = None,
        only_updates: bool = False,
    ) -> tuple[PyTree, Any]:
        """Steps weights in place, in one pass over each leaf.

        Args:
            grads: gradients of any float dtype, times `grad_scale`.
            state: what `init` or the last step returned.
            weights: a tree like `grads` of `pallas_kernels.Weight`.
            grad_scale: what to divide the gradients by, shape ().
            found_inf: if not zero, all bits stay, shape ().
            only_updates: whether to return what to add to the weights, not them.

        Returns:
            New weights and state.
        """
        grads, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
        weights = structure.flatten_up_to(weights)
        decays = [True] * len(weights)
        if self.mask is not None:
            params = structure.unflatten([weight.param for weight in weights])
            decays = decays_by_mask(self.mask, params)
        if is_number(self.weight_decay) and self.weight_decay == 0:
            decays = [False] * len(decays)  # which costs nothing
        lists = {
            name: structure.flatten_up_to(tree)
            for name, tree in zip(state._fields[1:], state[1:], strict=True)
            if tree is not None
        }
        skip = None if found_inf is None else jnp.asarray(found_inf).astype(bool)
        unscale = unscale_by(grad_scale)
        options = Options(unscale, skip, only_updates, self.backend, self.shardings)
        if self.max_grad_norm is not None:
            options = self.clipped(options, grads)
        numbers = self.numbers(state.count)
        leaves = Leaves(weights, grads, lists, decays)
        per_leaf, known = self.measure(leaves, state.count, numbers, options)
        moments = {name: lists[name] for name in lists if name not in known}
        leaves = leaves._replace(moments=moments)
        stepped = step(self.static, leaves, numbers, options, per_leaf)
        count = optax.safe_increment(state.count)
        if skip is not None:
            count = jnp.where(skip, state.count, count)
        trees = {
            name: structure.unflatten(x)
            for name, x in (stepped.moments | known).items()
        }
        new = state._replace(count=count, **trees)
        return structure.unflatten(stepped.weights), new


class FusedTransformation(Transformation):
    """An optax transformation that can also step weights in one pass."""

    def replace(self, **changes: Any) -> Self:
        """The same optimizer with other hyperparameters."""
        return type(self).from_rule(dataclasses.replace(self.rule, **changes))

    def all_finite(
        self, grads: PyTree, grad_scale: ArrayLike | None = None
    ) -> Bool[Array, ""]:
        """Whether no gradient is inf or NaN, shape (), bool.

        Args:
            grads: gradients of any float dtype, times `grad_scale`.
            grad_scale: with it the gradients are judged as the step sees them, divided
                by it in float32: below 1 a finite one may overflow. Shape ().
        """
        rule = self.rule
        options = Options(
            unscale_by(grad_scale), backend=rule.backend, shardings=rule.shardings
        )
        return ~found_inf_of(jax.tree.leaves(grads), options=options)

    @property
    def apply(self) -> Callable[..., tuple[PyTree, Any]]:
        """Steps weights in place, in one pass over each leaf: `FusedRule.apply`."""
        return self.rule.apply


def zeros(params: PyTree) -> PyTree:
    """Moments: float32, like the params; float64 for float64."""

    def leaf(p):
        p = p if hasattr(p, "dtype") else jnp.asarray(p)
        return jnp.zeros_like(p, p.dtype if p.dtype == jnp.float64 else jnp.float32)

    return jax.tree.map(leaf, params)


def no_steps() -> Int[Array, ""]:
    """The count of a new state."""
    return jnp.zeros((), jnp.int32)


def unscale_by(grad_scale: ArrayLike | None) -> Float[Array, ""] | None:
    """What gradients are multiplied by, to divide them by a scale; None for 1."""
    return None if grad_scale is None else 1 / jnp.asarray(grad_scale, jnp.float32)


def check_numbers(optimizer: str, below: Mapping[str, float], values: Any) -> None:
    """Raises for attributes that are not numbers, or not from 0 to below their limit.

    Schedules and arrays are not looked at.
    """
    for name, limit in below.items():
        value = getattr(values, name)
        if isinstance(value, bool | str):
            raise TypeError(f"{optimizer}: {name} must be a number, got {value!r}.")
        if is_number(value) and not 0 <= value < limit:
            raise ValueError(f"{optimizer}: invalid {name}: {value}.")


def is_number(x: object) -> bool:
    """Whether `x` is a number of Python or NumPy, known now."""
    return isinstance(x, int | float | np.number)


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask by value, so that a transformation with one can be hashed."""

    leaves: tuple[bool, ...]
    structure: Any

    def __call__(self, params: PyTree) -> PyTree:
        del params
        return jax.tree.unflatten(self.structure, self.leaves)


def hashable_mask(mask: Mask) -> Mask:
    """`mask`, which may be a tree of bools, as something that hashes."""
    if mask is None or callable(mask):
        return mask
    leaves, structure = jax.tree.flatten(mask)
    return _Mask(tuple(_checked_bool(x) for x in leaves), structure)


def _checked_bool(leaf: Any) -> bool:
    if not isinstance(leaf, bool | np.bool_):
        raise TypeError(f"mask must hold bools, got {leaf!r}.")
    return bool(leaf)


def decays_by_mask(mask: Mask, params: PyTree) -> list[bool]:
    """Per leaf, whether it decays."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    tree = mask(params)
    try:
        full = jax.tree.broadcast(tree, params)
    except ValueError as error:
        raise ValueError(
            f"mask must be a tree of bools like the params, or a prefix of it: {error}"
        ) from None
    return [_checked_bool(leaf) for leaf in jax.tree.leaves(full)]


def _check_leaves(tree: PyTree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and not is_castable(leaf):
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is {leaf.dtype}: fused optimizers "
                "step float16, bfloat16, float32 and float64. Use optax for the rest: "
                "optax.multi_transform."
            )
