"""Decides which matmuls run in fp8, by their operands, readers and sizes.

h = tanh (dot_general x w1)    half: x is an input of the program
y = dot_general h w2           fp8, if it is large: an activation by a weight
s = dot_general y y            half: no weight
r = dot_general y w3           half: `top_k` orders its result
z = dot_general y w4           half: no later matmul depends on it
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jc

from jamp._autocast.marks import Source
from jamp._autocast.primitives import (
    MOVES,
    Shape,
    is_matmul,
    is_plain,
    primitive_name,
    traits_of,
)
from jamp._autocast.scope import (
    Atom,
    disables_fp8,
    is_float32,
    name_stack,
    shape_of,
    size_of,
    size_of_shape,
)
from jamp._autocast.subjaxprs import Kind, Subjaxpr, subjaxprs_of
from jamp._autocast.values import Values
from jamp._fp8.options import Fp8

# The ways in which the rest of the program uses a value.
type Uses = frozenset[str]
MATMUL, ORDER = "matmul", "order"
NOTHING, MATMULS, ORDERED = (frozenset(), frozenset((MATMUL,)), frozenset((ORDER,)))
_ORDERS = ("top_k", "approx_top_k", "argmax", "argmin", "sort")
# Operations whose results have the order of their operands.
_PASSES = Shape.ELEMENTWISE, *MOVES

# NVIDIA's data sheet of the H200 SXM, without sparsity: FLOP/s, and bandwidth in B/s.
# FLOP/s per B/s are 1.4 times as high on an H100, and 1.35 times on a B200.
_BF16, _FP8, _MEMORY = 989e12, 1979e12, 4.8e12
# Bytes per quantized element: two reads (one for the largest number, one to quantize),
# and two writes, because the forward and the backward matmul contract different axes.
_MOVED = 2 + 2 + 1 + 1


class Plan:
    """Decides which matmuls of one program run in fp8, from its values."""

    def __init__(self, fp8: Fp8, values: Values, out_uses: Sequence[Uses]):
        self.fp8, self.values = fp8, values
        jaxpr, known = values.jaxpr, values.scope.cache
        out_uses = out_uses or [NOTHING] * len(jaxpr.outvars)
        self._uses = _uses_in_program(jaxpr, out_uses, known)
        # The number of matmuls that read each value and may have a weight.
        eqns = [eqn for eqn in jaxpr.eqns if may_have_weight(eqn)]
        self._readers: Counter[Atom] = Counter(
            v for eqn in eqns for v in eqn.invars if isinstance(v, jc.Var)
        )

    def why_half(self, eqn: jc.JaxprEqn, weight: jc.Var | None) -> str:
        """Returns why a matmul with this weight stays in half, or "" for fp8."""
        values = self.values
        (uses,) = self.uses_of(eqn.outvars)
        if values.scope.derived:
            # Its operands may be gradients or tangents.
            return "fp8 derivative"
        if weight is None:
            return "fp8 weight"
        x = eqn.invars[1 if weight is eqn.invars[0] else 0]
        if not values.depends_on_params(x):
            return "fp8 input"
        if MATMUL not in uses:
            return "fp8 last"
        if ORDER in uses:
            return "fp8 order"
        if Source.STAYS in values[weight].source:
            return "fp8 kept"
        if disables_fp8(name_stack(values.scope, eqn)):
            return "fp8 disabled"
        is_small = _is_small(self.fp8, eqn, x, weight, self._readers[x])
        return "fp8 small" if is_small else ""

    def uses_of(self, atoms: Sequence[Atom]) -> list[Uses]:
        """Returns the uses of each of the values."""
        return _uses_of(atoms, self._uses)

    def uses_of_results(self, sub: Subjaxpr) -> list[Uses]:
        """Returns the uses of a program's results. The next iteration uses carries."""
        results = self.uses_of(sub.results)
        carries = results[: sub.carries]
        if carries:
            known = self.values.scope.cache
            found = _uses_inside(sub, self._uses, known)[sub.consts :]
            carries = [a | b for a, b in zip(found, carries, strict=False)]
        return [*carries, *results[sub.carries :]]


def weight_of(values: Values, eqn: jc.JaxprEqn) -> jc.Var | None:
    """Returns the operand of a matmul that depends only on params, or None."""
    if not may_have_weight(eqn):
        return None
    weights = [v for v in eqn.invars if values.is_weight(v)]
    return weights[0] if len(weights) == 1 and isinstance(weights[0], jc.Var) else None


def may_have_weight(eqn: jc.JaxprEqn) -> bool:
    """Returns whether an equation is a float32 matmul without batch dimensions."""
    if not is_plain(eqn):
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return not batch and all(map(is_float32, eqn.invars))


