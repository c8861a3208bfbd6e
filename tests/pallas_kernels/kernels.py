"""Every kernel, as a case that tests compile for a GPU and run.

As a module, it compiles all kernels for one target. Mosaic compiles a kernel once per
process, so each target needs its own process.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import h200
from jamp import optimizers as jo

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
MARK = "==== "
# Blocks of 4096 and 1024 with a remainder, whole blocks, and less than a block.
SIZES = (4096 + 1024 + 256 + 44, 4096, 200)
RTOL = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


type Shapes = Sequence[int | tuple[int, ...]]


class Case(NamedTuple):
    """A call of a kernel, `(options, *args) -> results`.

    `make` creates the args for leaves of some shapes. `donate` are donated positions.
    """

    call: Callable[..., Any]
    make: Callable[[Shapes], tuple[Any, ...]]
    donate: tuple[int, ...] = ()
    kernels: int = 1


BETAS = {"b1": 0.9, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
# The names of the moments, and the optimizer.
OPTIMIZERS = {
    "adam": (["mu", "nu"], jo.fused_adam(0.01, **BETAS)),
    "narrow adam": (["mu", "nu"], jo.fused_adam(0.01, **BETAS, moment_dtype=BF16)),
    "sgd": (["trace"], jo.fused_sgd(0.01, 0.9, weight_decay=0.1)),
    "adagrad": (["sum_of_squares"], jo.fused_adagrad(0.01, 1e-6)),
    "lamb": (["mu", "nu"], jo.fused_lamb(0.01, **BETAS)),
    "novograd": (["mu"], jo.fused_novograd(0.01, **BETAS)),
}


def stepped(optimizer: str, kind: str, dtype: Any) -> Case:
    """Returns a case of an optimizer, a kind of weights and a dtype of gradients."""
    names, tx = OPTIMIZERS[optimizer]
    rule, only_updates = tx.rule, kind == "update"

    def call(options, weights, moments, grads, unscale, skip):
        options = pk.Options(unscale, skip, options.backend)
        decays = [rule.weight_decay != 0] * len(weights)
        if optimizer == "sgd":
            decays[1::2] = [False] * len(decays[1::2])
        leaves, count = pk.Leaves(weights, grads, moments, decays), jnp.int32(0)
        if optimizer == "novograd":  # a separate kernel computes its norms
            norms = jnp.arange(1, len(grads) + 1, dtype=F32)
            given = leaves._replace(moments={"nu": [*norms]})
            numbers = {**rule.numbers(count, given, pk.Options()), "norm": norms}
            del numbers["nu"]
        else:
            numbers = rule.numbers(count, leaves, options)
        how = {"rounds": optimizer == "narrow adam", "only_updates": only_updates}
        return pk.step(rule.static, leaves, numbers, options, count=count, **how)

    def make(shapes):
        weights = [weight(kind, dtype, n) for n in shapes]
        states = {
            name: [abs(noise(n, rule.moment_dtype, 5 + k)) for n in shapes]
            for k, name in enumerate(names)
        }
        grads = [8 * noise(n, dtype, 3) for n in shapes]
        return weights, states, grads, F32(0.125), jnp.bool_(False)

    # LAMB needs two passes. SGD has separate kernels with and without decay.
    return Case(call, make, (0, 1), 2 if optimizer in ("lamb", "sgd") else 1)


def weight(kind: str, dtype: Any, n: Any) -> pk.Weight:
    x = noise(n, F32, 1)
    if kind == "split":
        return pk.Weight(*pk.split_float32(x))
    if kind == "copied":
        return pk.Weight(noise(n, dtype, 2), x)
    return pk.Weight(x.astype(dtype))


def noise(shape: Any, dtype: Any, seed: int) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(x, dtype)


def reading(call: Callable, columns: int, dtype: Any) -> Case:
    """Returns a case of a call on lists of arrays of a dtype."""

    def make(sizes):
        return tuple([noise(n, dtype, k) for n in sizes] for k in range(columns))

    return Case(call, make)


# A call, and its number of lists of arrays.
READING = {
    "l2norm": (lambda options, xs: pk.norm(xs, per_leaf=True, options=options), 1),
    "max_norm": (lambda options, xs: pk.norm(xs, jnp.inf, options=options), 1),
    "found_inf": (lambda options, xs: pk.found_inf(xs, options=options), 1),
    "found_inf, unscaled": (
        lambda options, xs: pk.found_inf(xs, options=options._replace(unscale=F32(8))),
        1,
    ),
}


DTYPES = {"f16": F16, "bf16": BF16, "f32": F32}
CASES = {
    f"{optimizer}, {kind}, {name}": stepped(optimizer, kind, dtype)
    for optimizer in OPTIMIZERS
    for name, dtype in DTYPES.items()
    for kind in ("own", "copied", "split", "update")
    if (kind != "copied" or name != "f32") and (kind != "split" or name == "bf16")
    if optimizer == "adam" or (kind, name) in (("own", "f32"), ("copied", "bf16"))
    if optimizer != "narrow adam"
}
NARROW = {f"narrow adam, {kind}, bf16": kind for kind in ("split", "own")}
CASES |= {name: stepped("narrow adam", kind, BF16) for name, kind in NARROW.items()}
CASES |= {
    f"{call}, {name}": reading(*READING[call], dtype)
    for call in READING
    for name, dtype in (("bf16", BF16), ("f32", F32))
}


def cases(target: str) -> list[str]:
    """Returns all cases for an H200, and a few for other targets."""
    few = ["adam, copied, bf16", "adam, split, bf16", "narrow adam, own, bf16"]
    few += ["narrow adam, split, bf16", "lamb, copied, bf16", "sgd, copied, bf16"]
    return list(CASES) if target == "H200" else few


LARGE = 2**31 - 1  # the most elements that a kernel takes


def assert_close(found: Any, expected: Any) -> None:
    """Checks that two results agree within one rounding."""
    jax.tree.map(_assert_close, _joined(found), _joined(expected))


def _joined(results: Any) -> Any:
    """Joins split weights to float32, since their lower halves may differ."""

    def is_split(x):
        return isinstance(x, pk.Weight) and x.kind == "split"

    join = lambda x: x.value if is_split(x) else x  # noqa: E731
    return jax.tree.map(join, results, is_leaf=is_split)


def _assert_close(x, y):
    assert x.dtype == y.dtype and x.shape == y.shape
    rtol = RTOL.get(x.dtype.name, 0)
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def compile_all(target: str) -> None:
    """Compiles all cases, each after a line with its name."""
    for name in cases(target):
        args = jax.eval_shape(lambda name=name: CASES[name].make(SIZES))
        compile_case(name, CASES[name], args, target)
    args, case = ([jax.ShapeDtypeStruct((LARGE,), BF16)],), "found_inf, bf16"
    compile_case(f"{case}, large", CASES[case], args, target)


def compile_case(name: str, case: Case, args: Any, target: str) -> None:
    print(MARK + name, flush=True)
    config = {"H200": h200.H200, "B200": h200.B200}[target]
    options = pk.Options(backend="mosaic")
    h200.compile_step(
        lambda *args: case.call(options, *args),
        *args,
        donate=case.donate,
        target=config,
    )


if __name__ == "__main__":
    compile_all(sys.argv[1])
