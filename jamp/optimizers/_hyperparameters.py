"""The hyperparameters of every optimizer here: their ranges, the rate, the mask."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, PyTree
from typing_extensions import TypeIs

from jamp._core.layout import Structure
from jamp._core.show import short_repr
from pallas_kernels import Options, check_backend

type Mask = PyTree | Callable[[PyTree], PyTree] | None
type Count = Int[Array, ""]
# The numbers of a formula by name, of shape (), or (n,) for one per leaf.
type Scalars = dict[str, ArrayLike]
_NUMBERS = int | float | np.number
type ScalarOrSchedule = float | Array | Callable[[Array], Any]


def number(below: float = math.inf, optional: bool = False, **kwargs: Any) -> Any:
    """Makes a field for a number in [0, below), and for None if `optional`."""
    return dataclasses.field(metadata={"below": below, "optional": optional}, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The hyperparameters of every optimizer here.

    `shardings` has one NamedSharding per leaf for a mesh of Auto axes, or is None.
    """

    name: ClassVar[str]

    learning_rate: ScalarOrSchedule = number()
    weight_decay: ArrayLike = number()
    mask: Mask
    backend: str
    shardings: Any = None

    def __post_init__(self):
        check_backend(self.backend)
        if self.mask is not None and not callable(self.mask):
            leaves, structure = jax.tree.flatten(self.mask)
            mask = _MaskByValue(tuple(map(_checked_bool, leaves)), structure)
            object.__setattr__(self, "mask", mask)
        for field in dataclasses.fields(self):
            if "below" in field.metadata:
                self._check_number(field.name, **field.metadata)

    def _check_number(self, name: str, below: float, optional: bool) -> None:
        value: Any = getattr(self, name)
        is_schedule = name == "learning_rate" and callable(self.learning_rate)
        if is_schedule or (optional and value is None):
            return
        if isinstance(value, bool) or not is_one(value):
            raise self._not_one(name, value)
        if is_number(value) and not 0 <= value < below:
            most = "finite" if below == math.inf else f"less than {below}"
            raise ValueError(
                f"{self.name}: {name} must be at least 0 and {most}, got {value}."
            )

    def _not_one(self, name: str, value: object) -> TypeError:
        text = f"{self.name}: {name} must be a number, got {short_repr(value)}."
        return TypeError(text)

    def rate(self, count: Count, dtype: DTypeLike) -> Float[Array, ""]:
        """Returns the learning rate of the step after `count` steps."""
        rate = self.learning_rate
        if callable(rate):
            rate = rate(count)
            if not is_one(rate):
                raise self._not_one("the result of the schedule", rate)
        return jnp.asarray(rate, dtype)

    def options(
        self,
        grad_scale: ArrayLike | None = None,
        skip: ArrayLike | None = None,
        dtype: DTypeLike = "float32",
    ) -> Options:
        """Returns the options of kernels for gradients that have a scale."""
        for name, value in (("grad_scale", grad_scale), ("found_inf", skip)):
            if isinstance(value, tuple | list) or getattr(value, "shape", ()):
                raise self._not_one(name, value)
        unscale = None
        if grad_scale is not None:
            unscale = 1 / jnp.asarray(grad_scale, dtype)
        if skip is not None:
            skip = jnp.asarray(skip).astype(bool)
        return Options(unscale, skip, self.backend, self.shardings)

    def decays(self, structure: Structure, params: Sequence[Any]) -> list[bool]:
        """Returns whether each leaf decays."""
        decays = [True] * len(params)
        if self.mask is not None:
            tree = structure.unflatten(params)
            decays = _bools_like(tree, self.mask(tree))
        if is_zero(self.weight_decay):
            decays = [False] * len(decays)  # a decay of 0 then costs nothing
        return decays


def is_one(x: object) -> bool:
    """Returns whether `x` is one number, either known or traced."""
    return is_number(x) or getattr(x, "shape", None) == ()


def is_number(x: object) -> TypeIs[int | float | np.number]:
    """Returns whether `x` is a number of Python or NumPy, and not traced."""
    return isinstance(x, _NUMBERS)


def is_zero(x: object) -> bool:
    """Returns whether `x` is 0, and not traced."""
    return isinstance(x, _NUMBERS) and bool(x == 0)


@dataclasses.dataclass(frozen=True)
class _MaskByValue:
    """A mask that hashes by value, so that a transformation with a mask does too."""

    leaves: tuple[bool, ...]
    structure: Any

    def __call__(self, params: PyTree) -> PyTree:
        return jax.tree.unflatten(self.structure, self.leaves)


def _bools_like(params: PyTree, mask: PyTree) -> list[bool]:
    """Expands a mask to one bool for each leaf of the params."""
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(mask, params))
    except ValueError as error:
        raise ValueError(
            f"mask must be a tree of bools like the params, or a prefix of it: {error}"
        ) from None
    return list(map(_checked_bool, leaves))


def _checked_bool(leaf: Any) -> bool:
    if not isinstance(leaf, bool | np.bool_):
        raise TypeError(f"mask must hold bools, got {leaf!r}.")
    return bool(leaf)
