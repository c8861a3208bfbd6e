"""`ScaledGrads`: raw gradients of a scaled loss, with their scale and a finite flag."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jamp._core.show import counted, shown
from jamp._core.tree import all_finite, is_traced, widen_tree
from jamp._scaling import mapped_axis
from jamp._scaling.rules import LARGEST_SCALE, LossScaleState, lower_of, unscale_tree
from jamp._scaling.seal import Opened, opened, seal

NOT_A_TREE = (
    "ScaledGrads are not a tree of gradients: they are scaled, and may be inf. Pass "
    "them whole to `AmpState.apply_gradients(grads=grads)`, or take float32 gradients "
    "out with `tree, finite = grads.unscale()`."
)
_FIELDS = "tree scale finite loss_id groups scale_state overwrite".split()
_SAVED = ("tree", "scale", "finite", "scale_state", "overwrite")
_CHILDREN, _STATIC = ("tree", "sealed", "overwrite"), ("loss_id", "groups")


@dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)
class ScaledGrads:
    """Gradients of a scaled loss, with what it takes to unscale and check them.

    A pytree of the raw gradients and one leaf more, sealed: JAX raises a TypeError
    where it is computed with, as by `jax.tree.map(jnp.add, a, b)`, `lax.pmean(grads)`
    or `optax.global_norm(grads)`. Write what is meant:

    - `a + b` sums micro-batches of one loss, in float32 and at the scale of the first;
      begin a scan with `jamp.zero_grads`. `* k` and `/ k` act on the tree, in float32.
    - `grads.global_norm()`, `grads.clip_by_global_norm(1.0)`, `grads.pmean("data")`.
    - `grads.map(fn)` for any other function of a gradient.
    - `tree, finite = grads.unscale()`, and back with
      `grads.replace(tree=tree, scale=jnp.float32(1))`, which looks at the tree again.

    Attributes:
        tree: the raw scaled gradients, in the dtypes of the params. None where a param
            is not a float.
        scale: what to divide them by, shape (), float32: what the loss was multiplied
            by, until they are clipped or mapped.
        finite: whether the gradients are finite, shape (), bool: the raw ones were, and
            what users made of them is. Else the step is a skip, if the rule checks.
        raw_finite: whether the raw ones were, by which the loss scale moves; True where
            the rule does not check.
        loss_id: which loss scale it was.
        groups: the `wrt` that it was taken for; None for all groups.
        scale_state: with `redo_on_overflow`, what the loss scale has come to; the next
            step goes on from there.
        overwrite: by group, new values of Flax's `_overwrite_with_gradient`, which the
            gradients of fp8 params come with; `tree` is then like `params["params"]`.

    >>> import jax, jax.numpy as jnp, jamp, optax
    >>> params = {"w": jnp.ones(2)}
    >>> options = {"loss_scale": 1024, "verbosity": 0}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", **options)
    >>> grads = jamp.scaled_grad(lambda p, x: (p["w"] * x).sum(dtype="float32"))
    >>> total = grads(state, jnp.float16(0.25)) + grads(state, jnp.float16(0.5))
    >>> print(total.global_norm(), total.map(jnp.negative).unscale()[0]["w"])
    1.0606601 [-0.75 -0.75]
    >>> jax.tree.map(jnp.negative, total)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: neg does not accept dtype key<ScaledGrads: pass them whole, or ...
    """

    tree: Any
    sealed: Any
    loss_id: int
    groups: Any
    overwrite: Any
    _inside: ClassVar[Opened | None] = None  # of one that was made while tracing

    def __init__(
        self,
        tree: Any,
        scale: Float[Array, ""],
        finite: Bool[Array, ""],
        loss_id: int = 0,
        groups: Any = None,
        scale_state: LossScaleState | None = None,
        overwrite: Any = None,
    ):
        overwrite = {} if overwrite is None else overwrite
        _fill(self, tree=tree, loss_id=loss_id, groups=groups, overwrite=overwrite)
        _close(self, Opened(scale, finite, finite, scale_state))

    def __repr__(self) -> str:
        """One line: which loss, its scale, whether finite, how many; not the arrays."""
        groups = "" if self.groups is None else f", groups {self.groups!r}"
        try:
            seen = f"scale {shown(self.scale)}, finite {shown(self.finite)}"
        except RuntimeError:
            seen = "donated"
        return f"ScaledGrads(loss {self.loss_id}{groups}, {seen}: {counted(self.tree)})"

    @property
    def scale(self) -> Float[Array, ""]:
        """What to divide the tree by, shape (), float32."""
        return self._open().scale

    @property
    def finite(self) -> Bool[Array, ""]:
        """Whether all gradients are finite, shape (), bool."""
        return self._open().finite

    @property
    def raw_finite(self) -> Bool[Array, ""]:
        """Whether they were when they were computed, shape (), bool."""
        return self._open().raw_finite

    @property
    def scale_state(self) -> LossScaleState | None:
        """What the loss scale has come to, with `redo_on_overflow`; else None."""
        return self._open().scale_state

    def _open(self) -> Opened:
        return opened(self.sealed) if self._inside is None else self._inside

    def replace(self, **changes: Any) -> Self:
        """The same with other attributes; another tree is looked at again.

        An inf in a leaf that is not the one of before makes `finite` False, and with it
        the step a skip. What was not finite stays so, unless `finite=` says otherwise.

        Raises:
            TypeError: an unknown attribute.
        """
        if unknown := set(changes) - set(_FIELDS):
            raise TypeError(
                f"ScaledGrads have no attribute {sorted(unknown)[0]!r}; they have "
                f"{', '.join(_FIELDS)}."
            )
        if "finite" in changes:
            changes["raw_finite"] = changes["finite"]
        fresh = _changed(changes.get("tree", self.tree), self.tree)
        return self._edited(all_finite(fresh), **changes)

    def _edited(self, fits: Bool[Array, ""], /, **changes: Any) -> Self:
        """`replace`, where the caller knows whether what it made is finite."""
        inside = self._open()._asdict()
        inside |= {name: changes.pop(name) for name in inside if name in changes}
        inside["finite"] &= fits
        new = _fill(object.__new__(type(self)), **(vars(self) | changes))
        return _close(new, Opened(**inside))

    def unscale(self) -> tuple[PyTree, Bool[Array, ""]]:
        """Gradients in float32 divided by the scale, and whether they are finite."""
        return unscale_tree(self.tree, self.scale), self.finite

    def map(self, fn: Callable[[Array], Array]) -> Self:
        """The gradients after a function of one unscaled float32 gradient.

        `finite` stays False if it was, whatever `fn` made of an inf, and becomes False
        if `fn` made one.

        Args:
            fn: from an array to one of its shape.

        Returns:
            ScaledGrads at scale 1, in float32.

        >>> import jax.numpy as jnp, jamp, optax
        >>> state = jamp.initialize(jnp.ones(2), optax.sgd(1.0), "O2", verbosity=0)
        >>> grads = jamp.scaled_grad(lambda w: (3 * w).sum(dtype="float32") / 8)(state)
        >>> print(grads.map(lambda g: jnp.clip(g, -0.25, 0.25)).unscale()[0])
        [0.25 0.25]
        """
        before = unscale_tree(self.tree, self.scale)
        after = jax.tree.map(fn, before)
        finite = all_finite(_changed(after, before))
        return self._edited(finite, tree=after, scale=jnp.float32(1))

    def global_norm(self) -> Float[Array, ""]:
        """The square root of the sum of all squares, unscaled, shape (), float32.

        Of gradients that are not finite, inf or NaN. Inside of a `shard_map`, the norm
        of what this device holds.
        """
        return jnp.float32(optax.tree.norm(unscale_tree(self.tree, self.scale)))

    def clip_by_global_norm(self, max_norm: ArrayLike) -> Self:
        """The gradients times `min(1, max_norm / norm)`, by way of their scale.

        Of several losses that share an optimizer, clip inside of the optimizer.

        Args:
            max_norm: a positive number, of the unscaled gradients.

        Returns:
            ScaledGrads of the same tree at a larger scale; `finite` is False where
            float32 cannot hold the norm.

        Raises:
            ValueError: `max_norm` is not a positive number.

        >>> import jax.numpy as jnp, jamp, optax
        >>> state = jamp.initialize(jnp.ones(4), optax.sgd(1.0), "O2", verbosity=0)
        >>> grads = jamp.scaled_grad(lambda w: w.sum(dtype="float32") / 2)(state)
        >>> print(grads.global_norm(), grads.clip_by_global_norm(0.5).global_norm())
        1.0 0.5
        """
        if isinstance(max_norm, int | float) and not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}.")
        norm = self.global_norm()
        shrinks = norm > max_norm
        scale = jnp.where(shrinks, self.scale * (norm / max_norm), self.scale)
        # A larger scale has no reciprocal, and would make zeros.
        finite = jnp.isfinite(norm) & (scale <= LARGEST_SCALE)
        return self._edited(finite, scale=scale)

    def pmean(self, axis_name: Any) -> Self:
        """The mean over a mapped axis, in float32; not finite if one device is not so.

        `jamp.scaled_grad(..., axis_name=...)` does so itself, and must where params are
        replicated over a `shard_map` that checks: JAX has summed their gradients then,
        in half.

        Args:
            axis_name: of a `shard_map`, `pmap` or `vmap` around this.

        Returns:
            ScaledGrads in float32 at the lowest scale of any device.

        Raises:
            ValueError: `axis_name` is not bound, or gradients do not vary along it.
        """
        mapped_axis.check_bound(axis_name)
        mapped_axis.check_varies(self.tree, axis_name)
        scale, *flags, scale_state = self._open()
        lowest = jax.lax.pmin(scale, axis_name)
        rescaled = jax.tree.map(lambda x: x * (lowest / scale), widen_tree(self.tree))
        tree = jax.lax.pmean(rescaled, axis_name)
        fits = all_finite(tree)  # a sum may be too large for float32
        finite, raw_finite = (
            jax.lax.pmin(flag.astype(jnp.int32), axis_name) > 0 for flag in flags
        )
        return self._edited(
            fits,
            tree=tree,
            scale=lowest,
            finite=finite,
            raw_finite=raw_finite & fits,
            scale_state=jax.lax.pmin(scale_state, axis_name),
            overwrite=jax.lax.pmean(self.overwrite, axis_name),
        )

    def __add__(self, other: Any) -> Self:
        """Sums two gradients of one loss, in float32, at the scale of the first.

        Raises:
            TypeError: `other` is not ScaledGrads.
            ValueError: it belongs to another loss or other groups.
        """
        if not isinstance(other, ScaledGrads):
            raise TypeError(
                f"ScaledGrads add to ScaledGrads, got {type(other).__name__}. Begin a "
                "sum with `jamp.zero_grads(state)`."
            )
        if (self.loss_id, self.groups) != (other.loss_id, other.groups):
            raise ValueError(
                "ScaledGrads of different losses or groups do not add: loss_id "
                f"{self.loss_id} and {other.loss_id}, groups {self.groups} and "
                f"{other.groups}. Pass both: `apply_gradients(grads=(a, b))`."
            )
        # One, unless the scale moved between the two.
        ratio = self.scale / other.scale
        total = jax.tree.map(
            lambda a, b: a + b * ratio.astype(b.dtype),
            widen_tree(self.tree),
            widen_tree(other.tree),
        )
        its = other._open()
        return self._edited(
            its.finite,
            tree=total,
            overwrite=other.overwrite,  # later values replace earlier ones
            raw_finite=self.raw_finite & its.raw_finite,
            scale_state=lower_of(self.scale_state, its.scale_state),
        )

    def __radd__(self, other: Any) -> Self:
        """`sum(several)` begins with 0."""
        return self if type(other) is int and other == 0 else self.__add__(other)

    def __mul__(self, factor: Any) -> Self:
        """Multiplies the tree, in float32; the scale stays."""
        _check_factor(factor)
        return self._scaled(lambda x: x * factor, factor)

    def __truediv__(self, divisor: Any) -> Self:
        """Divides the tree, in float32; the scale stays."""
        _check_factor(divisor)
        return self._scaled(lambda x: x / divisor, 1 / jnp.float32(divisor))

    __rmul__ = __mul__

    def _scaled(self, fn: Callable[[Array], Array], factor: Any) -> Self:
        tree = jax.tree.map(fn, widen_tree(self.tree))
        return self._edited(jnp.isfinite(factor), tree=tree)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(NOT_A_TREE)

    # Flax's TrainState asks `"..." in grads`; people index. Both would go on silently.
    __getitem__: ClassVar[Any] = _refuse
    __contains__: ClassVar[Any] = _refuse
    __iter__: ClassVar[Any] = _refuse
    __len__: ClassVar[Any] = _refuse


def _fill[T](grads: T, **fields: Any) -> T:
    """Sets fields of ScaledGrads, which are frozen."""
    vars(grads).update(fields)
    return grads


def _close[T](grads: T, inside: Opened) -> T:
    """Seals what is inside.

    While a step is traced it stays at hand too, until JAX takes the gradients apart: so
    that the compiled step is what it would be without a seal.
    """
    inside = Opened(
        jnp.asarray(inside.scale, jnp.float32),
        jnp.asarray(inside.finite),
        jnp.asarray(inside.raw_finite),
        inside.scale_state,
    )
    sealed = seal(*inside)
    return _fill(grads, sealed=sealed, _inside=inside if is_traced(sealed) else None)


def _flatten(grads: ScaledGrads) -> Any:
    children = ((jax.tree_util.GetAttrKey(n), getattr(grads, n)) for n in _CHILDREN)
    return tuple(children), (grads.loss_id, grads.groups)


def _unflatten(static: Any, children: Any) -> ScaledGrads:
    fields = zip((*_CHILDREN, *_STATIC), (*children, *static), strict=True)
    return _fill(object.__new__(ScaledGrads), **dict(fields))


jax.tree_util.register_pytree_with_keys(ScaledGrads, _flatten, _unflatten)


def _to_state_dict(grads: ScaledGrads) -> dict[str, Any]:
    to = flax.serialization.to_state_dict
    return {name: to(getattr(grads, name)) for name in _SAVED}


def _from_state_dict(target: ScaledGrads, saved: dict[str, Any]) -> ScaledGrads:
    restored: Any = flax.serialization.from_state_dict
    fields = {n: restored(getattr(target, n), saved[n], name=n) for n in _SAVED}
    return ScaledGrads(**fields, loss_id=target.loss_id, groups=target.groups)


flax.serialization.register_serialization_state(
    ScaledGrads, _to_state_dict, _from_state_dict
)


def _changed(new: PyTree, old: PyTree) -> list[Any]:
    """The leaves of `new` that are not the very ones of `old`."""
    same = {id(x) for x in jax.tree.leaves(old)}
    return [x for x in jax.tree.leaves(new) if id(x) not in same]


def _check_factor(factor: Any) -> None:
    if not (isinstance(factor, int | float) or getattr(factor, "shape", None) == ()):
        raise TypeError(
            f"ScaledGrads take a scalar factor, got {type(factor).__name__}."
        )