def _is_small(
    fp8: Fp8, eqn: jc.JaxprEqn, x: Atom, weight: jc.Var, readers: int
) -> bool:
    first = weight is eqn.invars[0]
    sums = eqn.params["dimension_numbers"][0][0 if first else 1]
    k = size_of_shape(tuple(shape_of(weight)[i] for i in sums))
    m, n = (size_of(v) // max(k, 1) for v in (x, weight))
    if fp8.smallest is not None or not m * k * n:
        return not m * k * n or min(k, n) < (fp8.smallest or 1)
    half, in_fp8 = predicted_seconds(m, k, n, readers)
    return half < in_fp8


def predicted_seconds(m: int, k: int, n: int, readers: int = 1) -> tuple[float, float]:
    """Predicts the seconds of a matmul and its gradients, in half and in fp8.

    An M by K array is multiplied by a K by N weight, on an H200 at its peak. `readers`
    matmuls share the M rows.
    """
    flops, moved = 3 * 2 * m * k * n, _MOVED * (m * k / readers + m * n + k * n)
    return flops / _BF16, flops / _FP8 + moved / _MEMORY


# The uses of a value, from the end of the program to its start.


def _uses_of_operands(
    eqn: jc.JaxprEqn, results: Sequence[Uses], known: dict[Any, Any]
) -> list[Uses]:
    """Returns the uses of each operand of an equation, given the uses of its results.

    `known` caches the uses in nested programs.
    """
    subs = subjaxprs_of(eqn)
    if not subs:
        return _uses_by_operation(eqn, NOTHING.union(*results))
    found: dict[Atom, Uses] = {}
    uses: dict[Atom, Uses] = dict(zip(eqn.outvars, results, strict=True))
    for sub in subs:
        _note(found, sub.operands, _uses_inside(sub, uses, known))
    return _uses_of(eqn.invars, found)


def _uses_by_operation(eqn: jc.JaxprEqn, of_result: Uses) -> list[Uses]:
    name = primitive_name(eqn)
    ordered = eqn.params.get("num_keys", 1) if name in _ORDERS else 0
    matmul = MATMULS if is_matmul(eqn) else of_result & MATMULS
    # A matmul or a sum changes the order.
    passed = matmul | (of_result if traits_of(name).shape in _PASSES else NOTHING)
    return [
        passed | (ORDERED if i < ordered else NOTHING) for i in range(len(eqn.invars))
    ]


def _uses_inside(
    sub: Subjaxpr, uses: Mapping[Atom, Uses], known: dict[Any, Any]
) -> list[Uses]:
    """Returns the uses of each operand of a program, inside it or after it."""
    results = _uses_of(sub.results, uses)
    results += [NOTHING] * (len(sub.jaxpr.outvars) - len(results))
    carries = slice(sub.consts, sub.consts + sub.carries)
    while True:
        found = _uses_of_inputs(sub.jaxpr, results, known)
        pairs = zip(results, found[carries], strict=False)
        again = [*(a | b for a, b in pairs), *results[sub.carries :]]
        if sub.kind is not Kind.LOOP or again == results:
            return found
        results = again


def _uses_of_inputs(
    program: jc.Jaxpr, results: Sequence[Uses], known: dict[Any, Any]
) -> list[Uses]:
    key = "uses", program, *results
    if key not in known:
        uses = _uses_in_program(program, results, known)
        known[key] = _uses_of(program.invars, uses)
    return known[key]


def _uses_in_program(
    program: jc.Jaxpr, results: Sequence[Uses], known: dict[Any, Any]
) -> dict[Atom, Uses]:
    """Returns the uses of each value. It reads the program from the last equation."""
    uses: dict[Atom, Uses] = {}
    _note(uses, program.outvars, results)
    for eqn in reversed(program.eqns):
        of_results = _uses_of(eqn.outvars, uses)
        _note(uses, eqn.invars, _uses_of_operands(eqn, of_results, known))
    return uses


def _uses_of(atoms: Sequence[Atom], uses: Mapping[Atom, Uses]) -> list[Uses]:
    is_var = [isinstance(v, jc.Var) for v in atoms]
    pairs = zip(atoms, is_var, strict=True)
    return [uses.get(v, NOTHING) if var else NOTHING for v, var in pairs]


def _note(uses: dict[Atom, Uses], atoms: Sequence[Atom], found: Sequence[Uses]) -> None:
    for atom, new in zip(atoms, found, strict=True):
        if isinstance(atom, jc.Var):
            uses[atom] = uses.get(atom, NOTHING) | new
