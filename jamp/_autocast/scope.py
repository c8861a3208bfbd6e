"""Policies, scopes, rules of equations, and dtypes of variables."""

import dataclasses
import functools
import math
import operator
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.lists import (
    AutocastLists,
    What,
    last_of,
    rule_of,
    rule_of_function,
    rule_of_library,
    rules_for,
)
from jamp._autocast.marks import KERNEL, MARKERS, NO_FP8, Source
from jamp._autocast.primitives import Rule
from jamp._autocast.subjaxprs import subjaxprs_of
from jamp._core.dtypes import FLOAT32

type Atom = jc.Var | jc.Literal

# Reasons why a matmul runs in float32, in place of a region's name.
PRECISION = "precision="  # it requests float32
KEPT = "kept="  # its weight is a param that the level keeps in float32
NO_MODEL = "model="  # no operand depends on half params

_RULES = {marker: rule for rule, marker in MARKERS.items()} | {KERNEL: Rule.RECORDED}
# A mark is a whole scope of a name stack. JAX writes transformations around it, as in
# "a/vmap(jvp(mark))/b". Parentheses after a mark contain the listed function that set
# it.
_MARK = r"(?:(?<=/)|^)(?:\w+\()*({})(?:\(([^()]*)\))?\)*(?=/|$)"
_MARKER = re.compile(_MARK.format("|".join(_RULES)))
_NO_FP8 = re.compile(_MARK.format(NO_FP8))


@dataclasses.dataclass(frozen=True)
class Policy:
    """The options of an autocast."""

    dtype: Any  # the half dtype
    lists: AutocastLists  # the user's additions to the table
    promote: str  # "widest" or "narrowest", for operations whose operands differ
    # Whether autocast casts only matmuls with half params.
    of_model: bool = False
    fp8: Any = None  # a `Products` of `_fp8`, where matmuls run in fp8
    marked: bool = False  # whether the params have marks


class Scope(NamedTuple):
    """The context of an equation in the user's program."""

    policy: Policy
    names: str = ""  # the name stack of the equations around it
    library: str = ""  # the listed JAX function that contains it, if any
    loop: bool = False  # whether it is in a scan's body; a scan stacks residuals
    derived: bool = False  # whether it is in a function with a custom derivative
    within: Source = Source.DATA  # the sources of values about which nothing is known
    carried: bool = False  # whether a loop carries unknown values in float32
    may_hold: bool = True  # whether JAX allows the jaxpr to hold constant arrays
    cache: dict[Any, Any] = {}  # what was written in this call of `autocast`

    @property
    def key(self) -> Any:
        """Returns a key; in scopes with equal keys, `rewrite` gives equal jaxprs.

        It drops the two fields that are constant in one call of `autocast`.
        """
        names: Any = self.names
        if not rules_for(self.policy.lists, What.REGION):
            names = tuple(_MARKER.findall(names)), disables_fp8(names)
        return self._replace(policy=None, cache=None, names=names)

    def scope_inside(self, eqn: jc.JaxprEqn) -> "Scope":
        """Returns the scope of the jaxprs that an equation contains."""
        names = name_stack(self, eqn)
        may_hold = eqn.primitive.name in ("jit", "scan", "while", "cond")
        self = self._replace(names=names, may_hold=may_hold)
        if any(sub.has_derivative for sub in subjaxprs_of(eqn)):
            return self._replace(derived=True)
        if eqn.primitive.name != "jit":
            # JAX cannot differentiate a `while` in reverse mode.
            return self._replace(loop=self.loop or eqn.primitive.name == "scan")
        lists, library, name = self.policy.lists, self.library, eqn.params["name"]
        path = jax_internals.jitted_function(eqn)
        rule = rule_of_function(lists, name, is_jax=bool(path))
        if path and not library:  # the outermost function decides
            paths = [path, *jax_internals.calling_functions(eqn)]
            by_place, library = rule_of_library(lists, paths, whole=True)
            rule, name = (by_place, library) if rule is None else (rule, name)
        names = f"{names}/{MARKERS[rule]}({name})" if rule else names
        return self._replace(names=names, library=library)


