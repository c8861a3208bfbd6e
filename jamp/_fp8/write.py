"""Writes a matmul in fp8, in the hooks that `_autocast` calls.

y = dot_general x w        x8 e = quantize x; w8 d = quantize w
                           y = matmul x x8 e w w8 d
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jc

from jamp._autocast.calls import Replacement, call
from jamp._autocast.decide import Decision, shared_weight
from jamp._autocast.reasons import noting
from jamp._autocast.rewrite import Rewriter
from jamp._autocast.scope import Atom, dtype_of
from jamp._autocast.values import Values
from jamp._core.dtypes import FLOAT32
from jamp._core.path_rules import matches
from jamp._fp8.options import Fp8
from jamp._fp8.plan import Plan, Uses, weight_of
from jamp._fp8.quantized import FORWARD, Of, SharedKept, matmul_of, quantize


@dataclasses.dataclass(frozen=True)
class Products:
    """Decides on and writes the fp8 matmuls of an autocast. `Policy.fp8` holds it."""

    options: Fp8
    dtype = np.dtype(FORWARD)

    def keeps(self, path: str, leaf: Any) -> bool:
        """Returns whether the matmuls of a param stay in half."""
        return matches(self.options.keep, path, leaf)

    def plan(self, values: Values, out_uses: Sequence[Uses]) -> Plan:
        """Returns the plan of a program, given the uses of its results."""
        return Plan(self.options, values, out_uses)

    def checkpoint_policy(self, policy: Callable[..., Any] | None) -> SharedKept:
        """Returns the policy of a checkpoint that contains fp8 matmuls."""
        return SharedKept(policy)

    def decide(
        self, rewriter: Rewriter, eqn: jc.JaxprEqn, decision: Decision
    ) -> Decision:
        """Decides on a matmul that runs in half without fp8.

        All matmuls that read an operand share its quantization, which this writes.
        """
        values = rewriter.values
        weight = weight_of(values, eqn)
        why = rewriter.fp8.why_half(eqn, weight)
        if why or weight is None:
            return decision._replace(why=why)
        half, first = values.half, eqn.invars[0] is weight
        loop, summed = rewriter.scope.loop, shared_weight(values, eqn)
        shared = weight is summed
        # A scan would stack its fp8 weights in addition to the half ones.
        again = loop and not shared
        # `explain` needs a new trace, which records the user's line.
        make = matmul_of.__wrapped__ if noting.value else matmul_of
        numbers = eqn.params["dimension_numbers"]
        operands: list[tuple[Atom, Any]] = []
        of_weight = Of.SHARED if loop and shared else Of.WEIGHT
        x = eqn.invars[1 if first else 0]
        for v, of in ((x, Of.INPUT), (weight, of_weight)):
            quantized = _quantized(rewriter, rewriter.read(v, half), of, eqn)
            operands.append((v, FLOAT32 if v is summed else half))
            operands += [(new, dtype_of(new)) for new in quantized]
        function = make(numbers, first, half, self.options.grad_weight, again=again)
        return Decision(self.dtype, "fp8", Replacement(function, operands))


def _quantized(
    rewriter: Rewriter, half: Atom, of: Of, eqn: jc.JaxprEqn
) -> list[jc.Var]:
    known = rewriter.quantized
    if half not in known:
        (written,) = call(_QUANTIZE[of], [half], None, eqn)
        rewriter.eqns.append(written)
        known[half] = written.outvars
        rewriter.versions |= {v: {dtype_of(v): v} for v in written.outvars}
    return known[half]


# Not a new partial for each call: JAX's caches compare functions by identity.
_QUANTIZE = {of: functools.partial(quantize, of=of) for of in Of}
