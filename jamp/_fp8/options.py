"""The options of fp8, as a user writes them."""

import dataclasses
from collections.abc import Sequence

from jamp._core.path_rules import PathRule, parse_rules


@dataclasses.dataclass(frozen=True, init=False)
class Fp8:
    """Selects the matmuls that run in fp8; pass it as `fp8=` to `jamp.initialize`.

    Large matmuls of an activation and a weight run in fp8, with the two matmuls of
    their gradients. Operands are float8_e4m3fn, and cotangents are float8_e5m2. Each
    tensor has its own scale, a power of two that depends on its largest number in this
    step. The state stores no scales.

    These matmuls stay in half: matmuls of the program's inputs; logits; routers, whose
    result `top_k`, `sort` or `argmax` orders; matmuls without a weight, such as
    attention; convolutions; functions with a custom derivative; matmuls with a
    `precision`, a dtype or a mark of the user; and small matmuls.

    Attributes:
        keep: weights whose matmuls stay in half: a regex searched in the path
            ("layers/0/kernel"), a predicate `(path, leaf) -> bool`, or several.
        grad_weight: whether fp8 also computes the gradients of weights.
        smallest: the minimum number of rows and of columns of a weight. By default, fp8
            must save time on an H200: if R matmuls with K by N weights read M rows, the
            3 * 2MKN * (1/989e12 - 1/1979e12) seconds that fp8 saves must exceed the
            time to move 6 * (MK/R + MN + KN) bytes at 4.8e12 B/s (NVIDIA's data sheet).
            With a large M, a square weight needs N of at least 825.

    Raises:
        ValueError: a regex is invalid, or `smallest` is not positive.
        TypeError: `keep` or `grad_weight` has the wrong type.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"up": jnp.ones((32, 128)), "head": jnp.ones((128, 32))}
    >>> fp8 = jamp.Fp8(keep="head", smallest=16)
    >>> state = jamp.initialize(params, optax.sgd(0.1), "O5", fp8=fp8, verbosity=0)
    >>> state.properties.fp8.smallest
    16
    """

    keep: tuple[PathRule, ...]
    grad_weight: bool
    smallest: int | None

    def __init__(
        self,
        keep: PathRule | Sequence[PathRule] = (),
        grad_weight: bool = True,
        smallest: int | None = None,
    ):
        if not isinstance(grad_weight, bool):
            raise TypeError(f"Fp8(grad_weight=) must be a bool, got {grad_weight!r}.")
        is_number = isinstance(smallest, int) and not isinstance(smallest, bool)
        if smallest is not None and not (is_number and smallest > 0):
            raise ValueError(
                f"Fp8(smallest=) must be a positive integer or None, got {smallest!r}."
            )
        object.__setattr__(self, "keep", parse_rules("Fp8(keep=)", keep))
        object.__setattr__(self, "grad_weight", grad_weight)
        object.__setattr__(self, "smallest", smallest)
