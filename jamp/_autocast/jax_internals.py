"""Wraps the undocumented parts of JAX that autocast uses, one function for each.

The docstring of a function states the behavior of JAX that it relies on. The tests of
autocast check this behavior on the oldest and the newest supported JAX. `calls`,
`derivatives`, `subjaxprs`, `hijax` and `barriers` also use undocumented parts.
"""

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.extend.core import primitives
from jax.typing import DTypeLike

# Lines in these folders are not the user's code.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (jax.__file__, os.path.dirname(__file__))
)


# ---- jaxprs


def program_around(eqn: jc.JaxprEqn, jaxpr: jc.Jaxpr) -> jc.Jaxpr:
    """Returns a jaxpr of one equation, whose inputs are the equation's operands."""
    invars = [jc.Var(v.aval) for v in eqn.invars]
    return unnamed(jaxpr).replace(
        constvars=[],
        invars=invars,
        outvars=eqn.outvars,
        eqns=[eqn.replace(invars=list(invars))],
        effects=eqn.effects,
    )


def unnamed(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
    """Returns a jaxpr without names for its inputs and results."""
    return jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names())


def conv_features(eqn: jc.JaxprEqn) -> int:
    """Returns the number of output channels of a convolution.

    The first entry of `rhs_spec` is the axis of the output channels in the kernel.
    """
    kernel: Any = eqn.invars[1].aval
    return kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]


# ---- functions


def cudnn_attention() -> tuple[Any, str]:
    """Returns the module and name where cuDNN's attention is.

    cuDNN's attention raises while JAX traces it with float32 operands.
    `jax.nn.dot_product_attention` looks it up in this module at each call.
    """
    module = inspect.getmodule(jax.nn.dot_product_attention)
    return module, "cudnn_dot_product_attention"


def calling_functions(eqn: jc.JaxprEqn) -> list[str]:
    """Returns the paths of the JAX functions that made an equation, innermost first.

    JAX stores the traceback of each equation, up to the traced function. The list ends
    at the first function that is not part of JAX.
    """
    traceback = eqn.source_info.traceback
    codes = traceback.raw_frames()[0] if traceback is not None else ()
    paths = (_path(code.co_filename, code.co_name) for code in codes)
    return list(itertools.takewhile(bool, paths))


def jitted_function(eqn: jc.JaxprEqn) -> str:
    """Returns the path of the JAX function that a `jit` calls; "" for others."""
    name, line = function_of(eqn.params["jaxpr"])
    return _path(line.rpartition(":")[0], name)


def function_of(jaxpr: jc.Jaxpr) -> tuple[str, str]:
    """Returns the name and the line of the function that JAX traced to a jaxpr.

    The jaxpr stores both: "inv at .../linalg.py:12".
    """
    name, _, line = (jaxpr.debug_info.func_src_info or "").partition(" at ")
    return name, line


@functools.cache
def _path(file: str, name: str) -> str:
    """Returns the path of a JAX function, public if possible; "" for others."""
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


def in_dtype(aval: Any, dtype: DTypeLike) -> Any:
    """Returns an abstract value with another dtype and without a weak type."""
    return aval.update(dtype=dtype, weak_type=False)


def is_weak_scalar(atom: jc.Var | jc.Literal) -> bool:
    """Returns whether a value is a weakly typed scalar, such as a Python number."""
    aval: Any = atom.aval
    return getattr(aval, "weak_type", False) and aval.shape == ()


def array_of_type(value: Any, aval: Any) -> Any:
    """Converts a result of a jaxpr to an array with the type of an abstract value.

    Outside of `jit`, `jaxpr_as_fun` returns constants as the jaxpr stores them: as
    NumPy arrays, Python numbers, or a private type.
    """
    weak = getattr(aval, "weak_type", False)
    if not isinstance(value, jax.Array):
        value = jnp.array(value, aval.dtype)
    if getattr(jax.typeof(value), "weak_type", False) == weak:
        return value
    params = {"new_dtype": aval.dtype, "weak_type": weak, "sharding": None}
    return primitives.convert_element_type_p.bind(value, **params)


def scopes(eqn: jc.JaxprEqn) -> Any:
    """Returns the name scopes of an equation within its own jaxpr.

    Neighbors share this object.
    """
    return eqn.source_info.name_stack


def with_scope(eqn: jc.JaxprEqn, name: str) -> jc.JaxprEqn:
    """Adds an innermost name scope to an equation."""
    return with_scopes(eqn, scopes(eqn).extend(name))


