"""The table of primitives, as data.

A row has a rule, and lines of `words: names`. The words are the traits of a primitive.
The passes read only these traits. A primitive without a row is opaque. To add a
primitive, add its name to a line. Primitives that contain jaxprs are in `subjaxprs`.

The table follows apex/amp/lists and torch's autocast lists. It generates
`docs/autocast_lists.md`.
"""

import enum
import functools
import math
from typing import Any, NamedTuple


class Rule(enum.Enum):
    """What autocast does with the float32 operands of an operation."""

    HALF = "half"  # casts them to half
    FLOAT32 = "float32"  # casts them to float32
    PROMOTE = "promote"  # casts them to the widest dtype among them
    MOVE = "move"  # the same, for operations that only move values
    RECORDED = "recorded"  # keeps the dtypes of the user's program

    @classmethod
    def _missing_(cls, value: object) -> None:
        rules = ", ".join(repr(rule.value) for rule in cls)
        raise ValueError(f"A rule must be one of {rules}, got {value!r}.")


class Shape(enum.Enum):
    """How an element of the result depends on elements of the operands."""

    ELEMENTWISE = "elementwise"  # on those at the same position
    SAME = "same"  # equals the one at the same position, in any dtype
    MARK = "mark"  # the same, at a place that the user chose
    RESHAPE = "reshape"  # equals the one at the same place in row-major order
    REARRANGE = "rearrange"  # equals one of them, and each occurs once
    REPEAT = "repeat"  # equals one of them, which occurs several times
    PART = "part"  # equals one of the first operand's elements, in the same order
    MOVE = "move"  # equals one of some operand's elements
    REDUCE = "reduce"  # on those along some axes
    MATMUL = "matmul"  # on a row of one operand and a row of the other
    MIX = "mix"  # on many
    OPAQUE = "opaque"  # unknown


# The result has the elements of the operand, in the same order.
HANDS_ON = Shape.SAME, Shape.MARK, Shape.RESHAPE
# Each element depends only on the operands' elements at the same position.
IN_PLACE = *HANDS_ON, Shape.ELEMENTWISE, Shape.REPEAT
# Each element of the operands occurs exactly once in the result.
REARRANGES = Shape.RESHAPE, Shape.REARRANGE
# The elements of the result are elements of the operands, at fixed places.
PARTS = *HANDS_ON, Shape.REARRANGE, Shape.REPEAT, Shape.PART
MOVES = *PARTS, Shape.MOVE  # the places may depend on data
# XLA computes it in its readers, so recomputing it costs no memory.
FREE = Shape.SAME, Shape.REPEAT
# The backward pass may recompute it, because it has no effects.
RECOMPUTABLE = *FREE, Shape.ELEMENTWISE, Shape.RESHAPE, Shape.REDUCE


class Traits(NamedTuple):
    """The traits of a primitive; the words in the table are their names."""

    shape: Shape = Shape.OPAQUE
    rounds: bool = False  # its results have more digits than its operands
    keeps_range: bool = False  # its results are in the range of its operands
    reads_operands: bool = False  # its derivative reads both operands
    costly: bool = False  # XLA keeps its results instead of recomputing them
    slow: bool = False  # recomputing its results takes longer than reading them


class Row(NamedTuple):
    """A group of operations with one rule."""

    rule: Rule
    primitives: tuple[str, ...]  # their names, as `jax.make_jaxpr` prints them
    reason: str
    descends_from: str  # the list of apex or torch
    traits: tuple[Traits, ...] = ()  # one per primitive; empty for functions


def _row(rule: Rule, reason: str, descends_from: str, *lines: str) -> Row:
    found: dict[str, Traits] = {}
    for words, names in (line.split(": ") for line in lines):
        shape, *flags = words.split()
        traits = Traits(Shape(shape), **dict.fromkeys(flags, True))
        found |= dict.fromkeys(names.split(), traits)
    return Row(rule, tuple(found), reason, descends_from, tuple(found.values()))


