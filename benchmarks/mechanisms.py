"""The mechanisms of autocast, each with a patch that switches it off.

    with without("softmax"):
        ...  # JAX differentiates `jax.nn.softmax` itself

A mechanism saves bytes or digits beyond the lists and votes, which autocast promises
and which have no row here. `benchmarks.ablations` measures each mechanism.
"""

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

type Function = Callable[..., Any]


class Mechanism(NamedTuple):
    """A mechanism of autocast and the patch that switches it off."""

    says: str
    place: str  # of the replaced function, by default in jamp._autocast
    off: Callable[[Function], Any]  # maps the original to its replacement


def _gives(value: Any) -> Callable[[Function], Function]:
    return lambda original: lambda *args: value


def _first(original: Function) -> Function:
    return lambda first, *args: first


def _never(original: Any) -> property:
    return property(lambda case: False)


def _empty(original: Any) -> property:
    return property(lambda case: [])


def _never_apart(original: Function) -> Function:
    return lambda *args: original(*args)._replace(own_casts=False)


def _each_apart(original: Function) -> Function:
    def read(rewriter, atom, dtype, *apart):
        original(rewriter, atom, dtype)  # records the cast
        return original(rewriter, atom, dtype, True)

    return read


def _plain_sum(original: Function) -> Function:
    return lambda matmul, bias: matmul + bias.astype(matmul.dtype)


def _without_copies(original: Function) -> Function:
    return lambda numbers, first, copies: original(numbers, first, 0)


def _without_carries(original: Function) -> Function:
    def init(case, values, eqn, name, rule, given):
        given = [value._replace(carried=False) for value in given]
        original(case, values, eqn, name, rule, given)

    return init


def _without_barrier(original: Function) -> Function:
    return lambda graph, region, eqns, _, *args: original(
        graph, region, eqns, (), *args
    )


def _each_by_itself(original: Function) -> Function:
    def quantized(rewriter, *args):
        rewriter.quantized.clear()
        return original(rewriter, *args)

    return quantized


def _always_again(original: Function) -> Function:
    return lambda *args, **options: original(*args, **options | {"again": True})


