"""Which products run in fp8, by what they read, by who reads them, and by their size.

h = tanh (dot_general x w1)    half: x is what the program is given
y = dot_general h w2           fp8, if it is large: an activation by a weight
s = dot_general y y            half: no weight
z = dot_general y w3           half: no product reads what is made of it
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Container, Sequence
from typing import Any

from jax.extend import core as jc

from jamp._autocast.facts import PLAIN, Facts
from jamp._autocast.frames import Frame, Kind, frames_of
from jamp._autocast.marks import Source
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.program import (
    Atom,
    disables_fp8,
    is_float,
    is_float32,
    name_stack,
    shape_of,
)
from jamp._core.path_rules import PathRule, matches, parse_rules

# NVIDIA's data sheet of the H200 SXM, without sparsity: products in FLOP/s, and memory
# in B/s. The H100's ratio is 1.4 times that, the B200's 1.35.
_BF16, _FP8, _MEMORY = 989e12, 1979e12, 4.8e12
# Of an element that is quantized: read for its largest, read again, and written for the
# forward product and for the backward one, which contracts another axis.
_MOVED = 2 + 2 + 1 + 1


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Which products run in fp8, where `fp8=` of `jamp.initialize` asks for it.

    Those of an activation by a weight, each with the two of its gradients: operands in
    float8_e4m3fn, cotangents in float8_e5m2, each tensor with a scale of its own, a
    power of two by its largest number of this step. Nothing is stored. In half stay the
    products of what the program is given, and the last ones, whose results go to the
    loss (logits); attention and all else without a weight; convolutions; functions with
    a derivative of their own; what has a `precision`, a dtype or a mark of the user's;
    and what is too small.

    Attributes:
        keep: weights whose products stay in half: a regex searched in the path
            ("layers/0/kernel"), a predicate `(path, leaf) -> bool`, or several.
        grad_weight: whether gradients of weights are products in fp8 too.
        smallest: the least rows, and columns, of a weight; None for those where fp8
            saves time on an H200. That is where, of M rows by a weight of K by N, that
            R products read, 3 * 2MKN * (1/989e12 - 1/1979e12) seconds are more than
            6 * (MK/R + MN + KN) bytes at 4.8e12 B/s: a square weight from N = 825 on,
            if M is large (NVIDIA's data sheet: FLOP/s in bfloat16 and fp8, and memory).

    Raises:
        ValueError: a regex that is none, or `smallest` is not positive.
        TypeError: `keep` or `grad_weight` is of another type.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"up": jnp.ones((32, 128)), "head": jnp.ones((128, 32))}
    >>> fp8 = jamp.Fp8(keep="head", smallest=16)
    >>> state = jamp.initialize(params, optax.sgd(0.1), "O5", fp8=fp8, verbosity=0)
    >>> state.properties.fp8.smallest
    16
    """

    keep: PathRule | Sequence[PathRule] = ()
    grad_weight: bool = True
    smallest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", self.rules)
        if not isinstance(self.grad_weight, bool):
            raise TypeError(
                f"Fp8(grad_weight=) must be a bool, not {self.grad_weight!r}"
            )
        number = self.smallest
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_number and number > 0):
            raise ValueError(
                f"Fp8(smallest=) must be a positive integer or None, found {number!r}"
            )

    @property
    def rules(self) -> tuple[PathRule, ...]:
        """What `keep` holds, one or several."""
        return parse_rules("Fp8(keep=)", self.keep)

    def keeps(self, path: str, leaf: Any) -> bool:
        """Whether the products of a param stay in half."""
        return matches(self.rules, path, leaf)


def weight_of(facts: Facts, eqn: jc.JaxprEqn) -> jc.Var | None:
    """The operand of a plain product that is made of params alone, if one is."""
    if eqn.primitive.name != "dot_general" or not PLAIN <= eqn.params.items():
        return None
    _, (batch, _) = eqn.params["dimension_numbers"]
    if batch or not all(map(is_float32, eqn.invars)):
        return None
    weights = [v for v in eqn.invars if facts.is_weight(v)]
    return weights[0] if len(weights) == 1 and isinstance(weights[0], jc.Var) else None


