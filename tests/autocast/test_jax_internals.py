"""Test undocumented facts about JAX that autocast needs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jc
from jax.sharding import AxisType

import jamp
from jamp._autocast import frames, jax_internals
from jamp._autocast.primitives import primitive_name
from tests.support.constructs import AROUND, custom_vjp

X = jnp.arange(4.0).reshape(2, 2) / 4


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
