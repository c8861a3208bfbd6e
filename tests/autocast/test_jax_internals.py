"""Test undocumented facts about JAX that autocast needs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jc
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from jamp._autocast import frames, jax_internals
from jamp._autocast.primitives import primitive_name
from jamp._fp8.quantized import Of, quantize
from tests.support.constructs import AROUND, custom_vjp
from tests.support.programs import walk

X = jnp.arange(4.0).reshape(2, 2) / 4


def total(x):
    return quantize(x, Of.INPUT)[0].astype(jnp.float32).sum()


def trips(fn):
    return lax.scan(lambda sum, _: (sum + fn(), None), jnp.float32(0), length=2)[0]


def alone(x):
    """Closes a `shard_map` over the array."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    fn = lambda: total(x)  # noqa: E731
    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()


jitted = jax.jit(total)
BOUND_BEFORE = {
    "scan": lambda x: trips(lambda: total(x)),
    "scan of scan": lambda x: trips(lambda: trips(lambda: total(x))),
    "cast": lambda x: trips(lambda: total(x.astype("bfloat16").T)),
    "jit": lambda x: trips(jax.jit(lambda: total(x))),
    "branch": lambda x: lax.cond(
        x[0, 0] == 0, lambda: total(x), lambda: jnp.float32(0)
    ),
    "gradient": lambda x: trips(
        lambda: jax.grad(lambda x: total(x) + x.sum())(x).sum()
    ),
}
BOUND_WITHIN = {
    "computed": lambda x: trips(lambda: total(x + 1)),
    "an argument": lambda x: trips(lambda: jitted(x)),
    "vmap": lambda x: jax.vmap(BOUND_BEFORE["scan"])(x).sum(),
    "shard_map": alone,
}


@pytest.mark.parametrize("name", BOUND_BEFORE | BOUND_WITHIN)
def test_a_loop_invariant_is_quantized_before_the_loop(name):
    fn = (BOUND_BEFORE | BOUND_WITHIN)[name]
    program = jax.make_jaxpr(fn)(X).jaxpr
    names = [eqn.primitive.name for eqn in program.eqns]
    everywhere = [eqn.primitive.name for eqn in walk(program)]
    assert everywhere.count("jamp_quantize") == 1
    assert ("jamp_quantize" in names) == (name in BOUND_BEFORE)
    with jax.disable_jit():  # moves no operation
        expected = fn(X)
    np.testing.assert_array_equal(jax.jit(fn)(X), expected)


# ---- programs in the parameters of equations


def optimized_vjp(fn):
    """Returns a forward pass, the only place where JAX has `remat_opt`."""
    forward = lambda x: (fn(x), x)  # noqa: E731
    function = custom_vjp(fn, forward, lambda x, g: (g,), optimize_remat=True)
    return lambda x: jax.vjp(function, x)[0]


# By primitive: a construct, the flag that replaces it, and the replacement's name.
HOLDERS = {
    "jit": (AROUND["jit"], "", ""),
    frames.CHECKPOINT: (AROUND["checkpoint"], "jax_remat3", "RematTraced"),
    "scan": (AROUND["scan"], "", ""),
    "shard_map": (AROUND["shard_map"], "", ""),
    frames.OPTIMIZED_VJP: (optimized_vjp, "jax_custom_vjp3", ""),
    "custom_jvp_call": (AROUND["custom_jvp"], "jax_custom_jvp3", "CustomJVPTraced"),
    "custom_vjp_call": (AROUND["custom_vjp"], "jax_custom_vjp3", "CustomVJPTraced"),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_program_can_be_read_and_replaced(name):
    around, flag, upgraded = HOLDERS[name]
    if getattr(jax.config, flag, False):
        name = upgraded or pytest.skip(f"JAX has no {name} under {flag}")
    programs = (jax.make_jaxpr(around(fn))(X) for fn in (jnp.sin, jnp.cos))
    (jaxpr, (eqn, *rest)), (_, (other, *_)) = ((p.jaxpr, p.eqns) for p in programs)
    assert primitive_name(eqn) == name
    (frame,) = frames.frames_of(other)
    assert [e.primitive.name for e in frame.program.eqns] == ["cos"]
    replaced = eqn.replace(params=frames.with_programs(eqn, [frame.program]))
    (got,) = jc.jaxpr_as_fun(jaxpr.replace(eqns=[replaced, *rest]))(X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


# ---- options of a `jit`

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
OPTIONS = {
    "none": {},
    "inline": {"inline": True},
    "in_shardings": {"in_shardings": ONE},
    "out_shardings": {"out_shardings": ONE},
    "donated": {"donate_argnums": 0},
}


@pytest.mark.parametrize("in_mesh", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_only_a_jit_without_options_is_inlined(name, in_mesh):
    fn, is_bare = jax.jit(jnp.sin, **OPTIONS[name]), name in ("none", "inline")
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh) if in_mesh else contextlib.nullcontext():
        (eqn,) = jax.make_jaxpr(fn)(X).eqns
        written = jax.make_jaxpr(jamp.autocast(fn))(X).eqns
    assert jax_internals.is_bare_jit(eqn) == is_bare
    assert ([e.primitive.name for e in written] == ["sin"]) == is_bare
