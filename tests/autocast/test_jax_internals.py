"""What JAX documents nowhere and autocast relies on: each fact, on any JAX."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jc
from jax.sharding import AxisType, PartitionSpec as P

from jamp._autocast import frames, jax_internals, tracers
from jamp._autocast.primitives import primitive_name
from jamp._fp8.quantized import Of, quantize
from tests.support.programs import walk

X = jnp.arange(4.0).reshape(2, 2) / 4
W = X.T + 1
DROPPED = lax.ScatterDimensionNumbers((), (0,), (0,))


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


def test_the_equation_of_a_value_that_is_being_traced():
    def fn(x):
        assert tracers.equation_of(x) is None
        eqn = tracers.equation_of(x + 1)
        assert eqn.primitive.name == "add" and eqn.invars[0] is x
        return x

    jax.jit(fn)(X)
    jax.jit(jax.vmap(lambda x: tracers.equation_of(x + 1) or x))(X)
    assert tracers.equation_of(X) is None


def total(x8):
    return x8[0].astype(jnp.float32).sum()


def trips(fn):
    return lax.scan(lambda sum, _: (sum + fn(), None), jnp.float32(0), length=2)[0]


@jax.jit
def maximum(x):
    return total(quantize(x, Of.INPUT))


def alone(x):
    """In a `shard_map`, closing over the array."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    fn = lambda: total(quantize(x, Of.INPUT))  # noqa: E731
    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()


BOUND_BEFORE = {
    "scan": lambda x: trips(lambda: total(quantize(x, Of.INPUT))),
    "scan of scan": lambda x: trips(
        lambda: trips(lambda: total(quantize(x, Of.INPUT)))
    ),
    "cast": lambda x: trips(lambda: total(quantize(x.astype("bfloat16").T, Of.INPUT))),
    "jit": lambda x: trips(jax.jit(lambda: total(quantize(x, Of.INPUT)))),
    "branch": lambda x: lax.cond(
        x[0, 0] == 0, lambda: total(quantize(x, Of.INPUT)), lambda: jnp.float32(0)
    ),
    "gradient": lambda x: trips(
        lambda: jax.grad(lambda x: total(quantize(x, Of.INPUT)) + x.sum())(x).sum()
    ),
}
BOUND_WITHIN = {
    "computed": lambda x: trips(lambda: total(quantize(x + 1, Of.INPUT))),
    "an argument": lambda x: trips(lambda: maximum(x)),
    "vmap": lambda x: jax.vmap(BOUND_BEFORE["scan"])(x).sum(),
    "shard_map": alone,
}


@pytest.mark.parametrize("name", BOUND_BEFORE | BOUND_WITHIN)
def test_what_is_made_of_values_around_a_loop_is_bound_before_it(name):
    fn = (BOUND_BEFORE | BOUND_WITHIN)[name]
    program = jax.make_jaxpr(fn)(X).jaxpr
    names = [eqn.primitive.name for eqn in program.eqns]
    everywhere = [eqn.primitive.name for eqn in walk(program)]
    assert everywhere.count("quantize") == 1
    assert ("quantize" in names) == (name in BOUND_BEFORE)
    with jax.disable_jit():  # each operation where it is
        expected = fn(X)
    np.testing.assert_array_equal(jax.jit(fn)(X), expected)


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
    frames.CHECKPOINT: jax.checkpoint,
    "scan": lambda fn: lambda x: lax.scan(lambda c, x: (c, fn(x)), None, x)[1],
    "shard_map": mapped,
    frames.OPTIMIZED_VJP: rematerialized,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}


# What JAX's planned upgrades have instead, by their flags; without a name, nothing.
UPGRADES = {
    frames.CHECKPOINT: ("jax_remat3", "RematTraced"),
    frames.OPTIMIZED_VJP: ("jax_custom_vjp3", ""),
    "custom_jvp_call": ("jax_custom_jvp3", "CustomJVPTraced"),
    "custom_vjp_call": ("jax_custom_vjp3", "CustomVJPTraced"),
}


def name_of(holder):
    flag, upgraded = UPGRADES.get(holder, ("", ""))
    return upgraded if getattr(jax.config, flag, False) else holder