def name_stack(scope: Scope, eqn: jc.JaxprEqn) -> str:
    """Returns the whole name stack of an equation."""
    return f"{scope.names}/{jax_internals.scopes(eqn)}"


def disables_fp8(names: str) -> bool:
    """Returns whether a name stack contains the mark of `disable_fp8`."""
    return _NO_FP8.search(names) is not None


def ruling(
    scope: Scope, eqn: jc.JaxprEqn, name: str, found: tuple[Rule | None, str] | None
) -> tuple[Rule | None, str]:
    """Returns the rule for an equation, and the region that sets it, or "".

    `found` is its `region_rule`. The rule is None for a primitive that no list
    contains.
    """
    listed = rule_of(scope.policy.lists, name)
    if name == "convert_element_type" and is_float32(eqn.invars[0]):
        if is_float32(eqn.outvars[0]):
            listed = Rule.MOVE  # it only removes a weak type
    region, where = found or (None, "")
    # Autocast does not change an unknown primitive in a float32 region.
    as_recorded = region is Rule.FLOAT32 and listed is None
    if region is Rule.RECORDED or as_recorded:
        return Rule.RECORDED, where
    if found is None and listed is Rule.HALF and not scope.library:
        paths = jax_internals.calling_functions(eqn)
        region, where = rule_of_library(scope.policy.lists, paths)
    if region is None and "precision" in eqn.params and _wants_float32_matmul(eqn):
        return Rule.FLOAT32, PRECISION
    if listed is None or listed is Rule.RECORDED or region is None:
        return listed, ""
    if (region, listed) == (Rule.PROMOTE, Rule.MOVE):
        return Rule.MOVE, where
    return region, where


def _wants_float32_matmul(eqn: jc.JaxprEqn) -> bool:
    """Returns whether a matmul requests a precision that half operands do not have.

    This is `HIGHEST` for an operand, or an algorithm that reads more bits than half
    has. With "high" and "default", the backend decides.
    """
    precision = eqn.params["precision"]
    if precision is None or not all(map(is_float32, eqn.invars[:2])):
        return False  # the user cast an operand
    if isinstance(precision, lax.DotAlgorithm):
        names = precision.lhs_precision_type, precision.rhs_precision_type
        counts = precision.lhs_component_count, precision.rhs_component_count
        return max(counts) > 1 or any(jnp.finfo(name).bits > 16 for name in names)
    if isinstance(precision, lax.DotAlgorithmPreset):
        # A name states the types of the operands and of the sum, and the number of
        # half matmuls that compute the result.
        return re.search(r"^T?F(32|64)|_X\d$", precision.name) is not None
    return isinstance(precision, tuple) and lax.Precision.HIGHEST in precision


def dtype_of(atom: Atom) -> Any:
    """Returns the dtype in the user's program, or None for a value such as a token."""
    aval: Any = atom.aval
    try:
        return aval.dtype  # `getattr` would take twice as long
    except AttributeError:
        return None


def recorded(atoms: Sequence[Atom]) -> list[Any]:
    """Returns the dtypes of several values in the user's program."""
    return [dtype_of(v) for v in atoms]


def dtypes_of(atoms: Sequence[Atom]) -> tuple[str, ...]:
    """Returns the names of the dtypes of the values that have one."""
    return tuple(str(dtype) for dtype in map(dtype_of, atoms) if dtype is not None)


def size_of(atom: Atom) -> int:
    """Returns the number of elements of a value."""
    aval: Any = atom.aval
    try:
        return size_of_shape(aval.shape)  # `aval.size` is slower
    except AttributeError:
        return 1


@functools.lru_cache(maxsize=4096)
def size_of_shape(shape: tuple[Any, ...]) -> int:
    """Returns the number of elements of an array of a shape, to compare it with others.

    `jax.export` traces shapes with unknown dimensions such as `b`, which JAX does not
    compare with numbers. Here each counts as a large number of its own, so `16*b` is
    larger than 512, and equal sizes stay equal. JAX documents the text of a size.
    """
    size = math.prod(shape)
    if isinstance(size, int | np.integer):
        return int(size)
    return eval(str(size).replace("^", "**"), {"__builtins__": {}}, _Unknown())


