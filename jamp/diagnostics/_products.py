"""What fp8 would lose of each product of a step, on the numbers of one batch.

y = dot_general x w      x8, w8 in e4m3fn; of a gradient, the cotangent in e5m2
                         |x8 w8 - x w| / |x w|, in float32
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jamp._autocast.quantized import Of, quantize
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._replay import Site, Value
from jamp.diagnostics._source import is_backward
from jamp.diagnostics._table import columns, short


class ProductLoss(NamedTuple):
    """What fp8 would lose of a product.

    Attributes:
        module: its path.
        phase: "forward" or "backward".
        source: `file:line`; "" if JAX does not say.
        error: the norm of what the product is off by, as a part of its norm.
        underflow: the part of an operand's numbers that becomes zero, of the worse one.
    """

    module: str
    phase: str
    source: str
    error: float
    underflow: float


def loss_of_product(
    site: Site, read: Sequence[Value], module: str
) -> ProductLoss | None:
    """What fp8 would lose of an operation; None of what is no product for it."""
    if site.eqn.primitive.name != "dot_general" or site.context.devices:
        return None
    numbers = site.eqn.params["dimension_numbers"]
    batched = any(numbers[1])  # attention's: these stay in half
    if batched or not all(
        is_differentiable(v.array) and v.array.ndim > 1 for v in read
    ):
        return None
    backward = is_backward(site.names)
    cotangents = [
        v.maker is not None and backward and is_backward(v.maker.names) for v in read
    ]
    roles = [Of.COTANGENT if is_cotangent else Of.INPUT for is_cotangent in cotangents]
    error, underflow = _lost(*(v.array for v in read), numbers, *roles)
    return ProductLoss(
        module,
        "backward" if backward else "forward",
        site.line,
        float(error),
        float(underflow),
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _lost(x: Array, y: Array, numbers: Any, *roles: Of) -> tuple[Array, Array]:
    """The error of a product, and the underflow of its operands."""
    product = functools.partial(
        jax.lax.dot_general, dimension_numbers=numbers, precision="highest"
    )
    exact = [a.astype(jnp.float32) for a in (x, y)]
    pairs = [quantize(a, of) for a, of in zip(exact, roles, strict=True)]
    rounded = [jnp.ldexp(a8.astype(jnp.float32), exponent) for a8, exponent in pairs]
    norm = jnp.linalg.norm(product(*exact))
    difference = jnp.linalg.norm(product(*rounded) - product(*exact))
    lost = [
        jnp.sum((q == 0) & (a != 0)) / jnp.maximum(1, jnp.sum(a != 0))
        for q, a in zip(rounded, exact, strict=True)
    ]
    return difference / jnp.where(norm == 0, 1, norm), jnp.maximum(*lost)


def table(losses: Sequence[ProductLoss], rows: int) -> list[str]:
    """Lines on the products that lose most: of those of one name, on the worst."""
    if not losses:
        return []
    named: dict[str, list[ProductLoss]] = {}
    for x in sorted(losses, key=lambda x: -x.error):
        name = f"{x.module or '(no module)'}, {x.phase} {short(x.source)}".rstrip()
        named.setdefault(name, []).append(x)
    cells = [
        (
            f"{name} × {len(found)}" if len(found) > 1 else name,
            f"{100 * found[0].error:.3g}",
            f"{100 * max(x.underflow for x in found):.3g}",
        )
        for name, found in named.items()
    ]
    head = f"Of {len(losses)} products of matrices in fp8, the worst, in percent:"
    return [head, columns(["", "error", "underflow"], *cells[:rows])]
