"""Rewrites a gradient jaxpr to sum half gradients in float32.

    g:f16 = dot_general ct x           g':f32 = dot_general[float32] ct x
    h:f16 = add_any g (transpose f)    h':f32 = add_any g' (transpose f')

A half gradient is the half result of a matmul or of a sum over the batch. If the arrays
are sharded, XLA sums it over devices in half. The rewrite changes the results of these
operations, and of all operations between them and the gradient, to float32, even in
loops and calls. Matmuls keep their half operands.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jc
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from jamp._autocast import jax_internals
from jamp._autocast.primitives import Shape, traits_of
from jamp._autocast.scope import Atom, dtype_of
from jamp._autocast.subjaxprs import CHECKPOINT, Subjaxpr, subjaxprs_of, with_jaxprs
from jamp._autocast.sums import lower_barrier
from jamp._core.dtypes import FLOAT32, HALF_DTYPES

# Operations whose results are float32 if all their operands are.
_PASS = (Shape.RESHAPE, Shape.REARRANGE, Shape.REPEAT, Shape.MOVE, Shape.MARK)
_ALSO = "add add_any sub mul div neg select_n psum psum_invariant".split()
# Sums over arrays as large as the activations. The rewrite does not make these arrays
# float32: each sum casts its operand.
_SUMS = ("reduce_sum", "scatter-add", "reduce_scatter")
_CALLS = ("jit", "closed_call", CHECKPOINT, "scan", "cond", "shard_map")


def summed_in_float32(fn: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
    """Wraps `params -> (grads, rest)`, so that half gradients are summed in float32."""

    @functools.wraps(fn)
    def summed(params: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(params)
        result: dict[str, Any] = {}

        def flat(*leaves):
            grads, rest = fn(structure.unflatten(leaves))
            result["grads"] = len(jax.tree.leaves(grads))
            outs, result["tree"] = jax.tree.flatten((grads, rest))
            result["static"] = [None if isinstance(x, jax.Array) else x for x in outs]
            return [x for x in outs if isinstance(x, jax.Array)]

        jaxpr = jax.make_jaxpr(flat)(*leaves)
        written = _Widening().jaxpr(jaxpr, frozenset(range(result["grads"])))
        outs = jc.jaxpr_as_fun(written)(*leaves)
        pairs = zip(outs, written.outvars, strict=True)
        arrays = iter([jax_internals.array_of_type(x, v.aval) for x, v in pairs])
        filled = [next(arrays) if x is None else x for x in result["static"]]
        return result["tree"].unflatten(filled)

    return summed


class _Widening:
    """Rewrites jaxprs so that some of their results are float32.

    It caches each rewrite, so that calls with the same jaxpr still share it.
    """

    def __init__(self):
        self.known: dict[Any, set[jc.Var]] = {}
        self.jaxprs: dict[Any, jc.Jaxpr] = {}

    def asked(self, jaxpr: jc.Jaxpr, outs: frozenset[int]) -> set[jc.Var]:
        """Returns the values that must be float32 if the results `outs` must be."""
        key = jaxpr, outs
        if key not in self.known:
            asked = _vars(jaxpr.outvars[i] for i in outs)
            made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
            for eqn in reversed(jaxpr.eqns):
                if asked.intersection(eqn.outvars):
                    asked |= _vars(self._operands(eqn, asked, made))
            self.known[key] = asked
        return self.known[key]

    def _operands(
        self, eqn: jc.JaxprEqn, asked: set[jc.Var], made: dict[Any, jc.JaxprEqn]
    ) -> Iterable[Atom]:
        """Yields the operands that must be float32 if the asked results must be."""
        if eqn.primitive.name in _CALLS:
            for sub in subjaxprs_of(eqn):
                outs = self._outs(sub, asked)
                inside = self.asked(sub.jaxpr, outs)
                pairs = zip(sub.jaxpr.invars, sub.operands, strict=True)
                yield from (v for inner, v in pairs if inner in inside)
        elif eqn.primitive.name == "scatter-add":
            yield eqn.invars[0]
        elif _passes(eqn) or _sums_a_sum(eqn, made):
            yield from eqn.invars

    def _outs(self, sub: Subjaxpr, asked: set[jc.Var]) -> frozenset[int]:
        """Returns the indices of the asked results, including the carries of a loop."""
        outs = frozenset(i for i, v in enumerate(sub.results) if v in asked)
        if not sub.carries:
            return outs
        inside = self.asked(sub.jaxpr, outs)
        carries = sub.jaxpr.invars[sub.consts :][: sub.carries]
        more = outs | {i for i, v in enumerate(carries) if v in inside}
        if more == outs:
            return outs
        return self._outs(sub, asked | _vars(sub.results[i] for i in more))

    def jaxpr(
        self, jaxpr: jc.Jaxpr, outs: frozenset[int], ins: Collection[int] = ()
    ) -> jc.Jaxpr:
        """Returns a jaxpr with the results `outs` and the inputs `ins` in float32."""
        key = jaxpr, outs, frozenset(ins)
        if key not in self.jaxprs:
            self.jaxprs[key] = self._written(jaxpr, outs, ins)
        return self.jaxprs[key]

    def _written(
        self, jaxpr: jc.Jaxpr, outs: frozenset[int], ins: Collection[int]
    ) -> jc.Jaxpr:
        asked, wide, eqns = self.asked(jaxpr, outs), {}, []
        invars = list(jaxpr.invars)
        for i, v in enumerate(invars):
            if i in ins and _is_half(v):
                wide[v] = invars[i] = _new(v)
                eqns.append(_converted(wide[v], v))

        def read(atom: Atom) -> Atom:
            if isinstance(atom, jc.Literal):
                return _literal(atom) if _is_half(atom) else atom
            if atom not in wide and _is_half(atom):
                eqns.append(jax_internals.conversion(atom, FLOAT32, None))
                wide[atom] = eqns[-1].outvars[0]
            return wide.get(atom, atom)

        for eqn in jaxpr.eqns:
            wanted = [v for v in eqn.outvars if v in asked]
            if not wanted or not self._write(eqn, asked, wide, read, eqns):
                eqns.append(eqn)
        outvars = [read(v) if i in outs else v for i, v in enumerate(jaxpr.outvars)]
        jaxpr = jax_internals.unnamed(jaxpr)
        return jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns)

    def _write(
        self,
        eqn: jc.JaxprEqn,
        asked: set[jc.Var],
        wide: dict[jc.Var, Any],
        read: Callable[[Atom], Any],
        eqns: list[jc.JaxprEqn],
    ) -> bool:
        """Rewrites an equation so that the asked results are float32, if it can.

        It also casts them to half for other equations that read them.
        """
        name, params, invars = eqn.primitive.name, dict(eqn.params), list(eqn.invars)
        results = [v for v in eqn.outvars if v in asked]
        if name == "convert_element_type":
            (operand,), (out,) = eqn.invars, eqn.outvars
            if dtype_of(operand) in (FLOAT32, *HALF_DTYPES) and _is_float(out):
                wide[out] = read(operand)
            return False
        if name in _CALLS:
            params, invars = self._called(eqn, asked, read)
        elif traits_of(name).shape is Shape.MATMUL:
            params["preferred_element_type"] = FLOAT32
            results = [v for v in results if _is_half(v)]
        elif _passes(eqn) or name in _SUMS:
            invars = [read(v) if _is_float(v) else v for v in invars]
            results = [v for v in eqn.outvars if _is_float(v)]
            if name == "scatter-add":
                params |= jax_internals.combining_in(params, FLOAT32)
        else:
            return False
        halves = [v for v in results if _is_half(v)]
        wide |= {v: _new(v) for v in halves}
        outvars = [wide[v] if v in halves else v for v in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        if halves and traits_of(name).shape is Shape.MATMUL:
            # XLA for CPUs cannot run a bfloat16 matmul with a transposed float32
            # result, if it contracts several dimensions.
            eqns[-1] = eqns[-1].replace(outvars=(made := list(map(_new, halves))))
            pairs = zip(made, outvars, strict=True)
            eqns += [jc.new_jaxpr_eqn([a], [b], _made, {}, set()) for a, b in pairs]
        eqns += [_converted(wide[v], v) for v in halves]
        return True

    def _called(
        self, eqn: jc.JaxprEqn, asked: set[jc.Var], read: Callable[[Atom], Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns the parameters and operands of an equation that calls jaxprs."""
        invars, subs = list(eqn.invars), subjaxprs_of(eqn)
        pairs = [(f.jaxpr, self._outs(f, asked)) for f in subs]
        # Branches have the same operands, and may ask for different ones.
        wide: set[int] = set()
        for jaxpr, outs in pairs:
            taken = self.asked(jaxpr, outs)
            wide.update(i for i, v in enumerate(jaxpr.invars) if v in taken)
        jaxprs = [self.jaxpr(jaxpr, outs, wide) for jaxpr, outs in pairs]
        first = len(invars) - len(subs[0].operands)
        for i in wide:
            invars[first + i] = read(eqn.invars[first + i])
        return with_jaxprs(eqn, jaxprs), invars


