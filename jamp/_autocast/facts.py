"""Reads a program forward: what its values are, whatever they are computed in.

A literal that half cannot hold, such as a mask's -1e30, asks for float32 wherever it is
moved to. A bias is told from other sums by the product that it is added to. And a value
that is made of one array costs as much to compute again as to read.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast.jax_internals import CHECKPOINT, conv_features, program_of
from jamp._autocast.lists import Rule
from jamp._autocast.program import (
    Atom,
    Scope,
    is_castable_eqn,
    is_float32,
    ruling,
    shape_of,
    size_of,
)


class Product(NamedTuple):
    """Of the result of a matmul or convolution: what a bias of it looks like.

    Attributes:
        features: how many numbers a bias may have.
        trailing: whether it must vary along the last axes only.
    """

    features: frozenset[int]
    trailing: bool


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        asks: whether it holds, or may hold, a literal that half cannot.
        varies: the axes along which it is not repeated; None if it was not broadcast.
        product: if it is the result of a product, reshaped at most.
        joins: whether it is computed elementwise from two or more large arrays.
        roots: the large arrays that it is computed from elementwise; itself, if it is
            written to memory anyway.
    """

    asks: bool = False
    varies: tuple[int, ...] | None = None
    product: Product | None = None
    joins: bool = False
    roots: frozenset[jc.Var] = frozenset()


# Their results hold what their operands hold, to a few digits.
_KEEP_RANGE = frozenset(
    "max min clamp add sub neg abs sqrt reduce_max reduce_min".split()
)
# They change the shape, or nothing.
_RESHAPES = frozenset(
    "reshape transpose squeeze expand_dims convert_element_type copy name "
    "stop_gradient sharding_constraint optimization_barrier".split()
)
# They read more than one element for one of the result, or write to memory anyway.
_NOT_ELEMENTWISE = frozenset(
    "reduce_max reduce_min argmax argmin cummax cummin reduce_window_max "
    "reduce_window_min pmax pmin concatenate gather scatter dynamic_slice "
    "dynamic_update_slice all_gather all_to_all ppermute".split()
)
_CALLS = ("jit", "closed_call", CHECKPOINT, "custom_jvp_call")