def equation_before(
    eqn: jc.JaxprEqn, inner: jc.JaxprEqn, invars: Sequence[Any], outvar: jc.Var
) -> jc.JaxprEqn:
    """Moves the equation `inner` from a jaxpr inside `eqn` to before `eqn`."""
    inner = with_scopes(inner, scopes(eqn) + scopes(inner))
    return inner.replace(invars=list(invars), outvars=[outvar])


def equation_inside(
    call: jc.JaxprEqn, inner: jc.JaxprEqn, outvars: Sequence[jc.Var]
) -> jc.JaxprEqn:
    """Moves the equation `inner` from the jaxpr of `call` to the place of `call`.

    JAX records no user line inside its own functions, so `inner` gets the call's line.
    """
    names = scopes(call) + scopes(inner)
    if jitted_function(call):
        inner = inner.replace(source_info=call.source_info)
    return with_scopes(inner, names).replace(outvars=list(outvars))


def is_bare_jit(eqn: jc.JaxprEqn) -> bool:
    """Returns whether a `jit` only calls its jaxpr.

    Other `jit`s set shardings, layouts or compiler options, donate operands, or have
    effects, which refer to operands by position.
    """
    options = [free.issuperset(eqn.params[name]) for name, free in _without_options()]
    return not eqn.effects and all(options)


@functools.cache
def _without_options() -> list[tuple[str, frozenset[Any]]]:
    """Returns the values of a `jit`'s parameters if it has no options.

    Each option is a tuple, with one entry for each operand or each setting.
    """
    with jax.disable_jit(False):
        (call,) = jax.make_jaxpr(jax.jit(jnp.negative))(0.0).eqns
    named = call.params.items()
    return [(name, frozenset(v)) for name, v in named if isinstance(v, tuple)]


def with_scopes(eqn: jc.JaxprEqn, names: Any) -> jc.JaxprEqn:
    """Returns an equation with other name scopes."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


def source_lines(eqn: jc.JaxprEqn) -> Iterator[str]:
    """Yields the lines outside of JAX and jamp that made an equation, innermost first.

    JAX stores the traceback of each equation.
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            yield f"{frame.file_name}:{frame.line_num}"


def conversion(var: jc.Var, dtype: Any, reader: jc.JaxprEqn | None) -> jc.JaxprEqn:
    """Returns a cast of a variable, with the line of the equation that reads it."""
    new = jc.Var(in_dtype(var.aval, dtype))
    params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    cast = primitives.convert_element_type_p
    eqn = jc.new_jaxpr_eqn([var], [new], cast, params, set())
    return eqn if reader is None else at_source(eqn, reader)


def at_source(eqn: jc.JaxprEqn, source: jc.JaxprEqn) -> jc.JaxprEqn:
    """Returns `eqn` with the source line, the name scopes and the mesh of `source`."""
    return eqn.replace(source_info=source.source_info, ctx=source.ctx)


def combining_in(params: dict[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Returns the parameters of an equation that change with its float dtype.

    The parameter "update_jaxpr" of a scatter and "jaxpr" of a reduction hold the
    jaxpr by which it combines two numbers, in the dtype of its operands.
    """
    names = [name for name in ("update_jaxpr", "jaxpr") if params.get(name) is not None]
    return {name: _in_dtype(params[name], np.dtype(dtype)) for name in names}


@functools.lru_cache(maxsize=256)
def _in_dtype(jaxpr: jc.Jaxpr, dtype: np.dtype) -> jc.Jaxpr:
    """Returns a jaxpr of scalars that takes and returns floats in another dtype.

    A single addition, as in `x.at[i].add(y)`, runs in this dtype. A function of the
    user, as in `x.at[i].apply(f)`, still computes in its own.
    """
    combine = jc.jaxpr_as_fun(jaxpr)
    is_single = len(jaxpr.eqns) == 1 and jaxpr.eqns[0].invars == jaxpr.invars

    def new(own: Any) -> Any:
        return dtype if jnp.issubdtype(own, jnp.floating) else own

    def converted(*numbers):
        owns = [v.aval.dtype for v in jaxpr.invars]  # type: ignore[attr-defined]
        given = [x.astype(own) for x, own in zip(numbers, owns, strict=True)]
        return [x.astype(new(x.dtype)) for x in combine(*given)]

    avals: list[Any] = [v.aval for v in jaxpr.invars]
    scalars = [jax.ShapeDtypeStruct((), new(aval.dtype)) for aval in avals]
    return jax.make_jaxpr(combine if is_single else converted)(*scalars)