def _sums_a_sum(eqn: jc.JaxprEqn, made: dict[Any, jc.JaxprEqn]) -> bool:
    """Returns whether a sum has another sum as its operand, and not activations."""
    if eqn.primitive.name != "reduce_sum":
        return False
    name = "convert_element_type"
    while name == "convert_element_type" or traits_of(name).shape is Shape.RESHAPE:
        (operand,) = eqn.invars
        if not isinstance(operand, jc.Var) or operand not in made:
            return False
        eqn = made[operand]
        name = eqn.primitive.name
    return name == "reduce_sum"


def _passes(eqn: jc.JaxprEqn) -> bool:
    name = eqn.primitive.name
    is_cast = name == "convert_element_type"
    return is_cast or traits_of(name).shape in _PASS or name in _ALSO


def _vars(atoms: Iterable[Atom]) -> set[jc.Var]:
    return {v for v in atoms if isinstance(v, jc.Var) and _is_float(v)}


def _is_float(atom: Atom) -> bool:
    return dtype_of(atom) in (FLOAT32, *HALF_DTYPES)


def _is_half(atom: Atom) -> bool:
    return dtype_of(atom) in HALF_DTYPES


def _new(var: jc.Var) -> jc.Var:
    return jc.Var(jax_internals.in_dtype(var.aval, FLOAT32))


def _converted(wide: jc.Var, var: jc.Var) -> jc.JaxprEqn:
    """Returns the equation that casts a float32 value to half."""
    return jax_internals.conversion(wide, dtype_of(var), None).replace(outvars=[var])


_made = Primitive("jamp_made")  # its operand, which a CPU computes before its readers
_made.def_impl(lambda x: x)
_made.def_abstract_eval(lambda x: x)
ad.deflinear2(_made, lambda cotangent, _: [cotangent])
batching.defvectorized(_made)
mlir.register_lowering(_made, lambda _, x: [x])
mlir.register_lowering(_made, lower_barrier, platform="cpu")


def _literal(literal: jc.Literal) -> jc.Literal:
    value = np.asarray(literal.val, FLOAT32)
    return jc.Literal(value, jax_internals.in_dtype(literal.aval, FLOAT32))