NO_HALF_KERNEL = tuple(
    "cholesky cholesky_update eig eigh svd qr lu schur hessenberg tridiagonal "
    "householder_product ormqr triangular_solve tridiagonal_solve geqrf geqp3 "
    "symmetric_product fft".split()
)
ROWS = (
    _row(
        Rule.HALF,
        "Matrix units multiply half operands much faster, and accumulate in float32.",
        "apex FP16_FUNCS: linear, matmul, mm, bmm, conv1d to conv_transpose3d",
        "matmul: dot_general conv_general_dilated ragged_dot_general",
    ),
    _row(
        Rule.FLOAT32,
        "Their results exceed float16's range, or they amplify rounding errors.",
        "apex FP32_FUNCS: exp, expm1, log, log10, log2, pow, reciprocal, rsqrt",
        "elementwise costly: exp exp2 expm1 log log2 log1p pow cbrt",
        "elementwise: integer_pow square rsqrt",
    ),
    _row(
        Rule.FLOAT32,
        "They are ill-conditioned for some operands, and amplify rounding errors.",
        "apex FP32_FUNCS: acos, asin, cosh, erfinv, sinh, tan; the others likewise",
        "elementwise costly: sin cos tan asin acos atan atan2 sinh cosh asinh acosh "
        "atanh erf erfc erf_inv",
    ),
    _row(
        Rule.FLOAT32,
        "Special functions sum series, which lose digits, and have no half kernels.",
        "torch and apex: erfinv; no list has the others",
        "elementwise costly: lgamma digamma",
        "elementwise slow: polygamma zeta igamma igammac igamma_grad_a bessel_i0e "
        "bessel_i1e regularized_incomplete_beta polynomial one_minus_square",
    ),
    _row(
        Rule.FLOAT32,
        "Sums over many terms need more digits and more range than their terms.",
        "apex FP32_FUNCS: sum, prod, cumsum, cumprod, norm, std, var",
        "reduce: reduce_sum reduce_prod",
        "mix: cumsum cumprod cumlogsumexp reduce_window_sum psum psum_invariant "
        "reduce_scatter scatter-add scatter-mul",
    ),
    _row(
        Rule.FLOAT32,
        "Linear algebra and FFTs have no half kernels.",
        "torch: raises in half",
        f"mix: {' '.join(NO_HALF_KERNEL)} lu_pivots_to_permutation",
    ),
    _row(
        Rule.FLOAT32,
        "Rounding makes ties, which change the order.",
        "neither torch nor apex lists them",
        "mix: sort top_k approx_top_k",
    ),
    _row(
        Rule.PROMOTE,
        "They are elementwise or select values, and are as exact as their operands.",
        "apex CASTS: add, div, mul, eq, ge, ...; torch: operations in no list",
        "elementwise rounds keeps_range: add sub add_any sqrt neg",
        "elementwise rounds reads_operands: mul div",
        "elementwise rounds costly: tanh logistic",
        "elementwise rounds: rem",
        "elementwise keeps_range: max min abs clamp",
        "elementwise: sign floor ceil round eq ne ge gt le lt eq_to le_to lt_to "
        "is_finite",
        "reduce keeps_range: reduce_max reduce_min",
        "mix: argmax argmin cummax cummin reduce_window_max reduce_window_min pmax "
        "pmin",
    ),
    _row(
        Rule.MOVE,
        "They move values and compute nothing.",
        "apex SEQUENCE_CASTS: cat, stack",
        "repeat: broadcast_in_dim broadcast_to tile",
        "reshape: reshape squeeze transpose copy",
        "rearrange: rev concatenate stack",
        "part: slice dynamic_slice split unstack",
        "move: gather pad dynamic_update_slice scatter all_gather all_gather_invariant "
        "all_gather_reduced all_to_all ragged_all_to_all ppermute",
        "elementwise rounds: select_n",
        "elementwise: PrimalLeftTangentRight",
        "same: stop_gradient jamp_repeated",
        "mark: name CheckpointName CheckpointNameFwd optimization_barrier jamp_apart "
        "jamp_residual jamp_kept jamp_sum sharding_constraint layout_constraint "
        "jamp_row_major jamp_made "
        "with_memory_space_constraint reshard device_put pbroadcast pvary "
        "reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast "
        "vary_unreduced_cast_p",
    ),
    _row(
        Rule.RECORDED,
        "Their meaning depends on the dtype, or they have no float dtype.",
        "torch: not in any list; random numbers are drawn as the program says",
        "same: convert_element_type",
        "mark: reduce_precision",
        "elementwise: and or not iota",
        "opaque: bitcast_convert_type nextafter rng_uniform rng_bit_generator "
        "random_bits random_seed random_split random_fold_in random_wrap random_unwrap "
        "random_gamma random_clone threefry2x32 threefry4x32 philox2x32 philox4x32 "
        "iota_2x32_shape mulhi dimension_size dim_as_value shape_assertion check "
        "inspect_sharding tie pin unpin program_order unreachable to_edtype "
        "from_edtype reduce reduce_window select_and_scatter select_and_scatter_add "
        "select_and_gather_add scatter-min scatter-max "
        "scatter-sub complex real imag conj clz population_count xor shift_left "
        "shift_right_logical shift_right_arithmetic reduce_and reduce_or reduce_xor "
        "axis_index create_token after_all empty empty2 debug_print "
        "debug_callback get swap addupdate new_ref freeze platform_index SearchSorted "
        "Nonzero Frexp Ldexp pure_callback io_callback scaled_matmul "
        "scaled_matmul_wrapper call_hi_primitive_linearized",
    ),
    _row(
        Rule.RECORDED,
        "Solvers need float32. The others implement Equinox's loops.",
        "torch: not in any list",
        "opaque: CustomRoot _RootLinearMap linear_solve custom_linear_solve maybe_set "
        "nonbatchable "
        "nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any "
        "unvmap_max vprim",
    ),
)

