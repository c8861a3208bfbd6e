"""One optimizer step of O5, by jamp and by optax.

Each step starts from scaled bfloat16 gradients, and returns float32 masters and moments
and bfloat16 params. It checks the gradients on the device, and skips if one is not
finite.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.specs import Spec

LEARNING_RATE, WEIGHT_DECAY, EPS = 1e-3, 1e-2, 1e-8
SCALE = 2.0**16
HALF = jnp.bfloat16
PARAM_SIZE = 0.02

type Tree = dict[str, jax.Array]


class Contestant(NamedTuple):
    """An optimizer step that is timed.

    Attributes:
        init: maps float32 params to a state with a `step` and `skipped_steps`.
        step: maps a state and gradients to the next state; donate the state.
        params: maps a state to the params that the model reads.
        bytes_moved: the least bytes that a step reads and writes.
        error: the largest error of an update, as a fraction of the learning rate.
    """

    init: Callable[[Tree], Any]
    step: Callable[[Any, Tree], Any]
    params: Callable[[Any], Tree]
    bytes_moved: int
    error: float = 0.0


def names(spec: Spec) -> list[str]:
    """Returns a name for each leaf that says whether it stays float32."""
    return [f"{k:05}{'_fp32' * (k in spec.fp32)}" for k in range(len(spec.shapes))]


def least_bytes(spec: Spec, store_remainder: bool = False, moments: int = 8) -> int:
    """Returns the bytes of an Adam step that reads only gradients twice.

    The check and the update each read the gradients, because no element may change
    before all are known to be finite. The update reads and writes the master and two
    moments, and writes the half parameter: 2 + 2 + 12 + 12 + 2 = 30 bytes. A master of
    16 bits and the parameter needs 2 + 2 + 12 + 12 = 28. A float32 parameter has no
    copy and needs 4 + 4 + 12 + 12 = 32. `moments` are the bytes of the two.
    """
    half, saved = spec.total - spec.total_fp32, 2 * (8 - moments) * spec.total
    return half * (28 if store_remainder else 30) + spec.total_fp32 * 32 - saved


def optax_chain(spec: Spec) -> Contestant:
    """Makes a step by hand: optax.adamw, and a select for the skip."""
    tx = optax.adamw(LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY)
    return Contestant(
        init=lambda masters: _chain_init(tx, masters),
        step=lambda state, grads: _chain_step(tx, state, grads),
        params=lambda state: {**state.masters, **state.half},
        bytes_moved=least_bytes(spec),
    )


class ChainState(NamedTuple):
    """The state of O5 by hand; `half` lacks the leaves that stay float32."""

    step: jax.Array
    half: Tree
    masters: Tree
    opt_state: Any
    scale: jax.Array
    unskipped: jax.Array
    skipped_steps: jax.Array


def _chain_init(tx: optax.GradientTransformation, masters: Tree) -> ChainState:
    masters = {name: jnp.copy(x) for name, x in masters.items()}
    return ChainState(
        step=jnp.int32(0),
        half=_halves(masters),
        masters=masters,
        opt_state=tx.init(masters),
        scale=jnp.float32(SCALE),
        unskipped=jnp.int32(0),
        skipped_steps=jnp.int32(0),
    )


def _halves(masters: Tree) -> Tree:
    return {name: x.astype(HALF) for name, x in masters.items() if "fp32" not in name}


def _chain_step(
    tx: optax.GradientTransformation, state: ChainState, grads: Tree
) -> ChainState:
    finite = jnp.stack([jnp.isfinite(g).all() for g in grads.values()]).all()
    inverse = 1 / state.scale
    grads = {name: g.astype(jnp.float32) * inverse for name, g in grads.items()}
    updates, opt_state = tx.update(grads, state.opt_state, state.masters)
    masters = optax.apply_updates(state.masters, updates)
    masters, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (masters, opt_state),
        (state.masters, state.opt_state),
    )
    unskipped = jnp.where(finite, state.unskipped + 1, 0)
    grows = unskipped == 2000
    moved = jnp.where(grows, jnp.minimum(state.scale * 2, 2.0**24), state.scale)
    return ChainState(
        step=state.step + finite,
        half=_halves(masters),  # rounding the selected masters reads no old half params
        masters=masters,
        opt_state=opt_state,
        scale=jnp.where(finite, moved, state.scale / 2),
        unskipped=jnp.where(grows, 0, unskipped),
        skipped_steps=state.skipped_steps + ~finite,
    )


def jamp_fused(
    spec: Spec,
    backend: str,
    store_remainder: bool = False,
    moment_dtype: str = "float32",
) -> Contestant:
    """Makes a step of `jamp.optimizers.fused_adam` in an AmpState that checks."""
    tx = jamp.optimizers.fused_adam(
        LEARNING_RATE,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        moment_dtype=moment_dtype,
        backend=backend,
    )
    eight_bit = moment_dtype == "8bit"
    initialize = functools.partial(
        jamp.initialize,
        tx=tx,
        opt_level="O5",
        loss_scale=jamp.DynamicLossScale(init_scale=SCALE),
        keep_fp32="_fp32$" if spec.fp32 else None,
        store_remainder=store_remainder,
        verbosity=0,
    )
    return Contestant(
        init=initialize,
        step=fused_step,
        params=lambda state: state.params,
        bytes_moved=least_bytes(spec, store_remainder, 2 if eight_bit else 8),
        error=0.2 if eight_bit else 0.0,
    )


def fused_step(state: jamp.AmpState, grads: Tree) -> jamp.AmpState:
    """Runs a user's step without a model; `scaled_grad` checks the gradients."""
    return state.apply_gradients(grads=jamp.scaled_grad(_loss)(state, grads))


