"""Rules of fused optimizers, and their optax transformations.

A rule is a frozen dataclass of hyperparameters. It steps lists of leaves with kernels.
"""

import copy
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jamp._core.dtypes import is_castable
from jamp._core.layout import Structure
from jamp._core.path_rules import PathRule, check_rules, matches
from jamp._core.show import kind
from jamp._core.transformation import Transformation as Transformation
from jamp._core.tree import KeyPath, check_like, path_parts, path_string
from jamp.optimizers import _codes as codes
from jamp.optimizers._hyperparameters import (
    Count as Count,
    Hyperparameters as Hyperparameters,
    Mask as Mask,
    ScalarOrSchedule as ScalarOrSchedule,
    Scalars as Scalars,
    is_number as is_number,
    is_zero as is_zero,
    number as number,
)
from pallas_kernels import (
    Leaves,
    Options,
    Rule,
    Weight,
    found_inf as found_inf_of,
    keys_of,
    noise_like,
    norm as norm_of,
    step,
    width_of as width_of,
)

_REMEDY = "make it with the `init` of this optimizer, from these params."
EIGHT_BIT = "8bit"
_MOMENTS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


_NOT_IN_FORMULAS = ("mask", "shardings", "exempt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedRule(Hyperparameters, Rule):
    """The hyperparameters of all fused optimizers, and their step of a tree."""

    state: ClassVar[Any]  # a NamedTuple of `count` and trees like the params
    per_leaf: ClassVar[tuple[str, ...]] = ()  # the trees with one number per leaf
    static: ClassVar[Any]
    has_eight_bit: ClassVar[bool] = False

    bias_correction: bool = False
    max_grad_norm: ArrayLike | None = number(optional=True, default=None)
    moment_dtype: Any = "float32"  # or bfloat16 or "8bit"
    exempt: tuple[PathRule, ...] = ()  # leaves whose moments "8bit" keeps in float32

    def __post_init__(self):
        super().__post_init__()
        if self.has_eight_bit and self.moment_dtype == EIGHT_BIT:
            if self.backend != "xla":
                raise ValueError(
                    f"{self.name}: moment_dtype='8bit' needs backend='xla', got "
                    f"{self.backend!r}."
                )
        elif self.moment_dtype in _MOMENTS:
            object.__setattr__(self, "moment_dtype", jnp.dtype(self.moment_dtype))
        else:
            also = ", or '8bit'" if self.has_eight_bit else ""
            raise ValueError(
                f"{self.name}: moment_dtype must be 'float32' or 'bfloat16'{also}, got "
                f"{self.moment_dtype!r}."
            )
        # The rule without its numbers, which may be traced. Rules that differ only in
        # their numbers run the same compiled formula.
        static = copy.copy(self)
        for field in dataclasses.fields(self):
            if "below" in field.metadata or field.name in _NOT_IN_FORMULAS:
                object.__setattr__(static, field.name, None)
        object.__setattr__(self, "static", static)

    def moments(self, params: PyTree) -> tuple[PyTree, ...]:
        """Returns the moments of a new state, which are zeros."""
        return tuple(self.zeros(params, name) for name in self.state._fields[1:])

    def zeros(self, params: PyTree, name: str = "") -> PyTree:
        """Returns zeros like the params, in float64 for float64 params."""

        def leaf(path, p):
            p = p if hasattr(p, "dtype") else jnp.asarray(p)
            if self.moment_dtype == EIGHT_BIT:
                return self._eight_bit_zeros(path, p, name)
            is_wide = p.dtype == jnp.float64
            return jnp.zeros_like(p, p.dtype if is_wide else self.moment_dtype)

        return jax.tree.map_with_path(leaf, params)

    def _eight_bit_zeros(self, path: KeyPath, p: Array, name: str) -> Any:
        """Returns the first moment or second moment (`nu`) of a param."""
        codes.check_dtype(path, p)
        if matches(self.exempt, path_string(path), p):
            return jnp.zeros_like(p, jnp.float32)
        if codes.block_of(p) is None:
            return jnp.zeros_like(p, jnp.bfloat16)
        if name == "mu":  # relative to `nu`
            return jnp.zeros_like(p, codes.FIRST)
        return codes.zeros_like(p, codes.SECOND if name == "nu" else codes.MOMENTUM)

    def numbers(self, count: Count, leaves: Leaves, options: Options) -> Scalars:
        """Returns the numbers that `formula` takes after `count` steps.

        A number with the name of a tree in the state is the new value of the tree.
        """
        raise NotImplementedError

    def correction(self, b: ArrayLike, count: Count, dtype: DTypeLike) -> Array | float:
        """Returns 1 - b^t at step t = count + 1, or 1 without bias correction.

        It uses logarithms, because 1 - 0.999 in float32 has an error of 1e-5.
        """
        if not self.bias_correction:
            return 1.0
        if isinstance(b, int | float):
            log = math.log(b) if b > 0 else -math.inf
        else:
            log = jnp.log(jnp.asarray(b, dtype))
        return -jnp.expm1((count.astype(dtype) + 1) * log)

    def clipped(self, options: Options, grads: Sequence[Array]) -> Options:
        """Returns options whose `unscale` clips gradients by their norm.

        A `max_grad_norm` of 0 clips nothing. `optax.inject_hyperparams` passes it as an
        array, whose value is unknown here.
        """
        most: Any = self.max_grad_norm
        if is_zero(most):
            return options
        factor = self.clip_factor(norm_of(grads, options=options), most)
        if not is_number(most):
            factor = jnp.where(most == 0, 1, factor)
        if options.unscale is not None:
            factor = options.unscale * factor.astype(options.unscale.dtype)
        return options._replace(unscale=factor)

    def clip_factor(self, norm: Float[Array, ""], most: ArrayLike) -> Array:
        """Returns the factor that limits the norm of the gradients to `most`."""
        # As in apex, a comparison with NaN is false.
        return jnp.where(norm > most, most / norm, 1)

    def init(self, params: PyTree) -> Any:
        """Implements optax's `init`."""
        _check_leaves(params, "params")
        check_rules("exempt", self.exempt, params)
        return self.state(jnp.zeros((), jnp.int32), *self.moments(params))

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
        """Implements optax's `update`."""
        check_step(self.name, updates, params)
        _check_leaves(updates, "gradients")
        grads, structure = jax.tree.flatten(updates)
        weights = [Weight(jnp.asarray(p)) for p in jax.tree.leaves(params)]
        how: Any = {"grad_scale": grad_scale, "skip": found_inf, "only_updates": True}
        new, state = self.apply(structure, grads, state, weights, **how)
        return structure.unflatten(new), state

    def apply(
        self,
        structure: Structure,
        grads: Sequence[Any],
        state: PyTree,
        weights: Sequence[Weight],
        *,
        grad_scale: ArrayLike | None = None,
        skip: ArrayLike | None = None,
        rounds: bool = False,
        group: Hashable = None,
        only_updates: bool = False,
    ) -> tuple[list[Any], Any]:
        """Steps weights in one pass over each leaf.

        Args:
            structure: the structure of the params.
            grads, state: the gradients, still times `grad_scale`, and the state.
            weights: one `pallas_kernels.Weight` per gradient.
            grad_scale: see `fused_adam`.
            skip: `found_inf` of `fused_adam`.
            rounds: whether to round bfloat16 weights without masters stochastically.
            group: the key of the group of these weights, for the random bits.
            only_updates: whether to return updates instead of new weights.
        """
        rounds_some = rounds or self.moment_dtype != jnp.float32
        salts = leaf_salts(structure, group) if rounds_some else None
        grads, params = list(map(jnp.asarray, grads)), [w.param for w in weights]
        if not isinstance(state, self.state):
            raise TypeError(
                f"{self.name}: the state must be a {self.state.__name__}, got "
                f"{kind(state)}: {_REMEDY}"
            )
        trees = {}
        for name, tree in zip(state._fields[1:], state[1:], strict=True):
            if tree is not None:
                like = None if name in self.per_leaf else params
                trees[name] = self._leaves_of(name, tree, structure, like)
        dtype = width_of(params)
        options = self.options(grad_scale, skip, dtype)
        if self.max_grad_norm is not None:
            options = self.clipped(options, grads)
        old = trees
        if self.moment_dtype == EIGHT_BIT:
            trees = _by_leaf(_widened, old)
        leaves = Leaves(weights, grads, trees, self.decays(structure, params), dtype)
        numbers: dict[str, Any] = {**self.numbers(state.count, leaves, options)}
        new = {
            name: [
                x.astype(old.dtype)
                for x, old in zip(numbers.pop(name), trees[name], strict=True)
            ]
            for name in trees
            if name in numbers
        }
        leaves = leaves._replace(moments={n: trees[n] for n in trees if n not in new})
        how: Any = {"count": state.count, "salts": salts, "rounds": rounds}
        how["only_updates"] = only_updates
        stepped, moments = step(self.static, leaves, numbers, options, **how)
        if self.moment_dtype == EIGHT_BIT and moments:
            scales = self._scales(leaves, numbers, options, old)
            keys = keys_of(state.count, salts or ())
            narrowed = functools.partial(_narrowed, options.skip)
            moments = _by_leaf(narrowed, moments, old, keys, scales)
        new = {name: structure.unflatten(x) for name, x in (new | moments).items()}
        count = optax.safe_increment(state.count)
        if options.skip is not None:
            count = jnp.where(options.skip, state.count, count)
        return stepped, state._replace(count=count, **new)

    def most_second(
        self, s: Any, decays: bool, g: Array, weight: Weight, v: Array
    ) -> Array:
        """Returns a bound of the new second moments of each block.

        `g` and `v` are bounds of the gradients and the old moments.
        """
        raise NotImplementedError

    def _scales(
        self, leaves: Leaves, numbers: Any, options: Options, old: Any
    ) -> list[Any]:
        """Returns bounds of the roots of the second moments in each block.

        The maximum of the new moments would be tighter. But XLA would need a second
        kernel that reads gradients and moments again.
        """
        numbers = {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
        scales = []
        for k, nu in enumerate(old.get("nu", [None] * len(leaves.grads))):
            bound = None
            if codes.is_eight_bit(nu):
                g = codes.largest(leaves.grads[k])
                if options.unscale is not None:
                    g = g * options.unscale
                given = leaves.decays[k], g, leaves.weights[k], nu.scales * nu.scales
                bound = jnp.sqrt(self.most_second(numbers, *given))
            scales.append(bound)
        return scales

    def _leaves_of(
        self, name: str, tree: PyTree, structure: Structure, like: list[Array] | None
    ) -> list[Array]:
        """Returns the leaves of a tree of the state. It has the shapes of `like`."""
        is_leaf = codes.is_eight_bit if self.moment_dtype == EIGHT_BIT else None
        leaves, found = jax.tree.flatten(tree, is_leaf=is_leaf)
        fits = found == structure
        if fits and like is not None:
            fits = [x.shape for x in leaves] == [x.shape for x in like]
        if not fits:
            numbers = [np.float32(0)] * structure.num_leaves
            expected = structure.unflatten(numbers if like is None else like)
            check_like(tree, expected, f"{self.name}: `state.{name}`", _REMEDY)
        return leaves


class FusedTransformation(Transformation):
    """An optax transformation that can also step weights in one pass."""

    def replace(self, **changes: Any) -> Self:
        """Returns the same optimizer with other hyperparameters."""
        return type(self).from_rule(dataclasses.replace(self.rule, **changes))

    def all_finite(
        self, grads: PyTree, grad_scale: ArrayLike | None = None
    ) -> Bool[Array, ""]:
        """Returns whether no gradient is inf or NaN.

        It first divides the gradients by `grad_scale` in float32, like the step,
        because a finite gradient may overflow at a scale below 1.
        """
        leaves, rule = jax.tree.leaves(grads), self.rule
        if rule.moment_dtype == EIGHT_BIT and "nu" in rule.state._fields:
            # The step reads these maxima too, so this check reads no more gradients.
            has_blocks = [codes.block_of(g) is not None for g in leaves]
            pairs = zip(leaves, has_blocks, strict=True)
            leaves = [codes.largest(g) if blocks else g for g, blocks in pairs]
        return ~found_inf_of(leaves, options=rule.options(grad_scale))


def _by_leaf(fn: Callable[..., Any], *args: Any) -> dict[str, list[Any]]:
    """Calls `fn` once for each leaf, with dicts of its moments and items of lists."""
    lists = [
        [dict(zip(x, leaf, strict=True)) for leaf in zip(*x.values(), strict=True)]
        if isinstance(x, Mapping)
        else x
        for x in args
    ]
    results = [fn(*leaf) for leaf in zip(*lists, strict=True)]
    return {name: [leaf[name] for leaf in results] for name in args[0]}


_widened = jax.jit(codes.widened)


@jax.jit
def _narrowed(skip, wide, old, key, scales):
    noise = noise_like(next(iter(wide.values())), key)
    return codes.narrowed(wide, old, noise, scales, skip)


@functools.lru_cache(maxsize=64)
def leaf_salts(structure: Structure, group: Hashable = None) -> tuple[int, ...]:
    """Returns a 32-bit number per leaf, from its path and the key of its group.

    It is a checksum, because Python's `hash` differs between processes.
    """
    prefix = "" if group is None else f"{group!r}:"
    tree = structure.unflatten(range(structure.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [prefix + "/".join(path_parts(path)) for path, _ in leaves]
    return tuple(zlib.crc32(name.encode()) for name in names)


def check_step(name: str, updates: PyTree, params: PyTree | None) -> None:
    """Raises unless an optimizer's `update` got params, and updates of their shapes."""
    if params is None:
        raise ValueError(
            f"{name} needs the params: call `update(grads, state, params)`."
        )
    check_like(updates, params, "updates", "they must match the params.")


def _check_leaves(tree: PyTree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and not is_castable(leaf):
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is {leaf.dtype}: fused optimizers "
                "step float16, bfloat16, float32 and float64. Use optax for the rest: "
                "optax.multi_transform."
            )
