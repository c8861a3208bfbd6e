"""What JAX documents nowhere: all that autocast uses of it, each in a function.

A function says what JAX does there, and `tests/test_jax_internals.py` holds it to that
on the oldest and on the newest JAX. Other files name none of it: what a new JAX breaks,
it breaks here.
"""

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc, linear_util
from jax.extend.core import primitives

from jamp._autocast.closures import tracers_in

CHECKPOINT = "remat2"  # the primitive of `jax.checkpoint`
OPTIMIZED_VJP = "remat_opt"  # of a custom_vjp's fwd, with `optimize_remat=True`

# The parameter in which a primitive holds its one program.
_PROGRAM = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",  # of JAX 0.11.0
    CHECKPOINT: "jaxpr",
    "scan": "jaxpr",
    "shard_map": "jaxpr",
    OPTIMIZED_VJP: "fwd_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

# Folders whose lines are not the user's.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (jax.__file__, os.path.dirname(__file__))
)


# ---- programs in the parameters of equations


def program_of(eqn: jc.JaxprEqn) -> jc.Jaxpr:
    """The program of an equation that holds one."""
    return eqn.params[_PROGRAM[eqn.primitive.name]]


def with_program(eqn: jc.JaxprEqn, program: jc.Jaxpr) -> dict[str, Any]:
    """The parameters of an equation that holds one program, with another one."""
    return {**eqn.params, _PROGRAM[eqn.primitive.name]: program}


def scan_counts(eqn: jc.JaxprEqn) -> tuple[int, int]:
    """How many constants and carries a scan takes; what it slices comes after them.

    JAX 0.11 and newer keep it as the tree of the operands, `(consts, carry, xs)`.
    """
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def while_programs(eqn: jc.JaxprEqn) -> tuple[jc.Jaxpr, jc.Jaxpr, int, int]:
    """The condition and the body of a while loop, and how many constants each takes.

    The operands are the constants of the one, those of the other, and the carry.
    """
    params = eqn.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    return params["cond_jaxpr"], params["body_jaxpr"], *counts


def with_while_programs(
    eqn: jc.JaxprEqn, cond: jc.Jaxpr, body: jc.Jaxpr
) -> dict[str, Any]:
    """The parameters of a while loop, with another condition and another body."""
    return {**eqn.params, "cond_jaxpr": cond, "body_jaxpr": body}


# ---- functions with their own derivative


def custom_consts(eqn: jc.JaxprEqn) -> int:
    """How many operands of a custom function come from its closure.

    They come first, and the user's derivative does not take them.
    """
    return eqn.params["num_consts"]


def with_custom_jvp(
    eqn: jc.JaxprEqn, program: jc.Jaxpr, write: Callable[..., jc.Jaxpr]
) -> dict[str, Any]:
    """The parameters of a `custom_jvp_call`, with its programs written anew.

    JAX traces the user's rule when a derivative is taken, for the tangents that are
    there then: it is a program from all primals and these tangents to all primals and
    the tangents that are no symbolic zeros.

    Args:
        eqn: the call.
        program: the function, written anew.
        write: writes the rule anew: from the program, and for each argument and for
            each result whether its tangent is a symbolic zero.
    """
    rule = eqn.params["jvp_jaxpr_fun"]

    @functools.cache
    def written(*absent: bool):
        jaxpr, consts, zeros = rule.call_wrapped(*absent)
        jaxpr = write(_closed(jaxpr, consts), absent, zeros)
        return jaxpr, jaxpr.consts, zeros

    return {**with_program(eqn, program), "jvp_jaxpr_fun": _wrapped(written, rule)}


