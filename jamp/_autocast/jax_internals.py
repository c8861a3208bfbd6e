"""What JAX documents nowhere: all that autocast uses of it, each in a function.

A function says what JAX does there, and `tests/test_jax_internals.py` holds it to that
on the oldest and on the newest JAX. Other files name none of it: what a new JAX breaks,
it breaks here.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jc
from jax.extend.core import primitives

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


def conv_features(eqn: jc.JaxprEqn) -> int:
    """How many channels come out of a convolution.

    The first entry of a side's dimension numbers is the axis of its batch, or of the
    output channels of the kernel.
    """
    kernel = eqn.invars[1].aval.shape
    return kernel[eqn.params["dimension_numbers"].rhs_spec[0]]


# ---- functions with their own derivative


def custom_consts(eqn: jc.JaxprEqn) -> int:
    """How many operands of a custom function come from its closure.

    They come first, and the user's derivative does not take them.
    """
    return eqn.params["num_consts"]


def jvp_rule(
    eqn: jc.JaxprEqn, absent: Sequence[bool]
) -> tuple[jc.Jaxpr, Sequence[bool]]:
    """The user's rule of a `custom_jvp_call`, as a program.

    JAX traces it when a derivative is taken, for the tangents that are there then.

    Args:
        eqn: the call.
        absent: for each argument whether its tangent is a symbolic zero.

    Returns:
        The program, from all primals and the tangents that are there to all primals and
        the tangents that are no symbolic zeros; and for each tangent whether it is one.
    """
    jaxpr, consts, zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*absent)
    return _closed(jaxpr, consts), zeros


def forward_rule(eqn: jc.JaxprEqn, count: int) -> jc.Jaxpr:
    """The user's `fwd` of a `custom_vjp_call`, as a program of `count` arguments.

    JAX traces it when a derivative is taken; here, one of all arguments.
    """
    thunk = eqn.params["fwd_jaxpr_thunk"]
    return _closed(*thunk.call_wrapped(*[True] * count))


def split_results(
    eqn: jc.JaxprEqn, results: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and the residuals in what the program of `forward_rule` returns.

    That returns the residuals first, but for those that are arguments as they came:
    JAX knows of which one, once the rule has been traced.
    """
    _, residuals, forwarded = eqn.params["out_trees"]()
    split = residuals.num_leaves - sum(f is not None for f in forwarded)
    kept = iter(results[:split])
    saved = [next(kept) if f is None else args[f] for f in forwarded]
    return list(results[split:]), saved


def call_backward_rule(eqn: jc.JaxprEqn, *args: Any) -> list[Any]:
    """Calls the user's `bwd` of a `custom_vjp_call` on residuals and cotangents.

    JAX has wrapped it: it takes and returns leaves, with a `Zero` of a private type
    for a gradient that the user left out. Here that is None.
    """
    grads, _ = eqn.params["bwd"].call_wrapped(*args)
    return [None if type(g).__name__ == "Zero" else g for g in grads]


def _closed(jaxpr: jc.Jaxpr, consts: Sequence[Any]) -> jc.Jaxpr:
    """A program with its constants, which JAX has as its first inputs otherwise."""
    return jaxpr.with_consts(consts) if consts else jaxpr


# ---- variables and equations


def in_dtype(aval: Any, dtype: Any) -> Any:
    """An abstract value in another dtype, which is not a weak one."""
    return aval.update(dtype=dtype, weak_type=False)


def is_weak_scalar(var: jc.Var) -> bool:
    """Whether it is a number that takes the dtype of what it meets, as Python's do."""
    return getattr(var.aval, "weak_type", False) and var.aval.shape == ()


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
    primitive = primitives.convert_element_type_p
    return jc.new_jaxpr_eqn([var], [new], primitive, params, set(), **_place(reader))


def repetition(var: jc.Var, like: jc.Var, reader: jc.JaxprEqn) -> jc.JaxprEqn:
    """The equation that repeats a variable along its axes of size 1."""
    aval = in_dtype(like.aval, var.aval.dtype)
    explicit = getattr(aval.sharding.mesh, "are_all_axes_explicit", False)
    params = {
        "shape": aval.shape,
        "broadcast_dimensions": tuple(range(len(aval.shape))),
        "sharding": aval.sharding if explicit else None,
    }
    primitive = primitives.broadcast_in_dim_p
    new = jc.Var(aval)
    return jc.new_jaxpr_eqn([var], [new], primitive, params, set(), **_place(reader))


def _place(reader: jc.JaxprEqn | None) -> dict[str, Any]:
    """Where an equation stands that another one needs."""
    if reader is None:
        return {}
    return {"source_info": reader.source_info, "ctx": reader.ctx}


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
