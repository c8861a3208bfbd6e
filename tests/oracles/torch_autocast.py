"""Run a float32 program as torch.autocast would, operation by operation.

It interprets a jaxpr by torch's CUDA lists (`aten/src/ATen/autocast_mode.h`). jamp's
`promote="widest"` must be as accurate.

- A matmul casts float32 operands to half, sums in float32, and rounds its result once.
  Half copies of the program's inputs are cached, as torch caches copies of its leaves.
- A vector that an `add` broadcasts over a matmul's result is the bias of a linear layer
  or a convolution. The bias and the sum are rounded to half.
- Operations on the float32 list, and functions named on it, return float32.
- Every other operation runs in the widest dtype of its array operands. Python scalars
  and 0-d arrays do not promote. One that torch runs as one kernel computes in float32
  and rounds once.

Derivatives need no rules. JAX also differentiates the casts, and a cast's transpose
rounds the cotangent as torch does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core as jc

from tests.support.programs import PRODUCTS, products_of

# The lists by names of primitives and of JAX's jitted functions.
FLOAT32 = frozenset(
    # AT_FORALL_FP32
    "exp exp2 expm1 log log1p pow integer_pow square rsqrt acos asin cosh sinh tan "
    "erf_inv "
    # AT_FORALL_FP32_SET_OPT_DTYPE
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp "
    # torch has no half kernel for these and raises
    "cholesky eig eigh svd qr lu triangular_solve tridiagonal_solve fft "
    "householder_product geqrf custom_linear_solve "
    "lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad "
    "bessel_i0e bessel_i1e regularized_incomplete_beta".split()
)
FUNCTIONS = frozenset("softmax log_softmax logsumexp softplus standardize norm".split())
ONE_KERNEL = frozenset(
    "silu gelu elu selu celu relu6 hard_tanh leaky_relu hard_sigmoid mish "
    "log_sigmoid".split()
)
MOVES = frozenset("reshape squeeze transpose expand_dims copy copy_p".split())
F32 = jnp.dtype("float32")


class Value(NamedTuple):
    """An array with torch's properties.

    Attributes:
        array: the array, float32 or half.
        votes: whether it promotes other operands. A 0-d array does not.
        python: whether torch would have a Python number, which kernels read as float32.
        product: whether it is the result of a matmul.
        vector: whether it is a broadcast vector.
    """

    array: Any
    votes: bool = True
    python: bool = False
    product: bool = False
    vector: bool = False


def torch_autocast[**P, R](fn: Callable[P, R], half: Any) -> Callable[P, R]:
    """Returns `fn` under torch's rules, which takes and returns float32."""
    return _interpreted(fn, half, _Interpreter)


def by_hand[**P, R](fn: Callable[P, R], half: Any) -> Callable[P, R]:
    """Returns `fn` as a half model. The carries of its loops are float32."""
    return _interpreted(fn, half, _ByHand)


def _interpreted(fn: Callable, half: Any, interpreter: type["_Interpreter"]):
    @functools.wraps(fn)
    def wrapped(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(args)]
        outs = interpreter(half, leaves).run(closed, list(map(of_array, leaves)))
        recorded = [x.dtype for x in jax.tree.leaves(shape)]
        arrays = [cast(v.array, d) for v, d in zip(outs, recorded, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shape), arrays)

    return wrapped


def of_array(x: Any) -> Value:
    return Value(x, votes=jnp.ndim(x) > 0)


def is_float32(atom: Any) -> bool:
    is_array = isinstance(atom.aval, jax.core.ShapedArray)  # and no Ref
    return is_array and atom.aval.dtype == F32


