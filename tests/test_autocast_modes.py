"""Widest and narrowest: what differs, and what narrowest costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.programs import walk


def carries(fn, *args):
    """The dtypes of the carries of a scan."""
    (scan,) = [e for e in walk(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "scan"]
    _, carry, _ = (list(part) for part in scan.params["ft_in"].unpack())
    return [str(v.aval.dtype) for v in scan.outvars[: len(carry)]]


@pytest.mark.parametrize(("promote", "stream"), [("widest", 32), ("narrowest", 16)])
def test_a_carry_that_only_holds_activations_is_half_with_narrowest(promote, stream):
    def layers(w, x):
        def layer(carry, _):
            x, total, mean = carry
            y = x @ w
            return (x + y, total + y.sum(), 0.9 * mean + 0.1 * w[0]), None

        return jax.lax.scan(layer, (x, 0.0, w[0]), length=3)[0]

    x = jnp.ones((8, 8))
    found = carries(jamp.autocast(layers, promote=promote), x / 8, x)
    assert found == [f"float{stream}", "float32", "float32"]


def test_what_narrowest_costs():
    """The hazards of docs/autocast.md, which widest does not have."""
    a, ids = jnp.ones((1, 1)), jnp.float32(12345)

    def euler(x):
        return jax.lax.scan(lambda x, _: (x + 1e-3 * (x @ a), None), x, length=500)[0]

    def with_id(x):
        return jnp.concatenate([x @ a, ids[None, None]], 1)[0, 1]

    def denormalised(x):
        return ((x @ a) * (1e5 * a[0]))[0, 0]

    for fn, exact, lost in (
        (euler, 1.001**500, 1.0),
        (with_id, 12345, 12352),
        (denormalised, 1e5, 99840),
    ):
        wide, narrow = (
            jamp.autocast(fn, "bfloat16", promote=promote)(a)
            for promote in ("widest", "narrowest")
        )
        np.testing.assert_allclose(wide, exact, rtol=2e-3)
        np.testing.assert_allclose(narrow, lost, rtol=1e-6)
