"""Models for the tests of the forward pass, and tools that find dtypes in it.

Each model has one habit that makes Flax fall back to float32 without jamp. The tools
read jaxprs and rounding, not jamp's internals.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import jamp
from benchmarks.lean_transformers import GPT2
from tests.support import programs
from tests.support.models import CNN, Transformer


class Headed(nn.Module):
    """A body, and a head for `keep_fp32="head"`."""

    dtype: DTypeLike | None = None
    head_dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(4, dtype=self.dtype, name="body")(x))
        return nn.Dense(3, dtype=self.head_dtype, name="head")(x)


class Witness(nn.Module):
    """Returns the bytes of its matmul's operands.

    Half operands round a number next to 1 to 1.
    """

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (2, 2))
        rounded = jnp.diag(jnp.full(2, np.float32(1 + 2.0**-12))) @ w == w
        return nn.Dense(2)(x), jnp.where(rounded, 2, 4)[0, 0]


class Normed(nn.Module):
    """Applies BatchNorm to the input itself, so that tests can compute it by hand."""

    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x, train=True):
        norm = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)
        return nn.Dense(3)(norm(x))


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


IMAGES = normal(2, 6, 6, 3)
TOKENS = jnp.asarray([[1, 5, 0], [2, 2, 4]])
SMALL = {"width": 4, "heads": 2, "depth": 1, "length": 3, "vocabulary": 6}

CASES = {
    "cnn": (CNN((4, 8), 1), IMAGES),
    "transformer-float32": (Transformer(**SMALL, dtype=jnp.float32), TOKENS),
    "scan-remat": (GPT2(2, 4, 6, scan=True, heads=2), TOKENS),
}


def fill(shapes: Any) -> Any:
    """Draws variables of these shapes, which is faster than initializers."""
    rng = np.random.default_rng(0)

    def leaf(s):
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        if len(s.shape) > 1:
            return jnp.asarray(rng.normal(size=s.shape) / s.shape[-2] ** 0.5, s.dtype)
        return jnp.asarray(rng.uniform(0.5, 1.5, s.shape), s.dtype)

    return jax.tree.map(leaf, shapes)


def variables_of(model: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    init = lambda *args: model.init(jax.random.key(0), *args, **kwargs)  # noqa: E731
    return fill(jax.eval_shape(init, *inputs))


def state_of(
    model: nn.Module, *inputs: Any, level: str = "O2", variables=None, **overrides: Any
) -> Any:
    """Returns an AmpState with a small scale, which does not overflow."""
    variables = variables_of(model, *inputs) if variables is None else variables
    options = {"loss_scale": 8.0, "apply_fn": model.apply} | overrides
    stats = variables.get("batch_stats", {})
    params, tx = variables["params"], optax.sgd(1.0)
    return jamp.initialize(params, tx, level, verbosity=0, batch_stats=stats, **options)


def forward(state: Any, *args: Any, apply: Any = None, **kwargs: Any) -> Any:
    """Calls `state.apply_fn` or another function on the variables of the state."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (apply or state.apply_fn)(variables, *args, **kwargs)


def loss_of(state: Any, *inputs: Any, apply: Any = None) -> Callable[..., Any]:
    """Returns a function `params -> (loss, (outputs, statistics))`."""

    def loss_fn(params):
        options = {"apply": apply, "mutable": ["batch_stats"]}
        out, new = forward(state.replace(params=params), *inputs, **options)
        return mean_square(out), (out, new.get("batch_stats", {}))

    return loss_fn


def mean_square(out: Any) -> Any:
    leaves = [jnp.asarray(y, jnp.float32) for y in jax.tree.leaves(out)]
    return sum(jnp.mean(y * y) for y in leaves)


def under_policy(state: Any, fn: Callable[[], Any]) -> Any:
    """Returns the result of `fn` inside a loss under the state's policy."""

    def loss_fn(params):
        some = jax.tree.leaves(params)[0].astype(jnp.float32)  # avoids a warning
        return some.sum(), fn()

    return jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)[0][1]


def products(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the operand dtypes of each matmul of `fn`, such as "float16,float16"."""
    return [f"{p.lhs},{p.rhs}" for p in programs.products(fn, *args)]


def dtypes(tree: Any) -> list[str]:
    return [str(x.dtype) for x in jax.tree.leaves(tree)]
