"""What JAX documents nowhere and autocast relies on: each fact, on any JAX."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jc
from jax.sharding import PartitionSpec as P

from jamp._autocast import jax_internals
from tests.programs import walk

X = jnp.arange(4.0).reshape(2, 2) / 4
W = X.T + 1


def equation(fn, *args):
    """The one equation that a function is traced to."""
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return eqn


def evaluate(eqns, invars, *args):
    """What equations compute: the results of the last one."""
    empty = jax.make_jaxpr(lambda: ())()
    outvars = eqns[-1].outvars
    jaxpr = empty.replace(invars=list(invars), outvars=outvars, eqns=list(eqns))
    return jc.jaxpr_as_fun(jaxpr)(*args)


# ---- programs in the parameters of equations


def custom_jvp(fn):
    function = jax.custom_jvp(lambda x: fn(x))
    function.defjvp(lambda p, t: (fn(*p), 3.0 * t[0]))
    return function


def custom_vjp(fn, **options):
    function = jax.custom_vjp(lambda x: fn(x))
    function.defvjp(lambda x: (fn(x), x), lambda x, g: (3.0 * g,), **options)
    return function


def rematerialized(fn):
    """JAX has `remat_opt` in the forward pass of a derivative."""
    function = custom_vjp(fn, optimize_remat=True)
    return lambda x: jax.vjp(function, x)[0]


def mapped(fn):
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())


HOLDERS = {
    "jit": jax.jit,
    jax_internals.CHECKPOINT: jax.checkpoint,
    "scan": lambda fn: lambda x: lax.scan(lambda c, x: (c, fn(x)), None, x)[1],
    "shard_map": mapped,
    jax_internals.OPTIMIZED_VJP: rematerialized,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_program_can_be_read_and_replaced(name):
    eqn, other = (equation(HOLDERS[name](fn), X) for fn in (jnp.sin, jnp.cos))
    assert eqn.primitive.name == name
    program = jax_internals.program_of(other)
    assert [e.primitive.name for e in program.eqns] == ["cos"]
    replaced = eqn.replace(params=jax_internals.with_program(eqn, program))
    (got,) = evaluate([replaced], eqn.invars, X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


def test_operands_of_a_scan():
    fn = lambda w, x: lax.scan(lambda c, x: ((c[0] @ w, c[1] + 1), x), (x, 0), x)  # noqa: E731
    assert jax_internals.scan_counts(equation(fn, W, X)) == (1, 2)


def test_programs_of_a_while_loop():
    def fn(w, v, x):
        return lax.while_loop(lambda c: (c @ w + v).sum() < 9, lambda c: c @ w, x)

    eqn = equation(fn, W, W, X)
    cond, body, cond_consts, body_consts = jax_internals.while_programs(eqn)
    assert (cond_consts, body_consts, len(eqn.invars)) == (2, 1, 4)
    assert (len(cond.invars), len(body.invars)) == (3, 2)
    (stop,) = jax.make_jaxpr(lambda w, v, x: False)(W, W, X).outvars
    never = cond.replace(outvars=[stop])
    params = jax_internals.with_while_programs(eqn, never, body)
    (got,) = evaluate([eqn.replace(params=params)], eqn.invars, W, W, W, X)
    np.testing.assert_array_equal(got, X)


# ---- variables and equations


@pytest.mark.parametrize("value", [2, 2.0, np.float64(2), jnp.float32(2)], ids=repr)
def test_a_value_as_an_array_of_a_type(value):
    for weak in (False, True):
        aval = jax.typeof(jnp.asarray(2.0)).update(weak_type=weak)
        got = jax_internals.of_type(value, aval)
        assert isinstance(got, jax.Array) and jax.typeof(got) == aval and got == 2


def scoped(x):
    with jax.named_scope("outer"):
        return jnp.exp(x)


def test_the_names_and_the_lines_of_an_equation():
    eqn = equation(lambda x: scoped(x), X)
    assert jax_internals.name_stack(eqn) == "outer"
    first, second, *_ = jax_internals.source_lines(eqn)
    assert first == f"{__file__}:{scoped.__code__.co_firstlineno + 2}"
    assert second.startswith(f"{__file__}:")


def test_the_options_of_a_shard_map():
    options = jax_internals.shard_map_options(equation(mapped(jnp.sin), X))
    assert options["axis_names"] == {"d"} and options["check_vma"] is True
    again = jax.shard_map(jnp.cos, out_specs=P(), **options)
    np.testing.assert_allclose(again(X), jnp.cos(X), rtol=1e-6)


def test_a_cast_stands_where_it_is_read_if_anything_reads_it():
    eqn, half = equation(scoped, X), jnp.dtype(jnp.float16)
    for reader, name in ((eqn, "outer"), (None, "")):
        cast = jax_internals.conversion(eqn.invars[0], half, reader)
        assert jax_internals.name_stack(cast) == name
        (got,) = evaluate([cast], cast.invars, X)
        np.testing.assert_array_equal(got, X.astype(half), strict=True)


def test_equal_equations_share_a_checkpointed_program():
    def fn(x):
        for layer, factor in enumerate((2.0, 2.0, 3.0)):
            with jax.named_scope(f"layer_{layer}/exp"):
                x = lax.exp(x) * factor
        return x

    program, programs, keep = jax.make_jaxpr(fn)(X), {}, frozenset[str]()
    pairs = [program.eqns[i : i + 2] for i in (0, 2, 4)]
    eqns = [
        jax_internals.checkpointed(pair, pair[0].invars, keep, True, programs)
        for pair in pairs
    ]
    names = [jax_internals.name_stack(eqn) for eqn in eqns]
    assert names == ["layer_0/exp", "layer_1/exp", "layer_2/exp"]
    first, second, third = map(jax_internals.program_of, eqns)
    assert first is second and second is not third
    np.testing.assert_array_equal(evaluate(eqns, program.invars, X)[0], fn(X))


def test_an_equation_alone():
    program = jax.make_jaxpr(lambda x: jnp.sin(x * 2 + x))(X)
    (got,) = jc.jaxpr_as_fun(jax_internals.alone(program.eqns[1], program))(X, W)
    np.testing.assert_array_equal(got, X + W)


# ---- functions


def multiply(x):
    return jnp.linalg.multi_dot([x, x, x])


def last(fn):
    return jax.make_jaxpr(fn)(X).eqns[-1]


def test_functions_of_jax_that_wrote_an_equation():
    """The outermost is the one that was called, in public if it is; then it ends."""
    eqn = last(multiply)
    assert jax_internals.calling_functions(eqn)[-1] == "jax.numpy.linalg.multi_dot"
    (inside,) = jax_internals.program_of(equation(jax.jit(multiply), X)).eqns[-1:]
    assert jax_internals.calling_functions(inside)[-1] == "jax.numpy.linalg.multi_dot"
    own = [f.rpartition(".")[2] for f in jax_internals.calling_functions(last(W.dot))]
    assert "multi_dot" not in own and own


def test_the_trace_of_a_function_jitted_by_jax_does_not_say_who_called_it():
    def polynomials(x):
        return jnp.polymul(x[0], x[1])

    def convolution(x):
        return jnp.convolve(x[0], x[1])

    for fn in (polynomials, convolution):
        (eqn,) = [
            e for e in jax.make_jaxpr(fn)(X).eqns if e.params.get("name") == "convolve"
        ]
        functions = jax_internals.calling_functions(eqn)
        assert ("jax.numpy.polymul" in functions) == (fn is polynomials)
        for inner in jax_internals.program_of(eqn).eqns:
            assert "jax.numpy.polymul" not in jax_internals.calling_functions(inner)


def inv(x):
    return x + 1


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (jnp.linalg.inv, "jax.numpy.linalg.inv"),
        (jax.jit(jnp.linalg.inv), "jax.numpy.linalg.inv"),
        (jax.vmap(jnp.cov), "jax.numpy.cov"),
        (jax.scipy.linalg.cholesky, "jax.scipy.linalg.cholesky"),
        (jax.jit(inv), ""),
        (jax.jit(lambda x: x), ""),
    ],
)
def test_a_function_that_jax_jits_is_known_by_its_file(fn, path):
    (eqn,) = jax.make_jaxpr(fn)(X[None]).eqns
    assert jax_internals.jitted_function(eqn) == path


def test_primitives_that_share_one_have_names():
    names = {
        jax_internals.primitive_name(eqn)
        for eqn in walk(jax.make_jaxpr(jnp.searchsorted)(X[0], X[1]).jaxpr)
    }
    assert "call_hi_primitive" not in names
