"""`Optimizer`: an AmpState without its params, in the Variables of an NNX optimizer."""

import types
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib
from flax.nnx.training.optimizer import OptState, to_opt_state
from jaxtyping import PyTree

from jamp._core.devices import moves_constants
from jamp._core.dtypes import cast, is_castable
from jamp._core.names import check_same
from jamp._core.show import summary
from jamp._policy.forward import no_forward
from jamp._policy.levels import Properties
from jamp._scaling.rules import scales_in_use
from jamp._state.amp_state import AmpState
from jamp._state.closure import rounded
from jamp._state.step import master_params
from jamp.nnx._variables import (
    Models,
    arrays_of,
    by_keystr,
    by_path,
    entries,
    map_variables,
)

# What an AmpState has beyond its params, and what is static.
_PARTS = ("step", "opt_state", "loss_scales", "skipped_steps", "last_step_skipped")


class Optimizer(nnx.Optimizer):
    """Steps NNX models with masters and loss scales. `jamp.nnx.initialize` makes it.

    Attributes:
        step, opt_state, loss_scales, skipped_steps, last_step_skipped: Variables with
            the fields of `jamp.AmpState`.
        tx, properties, loss_scale_rules: the static fields of `jamp.AmpState`.
        wrt: the filter of the trained Variables. Static.
    """

    def __init__(self, state: AmpState, wrt: filterlib.Filter):
        """Takes the parts of a state whose params are a model's."""
        self.graph: None = None
        self.wrt = wrt
        self.tx = state.tx
        self.properties: Properties = state.properties
        self.loss_scale_rules = nnx.static(state.loss_scale_rules)
        leaves = by_keystr(state.params).items()
        shapes = tuple((path, x.shape, str(x.dtype)) for path, x in leaves)
        self.shapes = nnx.static(shapes)  # which hash
        self.step = OptState(state.step)
        for name in _PARTS[1:]:
            setattr(self, name, nnx.data(to_opt_state(getattr(state, name))))

    def __repr__(self) -> str:
        """A summary, as of an AmpState; NNX would show all Variables."""
        parts = {name: nnx.as_pure(getattr(self, name)) for name in _PARTS}
        parts |= {"properties": self.properties, "loss_scale": self.loss_scale}
        state = types.SimpleNamespace(**parts)
        return summary("Optimizer", state, self._like, state.opt_state)

    __str__ = __repr__  # NNX has a colored one

    def amp_state(self, models: Models) -> AmpState:
        """The AmpState of both: for `jamp.to_checkpoint`, `jamp.check` and the like.

        A ValueError if trained Variables have other paths, shapes or dtypes.
        """
        return self._state_with(arrays_of(models, self.wrt))

    @property
    def _like(self) -> dict[str, Any]:
        return {path: jax.ShapeDtypeStruct(*leaf) for path, *leaf in self.shapes}

    def _state_with(self, params: PyTree) -> AmpState:
        check_same(by_keystr(params), self._like, _NOT_THE_ONE, _REMEDY)
        return AmpState(
            apply_fn=no_forward,
            params=params,
            tx=self.tx,
            properties=self.properties,
            loss_scale_rules=self.loss_scale_rules,
            **{name: nnx.as_pure(getattr(self, name)) for name in _PARTS},
        )

    def load(self, models: Models, state: AmpState) -> None:
        """Puts an AmpState, as `jamp.from_checkpoint` gives, into both, in place."""
        nnx.update(models, by_path(state.params))
        for name in _PARTS:
            there, values = getattr(self, name), getattr(state, name)
            map_variables(lambda v, x: v.set_value(x), there, values)

    @moves_constants
    def load_params(
        self, models: Models, params: PyTree = None, *, reset_optimizer: bool = False
    ) -> None:
        """`AmpState.load_params`: sets the params of the model, and the masters.

        After `nnx.update(model, ...)` alone, the next step would restore the params
        from the masters.

        Args:
            models: the model, or the container of them.
            params: nested dicts of arrays, `nnx.State`s or models, in float32 or half;
                None for the present values in the model.
            reset_optimizer: whether to reset the optimizer's state.

        >>> import jax.numpy as jnp, jamp.nnx, optax
        >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> quiet = {"verbosity": 0}
        >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.1), "O2", **quiet)
        >>> optimizer.load_params(model, {"kernel": jnp.full((2, 1), 0.1)})
        >>> print(model.kernel[0], optimizer.master_params(model)["kernel"][0])
        [0.1] [0.1]
        """
        there = arrays_of(models, self.wrt)
        params = there if params is None else _pure(params, self.wrt)
        like = self._like

        def leaf(path, x):
            wanted = like.get(jax.tree_util.keystr(path), x)
            return cast(x, wanted.dtype) if is_castable(x) else x

        state = self._state_with(jax.tree_util.tree_map_with_path(leaf, there))
        # As they were before something was put into the model.
        state = self._state_with(rounded(master_params(state), state.params))
        self.load(models, state.load_params(params, reset_optimizer=reset_optimizer))

    def update(
        self,
        models: Models,
        grads: PyTree = None,
        /,
        *,
        loss_id: int | Sequence[int] = 0,
        **update_args: Any,
    ) -> None:
        """`AmpState.apply_gradients`, in place: steps, or skips after an overflow.

        Args:
            models: the model, or the container of them.
            grads: the gradients; a sequence of them for several losses.
            loss_id: the loss, or a sequence of several.
            **update_args: extra arguments for `tx.update`.
        """
        is_module = lambda x: isinstance(x, nnx.Module)  # noqa: E731
        swapped = any(map(is_module, jax.tree.leaves(grads, is_leaf=is_module)))
        one = grads is None  # `update(grads)`, as in older versions of Flax
        if one or swapped or not all(map(is_module, entries(models).values())):
            raise TypeError("Write optimizer.update(model, grads): the model first.")
        grads = _pure(grads, self.wrt)
        state = self.amp_state(models)
        args = _pure(update_args, self.wrt)
        new = state.apply_gradients(grads=grads, loss_id=loss_id, update_args=args)
        self.load(models, new)

    @property
    @moves_constants
    def loss_scale(self) -> Any:
        """The present loss scale, shape (), float32; a tuple of several."""
        states = nnx.as_pure(self.loss_scales)  # pyright: ignore[reportAttributeAccessIssue]
        return scales_in_use(self.loss_scale_rules, states)

    def master_params(self, models: Models) -> PyTree:
        """The trained params in float32, nested dicts by path."""
        return master_params(self.amp_state(models))


_NOT_THE_ONE = "The model is not the one of this optimizer: it"
_REMEDY = (
    "Pass what one call of jamp.nnx.initialize returned. After `nnx.update(model, "
    "params)`, `optimizer.load_params(model)` casts them, and sets the masters."
)


def _pure(grads: PyTree, wrt: filterlib.Filter) -> Any:
    """States and models as nested dicts."""

    def leaf(x):
        if isinstance(x, nnx.State):
            return nnx.to_pure_dict(x)
        return nnx.to_pure_dict(nnx.state(x, wrt)) if isinstance(x, nnx.Pytree) else x

    is_leaf = lambda x: isinstance(x, nnx.State | nnx.Pytree)  # noqa: E731
    return jax.tree.map(leaf, grads, is_leaf=is_leaf)
