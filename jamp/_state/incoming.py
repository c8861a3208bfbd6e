"""Checks the arguments of `initialize`."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.training.train_state import TrainState
from jaxtyping import PyTree

from jamp._core import groups
from jamp._core.dtypes import FLOAT32
from jamp._core.show import kind, short_repr
from jamp._core.tree import is_overwritten, path_parts
from jamp._policy.options import InitOptions, elsewhere, hint
from jamp.optimizers._masters import ALREADY_WRAPPED, MasterWeights

ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def check_containers(params: PyTree, tx: Any) -> None:
    """Raises unless `params` contain arrays, and `tx` has the same container."""
    if any(cls.__module__ == "flax.nnx.module" for cls in type(params).__mro__):
        raise TypeError(
            f"params is an nnx.Module, {kind(params)}. Write "
            "`model, optimizer = jamp.nnx.initialize(model, tx, opt_level)`."
        )
    if any(map(groups.is_transformation, (params, *_entries(params)))):
        swapped = "params and tx are swapped"
        if tx is None or groups.is_transformation(tx):
            swapped = "params are an optax transformation"
        raise TypeError(f"{swapped}: write `jamp.initialize(params, tx, opt_level)`.")
    if not jax.tree.leaves(params):
        raise ValueError(
            f"params hold no arrays: got {short_repr(params)}. Pass the params, "
            '`model.init(key, x)["params"]`.'
        )
    for variables in (params, *_entries(params)):
        names = set(variables) if isinstance(variables, Mapping) else set()
        if {"params", "batch_stats"} <= names:
            raise TypeError(
                "params are Flax variables with batch_stats, which no optimizer must "
                'train. Pass variables["params"], and '
                'batch_stats=variables["batch_stats"].'
            )
    is_state = lambda x: isinstance(x, TrainState)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_state):
        if isinstance(leaf, ARRAY_LIKE):
            continue
        where = f"params{jax.tree_util.keystr(path)}"
        if is_state(leaf):
            raise TypeError(
                f"{where} is {kind(leaf)}. Pass float32 params: "
                "state.params, or jamp.master_params(state) of an AmpState."
            )
        raise TypeError(
            f"{where} is {short_repr(leaf)}, which is not an array. Pass the params, "
            '`model.init(key, x)["params"]`, and `apply_fn=model.apply`.'
        )
    if isinstance(tx, MasterWeights):
        raise ValueError(ALREADY_WRAPPED)
    if tx is None or groups.is_transformation(tx):
        return
    if type(tx) not in groups.CONTAINERS:
        raise TypeError(
            "tx must be an optax transformation, or a list, tuple or dict of them, "
            f"got {type(tx).__name__}: {short_repr(tx)}."
        )
    if isinstance(tx, Mapping) and groups.SINGLE in tx:
        raise ValueError(
            f"tx has the key None, which names no group: got {kind_of(tx)}. Pass the "
            "transformation itself for one group, or name each group with another key."
        )
    for entry in _entries(tx):
        if not groups.is_transformation(entry):
            raise TypeError(
                f"tx holds {short_repr(entry)}, which is not an optax transformation."
            )
        if isinstance(entry, MasterWeights):
            raise ValueError(ALREADY_WRAPPED)
    if isinstance(tx, Mapping):
        matches = isinstance(params, Mapping) and set(params) == set(tx)
    else:
        matches = type(params) is type(tx) and len(params) == len(tx)
    if not matches:
        raise ValueError(
            f"params and tx must be in the same container, with the same keys: got "
            f"{kind_of(params)} of params and {kind_of(tx)} of transformations. For "
            "one model with several transformations in a row, pass optax.chain(...)."
        )


def check_apply_fn(apply_fn: Any) -> None:
    """Raises unless `apply_fn` is None, a function, or a container of functions."""
    for fn in groups.split(apply_fn, apply_fn).values():
        if isinstance(fn, linen.Module):
            raise TypeError(
                f"apply_fn is {kind(fn)}, a Linen module: pass its method "
                "`apply`, as in `apply_fn=model.apply`."
            )
        if fn is not None and not callable(fn):
            raise TypeError(
                f"apply_fn is {short_repr(fn)}, which is not callable: pass "
                "`model.apply`, or a list, tuple or dict of functions like `params`."
            )


def check_fields(
    names: Collection[str], state_class: type[Any], base: type[Any]
) -> None:
    """Raises for the first keyword that is neither an option nor a declared field."""
    if not (isinstance(state_class, type) and issubclass(state_class, base)):
        raise TypeError(
            f"state_class must be jamp.AmpState or a subclass, got {state_class!r}."
        )
    own = base.__dataclass_fields__
    declared = [name for name in state_class.__dataclass_fields__ if name not in own]
    options = ("apply_fn", "batch_stats", "state_class", *InitOptions.__optional_keys__)
    for name in names:
        if name in own:
            raise TypeError(f"initialize cannot take {name!r}, which it sets itself.")
        if name not in declared:
            if place := elsewhere(name):
                raise TypeError(f"initialize got an unknown keyword {name!r}.{place}")
            module = "jamp." if state_class is base else ""
            raise TypeError(
                f"initialize got an unknown keyword {name!r}."
                f"{hint(name, (*options, *declared))} A field of the state is declared "
                f"on a subclass: `class State({module}{state_class.__name__}): {name}: "
                "Any`, passed as `state_class=State`."
            )


def _entries(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return list(container.values())
    return list(container) if isinstance(container, list | tuple) else []


def kind_of(container: object) -> str:
    """Describes a container of groups in words."""
    if isinstance(container, Mapping):
        return f"a dict with the keys {list(container)}"
    if isinstance(container, list | tuple):
        return f"{kind(container)} of length {len(container)}"
    return f"one {type(container).__name__}"


def check_float32(params: PyTree) -> None:
    """Raises a ValueError for the first float leaf that is not float32."""
    if all(getattr(x, "dtype", FLOAT32) == FLOAT32 for x in jax.tree.leaves(params)):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype == FLOAT32:
            continue
        if is_overwritten(path_parts(path)):
            continue
        raise ValueError(
            f"Found params{jax.tree_util.keystr(path)} with dtype {dtype}, expected "
            "float32. You do not need to cast your model before jamp.initialize, no "
            "matter what opt level you choose. If the model is meant to be mixed, pass "
            "allow_incoming_model_not_fp32=True."
        )