def with_custom_vjp(
    eqn: jc.JaxprEqn,
    program: jc.Jaxpr,
    write: Callable[[jc.Jaxpr], jc.Jaxpr],
    free: Sequence[jc.Var] = (),
) -> dict[str, Any]:
    """The parameters of a `custom_vjp_call`, with its programs written anew.

    JAX traces the user's `fwd` when a derivative is taken, for the arguments that it
    is taken of. It gives the residuals first, but for those that are operands as they
    came, and the outputs after them; `out_trees` knows which.

    Args:
        eqn: the call.
        program: the function, written anew.
        write: writes `fwd` and `bwd` anew, with the same inputs and outputs.
        free: what `fwd` and `bwd` may close over. These become operands, after those of
            the closure of the function, and residuals, after the user's.
    """
    forward, backward = eqn.params["fwd_jaxpr_thunk"], eqn.params["bwd"]
    consts, count = custom_consts(eqn), len(free)

    @functools.cache
    def written_forward(*perturbed: bool):
        jaxpr = _closed(*forward.call_wrapped(*perturbed[count:]))
        jaxpr = write(_with_inputs(jaxpr, free))
        return jaxpr, jaxpr.consts

    def out_trees():
        out_tree, residuals, places = eqn.params["out_trees"]()
        if not count:
            return out_tree, residuals, places
        more = jax.tree.structure([0] * count)
        residuals = jax.tree_util.treedef_tuple((residuals, more))
        moved = [p if p is None or p < consts else p + count for p in places]
        return out_tree, residuals, [*moved, *range(consts, consts + count)]

    def written_backward(*args: Any):
        # Residuals, what is closed over, and cotangents, which may be symbolic zeros.
        end = eqn.params["out_trees"]()[1].num_leaves
        closed_over, args = args[end : end + count], args[:end] + args[end + count :]
        # What is known stays so: Equinox keeps in residuals what is perturbed.
        places = [i for i, x in enumerate(args) if isinstance(x, Tracer)]
        result: dict[str, Any] = {}

        def flat(*values):
            filled = list(args)
            for i, value in zip(places, values, strict=True):
                filled[i] = value
            # JAX has wrapped the user's `bwd`: it gives leaves, with a `Zero` of a
            # private type where there is no gradient, and what is to be logged.
            grads, result["logs"] = backward.call_wrapped(*filled)
            result["grads"] = list(grads)
            return [g for g in grads if not _is_zero(g)], result["logs"]

        values = [args[i] for i in places]
        jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*values)
        jaxpr = write(_with_inputs(jaxpr, free))
        outs = jc.jaxpr_as_fun(jaxpr)(*closed_over, *values)
        grads, logs = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        left = iter(grads)
        grads = [g if _is_zero(g) else next(left) for g in result["grads"]]
        none = [SymbolicZero(v.aval.to_tangent_aval()) for v in free]
        return [*none, *grads], logs

    return {
        **with_program(eqn, _with_inputs(program, free, consts)),
        "fwd_jaxpr_thunk": _wrapped(written_forward, forward),
        "bwd": _wrapped(written_backward, backward),
        "out_trees": out_trees,
    }