class _Unknown(dict[str, Any]):
    """Maps the names in the text of a size to numbers and functions."""

    def __init__(self):
        super().__init__(floordiv=operator.floordiv, mod=operator.mod, max=max, min=min)

    def __missing__(self, name: str) -> int:
        return _LARGE + zlib.crc32(name.encode()) % _LARGE


_LARGE = 2**24
LARGEST = 2**22  # the largest size of a constant that autocast reads or computes


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of a value, or () if it has none."""
    aval: Any = atom.aval
    try:
        return aval.shape
    except AttributeError:
        return ()


def is_float32(atom: Atom) -> bool:
    """Returns whether a value is float32. Autocast casts only such values."""
    aval: Any = atom.aval
    try:
        return aval.dtype == FLOAT32
    except AttributeError:
        return False


def is_float(atom: Atom) -> bool:
    """Returns whether a value is a float of any width."""
    aval: Any = atom.aval
    try:
        return is_floating(aval.dtype)
    except AttributeError:
        return False


@functools.cache
def is_floating(dtype: Any) -> bool:
    """Returns whether a dtype is a float of any width."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


@functools.lru_cache(maxsize=1024)
def exceeds_half(number: float, half: Any) -> bool:
    """Returns whether half cannot hold a number, such as a mask's -1e30 or 1e-8."""
    size, limits = abs(number), jnp.finfo(half)
    # Half can hold infinities, zero and NaN.
    return float(limits.max) < size < np.inf or 0 < size < float(limits.tiny)


def array_exceeds_half(x: Any, half: Any) -> bool:
    """Returns whether half cannot hold the largest number of a constant array.

    An example is a mask with -1e9. An array that is large, or not known here, counts as
    in range, and so does a Ref.
    """
    is_array = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)
    is_known = is_array and getattr(x, "is_fully_addressable", True)
    if not is_known or x.size > LARGEST:
        return False
    sizes = np.abs(jax.device_get(x))
    largest = np.max(sizes, where=np.isfinite(sizes), initial=0)
    return exceeds_half(float(largest), half)


@functools.lru_cache(maxsize=1024)
def changes_in_half(number: float, half: Any) -> bool:
    """Returns whether half rounds a number to another one: 1 - 1e-6 becomes 1."""
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(number, half))
    return rounded != number and not math.isnan(number)


def is_castable_eqn(eqn: jc.JaxprEqn, rule: Rule | None, half: DTypeLike) -> bool:
    """Returns whether all floats of an equation are float32.

    Autocast leaves float64 and the user's own half. It does cast a matmul of half and
    float32, which JAX would promote to float32.
    """
    dtypes = {dtype_of(v) for v in (*eqn.invars, *eqn.outvars)} - {FLOAT32}
    if rule is Rule.HALF and any(map(is_float32, eqn.invars)):
        dtypes.discard(half)
    return not any(map(is_floating, dtypes))


def region_rule(
    scope: Scope, eqn: jc.JaxprEqn, primitive: str
) -> tuple[Rule | None, str] | None:
    """Returns the rule of a region, and the mark, function or regex that sets it.

    The user's marks come first, then the last rule of the lists that matches. Returns
    None if no rule matches, and a rule of None if the last one is for the primitive.
    """
    names = name_stack(scope, eqn)
    markers = _MARKER.findall(names)
    marks = [marker for marker, function in markers if not function]
    if marks:
        return _RULES[marks[-1]], marks[-1]
    marker, function = markers[-1] if markers else ("", "")
    last = last_of(scope.policy.lists, primitive, function, names)
    if last is not None and last[0] is What.PRIMITIVE:
        return None, ""
    if last is not None and last[0] is What.REGION and last[2] is not None:
        return last[2], last[1]
    return (_RULES[marker], function) if function else None