def cast(x: Array, dtype: Any) -> Array:
    """Casts like `x.astype`, in a fifth of its tracing time."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def widest(dtypes: Sequence[Any]) -> Any:
    """Returns the widest of float32 and one half dtype."""
    return F32 if F32 in dtypes or not dtypes else dtypes[0]


class _Interpreter:
    def __init__(self, half: Any, leaves: Sequence[Array]):
        self.half = jnp.dtype(half)
        floats = [x for x in leaves if x.dtype == F32]
        self.cached = {id(x): (x, cast(x, self.half)) for x in floats}

    # Programs.

    def run(self, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = {}

        def read(atom):
            if isinstance(atom, jc.Literal):
                return Value(jnp.asarray(atom.val, atom.aval.dtype), False, True)
            return env[atom]

        consts = [of_array(jnp.asarray(c)) for c in getattr(jaxpr, "consts", ())]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if consts and jaxpr.constvars:
            env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def equation(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        inside = getattr(self, f"_{name}", None)
        if inside is not None:
            return inside(eqn, ins)
        if name in PRODUCTS and is_float32(eqn.outvars[0]):
            return [self.product(eqn, ins)]
        if name == "convert_element_type":
            return [self.conversion(eqn, ins[0])]
        floats = [v for v, a in zip(ins, eqn.invars, strict=True) if is_float32(a)]
        if not floats or not any(map(is_float32, [*eqn.outvars, *eqn.invars])):
            recorded = [a.aval for a in eqn.invars]
            return list(map(of_array, self.bind(eqn, _cast(ins, recorded))))
        return self.operation(eqn, ins, self.dtype(eqn, ins, floats))

    def dtype(self, eqn: jc.JaxprEqn, ins: list[Value], floats: list[Value]) -> Any:
        """Returns the dtype in which an operation runs."""
        name = eqn.primitive.name
        if name in FLOAT32:
            return F32
        if name == "div" and ins[0].python:
            return F32  # torch: reciprocal
        if name == "add" and any(
            y.product and b.vector and b.array.size < y.array.size
            for y, b in (ins, ins[::-1])
        ):
            return self.half
        return self.promoted(floats)

    def promoted(self, floats: Sequence[Value]) -> Any:
        """Returns the widest dtype of the voting operands, or of the 0-d ones."""
        for who in (
            [v for v in floats if v.votes],
            [v for v in floats if not v.python],
        ):
            if who:
                return widest([v.array.dtype for v in who])
        return F32

    def operation(self, eqn: jc.JaxprEqn, ins: list[Value], dtype: Any) -> list[Value]:
        """Computes in float32 from rounded operands, and rounds the result."""
        floats = [is_float32(a) for a in eqn.invars]
        arrays = [
            v.array if v.python or not f else cast(cast(v.array, dtype), F32)
            for v, f in zip(ins, floats, strict=True)
        ]
        outs = self.bind(eqn, arrays)
        floats = [v for v, f in zip(ins, floats, strict=True) if f]
        python, name = all(v.python for v in floats), eqn.primitive.name
        voted = any(v.votes for v in floats)
        found = []
        for x, atom in zip(outs, eqn.outvars, strict=True):
            if not is_float32(atom):
                found.append(of_array(x))
                continue
            spread = name in ("broadcast_in_dim", "reshape")
            # A statistic that keeps its axes is an array of one element.
            alone = spread and x.ndim > 0 and x.size == 1 and not python
            found.append(
                Value(
                    cast(x, dtype) if not python else x,
                    votes=(voted and x.ndim > 0) or alone,
                    python=python,
                    product=name in MOVES and ins[0].product,
                    vector=(spread and jnp.ndim(arrays[0]) == 1 and x.ndim > 1)
                    or (spread and ins[0].vector),
                )
            )
        return found

    def product(self, eqn: jc.JaxprEqn, ins: list[Value]) -> Value:
        """Multiplies half operands with float32 sums and a half result."""
        halves = [
            self.rounded(v.array) if is_float32(a) else v.array
            for v, a in zip(ins, eqn.invars, strict=True)
        ]
        arrays = [cast(x, F32) if x.dtype == self.half else x for x in halves]
        exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": F32}
        exact = {k: v for k, v in exact.items() if k in eqn.params}
        (out,) = self.bind(eqn, arrays, exact)
        out = cast(out, self.half)
        return Value(out, votes=out.ndim > 0, product=True)

    def rounded(self, x: Array) -> Array:
        kept = self.cached.get(id(x))
        return kept[1] if kept is not None else cast(x, self.half)

    def conversion(self, eqn: jc.JaxprEqn, value: Value) -> Value:
        """Evaluates a cast. A cast from float32 to float32 has no effect."""
        (atom,), (out,) = eqn.invars, eqn.outvars
        if is_float32(atom) and is_float32(out):
            return value
        (x,) = self.bind(eqn, _cast([value], [atom.aval]))
        return Value(x, votes=x.ndim > 0 and not value.python, python=value.python)

    def bind(self, eqn: jc.JaxprEqn, arrays: Sequence[Any], params: Any = ()) -> list:
        """Evaluates an equation with some other parameters."""
        params = eqn.primitive.get_bind_params({**eqn.params, **dict(params)})
        outs = eqn.primitive.bind(*arrays, **params)
        return list(outs) if eqn.primitive.multiple_results else [outs]

    # Operations that contain programs.

    def _jit(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        name = eqn.params["name"]
        floats = [v for v, a in zip(ins, eqn.invars, strict=True) if is_float32(a)]
        if name in FUNCTIONS:
            return self.one_kernel(eqn, ins, F32)
        if name in ONE_KERNEL:
            return self.one_kernel(eqn, ins, self.promoted(floats))
        return self.run(eqn.params["jaxpr"], ins)

    def one_kernel(
        self, eqn: jc.JaxprEqn, ins: list[Value], *dtypes: Any
    ) -> list[Value]:
        """Runs inside in float32, and returns results in the given dtypes."""
        outs = self.bind(eqn, _cast(ins, [a.aval for a in eqn.invars]))
        dtypes = dtypes if len(dtypes) == len(outs) else dtypes * len(outs)
        pairs = zip(outs, eqn.outvars, dtypes, strict=True)
        return [of_array(cast(x, d) if is_float32(a) else x) for x, a, d in pairs]

    def _remat2(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        return self.run(eqn.params["jaxpr"], ins)

    def _closed_call(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        return self.run(eqn.params["call_jaxpr"], ins)

    def _scan(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        """Loops in Python, because the first trip may change a carry's dtype."""
        params = eqn.params
        consts, carried, _ = (len(list(p)) for p in params["ft_in"].unpack())
        fixed, xs = ins[:consts], ins[consts + carried :]
        carry = [of_array(v.array) for v in ins[consts : consts + carried]]
        trips, rows = range(params["length"]), []
        for trip in reversed(trips) if params["reverse"] else trips:
            given = [of_array(v.array[trip]) for v in xs]
            outs = self.run(params["jaxpr"], [*fixed, *carry, *given])
            carry = [of_array(v.array) for v in outs[:carried]]
            rows.append([v.array for v in outs[carried:]])
        rows = rows[::-1] if params["reverse"] else rows
        return [*carry, *(of_array(stacked(ys)) for ys in zip(*rows, strict=True))]

    def _cond(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        """Runs all branches and selects, because the index may be a batch."""
        branches = [self.run(b, ins[1:]) for b in eqn.params["branches"]]
        index, outs = ins[0].array.astype(jnp.int32), []
        for values in zip(*branches, strict=True):
            dtype = widest(list({v.array.dtype for v in values}))
            cases = [cast(v.array, dtype) for v in values]
            outs.append(of_array(lax.select_n(index, *cases)))
        return outs

    # Refs, which keep the dtype of their first value.

    def _new_ref(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        return [of_array(jax.new_ref(ins[0].array))]

    def _in_place(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        ref, value, *index = (v.array for v in ins)
        outs = self.bind(eqn, [ref, cast(value, ref.dtype), *index])
        return list(map(of_array, outs))

    _swap = _addupdate = _in_place

    def _get(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        return list(map(of_array, self.bind(eqn, [v.array for v in ins])))

    _freeze = _get

    # Functions with custom derivatives.

    def _custom_jvp_call(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        """Runs one kernel, whose results have the dtypes that its body returns.

        With matmuls, torch casts inside, and the derivative must be the true one.
        """
        program = eqn.params["call_jaxpr"]
        if products_of(program.jaxpr):
            return self.run(program, ins)
        return self.one_kernel(eqn, ins, *_dtypes(lambda: self.run(program, ins)))

    def _custom_vjp_call(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        return self.run(eqn.params["call_jaxpr"], ins)


class _ByHand(_Interpreter):
    """Runs a model in half. In a loop, what is computed from a carry is float32."""

    loops = 0

    def dtype(self, eqn: jc.JaxprEqn, ins: list[Value], floats: list[Value]) -> Any:
        return super().dtype(eqn, ins, floats) if self.loops else self.half

    def one_kernel(
        self, eqn: jc.JaxprEqn, ins: list[Value], *dtypes: Any
    ) -> list[Value]:
        return super().one_kernel(eqn, ins, *(dtypes if self.loops else [self.half]))

    def _jit(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        if eqn.params["name"] in ONE_KERNEL:  # JAX has none
            return self.run(eqn.params["jaxpr"], ins)
        return super()._jit(eqn, ins)

    def _scan(self, eqn: jc.JaxprEqn, ins: list[Value]) -> list[Value]:
        consts, carried, _ = (len(list(p)) for p in eqn.params["ft_in"].unpack())
        entering = []
        for i, (v, atom) in enumerate(zip(ins, eqn.invars, strict=True)):
            dtype = F32 if consts <= i < consts + carried else self.half
            entering.append(of_array(cast(v.array, dtype)) if is_float32(atom) else v)
        self.loops += 1
        outs = super()._scan(eqn, entering)
        self.loops -= 1
        return outs


def _cast(values: Sequence[Value], avals: Sequence[Any]) -> list[Any]:
    pairs = zip(values, avals, strict=True)
    return [
        cast(v.array, a.dtype) if getattr(a, "dtype", None) == F32 else v.array
        for v, a in pairs
    ]


def _dtypes(run: Callable[[], list[Value]]) -> list[Any]:
    outs = jax.eval_shape(lambda: [v.array for v in run()])
    return [x.dtype for x in outs]


def stacked(parts: Sequence[Array]) -> Array:
    """Casts to the widest dtype if the dtypes differ."""
    dtypes = list(dict.fromkeys(p.dtype for p in parts))
    dtype = widest(dtypes) if len(dtypes) > 1 else dtypes[0]
    return jnp.stack([cast(p, dtype) for p in parts])
