"""`eight_bit` stores the moments of any optax transformation in 8 bits."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jamp._core.dtypes import FLOAT32, is_castable, widen
from jamp._core.groups import check_transformation
from jamp._core.path_rules import PathRule, check_rules, matches, parse_rules
from jamp._core.tree import KeyPath, path_string
from jamp.optimizers import _codes as codes
from jamp.optimizers._fused import FusedTransformation, Transformation, leaf_salts
from pallas_kernels import keys_of, noise_like, stochastic


class EightBitState(NamedTuple):
    """State of `eight_bit`.

    Attributes:
        count: steps taken, shape (), int32.
        inner_state: the state of the wrapped transformation. An encoded moment is a
            pair of `codes` and `scales`.
    """

    count: Int[Array, ""]
    inner_state: Any


def eight_bit(
    tx: optax.GradientTransformation,
    exempt: Any = None,
    *,
    first: Sequence[str] = ("mu",),
    second: Sequence[str] = ("nu", "nu_max", "sum_of_squares"),
    momentum: Sequence[str] = ("trace",),
) -> Transformation:
    r"""Stores the moments of an optax transformation in 8 bits per element.

    The last axis is split into blocks of 256 elements, or else 128 or 64. Each block
    has its largest magnitude as a float32 scale. A first moment is stored as
    `float8_e4m3fn`, the root of a second moment as a float with 4 exponent and 4
    mantissa bits, and a momentum as a signed square. All are rounded stochastically by
    a hash of step, path and element, so their means are right. A positive second moment
    never becomes 0.

    Moments of fewer than 4,096 elements, and of a last axis without such blocks, are
    bfloat16. `tx` gets float32 moments.

    Args:
        tx: an optax transformation. A fused optimizer gets `moment_dtype="8bit"`, and
            steps in one pass.
        exempt: a regex that is searched in the paths of params, a predicate `(path,
            param) -> bool`, or a list of them. The moments of these params do not
            change.
        first, second, momentum: the fields of the states in `tx` that hold moments:
            those that a root divides or whose sign is taken, those that are not
            negative, and those that are the update. Other fields do not change.

    Returns:
        A transformation. Two with the same arguments are equal and have the same hash.

    Raises:
        TypeError: `tx` is not a transformation; or, in `init`, a param is float64 or
            complex.
        ValueError: in `init`, the state has no such fields, or a regex of `exempt`
            matches no path; or a fused `tx` has no moments in 8 bits.

    >>> import jax.numpy as jnp, optax
    >>> params, tx = {"w": jnp.ones((64, 256))}, eight_bit(optax.lion(1e-2))
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.ones((64, 256))}, state, params)
    >>> mu = state.inner_state[0].mu["w"]
    >>> print(mu.codes.dtype, mu.codes.shape, mu.scales.shape, f"{mu.value[0, 0]:.3f}")
    float8_e4m3fn (64, 256) (64, 1) 0.010
    """
    check_transformation("eight_bit", tx)
    rules = () if exempt is None else parse_rules("exempt", exempt)
    if isinstance(tx, FusedTransformation):
        return tx.replace(moment_dtype="8bit", exempt=rules)
    formats = {codes.FIRST: first, codes.SECOND: second, codes.MOMENTUM: momentum}
    names = tuple((name, dtype) for dtype, xs in formats.items() for name in xs)
    return Transformation.from_rule(_EightBitRule(tx, rules, names))


@dataclasses.dataclass(frozen=True)
class _EightBitRule:
    tx: optax.GradientTransformation
    exempt: tuple[PathRule, ...]
    names: tuple[tuple[str, Any], ...]

    def init(self, params: PyTree) -> EightBitState:
        check_rules("exempt", self.exempt, params)
        by_path = dict(jax.tree_util.tree_leaves_with_path(params))
        for path, param in by_path.items():
            codes.check_dtype(path, param)
        found = []

        def leaf(path: KeyPath, x: Any) -> Any:
            dtype, of = self._moment(path)
            if dtype is None or of not in by_path or not is_castable(x):
                return x
            param = by_path[of]
            if jnp.shape(param) != x.shape:
                return x
            found.append(path)
            if matches(self.exempt, path_string(of), param):
                return x
            if codes.block_of(x) is None:
                return x.astype(jnp.bfloat16)
            return codes.encoded(widen(x), dtype)

        inner = jax.tree.map_with_path(leaf, self.tx.init(params))
        if not found:
            raise ValueError(
                f"eight_bit: no state of {self.tx} has a field of {[*dict(self.names)]}"
                " like the params. Name its moments with first=, second= or momentum=."
            )
        return EightBitState(jnp.zeros((), jnp.int32), inner)

    def update(self, updates, state, params=None, **extra_args):
        tx, count = optax.with_extra_args_support(self.tx), state.count
        is_leaf = codes.is_eight_bit
        old = state.inner_state
        wide = jax.tree.map_with_path(self._widened, old, is_leaf=is_leaf)
        updates, new = tx.update(updates, wide, params, **extra_args)
        before, structure = jax.tree.flatten(old, is_leaf=is_leaf)
        keys = keys_of(count, leaf_salts(structure))
        after = map(_narrowed, structure.flatten_up_to(new), before, keys)
        count = jnp.asarray(optax.safe_increment(count))
        return updates, EightBitState(count, structure.unflatten(after))

    def _moment(self, path: KeyPath) -> tuple[Any, KeyPath]:
        """Returns the format of a leaf, or None, and the path of its param."""
        for i, key in enumerate(path):
            name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else None
            if name in dict(self.names):
                return dict(self.names)[name], path[i + 1 :]
        return None, ()

    def _widened(self, path: KeyPath, x: Any) -> Any:
        if codes.is_eight_bit(x):
            return x.value
        return widen(x) if self._moment(path)[0] is not None else x


def _narrowed(new: Any, old: Any, key: Array) -> Any:
    """Returns a leaf of the new state in the format of the old one."""
    if codes.is_eight_bit(old):
        new = widen(new)
        return codes.encoded(new, old.codes.dtype, noise_like(new, key).bits(0))
    if getattr(old, "dtype", None) == jnp.bfloat16 and new.dtype == FLOAT32:
        return stochastic(new, key)
    return new
