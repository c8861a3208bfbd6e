"""The cases of `benchmarks.peers` by libraries that are not among jamp's own.

    pip install torch                      # or mixed-precision-for-JAX keras flax jmp,
                                           # or qwix flax equinox
    python -m benchmarks.peers_elsewhere   # of those, runs what is installed, on a CPU

Each in an environment of its own, without jamp. Prints what docs/results.md shows.
"""

import collections
import importlib.metadata
import importlib.util
import itertools
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

INF, CLEAN = float("inf"), 1e-3
UNSTATED = "no floor"
SPOILED = "spoiled, if you do not select them too"


class Torch:
    """torch.amp: autocast and GradScaler."""

    package = "torch"

    def __init__(self):
        import torch

        self.torch = torch

    def _stepped(self, steps, **options):
        """The param and the scale after each of some steps, True for finite ones."""
        param = self.torch.nn.Parameter(self.torch.ones(2))
        optimizer = self.torch.optim.SGD([param], 0.1)
        scaler, found = self.torch.amp.GradScaler("cpu", **options), []
        for finite in steps:
            optimizer.zero_grad()
            loss = (param * (CLEAN if finite else INF)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append((param.detach().numpy().copy(), scaler.get_scale()))
        return found

    def overflow(self):
        return said_of_skip(self._stepped([False])[0][0])

    def growth(self):
        found = self._stepped([True] * 6, init_scale=1.0, growth_interval=2)
        return grew([1.0, *(scale for _, scale in found)])

    def floor(self):
        return f"{UNSTATED}: {self._stepped([False] * 24, init_scale=2.0**16)[-1][1]:g}"

    def masters(self):
        param = self.torch.nn.Parameter(self.torch.ones(2, dtype=self.torch.bfloat16))
        optimizer = self.torch.optim.Adam([param], 1e-3)
        for _ in range(100):
            param.grad = self.torch.ones_like(param)
            optimizer.step()
        return f"{param[0].item():.3f}"

    def batchnorm(self):
        return name_of(self.torch.nn.BatchNorm1d(4).weight.dtype)

    def statistics(self):
        norm, x = self.torch.nn.BatchNorm1d(3), self.torch.ones(2, 3)
        x[0] = INF
        optimizer = self.torch.optim.SGD(norm.parameters(), 0.1)
        scaler = self.torch.amp.GradScaler("cpu")
        scaler.scale(norm(x).mean()).backward()
        scaler.step(optimizer)
        return said_of_statistics(norm.running_mean.numpy())

    def steps(self, rounds=9, calls=30):
        """Times of the MLP's step of `benchmarks.compared`, over float32's."""
        nn, amp = self.torch.nn, self.torch.amp
        self.torch.manual_seed(0)
        x, y = self.torch.randn(128, 64), self.torch.randint(10, (128,))
        seconds = {}
        for dtype in [None, self.torch.bfloat16, self.torch.float16] * rounds:
            widths = (64, 256, 256, 10)
            layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
            net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
            adam = self.torch.optim.Adam(net.parameters(), 1e-3, fused=True)
            scaler = amp.GradScaler("cpu", enabled=dtype is self.torch.float16)
            for i in range(2 * calls):
                if i == calls:  # warm
                    start = time.perf_counter()
                adam.zero_grad()
                with amp.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = nn.functional.cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                scaler.step(adam)
                scaler.update()
            seconds.setdefault(dtype, []).append(time.perf_counter() - start)
        plain = seconds.pop(None)
        return {
            name_of(dtype): np.percentile(np.divide(found, plain), [25, 50, 75])
            for dtype, found in seconds.items()
        }

    def autocast(self):
        layer, x = self.torch.nn.Linear(3, 4), self.torch.ones(2, 3)
        with self.torch.autocast("cpu", self.torch.float16):
            product = layer(x)
            return f"{name_of(product.dtype)}, {name_of(product.softmax(-1).dtype)}"

    def first_loss(self):
        scaler = self.torch.amp.GradScaler("cpu")
        loss = self.torch.tensor(2.0, dtype=self.torch.float16, requires_grad=True)
        scaled = scaler.scale(loss).item()
        return f"{loss.item():g}; scaled {scaled:g}"


class Keras:
    """Keras 3 on JAX: LossScaleOptimizer and the policy mixed_float16."""

    package = "keras"

    def __init__(self):
        import keras

        self.keras = keras

    def _stepped(self, steps, **options):
        param = self.keras.Variable(np.ones(2, np.float32))
        inner = self.keras.optimizers.SGD(0.1)
        optimizer = self.keras.optimizers.LossScaleOptimizer(inner, **options)
        optimizer.build([param])
        params, found = [param.value], []
        variables = [v.value for v in optimizer.variables]
        for finite in steps:
            grad = np.full(2, CLEAN if finite else INF, np.float32)
            grads = [self.keras.ops.convert_to_tensor(grad)]
            params, variables = optimizer.stateless_apply(variables, grads, params)
            scale = dict(
                zip((v.name for v in optimizer.variables), variables, strict=True)
            )
            found.append((np.array(params[0]), float(scale["dynamic_scale"])))
        return found

    def overflow(self):
        return said_of_skip(self._stepped([False])[0][0])

    def growth(self):
        found = self._stepped([True] * 6, initial_scale=1.0, dynamic_growth_steps=2)
        return grew([1.0, *(scale for _, scale in found)])

    def floor(self):
        found = self._stepped([False] * 24, initial_scale=2.0**16)
        return f"{UNSTATED}: {found[-1][1]:g}"

    def masters(self):
        param = self.keras.Variable(np.ones(2), dtype="bfloat16")
        optimizer = self.keras.optimizers.Adam(1e-3)
        for _ in range(100):
            optimizer.apply([self.keras.ops.ones(2, "bfloat16")], [param])
        return f"{float(param.value[0]):.3f}"

    def _model(self):
        layers = self.keras.layers
        mixed = {"dtype": "mixed_float16"}
        stack = [layers.Dense(4, **mixed), layers.BatchNormalization(**mixed)]
        model = self.keras.Sequential([*stack, layers.Softmax(**mixed)])
        model.build((2, 3))
        return model

    def batchnorm(self):
        return self._model().layers[1].gamma.dtype

    def statistics(self):
        model = self._model()
        inner = self.keras.optimizers.SGD(0.1)
        model.compile(self.keras.optimizers.LossScaleOptimizer(inner), "mse")
        x = np.ones((2, 3), np.float32)
        x[0] = INF
        model.train_on_batch(x, np.zeros((2, 4), np.float32))
        return said_of_statistics(np.array(model.layers[1].moving_mean))

    def autocast(self):
        model = self._model()
        call = lambda *variables: model.stateless_call(*variables)[0]  # noqa: E731
        values = [
            [v.value for v in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        ]
        return dtypes_in(call, *values, np.ones((2, 3), np.float32))

    def first_loss(self):
        inner = self.keras.optimizers.SGD(0.1)
        optimizer = self.keras.optimizers.LossScaleOptimizer(inner)
        optimizer.build([self.keras.Variable(np.ones(2))])
        scaled = optimizer.scale_loss(self.keras.ops.convert_to_tensor(2.0, "float16"))
        return f"scaled {float(scaled):g}"


class Mpx:
    """mpx: jmp's ideas over Equinox."""

    package = "mixed-precision-for-JAX"

    def __init__(self):
        import jax.numpy as jnp
        import mpx
        import optax

        self.jnp, self.mpx, self.optax = jnp, mpx, optax

    def _stepped(self, steps, scale=2.0**15, floor=1.0, period=2000):
        jnp, model = self.jnp, {"w": self.jnp.ones(2)}
        rule = self.mpx.DynamicLossScaling(
            jnp.float32(scale), min_loss_scaling=jnp.float32(floor), period=period
        )
        tx, found = self.optax.sgd(0.1), []
        opt_state = tx.init(model)
        for finite in steps:
            loss_fn = lambda p, x: (p["w"].astype(jnp.float32) * x).sum()  # noqa: E731
            grad = self.mpx.filter_value_and_grad(loss_fn, scaling=rule)
            x = jnp.float32(CLEAN if finite else INF)
            _, rule, ok, grads = grad(model, x)
            model, opt_state = self.mpx.optimizer_update(
                model, tx, opt_state, grads, ok
            )
            found.append((np.array(model["w"]), float(rule.loss_scaling)))
        return found

    def overflow(self):
        return said_of_skip(self._stepped([False])[0][0])

    def growth(self):
        found = self._stepped([True] * 6, scale=1.0, period=2)
        return grew([1.0, *(scale for _, scale in found)])

    def floor(self):
        ends = self._stepped([False] * 24, scale=2.0**15, floor=2.0**14)[-1][1]
        return "kept" if ends == 2.0**14 else f"lost: {ends:g}"

    def masters(self):
        jnp, model = self.jnp, {"w": self.jnp.ones(2, self.jnp.bfloat16)}
        tx = self.optax.adam(1e-3)
        opt_state = tx.init(model)
        for _ in range(100):
            grads = {"w": jnp.ones(2, jnp.bfloat16)}
            model, opt_state = self.mpx.optimizer_update(
                model, tx, opt_state, grads, jnp.bool_(True)
            )
        return f"{float(model['w'][0]):.3f}"

    def batchnorm(self):
        params = self.mpx.cast_to_half_precision(initialized(linen_net())["params"])
        return params["layers_1"]["scale"].dtype.name

    def statistics(self):
        return statistics_of(linen_net())

    def autocast(self):
        half = self.mpx.cast_to_half_precision(initialized(linen_net()))
        return dtypes_in(call_of(linen_net()), half, self.jnp.ones((2, 3), "float16"))

    def first_loss(self):
        jnp = self.jnp
        rule = self.mpx.DynamicLossScaling(
            jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1)
        )
        loss_fn = lambda p: p["w"].astype(jnp.float16).sum()  # noqa: E731
        grad = self.mpx.filter_value_and_grad(loss_fn, scaling=rule)
        return f"{float(grad({'w': jnp.ones(2)})[0]):g}"


class Qwix:
    """Qwix: fp8 of Flax models by rules, set as jamp's O6 is. It scales no loss."""

    package = "qwix"

    def overflow(self):
        return said_of_skip(self._stepped(INF, "float32", 1))

    def growth(self):
        return "no scale"

    floor = first_loss = growth

    def masters(self):
        return f"{self._stepped(1, 'bfloat16', 100)[0]:.3f}"

    def _stepped(self, grad, dtype, steps):
        """A param after steps of optax alone: Qwix has none of its own."""
        import jax.numpy as jnp
        import optax

        tx, param = optax.adam(1e-3), jnp.ones(2, dtype)
        opt_state = tx.init(param)
        for _ in range(steps):
            updates, opt_state = tx.update(jnp.full(2, grad, dtype), opt_state, param)
            param = optax.apply_updates(param, updates)
        return np.array(param)

    def batchnorm(self):
        params = initialized(self._model(linen_net()))["params"]
        return params["layers_1"]["scale"].dtype.name

    def statistics(self):
        return statistics_of(self._model(linen_net()))

    def autocast(self):
        net = self._model(linen_net())
        return dtypes_in(call_of(net), initialized(net), np.ones((2, 3), np.float32))

    def _model(self, model):
        import jax.numpy as jnp
        import qwix

        forward, backward = jnp.float8_e4m3fn, jnp.float8_e5m2
        formats = {"weight_qtype": forward, "act_qtype": forward, "bwd_qtype": backward}
        rule = qwix.QtRule(module_path=".*", disable_channelwise_axes=True, **formats)
        return qwix.quantize_model(model, qwix.QtProvider([rule]))

    def fp8(self):
        """What it says of models of a kind, and of a row with an inf."""
        import equinox
        import flax.linen as nn
        import jax
        import jax.numpy as jnp

        x, key = jnp.ones((32, 64), jnp.bfloat16), jax.random.key(0)
        net = self._model(nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64)]))
        params = net.init(key, x)
        loss = lambda p: net.apply(p, x).astype(jnp.float32).mean()  # noqa: E731
        operands = collections.Counter(
            " x ".join(v.aval.dtype.name for v in eqn.invars)
            for eqn in equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
            if eqn.primitive.name == "dot_general"
        )
        yield "Linen", ", ".join(f"{n} {name}" for name, n in operands.items())
        others = {
            "a function": lambda w, x: x @ w,
            "Equinox": equinox.nn.Linear(64, 64, key=key),
        }
        for name, model in others.items():
            try:
                self._model(model)
                yield name, "taken"
            except ValueError as error:
                yield name, f"ValueError: {error}"
        out = net.apply(params, x.at[0, 0].set(INF))
        lost = int((~jnp.isfinite(out)).any(axis=1).sum())
        yield "an inf in one row of 32", f"{lost} rows are not finite"


