"""Test that a region of a program becomes one checkpoint without changing results."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jc

from jamp._autocast.graph import Graph, Region, checkpoint, inputs_of


def graph_of(fn, *args):
    return Graph(jax.make_jaxpr(fn)(*args))


HALF = jnp.linspace(-1, 1, 4).astype("float16")


def diamond(x):
    """Equation 0 casts, 1 and 2 read the cast, 3 joins them, and 4 rounds."""
    wide = x.astype("float32")
    left, right = jnp.sin(wide), jnp.cos(wide)
    return (left * right).astype("float16"), left


def test_a_graph_finds_readers_needs_and_ancestors():
    graph = graph_of(diamond, HALF)
    (wide,), (left,) = graph.eqns[0].outvars, graph.eqns[1].outvars
    assert graph.readers_of([wide]) == {1, 2}
    assert graph.readers_of([wide, left]) == {1, 2, 3, 5}  # 5: the outputs
    assert [sorted(needs) for needs in graph.needs] == [[], [0], [0], [1, 2], [3]]
    assert graph.ancestors([left]) == {0, 1}
    assert [graph.has_gradient(i) for i in (0, 5)] == [True, False]


def with_effects(x):
    ref = jax.new_ref(jnp.float32(0))
    ref[...] = jnp.exp(x).sum()
    seen = ref[...]
    return x * seen


def test_effects_between_equations_are_found_in_order():
    graph = graph_of(with_effects, jnp.ones(4))
    (exp,) = (i for i, e in enumerate(graph.eqns) if e.primitive.name == "exp")
    (mul,) = (i for i, e in enumerate(graph.eqns) if e.primitive.name == "mul")
    names = [graph.eqns[i].primitive.name for i in sorted(graph.between({exp, mul}))]
    assert names == ["reduce_sum", "swap", "get"]


def random_program(rng, depth=24):
    """Draws sums, differences and casts of integers, which half holds exactly."""

    def fn(x):
        values = [x, x.astype("float32")]
        for _ in range(depth):
            a, b = rng.choice(values), rng.choice(values)
            values.append(
                rng.choice([a.astype("float16"), a.astype("float32"), a.sum() + 0 * a])
                if rng.random() < 0.5
                else jnp.clip(a.astype("float32") - b.astype("float32"), -9, 9)
            )
        return values[-1], rng.choice(values)

    return fn


def random_region(rng, graph, places):
    """Draws equations with all equations between them, and some of these to repeat."""
    members = set(rng.sample(places, 4))
    while between := graph.between(members):
        members |= between
    shared = {i for i in members if rng.random() < 0.2}
    return Region(members, shared)


@pytest.mark.parametrize("seed", range(40))
def test_a_program_with_checkpoints_computes_the_same(seed):
    rng = random.Random(seed)
    graph = graph_of(random_program(rng), HALF)
    half, count = len(graph.eqns) // 2, len(graph.eqns)
    regions = [
        random_region(rng, graph, places)
        for places in (range(half), range(half, count))
    ]
    written = []
    for region in regions:
        eqns = [graph.eqns[i] for i in sorted(region.members)]
        variables = [*inputs_of(eqns), *(v for eqn in eqns for v in eqn.outvars)]
        pinned = rng.sample(variables, len(variables) // 2)
        written.append(checkpoint(graph, region, eqns, pinned, {}))
        count += 1 - len(region.members - region.shared)
    program = graph.with_checkpoints(written)
    assert len(program.eqns) == count
    for x in (HALF, HALF[::-1]):
        x = jnp.round(x * 2)
        got, wanted = (jc.jaxpr_as_fun(p)(x) for p in (program, graph.jaxpr))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