@pytest.mark.parametrize("name", [*filter(name_of, HOLDERS)])
def test_a_program_can_be_read_and_replaced(name):
    eqn, other = (equation(HOLDERS[name](fn), X) for fn in (jnp.sin, jnp.cos))
    assert primitive_name(eqn) == name_of(name)
    (frame,) = frames.frames_of(other)
    assert [e.primitive.name for e in frame.program.eqns] == ["cos"]
    replaced = eqn.replace(params=frames.with_programs(eqn, [frame.program]))
    (got,) = evaluate([replaced], eqn.invars, X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


# How a program is run, what goes in and out, and in which dtypes.
FRAMES = {
    "jit": "call open",
    frames.CHECKPOINT: "call open residuals",
    "scan": "loop open 1 1 5",
    "shard_map": "map",
    frames.OPTIMIZED_VJP: "call",
    "custom_jvp_call": "call open",
    "custom_vjp_call": "call",
    "cond": "branch open",
    "while": "loop 2 1 None",
}


@pytest.mark.parametrize("name", [*filter(name_of, FRAMES)])
def test_what_a_frame_says(name):
    holders = HOLDERS | {
        "scan": lambda fn: (
            lambda x: lax.scan(lambda c, y: (c @ fn(x), y), x, jnp.stack([x] * 5))
        ),
        "cond": lambda fn: lambda x: lax.cond(x[0, 0] > 0, fn, lambda x: x, x),
        "while": lambda fn: (
            lambda x: lax.while_loop(
                lambda c: (c + x < 9).all(), lambda c: fn(c) @ W + x, x
            )
        ),
    }
    jaxpr = jax.make_jaxpr(holders[name](jnp.sin))(X)
    (eqn,) = (e for e in jaxpr.eqns if primitive_name(e) == name_of(name))
    *_, frame = found = frames.frames_of(eqn)
    words = [frame.kind.value]
    flags = {"open": "is_open", "residuals": "own_residuals"}
    words += [word for word, field in flags.items() if getattr(frame, field)]
    if frame.kind is frames.Kind.LOOP:
        words += map(str, (frame.consts, frame.carries, frame.trips))
    assert " ".join(words) == FRAMES[name]
    for f in found:
        inner = [v.aval.dtype for v in f.program.invars]
        assert [v.aval.dtype for v in f.operands] == inner
        assert len(f.results) in (0, len(f.program.outvars))
    programs = [f.program for f in found][::-1]
    replaced = eqn.replace(params=frames.with_programs(eqn, programs))
    assert [f.program for f in frames.frames_of(replaced)] == programs
    labels = {"cond": ["branch 0", "branch 1"], "while": ["cond", "body"]}
    assert [f.label for f in found] == labels.get(name, [""])


def test_a_scan_is_given_fewer_constants_and_an_equation_before_it():
    def fn(a, b, xs):
        with jax.named_scope("outer"):
            return lax.scan(lambda c, x: (c + x @ jnp.concatenate([a, b]), c), X, xs)

    args = X[:1], W[:1], jnp.stack([X, W])
    jaxpr = jax.make_jaxpr(fn)(*args)
    (scan,) = jaxpr.eqns
    body = frames.program_of(scan)
    place = [e.primitive.name for e in body.eqns].index("concatenate")
    inner, new = body.eqns[place], jc.Var(body.eqns[place].outvars[0].aval)
    before = jax_internals.equation_before(scan, inner, scan.invars[:2], new)
    left = [e for e in body.eqns if e is not inner]
    fewer = frames.with_fewer_consts(scan, body, left, {inner.outvars[0]: new})
    assert frames.scan_counts(fewer) == (1, 1)
    assert jax_internals.name_stack(before) == "outer"
    got = jc.jaxpr_as_fun(jaxpr.replace(eqns=[before, fewer]))(*args)
    for ours, plain in zip(got, fn(*args), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_how_a_scatter_joins_numbers_of_another_dtype():
    multiply = lambda x, y: lax.scatter_mul(x, np.array([0]), y, DROPPED)  # noqa: E731
    *_, eqn = jax.make_jaxpr(multiply)(X[0], 2.0).eqns
    joined = jax_internals.in_scalars(eqn.params["update_jaxpr"], jnp.bfloat16.dtype)
    assert [str(v.aval) for v in joined.invars] == ["bfloat16[]"] * 2
    assert jc.jaxpr_as_fun(joined)(3.0, 2.0) == [6]


@pytest.mark.parametrize("value", [2, 2.0, np.float64(2), jnp.float32(2)], ids=repr)
def test_a_value_as_an_array_of_a_type(value):
    for weak in (False, True):
        aval = jax.typeof(jnp.asarray(2.0)).update(weak_type=weak)
        got = jax_internals.array_of_type(value, aval)
        assert isinstance(got, jax.Array) and jax.typeof(got) == aval and got == 2


def multiply(x):
    return jnp.linalg.multi_dot([x, x, x])


def last(fn):
    return jax.make_jaxpr(fn)(X).eqns[-1]


def test_functions_of_jax_that_wrote_an_equation():
    """The outermost is the one that was called, in public if it is; then it ends."""
    eqn = last(multiply)
    assert jax_internals.calling_functions(eqn)[-1] == "jax.numpy.linalg.multi_dot"
    (inside,) = frames.program_of(equation(jax.jit(multiply), X)).eqns[-1:]
    assert jax_internals.calling_functions(inside)[-1] == "jax.numpy.linalg.multi_dot"
    own = [f.rpartition(".")[2] for f in jax_internals.calling_functions(last(W.dot))]
    assert "multi_dot" not in own and own


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
        primitive_name(eqn)
        for eqn in walk(jax.make_jaxpr(jnp.searchsorted)(X[0], X[1]).jaxpr)
    }
    assert "call_hi_primitive" not in names
