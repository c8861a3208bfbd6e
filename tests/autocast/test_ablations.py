"""Each mechanism of autocast can be switched off, and its example then differs."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax, nn

import jamp
from benchmarks import ablations, lean
from benchmarks.mechanisms import MECHANISMS, without
from jamp._autocast import marks, transform


class Example(NamedTuple):
    """A function whose gradients differ without a mechanism."""

    fn: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    promote: Any = "widest"
    of_model: bool = False  # whether the first argument is a param of a half model
    half: str = "bfloat16"
    fp8: bool = False


def attention(w, x):
    return nn.softmax(x @ w) @ w


def label_loss(w, x):
    logits, labels = x @ w, jnp.arange(4)[:, None]
    return nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels, -1)[:, 0]


def standardised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def activations(w, x):
    """An activation that two products by weights read, and a third their sum."""
    y = x * w
    return jnp.tanh(y @ w + y @ w.T) @ w


def rnn(w, v, xs):
    """Two products of what is carried, with weights that all steps share."""

    def step(h, x):
        h = jnp.tanh(h @ w + h @ v + x)
        return h, h

    return lax.scan(step, xs[0] @ w, xs)[1]


def lstm(w, v, xs):
    """The weights of two gates are joined in each step."""

    def step(h, x):
        a, b = jnp.split(h @ jnp.concatenate([w, v], 1) + x.repeat(2, -1), 2, -1)
        return jnp.tanh(a) * b, a

    return lax.scan(step, xs[0], xs)[1]


def blocks(ws, x):
    """What a step gives the next is an activation: products read it."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ ws[0], ws)[0]


def products(ws, x):
    """What a step keeps, a product with a float32 slice reads."""
    return lax.scan(lambda h, w: (h, (h @ w) * 2.0 * w), x, ws)[1]


def summed(ws, x):
    """Products are added up over the steps."""
    step = lambda total, w: (total + x @ w, None)  # noqa: E731
    return lax.scan(step, jnp.zeros((4, 4)), ws)[0]


def shifted(shift, x, w):
    return x @ w + shift * 3.0


def residual(w, x):
    y = x @ w
    return y + standardised(y)


def stream(w, x):
    """Of two shortcuts the first is read in float32 as well."""
    y = x @ w + w @ w
    return jnp.exp(jnp.sin(y) @ w + y)


def twice_read(w, x):
    """Two products read what is float32, as an array beside them makes it."""
    h = jnp.tanh(x @ w + x)
    return h @ w + h @ x


