"""Runs jamp and what else trains in half in JAX through the same cases, on the CPU.

`python -m benchmarks.peers` prints the table that README and site show.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import jamp

PEERS = ("jamp", "jmp", "DynamicScale", "dtype=bfloat16")
NOTHING = "no scale"
_QUIET = {"verbosity": 0}
_HALF = jmp.get_policy("params=float32,compute=float16,output=float32")


def _loss(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()  # its gradient is x


def _state(value=1.0, level="O2", tx=None, **options):
    params = {"w": jnp.full(2, value)}
    return jamp.initialize(params, tx or optax.sgd(0.1), level, **_QUIET, **options)


@jax.jit
def _jamp_step(state, x):
    grads = jamp.scaled_grad(_loss)(state, x)
    return state.apply_gradients(grads=grads)


def _flax_gradients(scale, x):
    """What its value_and_grad gives: (scale, finite, loss, gradients)."""
    return jax.jit(
        lambda s, x: s.value_and_grad(lambda p: _loss(p, x))({"w": jnp.ones(2)})
    )(scale, x)


def _scales(peer, steps, **options):
    """The scale after each of `steps`, True for finite gradients."""
    found = []
    if peer == "jamp":
        state = _state(loss_scale=jamp.DynamicLossScale(**options))
        for finite in steps:
            state = _jamp_step(state, jnp.float32(1e-3 if finite else jnp.inf))
            found.append(float(state.loss_scale))
    elif peer == "jmp":
        names = {
            "init_scale": "loss_scale",
            "window": "period",
            "min_scale": "min_loss_scale",
        }
        options = {names[k]: jnp.float32(v) for k, v in options.items()}
        if "period" in options:
            options["period"] = jnp.int32(options["period"])
        scale = jmp.DynamicLossScale(**options)
        for finite in steps:
            scale = jax.jit(lambda s, f: s.adjust(f))(scale, jnp.asarray(finite))
            found.append(float(scale.loss_scale))
    else:
        names = {
            "init_scale": "scale",
            "window": "growth_interval",
            "min_scale": "minimum_scale",
        }
        scale = DynamicScale(**{names[k]: v for k, v in options.items()})
        for finite in steps:
            x = jnp.float32(1e-3 if finite else jnp.inf)
            scale = _flax_gradients(scale, x)[0]
            found.append(float(scale.scale))
    return found


def overflow(peer):
    """Gradients of inf: which params does the step give, if the user adds no select?"""
    grads = {"w": jnp.full(2, jnp.inf)}
    if peer == "jamp":
        params = _jamp_step(_state(), jnp.float32(jnp.inf)).params
    else:
        if peer == "jmp":
            grads = jmp.DynamicLossScale(jnp.float32(2.0**15)).unscale(grads)
        if peer == "DynamicScale":
            grads = _flax_gradients(DynamicScale(), jnp.float32(jnp.inf))[3]
        params = optax.apply_updates({"w": jnp.ones(2)}, {"w": -0.1 * grads["w"]})
    if jnp.array_equal(params["w"], jnp.ones(2)):
        return "skipped"
    return "not looked at" if peer == "dtype=bfloat16" else "you write the select"


def growth(peer):
    """A window of 2 clean steps: after which steps does the scale grow?"""
    if peer == "dtype=bfloat16":
        return NOTHING
    scales = [1.0, *_scales(peer, [True] * 6, init_scale=1.0, window=2)]
    grew = [str(i) for i in range(1, 7) if scales[i] > scales[i - 1]]
    return "steps " + ", ".join(grew)


def floor(peer):
    """A floor of 2^14, 24 overflows from 2^16, under jit: where does the scale end?"""
    if peer == "dtype=bfloat16":
        return NOTHING
    options = {"init_scale": 2.0**16, "min_scale": 2.0**14}
    ends = _scales(peer, [False] * 24, **options)[-1]
    return "kept" if ends == 2.0**14 else f"lost: {ends:g}"


def masters(peer):
    """Params of 1 stored in bfloat16, 100 steps of Adam at 0.001; in float32: 0.9."""
    tx = optax.adam(1e-3)
    if peer == "jamp":
        state = _state(level="O5", tx=tx)
        for _ in range(100):
            state = _jamp_step(state, jnp.float32(1.0))
        end = jamp.master_params(state)["w"][0]
    else:
        params = {"w": jnp.ones(2, jnp.bfloat16)}
        opt_state = tx.init(params)
        for _ in range(100):
            updates, opt_state = tx.update({"w": jnp.ones(2, jnp.bfloat16)}, opt_state)
            params = optax.apply_updates(params, updates)
        end = params["w"][0]
    return f"{float(end):.3f}"


class _Net(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype)(x)
        x = nn.BatchNorm(False, momentum=0.5, dtype=self.dtype)(x)
        return jax.nn.softmax(x)


@functools.cache
def _variables():
    return _Net().init(jax.random.key(0), jnp.ones((2, 3)))


def batchnorm(peer):
    """In which dtype are a BatchNorm's params when the model runs?"""
    params, stats = _variables()["params"], _variables()["batch_stats"]
    if peer == "jamp":
        state = jamp.initialize(
            params, optax.sgd(0.1), "O2", batch_stats=stats, **_QUIET
        )
        params = state.params
    if peer == "jmp":
        params = _HALF.cast_to_compute(params)
    return params["BatchNorm_0"]["scale"].dtype.name