def closed_over(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """The variables whose tracers the rules of a `custom_vjp_call` may close over.

    Where JAX differentiates a function without tracing it first, they close over
    values; here over tracers of a trace that has ended. These keep their variables.
    """
    rules = eqn.params["fwd_jaxpr_thunk"], eqn.params["bwd"]
    return list(dict.fromkeys(filter(None, map(_variable_of, tracers_in(rules)))))


def _variable_of(tracer: Any) -> jc.Var | None:
    """What a tracer stands for in the program that is or was traced."""
    while isinstance(tracer, Tracer):
        tracer = getattr(tracer, "val", None)  # one of `vmap` holds another one
    return tracer if isinstance(tracer, jc.Var) else None


def _with_inputs(
    jaxpr: jc.Jaxpr, variables: Sequence[jc.Var], place: int = 0
) -> jc.Jaxpr:
    """A program with variables of another one as inputs more.

    Where their tracers are among its constants, they are constants no more.
    """
    if not variables:
        return jaxpr
    new = {v: jc.Var(v.aval) for v in variables}
    kept = []
    for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        known = _variable_of(const)
        if known in new:
            new[known] = var
        else:
            kept.append((var, const))
    invars = [*jaxpr.invars[:place], *new.values(), *jaxpr.invars[place:]]
    jaxpr = jaxpr.replace(constvars=[var for var, _ in kept], invars=invars)
    return _closed(jaxpr, [const for _, const in kept])


def _is_zero(x: Any) -> bool:
    """Whether it is a symbolic zero, of JAX's public type or of its private one."""
    return isinstance(x, SymbolicZero) or type(x).__name__ == "Zero"


def _wrapped(fn: Callable[..., Any], old: Any) -> Any:
    """A function as JAX keeps them in parameters, in the place of another one."""
    return linear_util.wrap_init(fn, debug_info=old.debug_info)


def _closed(jaxpr: jc.Jaxpr, consts: Sequence[Any]) -> jc.Jaxpr:
    """A program with its constants, which JAX has as its first inputs otherwise."""
    return jaxpr.with_consts(consts) if consts else jaxpr


# ---- functions


def cudnn_attention() -> tuple[Any, str] | None:
    """Where `jax.nn.dot_product_attention` looks up cuDNN's attention, if it does.

    It asks for half while it is traced. JAX's own function finds it there, however a
    program has come by that.
    """
    module = inspect.getmodule(jax.nn.dot_product_attention)
    name = "cudnn_dot_product_attention"
    return (module, name) if hasattr(module, name) else None


def calling_functions(eqn: jc.JaxprEqn) -> list[str]:
    """The functions of JAX by which other code wrote an equation, innermost first.

    JAX keeps the traceback of each equation, up to the function that was traced; here
    it ends where a function is not JAX's.
    """
    traceback = eqn.source_info.traceback
    codes = traceback.raw_frames()[0] if traceback is not None else ()
    places = (_path(code.co_filename, code.co_name) for code in codes)
    return list(itertools.takewhile(bool, places))


def jitted_function(eqn: jc.JaxprEqn) -> str:
    """The path of a function of JAX that JAX jits itself; "" of any other.

    The program of a `jit` says where its function stands: "inv at .../linalg.py:12".
    """
    name, _, place = (program_of(eqn).debug_info.func_src_info or "").partition(" at ")
    return _path(place.rpartition(":")[0], name)


@functools.cache
def _path(file: str, name: str) -> str:
    """The public path of a function of JAX, as far as it has one; "" of any other."""
    if not file.startswith(_LIBRARIES[0]):
        return ""
    parts = file.removeprefix(_LIBRARIES[0]).removesuffix(".py").split(os.sep)
    parts, name = ["jax", *(p for p in parts if p != "_src")], name.strip("_")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if name in vars(sys.modules.get(module, object)):
            return f"{module}.{name}"
    return ".".join([*parts, name])


# ---- variables and equations


def in_dtype(aval: Any, dtype: Any) -> Any:
    """An abstract value in another dtype, which is not a weak one."""
    return aval.update(dtype=dtype, weak_type=False)


def of_type(value: Any, aval: Any) -> Any:
    """A result of a program as an array of an abstract value's dtype and weak type.

    Evaluated outside of `jit`, a program gives its constants as it keeps them: as
    NumPy arrays, as Python numbers, or in a private type.
    """
    weak = getattr(aval, "weak_type", False)
    if not isinstance(value, jax.Array):
        value = jnp.array(value, aval.dtype)
    if getattr(jax.typeof(value), "weak_type", False) == weak:
        return value
    params = {"new_dtype": aval.dtype, "weak_type": weak, "sharding": None}
    return primitives.convert_element_type_p.bind(value, **params)


def primitive_name(eqn: jc.JaxprEqn) -> str:
    """The name of what an equation does.

    JAX 0.12 has one primitive, `call_hi_primitive`, for all of a newer kind, such as
    `SearchSorted`.
    """
    kind = eqn.params.get("_prim")
    return eqn.primitive.name if kind is None else type(kind).__name__


def name_stack(eqn: jc.JaxprEqn) -> str:
    """The name scopes in which an equation was traced, in its own program."""
    return str(eqn.source_info.name_stack)


def source_line(eqn: jc.JaxprEqn) -> str:
    """`file:line` of an equation, the innermost outside of JAX and jamp; "" if none.

    JAX keeps the traceback of each equation, innermost first.
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def conversion(var: jc.Var, dtype: Any, reader: jc.JaxprEqn | None) -> jc.JaxprEqn:
    """The equation that casts a variable, on the line of the equation that reads it."""
    new = jc.Var(in_dtype(var.aval, dtype))
    params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    here: dict[str, Any] = {}
    if reader is not None:
        here = {"source_info": reader.source_info, "ctx": reader.ctx}
    primitive = primitives.convert_element_type_p
    return jc.new_jaxpr_eqn([var], [new], primitive, params, set(), **here)


def stopped(var: jc.Var) -> jc.JaxprEqn:
    """The equation of `jax.lax.stop_gradient` of a variable."""
    primitive = primitives.stop_gradient_p
    return jc.new_jaxpr_eqn([var], [jc.Var(var.aval)], primitive, {}, set())


def checkpointed(
    eqns: Sequence[jc.JaxprEqn], invars: Sequence[jc.Var], keep: frozenset[str]
) -> jc.JaxprEqn:
    """The equation that `jax.checkpoint` makes, around equations that exist already.

    Its parameters are those of an example, and it stands where the last equation does;
    but its name stack is empty, as JAX puts it before those of the equations inside.

    Args:
        eqns: what is to be inside; the results of the last one come out.
        invars: what comes in.
        keep: the primitives whose results are kept for the backward pass.
    """
    last, example = eqns[-1], _example_of_checkpoint(keep)
    inner = program_of(example)
    inner = inner.replace(
        constvars=[],
        invars=list(invars),
        outvars=last.outvars,
        eqns=list(eqns),
        debug_info=inner.debug_info.with_unknown_names(),
    )
    no_names = type(last.source_info.name_stack)()
    return example.replace(
        invars=list(invars),
        outvars=last.outvars,
        params=with_program(example, inner),
        source_info=last.source_info.replace(name_stack=no_names),
        ctx=last.ctx,
    )


@functools.cache
def _example_of_checkpoint(keep: frozenset[str]) -> jc.JaxprEqn:
    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name in keep

    example = jax.checkpoint(jnp.negative, policy=policy)
    (eqn,) = jax.make_jaxpr(example)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    return eqn