def linen_net():
    import flax.linen as nn

    return nn.Sequential([nn.Dense(4), nn.BatchNorm(False), nn.softmax])


def initialized(net):
    import jax

    return net.init(jax.random.key(0), np.ones((2, 3), np.float32))


def call_of(net):
    return lambda *args: net.apply(*args, mutable=["batch_stats"])[0]


def statistics_of(net):
    x = np.ones((2, 3), np.float32)
    x[0] = INF
    _, new = net.apply(initialized(net), x, mutable=["batch_stats"])
    return said_of_statistics(np.array(new["batch_stats"]["layers_1"]["mean"]))


def said_of_skip(param):
    return "skipped" if np.array_equal(param, np.ones(2)) else f"steps to {param[0]:g}"


def said_of_statistics(statistics):
    return "as before" if np.isfinite(statistics).all() else SPOILED


def grew(scales):
    return "steps " + ", ".join(
        str(i) for i in range(1, len(scales)) if scales[i] > scales[i - 1]
    )


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def dtypes_in(call, *args):
    """Of the first matmul and the last exponential in a program."""
    import jax

    found = {
        eqn.primitive.name: eqn.invars[0].aval.dtype.name
        for eqn in equations(jax.make_jaxpr(call)(*args).jaxpr)
        if eqn.invars and hasattr(eqn.invars[0].aval, "dtype")
    }
    return f"{found['dot_general']}, {found['exp']}"