def why_half(facts: Facts, eqn: jc.JaxprEqn, feeds: bool) -> str:
    """Why a product stays in half; "" if it runs in fp8.

    It `feeds` others if a later product reads what is made of it.
    """
    fp8, weight = facts.scope.policy.fp8, weight_of(facts, eqn)
    if facts.scope.derived:
        return "fp8 derivative"  # what is a gradient or a tangent in it is not known
    if weight is None:
        return "fp8 weight"
    x = eqn.invars[1 if weight is eqn.invars[0] else 0]
    if not facts.depends_on_params(x):
        return "fp8 input"
    if not feeds:
        return "fp8 last"
    if Source.STAYS in facts[weight].source:
        return "fp8 kept"
    if disables_fp8(name_stack(facts.scope, eqn)):
        return "fp8 disabled"
    return "fp8 small" if _is_small(fp8, eqn, x, weight, _readers(facts, x)) else ""


def _readers(facts: Facts, x: Atom) -> int:
    """How many products by weights read a value: it is quantized once for all."""
    read = [e for e in facts.jaxpr.eqns if any(v is x for v in e.invars)]
    return sum(weight_of(facts, eqn) is not None for eqn in read)


def _is_small(
    fp8: Fp8, eqn: jc.JaxprEqn, x: Atom, weight: jc.Var, readers: int
) -> bool:
    first = weight is eqn.invars[0]
    sums = eqn.params["dimension_numbers"][0][0 if first else 1]
    k = math.prod(shape_of(weight)[i] for i in sums)
    m, n = (math.prod(shape_of(v)) // max(k, 1) for v in (x, weight))
    if fp8.smallest is not None or not m * k * n:
        return not m * k * n or min(k, n) < (fp8.smallest or 1)
    half, in_fp8 = predicted_seconds(m, k, n, readers)
    return half < in_fp8


def predicted_seconds(m: int, k: int, n: int, readers: int = 1) -> tuple[float, float]:
    """Of M rows by K columns, times K by N, with both gradients: in half, and in fp8.

    On an H200 at its peak; `readers` is how many products share the M rows.
    """
    flops, moved = 3 * 2 * m * k * n, _MOVED * (m * k / readers + m * n + k * n)
    return flops / _BF16, flops / _FP8 + moved / _MEMORY


# ---- what a product's result goes to


def feeds_itself(body: jc.Jaxpr, consts: int, carries: int) -> list[bool]:
    """Of each carry of a loop, whether a product reads what is made of it."""
    read = _read_by_products(body, [False] * len(body.outvars))
    return read[consts:][:carries]


def _read_by_products(program: jc.Jaxpr, results: Sequence[bool]) -> list[bool]:
    """Of each input of a program, whether a product is made of it.

    Of its `results` it is known.
    """
    pairs = zip(program.outvars, results, strict=True)
    read = {v for v, is_read in pairs if is_read and isinstance(v, jc.Var)}
    for eqn in reversed(program.eqns):
        inside = [_read_in_frame(frame, read) for frame in frames_of(eqn)]
        if not inside:
            is_read = is_product(eqn) or not read.isdisjoint(eqn.outvars)
            inside = [eqn.invars if is_read else []]
        atoms = itertools.chain(*inside)
        read.update(v for v in atoms if isinstance(v, jc.Var) and is_float(v))
    return [v in read for v in program.invars]


def _read_in_frame(frame: Frame, read: Container[Atom]) -> list[Atom]:
    """The operands of a program of which a product in it, or after it, is made."""
    carries = slice(frame.consts, frame.consts + frame.carries)
    results = [v in read for v in frame.results]
    results += [False] * (len(frame.program.outvars) - len(results))
    while True:
        found = _read_by_products(frame.program, results)
        again = [*map(operator.or_, results, found[carries]), *results[frame.carries :]]
        if frame.kind is not Kind.LOOP or again == results:
            pairs = zip(frame.operands, found, strict=True)
            return [v for v, is_read in pairs if is_read]
        results = again


def multiplies(eqn: jc.JaxprEqn) -> bool:
    """Whether an equation is a product, or a program that it holds has one."""
    return is_product(eqn) or any(
        multiplies(inner) for frame in frames_of(eqn) for inner in frame.program.eqns
    )


def is_product(eqn: jc.JaxprEqn) -> bool:
    """Whether an equation itself is a product."""
    return traits_of(primitive_name(eqn)).shape is Shape.PRODUCT
