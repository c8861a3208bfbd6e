"""Finds written-out attention: a softmax between two batched matmuls."""

from jax.extend import core as jc

from jamp._autocast.program import dtype_of, size_of

REASON = (
    "Attention writes its weights to memory, {size:.3g} MB, and the backward pass "
    'reads them. On a GPU, `jax.nn.dot_product_attention(..., implementation="cudnn")` '
    "does not."
)


class Scores:
    """The sizes of batched matmuls' results, and whether an exponential followed."""

    def __init__(self) -> None:
        self._are_weights: dict[int, bool] = {}

    def bytes_read(self, eqn: jc.JaxprEqn) -> int:
        """Returns the bytes of the scores if their softmax is an operand, otherwise 0.

        Call it for each operation of the forward pass, in the order of the program.
        """
        name = eqn.primitive.name
        if name == "exp" and size_of(eqn.outvars[0]) in self._are_weights:
            self._are_weights[size_of(eqn.outvars[0])] = True
        if name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
            return 0
        weights = [v for v in eqn.invars if self._are_weights.pop(size_of(v), False)]
        self._are_weights[size_of(eqn.outvars[0])] = False
        return sum(size_of(v) * dtype_of(v).itemsize for v in weights)