def equations(jaxpr):
    """Those of a program and, after each, of the programs in it."""
    import jax

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


CASES = {
    "a step with gradients of inf": "overflow",
    "window of 2: the scale grows after": "growth",
    "floor of the scale": "floor",
    "bfloat16 params, 100 steps of Adam (float32: 0.900)": "masters",
    "BatchNorm's params in the model": "batchnorm",
    "its statistics after an overflow": "statistics",
    "product, exponential of a float32 model": "autocast",
    "a float16 loss of 2 on step 1": "first_loss",
}


def main():
    modules = {Torch: "torch", Keras: "keras", Mpx: "mpx", Qwix: "qwix"}
    here = [p() for p, name in modules.items() if importlib.util.find_spec(name)]
    versions = [f"{p.package} {importlib.metadata.version(p.package)}" for p in here]
    if here:
        print("| |", " | ".join(versions), "|")
        print("|---" * (len(here) + 1) + "|")
    for name, case in CASES.items() if here else ():
        print("|", name, "|", " | ".join(getattr(p, case)() for p in here), "|")
    for peer in here:
        if isinstance(peer, Qwix):
            for name, what in peer.fp8():
                print(f"qwix, {name}: {what}")
        if isinstance(peer, Torch):
            for name, (low, middle, high) in peer.steps().items():
                print(f"torch, {name}: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