def statistics(peer):
    """A batch with an inf: are BatchNorm's running statistics finite after the step?"""
    x = jnp.ones((2, 3)).at[0].set(jnp.inf)
    variables = _variables()

    def loss_fn(params):
        out, new = _Net().apply(
            variables | {"params": params}, x, mutable=["batch_stats"]
        )
        return out.mean(), new["batch_stats"]

    if peer == "jamp":
        options = {"batch_stats": variables["batch_stats"]} | _QUIET
        state = jamp.initialize(variables["params"], optax.sgd(0.1), "O2", **options)
        (_, stats), grads = jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)
        stats = state.apply_gradients(grads=grads, batch_stats=stats).batch_stats
    else:
        _, stats = loss_fn(variables["params"])
    finite = jmp.all_finite(stats)
    return "as before" if finite else "spoiled, if you do not select them too"


def autocast(peer):
    """The model as it is, in half: what do its product and its softmax run in?"""
    model, x = (
        _Net(jnp.bfloat16 if peer == "dtype=bfloat16" else None),
        jnp.ones((2, 3)),
    )
    params, stats = _variables()["params"], _variables()["batch_stats"]

    def forward(params, x):
        variables = {"params": params, "batch_stats": stats}
        return model.apply(variables, x, mutable=["batch_stats"])[0]

    if peer == "jamp":
        forward = jamp.autocast(forward, jnp.float16)
    if peer == "jmp":
        params, x, stats = _HALF.cast_to_compute((params, x, stats))
    found = dict(_dtypes(jax.make_jaxpr(forward)(params, x).jaxpr))
    return f"{found['dot_general']}, {found['exp']}"


def _dtypes(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, eqn.invars[0].aval.dtype if eqn.invars else None
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _dtypes(getattr(inner, "jaxpr", inner))


def first_loss(peer):
    """A loss of 2 that is left in float16, at the default scale: what is reported?"""
    if peer == "dtype=bfloat16":
        return NOTHING
    loss_fn = lambda p: (p["w"].astype(jnp.float16)).sum()  # noqa: E731
    if peer == "jamp":
        loss, _ = jamp.scaled_value_and_grad(loss_fn)(_state())
    elif peer == "jmp":
        rule = jmp.DynamicLossScale(jnp.float32(2.0**15))
        loss = rule.unscale(jax.value_and_grad(lambda p: rule.scale(loss_fn(p)))(
            {"w": jnp.ones(2)}
        )[0])  # fmt: skip
    else:
        loss = DynamicScale().value_and_grad(loss_fn)({"w": jnp.ones(2)})[2]
    return f"{float(loss):g}"


CASES = {
    "a step with gradients of inf": overflow,
    "window of 2: the scale grows after": growth,
    "floor of the scale, under `jit`": floor,
    "bfloat16 params, 100 steps of Adam (float32: 0.900)": masters,
    "BatchNorm's params in the model": batchnorm,
    "its statistics after an overflow": statistics,
    "product, exponential of a float32 model": autocast,
    "a float16 loss of 2 on step 1": first_loss,
}


def table():
    """The rows, by case and peer."""
    return {name: {peer: case(peer) for peer in PEERS} for name, case in CASES.items()}


def main():
    print("| |", " | ".join(PEERS), "|")
    print("|---" * (len(PEERS) + 1) + "|")
    for name, row in table().items():
        print("|", name, "|", " | ".join(row.values()), "|")


if __name__ == "__main__":
    main()