_OPAQUE = Traits()
_TRAITS = {
    name: traits
    for row in ROWS
    for name, traits in zip(row.primitives, row.traits, strict=True)
}
_FOLLOWING = {
    name
    for row in ROWS
    for name in row.primitives
    if row.rule in (Rule.PROMOTE, Rule.MOVE)
}


def primitive_name(eqn: Any) -> str:
    """Returns the name under which the table lists an equation.

    For a high-level primitive of JAX, this is the name of its class. A `dot_general`
    that is not a matmul gets the name of its operation: "mul" without a contracted
    dimension, "reduce_sum" without a free one. Dimensions of size 1 do not count.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        lhs, rhs = eqn.invars
        numbers = eqn.params["dimension_numbers"]
        return _name_of_dot(numbers, lhs.aval.shape, rhs.aval.shape)
    is_hi = name == "call_hi_primitive"
    return type(eqn.params["_prim"]).__name__ if is_hi else name


@functools.lru_cache(maxsize=1024)
def _name_of_dot(numbers: Any, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> str:
    contracted, batch = numbers
    if math.prod(lhs[i] for i in contracted[0]) == 1:
        return "mul"
    for shape, *used in zip((lhs, rhs), contracted, batch, strict=True):
        taken = set().union(*used)
        if math.prod(n for i, n in enumerate(shape) if i not in taken) != 1:
            return "dot_general"
    return "reduce_sum"


def is_matmul(eqn: Any) -> bool:
    """Returns whether an equation is a matmul or a convolution."""
    return traits_of(primitive_name(eqn)).shape is Shape.MATMUL


def is_plain(eqn: Any) -> bool:
    """Returns whether an equation is a matmul without `precision` or `out_sharding`."""
    options = eqn.params.get("precision"), eqn.params.get("out_sharding")
    return primitive_name(eqn) == "dot_general" and options == (None, None)


def is_listed(primitive: str) -> bool:
    """Returns whether the table contains a primitive."""
    return primitive in _TRAITS


def traits_of(primitive: str) -> Traits:
    """Returns the traits of a primitive."""
    return _TRAITS.get(primitive, _OPAQUE)


def follows_operands(primitive: str) -> bool:
    """Returns whether a result of half operands is half, unlike an exponential's."""
    shape = traits_of(primitive).shape
    follows = primitive in _FOLLOWING and shape is not Shape.REDUCE
    return follows or shape in HANDS_ON
