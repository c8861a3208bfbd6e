"""Test undocumented facts about JAX on which autocast relies.

`jamp/_autocast/README.md` lists all such facts, and the test of each.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType

import jamp
from jamp._autocast import jax_internals

X = jnp.arange(4.0).reshape(2, 2) / 4

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


def with_metadata(x):
    with set_xla_metadata(room="bind"):
        return jnp.tanh(x @ x)


def test_equations_and_casts_keep_the_context_of_the_user():
    text = jax.jit(jamp.autocast(with_metadata)).lower(X).as_text()
    lines = [line for line in text.splitlines() if "= stablehlo." in line]
    assert lines and all('room = "bind"' in line for line in lines)
