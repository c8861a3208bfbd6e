"""The options of fp8, as a user writes them."""

import dataclasses
from collections.abc import Sequence

from jamp._core.path_rules import PathRule, parse_rules


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Which products run in fp8, where `fp8=` of `jamp.initialize` asks for it.

    These are the matmuls of an activation and a weight, each with the two matmuls of
    its gradients: operands in float8_e4m3fn, cotangents in float8_e5m2. Each tensor has
    its own scale, a power of two from its largest number of this step. Nothing is
    stored.

    These matmuls stay in half: those of the program's inputs; the last ones, whose
    results go to the loss (logits); those whose result `top_k`, `sort` or `argmax`
    orders (routers); attention and all others without a weight; convolutions; functions
    with their own derivative; those with a `precision`, a dtype or a mark of the user;
    and small ones.

    Attributes:
        keep: weights whose products stay in half: a regex searched in the path
            ("layers/0/kernel"), a predicate `(path, leaf) -> bool`, or several.
        grad_weight: whether gradients of weights are products in fp8 too.
        smallest: the least rows, and columns, of a weight; None for those where fp8
            saves time on an H200. That is where, of M rows by a weight of K by N, that
            R products read, 3 * 2MKN * (1/989e12 - 1/1979e12) seconds are more than
            6 * (MK/R + MN + KN) bytes at 4.8e12 B/s: a square weight from N = 825 on,
            if M is large (NVIDIA's data sheet: FLOP/s in bfloat16 and fp8, and memory).

    Raises:
        ValueError: a regex that is none, or `smallest` is not positive.
        TypeError: `keep` or `grad_weight` is of another type.

    >>> import jax.numpy as jnp, jamp, optax
    >>> params = {"up": jnp.ones((32, 128)), "head": jnp.ones((128, 32))}
    >>> fp8 = jamp.Fp8(keep="head", smallest=16)
    >>> state = jamp.initialize(params, optax.sgd(0.1), "O5", fp8=fp8, verbosity=0)
    >>> state.properties.fp8.smallest
    16
    """

    keep: PathRule | Sequence[PathRule] = ()
    grad_weight: bool = True
    smallest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", self.rules)
        if not isinstance(self.grad_weight, bool):
            raise TypeError(
                f"Fp8(grad_weight=) must be a bool, not {self.grad_weight!r}"
            )
        number = self.smallest
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_number and number > 0):
            raise ValueError(
                f"Fp8(smallest=) must be a positive integer or None, found {number!r}"
            )

    @property
    def rules(self) -> tuple[PathRule, ...]:
        """What `keep` holds, one or several."""
        return parse_rules("Fp8(keep=)", self.keep)
