"""Steps to export, and a process that loads and runs them.

python -m tests.autocast.exported DIR    runs each program in the folder DIR on its
                                         inputs, and saves the results beside it
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export, lax, nn

W = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32) / 4
PARAMS = {"w": W, "b": W[0], "scale": W[1]}
KERNELS = PARAMS | {"kernel": W.reshape(2, 2, 4, 16)}
TABLE = {"w": W, "embedding": np.concatenate([W, W])}


class Model(NamedTuple):
    """A function of params and inputs, and the shapes of its inputs."""

    fn: Callable[..., Any]
    shapes: tuple[str, ...]  # the letters are unknown sizes
    params: Any = PARAMS
    ints: tuple[int, ...] = ()  # the inputs that are integers


def layer_norm(p, x):
    x = x @ p["w"]
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x * p["scale"] + p["b"]) @ p["w"]


def batch_norm(p, x):
    x = x @ p["w"] + p["b"]
    return nn.relu((x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5) * p["scale"]) @ p["w"]


def attention(p, x):
    q, k, v = (x @ w for w in (p["w"], p["w"].T, p["w"]))
    return x + nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ v


def convolution(p, x):
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=dims)
    return nn.relu(x + p["b"]).mean((1, 2)) @ p["w"]


def cross_entropy(p, x, labels):
    logits = x @ p["w"] + p["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def recurrent(p, x):
    step = lambda c, x: (jnp.tanh(c @ p["w"] + x), c.sum(-1))  # noqa: E731
    return lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))[1]


def rows(p, x, labels):
    return nn.log_softmax(x @ p["w"])[jnp.arange(x.shape[0]), labels]


MODELS = {
    "layer norm": Model(layer_norm, ("b, 16",)),
    "batch norm": Model(batch_norm, ("b, 16",)),
    "softmax": Model(lambda p, x: nn.softmax(x @ p["w"]) @ p["w"], ("b, 16",)),
    "mean": Model(lambda p, x: (x @ p["w"]).mean(0), ("b, 16",)),
    "shortcut": Model(lambda p, x: x + nn.relu(x @ p["w"]) @ p["w"], ("b, 16",)),
    "attention": Model(attention, ("b, t, 16",)),
    "convolution": Model(convolution, ("b, h, h, 4",), KERNELS),
    "embedding": Model(
        lambda p, i: p["embedding"][i] @ p["w"] @ p["embedding"].T,
        ("b, t",),
        TABLE,
        ints=(0,),
    ),
    "cross entropy": Model(cross_entropy, ("b, 16", "b"), ints=(1,)),
    "language": Model(cross_entropy, ("b, t, 16", "b, t"), ints=(1,)),
    "rows": Model(rows, ("b, 16", "b"), ints=(1,)),
    "recurrent": Model(recurrent, ("b, 5, 16",)),
    "joined": Model(
        lambda p, x: nn.gelu(jnp.concatenate([x, x @ p["w"]])) @ p["w"], ("b, 16",)
    ),
    "reshaped": Model(
        lambda p, x: nn.gelu((x.reshape(-1, 16) @ p["w"]).reshape(x.shape) + p["b"]),
        ("b, 2*t, 16",),
    ),
    "jitted": Model(
        lambda p, x: jax.jit(layer_norm)(p, jax.jit(nn.silu)(x @ p["w"])), ("b, 16",)
    ),
}


def shapes_of(model: Model) -> list[jax.ShapeDtypeStruct]:
    """Returns the inputs of a model with unknown sizes, in a new scope."""
    scope, ints = export.SymbolicScope(), model.ints
    return [
        jax.ShapeDtypeStruct(
            export.symbolic_shape(shape, scope=scope),
            np.dtype("int32" if i in ints else "float32"),
        )
        for i, shape in enumerate(model.shapes)
    ]


def inputs_of(model: Model) -> list[np.ndarray]:
    """Returns inputs in which the unknown sizes are small numbers."""
    rng, sizes = np.random.default_rng(1), {"b": 3, "t": 4, "2*t": 8, "h": 5}
    inputs = []
    for i, text in enumerate(model.shapes):
        shape = [sizes.get(n) or int(n) for n in text.split(", ")]
        normal = rng.normal(size=shape).astype(np.float32)
        is_int = i in model.ints
        inputs.append(rng.integers(0, 16, shape).astype("i") if is_int else normal)
    return inputs


def main(folder: str) -> None:
    for path in sorted(pathlib.Path(folder).glob("*.exported")):
        program = export.deserialize(bytearray(path.read_bytes()))
        with np.load(path.with_suffix(".inputs.npz")) as file:
            leaves = [file[name] for name in file.files]
        args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
        results = jax.tree.leaves(program.call(*args, **kwargs))
        np.savez(path.with_suffix(".results.npz"), *map(np.asarray, results))


if __name__ == "__main__":
    main(sys.argv[1])