class Facts:
    """What is known of the values of a program."""

    def __init__(self, scope: Scope):
        self._limits = jnp.finfo(scope.policy.dtype)
        self._facts: dict[jc.Var, Fact] = {}

    def of(self, atom: Atom) -> Fact:
        """What is known of a value."""
        if isinstance(atom, jc.Literal):
            return Fact(asks=is_float32(atom) and self.exceeds_half(atom.val))
        return self._facts.get(atom) or Fact(roots=frozenset((atom,)))

    def asks(self, eqn: jc.JaxprEqn) -> bool:
        """Whether an operand of an equation asks for float32 by its number."""
        fill = eqn.params.get("fill_value")
        return any(self.of(v).asks for v in eqn.invars) or (
            fill is not None and is_float32(eqn.outvars[0]) and self.exceeds_half(fill)
        )

    def exceeds_half(self, value: object) -> bool:
        """Such as a mask's -1e30, or the 1e-8 in a denominator: inf or 0 in float16."""
        sizes = np.abs(np.asarray(value, np.float64))
        # An infinity is the same in half, and so are zero and nan.
        too_large = (sizes > float(self._limits.max)) & (sizes < np.inf)
        too_small = (sizes > 0) & (sizes < float(self._limits.tiny))
        return bool((too_large | too_small).any())

    def is_broadcast(self, atom: Atom) -> bool:
        """Whether it has the same number more than once."""
        return self.of(atom).varies is not None

    def of_full_size(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands that are as large as the result, and not by being broadcast."""
        size = max(size_of(v) for v in [*eqn.invars, *eqn.outvars])
        return [
            v for v in eqn.invars if size_of(v) == size and not self.is_broadcast(v)
        ]

    def bias_of(self, eqn: jc.JaxprEqn) -> Atom | None:
        """The bias that an equation adds to the result of a product, if it does."""
        if eqn.primitive.name != "add":
            return None
        for product, bias in (eqn.invars, eqn.invars[::-1]):
            if self._is_bias(bias, self.of(product).product):
                return bias
        return None

    def _is_bias(self, atom: Atom, product: Product | None) -> bool:
        if product is None or isinstance(atom, jc.Literal) or not is_float32(atom):
            return False
        fact, shape = self.of(atom), shape_of(atom)
        axes = [i for i, n in enumerate(shape) if n > 1]
        if fact.varies is not None:
            axes = [i for i in axes if i in fact.varies]
        if fact.product or math.prod(shape[i] for i in axes) not in product.features:
            return False
        trailing = list(range(len(shape) - len(axes), len(shape)))
        return axes == trailing or not product.trailing

    def learn(self, eqn: jc.JaxprEqn, scope: Scope) -> None:
        """Adds what is known of the results of an equation."""
        if eqn.primitive.name in _CALLS:
            given = [self.of(v)._replace(roots=frozenset()) for v in eqn.invars]
            program = program_of(eqn)
            inner = facts_of(program, given, scope.inside(eqn))
            for outer, result in zip(eqn.outvars, program.outvars, strict=True):
                fact = inner.of(result)
                self._facts[outer] = fact._replace(roots=frozenset((outer,)))
            return
        rule, _ = ruling(scope, eqn)
        for v in eqn.outvars:
            if is_float32(v):
                self._facts[v] = self._of_result(eqn, v, rule)

    def _of_result(self, eqn: jc.JaxprEqn, out: jc.Var, rule: Rule | None) -> Fact:
        name = eqn.primitive.name
        keeps = rule is Rule.MOVE or (rule is Rule.PROMOTE and name in _KEEP_RANGE)
        asks = keeps and self.asks(eqn)
        if rule is Rule.HALF and is_castable_eqn(eqn):
            return Fact(product=_product(eqn), roots=frozenset((out,)))
        varies = self._varies(eqn, out)
        if varies is not None:
            return Fact(asks, varies)
        product = self.of(eqn.invars[0]).product if name in _RESHAPES else None
        roots = self._roots(eqn, rule)
        joins = len(roots) > 1
        if joins or not roots:
            roots = frozenset((out,))
        return Fact(asks, None, product, joins, roots)

    def _varies(self, eqn: jc.JaxprEqn, out: jc.Var) -> tuple[int, ...] | None:
        """The axes along which a result is not repeated, if it is along others."""
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if name == "broadcast_in_dim":
            if size_of(first) == size_of(out):
                return None
            places, before = eqn.params["broadcast_dimensions"], self.of(first).varies
            axes = before if before is not None else range(len(shape_of(first)))
            return tuple(places[i] for i in axes if shape_of(first)[i] > 1)
        atoms = [v for v in eqn.invars if not isinstance(v, jc.Literal)]
        found = [self.of(v).varies for v in atoms]
        if not atoms or None in found or {size_of(v) for v in atoms} != {size_of(out)}:
            return None
        if name == "transpose":
            return tuple(map(eqn.params["permutation"].index, found[0]))
        if shape_of(atoms[0]) != shape_of(out):
            return ()  # reshaped: it is not known along which
        return tuple(sorted(set().union(*found)))

    def _roots(self, eqn: jc.JaxprEqn, rule: Rule | None) -> frozenset[jc.Var]:
        if rule is not Rule.PROMOTE and rule is not Rule.MOVE:
            return frozenset()
        if eqn.primitive.name in _NOT_ELEMENTWISE or len(eqn.outvars) > 1:
            return frozenset()
        full = [v for v in self.of_full_size(eqn) if is_float32(v)]
        if size_of(eqn.outvars[0]) < max(map(size_of, eqn.invars), default=0):
            return frozenset()
        return frozenset().union(*(self.of(v).roots for v in full))


def facts_of(jaxpr: jc.Jaxpr, given: Sequence[Fact], scope: Scope) -> Facts:
    """Reads a program, given what is known of its inputs; nothing, if that is empty."""
    facts = Facts(scope)
    for var, fact in zip(jaxpr.invars, given, strict=bool(given)):
        facts._facts[var] = fact._replace(roots=frozenset((var,)))
    for eqn in jaxpr.eqns:
        facts.learn(eqn, scope)
    return facts


def _product(eqn: jc.JaxprEqn) -> Product:
    """What a bias of a product looks like: as what is contracted on neither side."""
    if eqn.primitive.name == "conv_general_dilated":
        return Product(frozenset((conv_features(eqn),)), trailing=False)
    sides = eqn.params.get("dimension_numbers")
    if eqn.primitive.name != "dot_general" or sides is None:
        return Product(frozenset(), trailing=True)
    contracted, batch = sides
    free = []
    for side, atom in enumerate(eqn.invars[:2]):
        shape = shape_of(atom)
        used = {*contracted[side], *batch[side]}
        free.append(math.prod(n for i, n in enumerate(shape) if i not in used))
    return Product(frozenset(free) - {1}, trailing=True)
