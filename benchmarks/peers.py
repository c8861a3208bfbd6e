"""Run jamp and other libraries through the same cases on a CPU: `make peers`.

It prints the table of docs/results.md, with a column for each installed library.
"""

import functools
import importlib.metadata
import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import jamp

LEVELS = "O1", "O2", "O4", "O5", "O6"  # those that README recommends for training
SGD = optax.sgd(0.1)
ONES, HALF = {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.bfloat16)}
IMAGES, BAD = np.ones((2, 3), np.float32), np.float32([[np.inf] * 3, [1] * 3])


class Net(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype)(x)
        return nn.softmax(nn.BatchNorm(False, dtype=self.dtype)(x))


VARIABLES = Net().init(jax.random.key(0), IMAGES)


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()  # its gradient is x


class ByHand:
    """A model with `dtype=bfloat16` and optax. A library overrides what it adds."""

    name, package, reports = "`dtype=bfloat16`", "flax", False
    model = Net(jnp.bfloat16)

    def walk(self, xs, **options):
        """Returns the params and the scale after steps with gradients `xs`."""
        del options
        return [(1 - 0.1 * np.full(2, x), None) for x in xs]

    def adam(self):
        """Returns a bfloat16 param of 1 after 100 steps of 0.001."""
        tx, params = optax.adam(1e-3), HALF
        state = tx.init(params)
        for _ in range(100):
            updates, state = tx.update(HALF, state, params)
            params = optax.apply_updates(params, updates)
        return params["w"][0]

    def statistics(self):
        """Returns BatchNorm's statistics after a step with an inf in the batch."""
        return self.model.apply(VARIABLES, BAD, mutable=["batch_stats"])[1]

    def forward(self, variables, x):
        return self.model.apply(variables, x, mutable=["batch_stats"])[0]

    def dtypes(self):
        """Returns the dtypes of the operands of a matmul and an exponential."""
        program = jax.make_jaxpr(self.forward)(VARIABLES, IMAGES)
        found = dict(operands(program.jaxpr))
        return found["dot_general"], found["exp"]


class Jamp(ByHand):
    name = package = "jamp"
    model = Net()

    def __init__(self, level="O2"):
        self.level = level

    def walk(self, xs, tx=SGD, init=2.0**16, window=2000, floor=None):
        rule = jamp.DynamicLossScale(init, window=window, min_scale=floor)
        scale = rule if self.level in ("O1", "O2") else None  # else the level's
        state = jamp.initialize(ONES, tx, self.level, loss_scale=scale, verbosity=0)

        def step(state, x):
            state = state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))
            return state, (jamp.master_params(state)["w"], state.loss_scale)

        _, (params, scales) = jax.lax.scan(step, state, jnp.float32(xs))
        return list(zip(params, scales, strict=True))

    def adam(self):
        return Jamp("O5").walk([1.0] * 100, optax.adam(1e-3))[-1][0][0]

    def statistics(self):
        def loss(params, state):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, BAD, mutable=["batch_stats"])
            return out.mean(), new["batch_stats"]

        options = VARIABLES | {"apply_fn": self.model.apply, "verbosity": 0}
        state = jamp.initialize(tx=SGD, opt_level=self.level, **options)
        grad = jamp.scaled_value_and_grad(loss, has_aux=True)
        (_, stats), grads = grad(state, state)
        return state.apply_gradients(grads=grads, batch_stats=stats).batch_stats

    def forward(self, variables, x):
        return jamp.autocast(super().forward, "float16")(variables, x)


class Jmp(ByHand):
    name, package, reports, model = "jmp", "jmp", True, Net()
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def walk(self, xs, init=2.0**16, window=2000, floor=1.0):
        numbers = jnp.float32(init), jnp.int32(0), window, 2, jnp.float32(floor)
        scale, found = jmp.DynamicLossScale(*numbers), []
        adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
        for x in xs:
            grads = scale.unscale(scale.scale(jnp.float32(x)))
            scale = adjust(scale, jnp.isfinite(grads))
            found.append((1 - 0.1 * np.full(2, grads), scale.loss_scale))
        return found

    def forward(self, variables, x):
        return super().forward(*self.policy.cast_to_compute((variables, x)))


class Flax(ByHand):
    name, reports, model = "`DynamicScale`", True, Net()

    def walk(self, xs, init=2.0**16, window=2000, floor=1.0):
        options = {"scale": init, "growth_interval": window, "minimum_scale": floor}
        scale, found = DynamicScale(**options), []
        for x in xs:
            loss = functools.partial(loss_fn, x=jnp.float32(x))
            scale, _, _, grads = scale.value_and_grad(loss)(ONES)
            found.append((1 - 0.1 * grads["w"], scale.scale))
        return found