MATRIX, MATRICES = (4, 4), (3, 4, 4)
EXAMPLES = {
    "bias sums": Example(lambda b, x, w: x @ w + b, ((4,), MATRIX, MATRIX)),
    "repeated": Example(
        lambda w, x: standardised(x @ w + (x[:, 0] @ w)[:, None]), (MATRIX, MATRICES)
    ),
    "softmax": Example(attention, (MATRIX, MATRIX)),
    "dropped softmax": Example(
        lambda w, x: jnp.where(jnp.arange(4) < 2, nn.softmax(x @ w), 0) @ w,
        (MATRIX, MATRIX),
    ),
    "islands": Example(lambda w, x: jnp.tanh(x @ w) @ w, (MATRIX, MATRIX)),
    "heads": Example(lambda w, x: nn.logsumexp(x @ w, -1), (MATRIX, MATRIX)),
    "labels": Example(label_loss, (MATRIX, MATRIX)),
    "chains": Example(lambda w, x: (x @ w * 2.0 + 1.0) @ w, (MATRIX, MATRIX)),
    "ratios": Example(
        lambda w, x: (x @ w) / (w @ x) @ w, (MATRIX, MATRIX), half="float16"
    ),
    "norms": Example(residual, (MATRIX, MATRIX)),
    "smaller": Example(lambda w, x: standardised(x @ w) @ w, (MATRIX, MATRIX)),
    "streams": Example(stream, (MATRIX, MATRIX)),
    "feeders": Example(lambda w, x: jnp.exp(x @ w + x @ w), (MATRIX, MATRIX)),
    "biases": Example(lambda b, x, w: x @ w + b, ((4,), MATRIX, MATRIX)),
    "weights": Example(rnn, (MATRIX, MATRIX, MATRICES)),
    "tables": Example(lambda w, x: w[jnp.arange(4)] @ w.T @ x, (MATRIX, MATRIX)),
    "rows": Example(lambda w, x: w[jnp.arange(4)] @ w.T @ x, (MATRIX, MATRIX)),
    "loops": Example(lstm, (MATRIX, MATRIX, MATRICES)),
    "one cast": Example(twice_read, (MATRIX, MATRIX)),
    "one copy": Example(
        lambda w, x: nn.logsumexp(x @ w, -1) - (x @ w)[:, 0], (MATRIX, MATRIX)
    ),
    "cast apart": Example(
        lambda w, x: standardised(x @ w) @ w, (MATRIX, MATRIX), "narrowest"
    ),
    "sums kept": Example(attention, (MATRIX, MATRIX)),
    "island barrier": Example(lambda w, x: jnp.tanh(x @ w) @ w, (MATRIX, MATRIX)),
    "head barrier": Example(lambda w, x: nn.logsumexp(x @ w, -1), (MATRIX, MATRIX)),
    "sum barrier": Example(lambda b, x, w: x @ w + b, ((4,), MATRIX, MATRIX)),
    "cotangent copies": Example(rnn, (MATRIX, MATRIX, MATRICES)),
    "loop residuals": Example(products, (MATRICES, MATRIX)),
    "half params": Example(shifted, (MATRIX, MATRIX, MATRIX), "narrowest", True),
    "half carries": Example(blocks, (MATRICES, MATRIX), "narrowest"),
    "float32 carries": Example(summed, (MATRICES, MATRIX), "narrowest"),
    **dict.fromkeys(
        ("quantized once", "weights in fp8", "quantizing barrier"),
        Example(activations, (MATRIX, MATRIX), "narrowest", True, fp8=True),
    ),
    "moving calls": Example(
        lambda w, x: jnp.exp(jax.jit(lambda y: y.T)(x @ w)), (MATRIX, MATRIX)
    ),
}


def program(name: str) -> str:
    """The program of an example's gradients, without addresses."""
    example = EXAMPLES[name]
    fp8 = jamp.Fp8(smallest=1) if example.fp8 else None
    options = example.promote, example.of_model, fp8
    scope = transform.scope_of(example.half, None, *options)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in example.shapes]

    def fn(first, *rest):
        if example.of_model:
            first = marks.shown_params(first.astype(example.half), scope.policy)
        return example.fn(first, *rest)

    written = transform.autocast_in(scope, fn)
    places = tuple(range(len(shapes)))
    grad = jax.grad(lambda *args: jnp.square(written(*args)).sum(), places)
    traced = jax.jit(grad).trace(*shapes)
    written = str(traced.jaxpr)
    if example.fp8:  # what quantizing is, its primitive says when it is lowered
        written += traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r"0x[0-9a-f]+", "", written)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_program_differs_without_its_mechanism(name):
    as_is = program(name)
    with without(name):
        assert program(name) != as_is
    assert program(name) == as_is


def test_every_figure_is_of_a_step_and_a_mechanism_that_exist():
    names = {ablations.AS_IS, *MECHANISMS}
    for entry in ablations.read():
        assert entry["model"] in lean.CASES and entry["mode"] in lean.MODES
        assert entry["without"] in names


def test_the_table_parts_what_matters_from_what_does_not():
    here = {"jax": "1", "commit": "a", "kernels": 1.0}
    step = here | {"model": "gpt2", "traffic": 1.0, "temp": 1.0}
    lines = ablations.table(
        [
            step | {"mode": "O5", "without": "none"},
            step | {"mode": "O5", "without": "softmax", "traffic": 1.2},
            step | {"mode": "O5", "without": "islands", "temp": 1.001},
            step | {"mode": "O5", "without": "chains", "commit": "b", "traffic": 2.0},
        ]
    ).splitlines()
    rows = {line.split(":")[0]: line for line in lines}
    assert rows["| softmax"].endswith("| gpt2 O5 +0.200, +0.000 |  |")
    assert rows["| islands"].endswith("|  | gpt2 O5 |")
    assert rows["| chains"].endswith("|  |  |")