MECHANISMS = {
    "bias sums": Mechanism(
        "The gradient of a bias is summed in float32.",
        "decide.with_bias",
        _plain_sum,
    ),
    "repeated": Mechanism(
        "The gradient of a broadcast array sums rounded cotangents in float32.",
        "decide._with_rounded_sum",
        _gives(None),
    ),
    "softmax": Mechanism(
        "The derivative of a softmax reads its result in half.",
        "softmax._softmax_ending_in",
        _gives(None),
    ),
    "islands": Mechanism(
        "The backward pass recomputes float32 values between two half values.",
        "rewrite.checkpoint_islands",
        _first,
    ),
    "heads": Mechanism(
        "The backward pass recomputes float32 values of a loss of large half values.",
        "rewrite.checkpoint_heads",
        _first,
    ),
    "logit biases": Mechanism(
        "A bias is added in float32 if only a head with a label reads the sum.",
        "heads._place_of_bias",
        _gives(None),
    ),
    "inlined calls": Mechanism(
        "A call without a matmul is inlined before autocast decides.",
        "values.inlined",
        _first,
    ),
    "labels": Mechanism(
        "The derivative of a label's logit is a comparison in the softmax's kernel.",
        "labels.call",
        _gives(None),
    ),
    "chains": Mechanism(
        "An elementwise chain on one array is computed in float32.",
        "case.Case.is_fused",
        _never,
    ),
    "ratios": Mechanism(
        "A division by a float16 value is computed in float32.",
        "case.Case.is_ratio",
        _never,
    ),
    "norms": Mechanism(
        "A half value that meets its own statistics stays half.",
        "origins.is_normalized",
        _gives(False),
    ),
    "smaller": Mechanism(
        "An operation with float32 statistics and scales is computed in float32.",
        "case.Case.smaller",
        _empty,
    ),
    "biases": Mechanism(
        "A bias belongs to its matmul, and is half.",
        "case.Case._bias",
        _gives(None),
    ),
    "weights": Mechanism(
        "The gradient of a weight that a loop shares is a sum of float32 matmuls.",
        "decide.shared_weight",
        _gives(None),
    ),
    "lookups": Mechanism(
        "The gradient of a lookup in a half array is a float32 sum.",
        "decide.LOOKUPS",
        lambda original: (),
    ),
    "numbers": Mechanism(
        "An operation that does not round keeps the digits of its numbers.",
        "case.Case._keeps_digits",
        _gives(False),
    ),
    "arrays": Mechanism(
        "A constant array whose largest number half cannot hold keeps float32.",
        "values.array_exceeds_half",
        _gives(False),
    ),
    "loops": Mechanism(
        "Operations that only rearrange a scan's constants run before the scan.",
        "transform.moves_taken_out",
        _first,
    ),
    "one cast": Mechanism(
        "A float32 value is cast to half once for all readers.",
        "writer.Writer.read",
        _each_apart,
    ),
    "cast apart": Mechanism(
        "The last operations of a norm have their own casts (narrowest, O5).",
        "rewrite.decide",
        _never_apart,
    ),
    "sums kept": Mechanism(
        "A checkpoint saves its sums and maxima for the backward pass.",
        "graph.is_kept",
        lambda original: lambda *args, **params: False,
    ),
    "sums recomputed": Mechanism(
        "A GPU recomputes the sums of a softmax, in one kernel with its cotangents.",
        "islands.fit_one_kernel",
        _gives(False),
    ),
    "small inputs": Mechanism(
        "The gradient of an island's small input sums rounded cotangents.",
        "islands._with_rounded",
        _first,
    ),
    "islands of loops": Mechanism(
        "An island in a loop may read and return float32 carries.",
        "islands._is_carried",
        _gives(False),
    ),
    "island barrier": Mechanism(
        "A barrier separates the backward pass of an island from the forward pass.",
        "islands.checkpoint",
        _without_barrier,
    ),
    "head barrier": Mechanism(
        "A barrier separates the residuals of a head from their backward readers.",
        "heads.checkpoint",
        _without_barrier,
    ),
    "sum barrier": Mechanism(
        "On a GPU, a cotangent is rounded before it is summed in float32.",
        "sums.apart",
        _first,
    ),
    "cotangent copies": Mechanism(
        "Matmuls of several shared weights with one cotangent are not merged.",
        "decide.with_weight",
        _without_copies,
    ),
    "half params": Mechanism(
        "A half param does not round the float32 values that it meets (O5).",
        "values.Value.is_half_param",
        _never,
    ),
    "half carries": Mechanism(
        "An activation that a scan carries is half (narrowest, O5).",
        "control_flow._half_carries",
        _gives(set()),
    ),
    "float32 carries": Mechanism(
        "A sum with a float32 carry of a scan is float32.",
        "case.Case.__init__",
        _without_carries,
    ),
    "quantized once": Mechanism(
        "An operand of several matmuls is quantized once (O6).",
        "jamp._fp8.write._quantized",
        _each_by_itself,
    ),
    "weights in fp8": Mechanism(
        "Outside of loops, weights are saved in fp8, so devices gather them once (O6).",
        "jamp._fp8.write.matmul_of",
        _always_again,
    ),
    "quantizing barrier": Mechanism(
        "On a GPU, an operand to quantize is written in half, with its maximum (O6).",
        "jamp._fp8.quantized.apart",
        _first,
    ),
    "quantized before loops": Mechanism(
        "Weights that a loop around the gradient shares are quantized before it (O6).",
        "jamp._fp8.outermost._is_of",
        _gives(False),
    ),
}


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Switches a mechanism off."""
    row = MECHANISMS[name]
    inside = row.place.startswith("jamp.")
    place = row.place if inside else f"jamp._autocast.{row.place}"
    with mock.patch(place, row.off(pkgutil.resolve_name(place))):
        jax.clear_caches()  # earlier traces used other mechanisms
        yield
    jax.clear_caches()