class Torch(ByHand):
    name = package = "torch"

    def __init__(self):
        import torch

        self.torch = torch

    def walk(self, xs, init=2.0**16, window=2000, floor=None):
        param = self.torch.nn.Parameter(self.torch.ones(2))
        sgd, found = self.torch.optim.SGD([param], 0.1), []
        scaler = self.torch.amp.GradScaler("cpu", init, growth_interval=window)
        for x in xs:
            sgd.zero_grad()
            scaler.scale((param * x).sum()).backward()
            scaler.step(sgd)
            scaler.update()
            found.append((param.detach().numpy().copy(), scaler.get_scale()))
        return [] if floor else found  # GradScaler has no floor

    def adam(self):
        param = self.torch.nn.Parameter(self.torch.ones(2, dtype=self.torch.bfloat16))
        adam, param.grad = self.torch.optim.Adam([param], 1e-3), param.data.clone()
        for _ in range(100):
            adam.step()
        return param[0].item()

    def statistics(self):
        norm = self.torch.nn.BatchNorm1d(3)
        norm(self.torch.tensor(BAD))  # GradScaler sees only gradients
        return norm.running_mean.numpy()

    def dtypes(self):
        with self.torch.autocast("cpu", self.torch.float16):
            product = self.torch.nn.Linear(3, 4)(self.torch.tensor(IMAGES))
            return product.dtype, product.softmax(-1).dtype


class Qwix(ByHand):
    name = package = "qwix"

    @property
    def model(self):
        import qwix

        types = dict.fromkeys(("weight_qtype", "act_qtype"), "float8_e4m3fn")
        rule = qwix.QtRule(module_path=".*", disable_channelwise_axes=True, **types)
        return qwix.quantize_model(Net(), qwix.QtProvider([rule]))


def operands(jaxpr):
    """Yields each primitive of a program with its first operand's dtype."""
    for eqn in jaxpr.eqns:
        if eqn.invars and hasattr(eqn.invars[0].aval, "dtype"):
            yield eqn.primitive.name, eqn.invars[0].aval.dtype
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            yield from operands(inner) if hasattr(inner, "eqns") else ()


def overflow(peer):
    """Says what happens to params and to BatchNorm's statistics."""
    ((params, _),) = peer.walk([np.inf])
    otherwise = "you select" if peer.reports else "not checked"
    skips = bool((params == ONES["w"]).all())
    kept = all(np.isfinite(x).all() for x in jax.tree.leaves(peer.statistics()))
    return skips and "skipped" or otherwise, kept and "unchanged" or "spoiled"


def column(peer):
    """Returns the cells of a library by row."""
    grown = [1.0, *(scale for _, scale in peer.walk([1e-3] * 6, init=1.0, window=2))]
    steps = kept = "no scale"
    if grown[1] is not None:
        steps = ", ".join(str(i) for i in range(1, 7) if grown[i] > grown[i - 1])
        low = peer.walk([np.inf] * 24, floor=2.0**14)
        kept = "kept" if low and low[-1][1] == 2**14 else "lost" if low else "none"
    gradients, statistics = overflow(peer)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in peer.dtypes()]
    return {
        "matmul, exponential of a float32 model": ", ".join(dtypes),
        "bfloat16 param of 1, 100 steps of 0.001": f"{float(peer.adam()):.3f}",
        "gradients of inf": gradients,
        "BatchNorm's statistics after an overflow": statistics,
        "window of 2: the scale grows after steps": steps,
        "floor of the scale under `jit`": kept,
    }


def main():
    assert {overflow(Jamp(level)) for level in LEVELS} == {("skipped", "unchanged")}
    kinds = Jamp, Jmp, Flax, ByHand, Torch, Qwix
    peers = [kind() for kind in kinds if importlib.util.find_spec(kind.package)]
    columns = [column(peer) for peer in peers]
    print("| |", " | ".join(peer.name for peer in peers), "|")
    print("|---" * (len(peers) + 1) + "|")
    for row in columns[0]:
        print("|", row, "|", " | ".join(found[row] for found in columns), "|")
    for name in ("jax", *{peer.package: None for peer in peers[1:]}):
        print(name, importlib.metadata.version(name))


if __name__ == "__main__":
    main()
