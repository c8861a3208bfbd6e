"""Half params without masters: rounded stochastically, by any optax transformation."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jamp._core.groups import check_transformation
from jamp.optimizers._fused import Transformation, check_step
from jamp.optimizers._masters import landing, parted, step_weights, values
from pallas_kernels import Weight


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        count: steps taken, shape (), int32.
        inner_state: the state of the wrapped transformation.
    """

    count: Int[Array, ""]
    inner_state: Any


class StochasticRounding(Transformation):
    """What `stochastic_rounding` returns: optax's pair."""


def stochastic_rounding(tx: optax.GradientTransformation) -> StochasticRounding:
    r"""Steps bfloat16 params with `tx` and no masters, rounding them stochastically.

    The step is in float32; the param becomes one of the two bfloat16 around it, the
    upper one as often as it is nearer, so that small steps add up in the mean. The bits
    are a hash of step, leaf and element: nothing is kept but a count, and they are the
    same under any sharding and after a resume. Other params are stepped as `tx` does.

    Place it last in a chain: `update` returns what makes `optax.apply_updates` land on
    the rounded params. Under `jamp.initialize` write `stochastic_rounding=True` there.

    Args:
        tx: any optax transformation; it sees float32 gradients and params only.

    Returns:
        A transformation that is equal to, and hashes as, any other of the same `tx`.

    Raises:
        TypeError: `tx` is not a transformation.

    >>> import jax.numpy as jnp, optax
    >>> params, tx = jnp.ones(1000, jnp.bfloat16), stochastic_rounding(optax.sgd(1e-3))
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...     updates, state = tx.update(jnp.ones(1000), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(f"{params.astype(jnp.float32).mean():.2f}")  # to nearest it would stay 1
    0.90
    """
    check_transformation("stochastic_rounding", tx)
    return StochasticRounding.from_rule(_Rule(tx))


@dataclasses.dataclass(frozen=True)
class _Rule:
    tx: optax.GradientTransformation

    def init(self, params: PyTree) -> StochasticRoundingState:
        wide = values(jax.tree.map(Weight, params))
        return StochasticRoundingState(jnp.int32(0), self.tx.init(wide))

    def update(self, updates, state, params=None, **extra_args):
        check_step("stochastic_rounding", updates, params)
        weights, count = jax.tree.map(Weight, params), state.count
        new, inner_state, updates = step_weights(
            self.tx, updates, state.inner_state, weights, count=count, **extra_args
        )
        count = optax.safe_increment(count)
        state = state._replace(count=count, inner_state=inner_state)
        return landing(updates, parted(new)[0], params), state