@jax.custom_vjp
def _loss(params: Tree, grads: Tree) -> jax.Array:
    """Returns a loss whose scaled gradients are `grads`, without a model."""
    del params, grads
    return jnp.float32(0)


_loss.defvjp(
    lambda params, grads: (_loss(params, grads), grads),
    lambda grads, cotangent: (grads, None),
)


class Running(NamedTuple):
    """An optimizer on a device that steps in place.

    Attributes:
        call: runs some steps without waiting for the device.
        wait: waits until all steps are done.
        row: a row of the model's first param, on the host.
        first_row: the expected row after the first call.
        is_clean: whether no step was skipped.
        bytes_moved: the least bytes that a step reads and writes.
        steps: the steps of a call.
    """

    call: Callable[[], None]
    wait: Callable[[], Any]
    row: Callable[[], np.ndarray]
    first_row: np.ndarray
    is_clean: Callable[[], Any]
    bytes_moved: int
    steps: int = 1


def chained(step: Callable[[Any, Tree], Any], steps: int) -> Callable[[Any, Tree], Any]:
    """Returns a function that runs `steps` steps."""

    def call(state: Any, grads: Tree) -> Any:
        body = lambda _, state: step(state, grads)  # noqa: E731
        return jax.lax.fori_loop(0, steps, body, state)

    return step if steps == 1 else call


def run_jitted(
    contestant: Contestant,
    init: Callable[[Tree], Any],
    call: Callable[[Any, Tree], Any],
    params: Tree,
    grads: Tree,
    steps: int = 1,
) -> Running:
    """Compiles a contestant, with one function for several steps."""
    state = init(params)
    first = next(iter(params))

    def advance():
        nonlocal state
        state = call(state, grads)

    def row(tree):
        return np.asarray(_row(tree[first]), np.float32)

    return Running(
        advance,
        lambda: state.step.block_until_ready(),  # a program ends as a whole
        lambda: row(contestant.params(state)),
        first_steps(row(params), row(grads), steps),
        lambda: state.skipped_steps == 0,
        contestant.bytes_moved,
        steps,
    )


def _row(x: Any) -> Any:
    return x[(0,) * (x.ndim - 1)][:1000]


def first_steps(param: np.ndarray, raw_grad: np.ndarray, steps: int = 1) -> np.ndarray:
    """Returns a float64 master after steps with one gradient from zero moments."""
    param, grad = param.astype(np.float64), raw_grad.astype(np.float64) / SCALE
    # In every step, bias correction gives m = g and v = g**2.
    for _ in range(steps):
        step = grad / (abs(grad) + EPS) + WEIGHT_DECAY * param
        param = param - LEARNING_RATE * step
    return param
