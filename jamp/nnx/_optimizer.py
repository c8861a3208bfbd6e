"""`Optimizer`: an NNX optimizer that holds an AmpState without its params."""

import types
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib
from flax.nnx.training.optimizer import OptState, to_opt_state
from jaxtyping import PyTree

from jamp._core.dtypes import cast, is_castable
from jamp._core.names import check_same
from jamp._core.show import summary
from jamp._core.tree import by_keystr
from jamp._policy.forward import no_forward
from jamp._policy.levels import Properties
from jamp._scaling.rules import scales_in_use
from jamp._state.amp_state import AmpState
from jamp._state.closure import rounded
from jamp._state.group import master_params
from jamp.nnx._variables import Models, arrays_of, by_path, is_node

# The fields of an AmpState that hold arrays, except the params.
_PARTS = ("step", "opt_state", "loss_scales", "skipped_steps", "last_step_skipped")


class Optimizer(nnx.Optimizer):
    """Steps NNX models with masters and loss scales; see `jamp.nnx.initialize`.

    Attributes:
        step, opt_state, loss_scales, skipped_steps, last_step_skipped: the fields of
            `jamp.AmpState`, in Variables.
        tx, properties, loss_scale_rules: the static fields of `jamp.AmpState`.
        wrt: the filter of the trained Variables. Static.
    """

    def __init__(self, state: AmpState, wrt: filterlib.Filter):
        """Makes an optimizer from a state. The params stay in the models."""
        self.graph: None = None
        self.wrt = wrt
        self.tx = state.tx
        self.properties: Properties = state.properties
        self.loss_scale_rules = nnx.static(state.loss_scale_rules)
        leaves = by_keystr(state.params).items()
        shapes = tuple((path, x.shape, str(x.dtype)) for path, x in leaves)
        self.shapes = nnx.static(shapes)
        self.step = OptState(state.step)
        for name in _PARTS[1:]:
            setattr(self, name, nnx.data(to_opt_state(getattr(state, name))))

    def __repr__(self) -> str:
        """Returns the summary of an AmpState, because NNX would print all arrays."""
        parts = {name: nnx.as_pure(getattr(self, name)) for name in _PARTS}
        parts |= {"properties": self.properties, "loss_scale": self.loss_scale}
        state = types.SimpleNamespace(**parts)
        return summary("Optimizer", state, self._like, state.opt_state)

    __str__ = __repr__  # NNX defines one with colors

    def amp_state(self, models: Models) -> AmpState:
        """Returns an AmpState for functions such as `jamp.to_checkpoint`.

        Raises:
            ValueError: trained Variables have other paths, shapes or dtypes than at
                `jamp.nnx.initialize`.
        """
        return self._state_with(arrays_of(models, self.wrt))

    @property
    def _like(self) -> dict[str, Any]:
        return {path: jax.ShapeDtypeStruct(*leaf) for path, *leaf in self.shapes}

    def _state_with(self, params: PyTree) -> AmpState:
        check_same(by_keystr(params), self._like, _OTHER_MODEL, _REMEDY)
        return AmpState(
            apply_fn=no_forward,
            params=params,
            tx=self.tx,
            properties=self.properties,
            loss_scale_rules=self.loss_scale_rules,
            **{name: nnx.as_pure(getattr(self, name)) for name in _PARTS},
        )

    def load(self, models: Models, state: AmpState) -> None:
        """Sets models and optimizer to an AmpState, such as a restored checkpoint."""
        nnx.update(models, by_path(state.params))
        for name in _PARTS:
            there, values = getattr(self, name), getattr(state, name)
            jax.tree.map(lambda v, x: v.set_value(x), there, values, is_leaf=is_node)

    def load_params(
        self, models: Models, params: PyTree = None, *, reset_optimizer: bool = False
    ) -> None:
        """Sets the params of the model and the masters, as `AmpState.load_params` does.

        Call it after `nnx.update(model, ...)`, because the next step would otherwise
        overwrite the params with the old masters.

        Args:
            models: the model, or the container of models.
            params: nested dicts of arrays, `nnx.State`s or models, in float32 or half;
                None takes the present params of the model.
            reset_optimizer: whether to reset the state of the optimizer.

        >>> import jax.numpy as jnp, jamp.nnx, optax
        >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> quiet = {"verbosity": 0}
        >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.1), "O2", **quiet)
        >>> optimizer.load_params(model, {"kernel": jnp.full((2, 1), 0.1)})
        >>> print(model.kernel[0],
        ...       jamp.master_params(optimizer.amp_state(model))["kernel"][0])
        [0.1] [0.1]
        """
        there = arrays_of(models, self.wrt)
        params = there if params is None else _pure(params, self.wrt)
        like = self._like

        def leaf(path, x):
            wanted = like.get(jax.tree_util.keystr(path), x)
            return cast(x, wanted.dtype) if is_castable(x) else x

        state = self._state_with(jax.tree_util.tree_map_with_path(leaf, there))
        # `load_params` keeps the master of a param that has not changed since the step.
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
        """Steps in place or skips after an overflow; see `AmpState.apply_gradients`.

        Args:
            models: the model, or the container of models.
            grads: the gradients; for several losses, one tree for each.
            loss_id: the id of the loss; for several losses, a sequence.
            **update_args: extra arguments for `tx.update`.
        """
        leaves = jax.tree.leaves(models, is_leaf=is_node)
        if grads is None or not all(isinstance(x, nnx.Module) for x in leaves):
            raise TypeError(
                "optimizer.update takes the model first: write "
                "`optimizer.update(model, grads)`."
            )
        grads = _pure(grads, self.wrt)
        state = self.amp_state(models)
        args = _pure(update_args, self.wrt)
        new = state.apply_gradients(grads=grads, loss_id=loss_id, update_args=args)
        self.load(models, new)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, shape (), float32; for several losses, a tuple."""
        states = nnx.as_pure(self.loss_scales)  # pyright: ignore[reportAttributeAccessIssue]
        return scales_in_use(self.loss_scale_rules, states)


_OTHER_MODEL = "The model does not belong to this optimizer: it"
_REMEDY = (
    "Pass the model and the optimizer that one call of jamp.nnx.initialize returned. "
    "After `nnx.update(model, params)`, call `optimizer.load_params(model)`, which "
    "casts the params and sets the masters."
)


def _pure(grads: PyTree, wrt: filterlib.Filter) -> Any:
    """Converts the states and models in a tree to nested dicts."""
    kinds = nnx.State | nnx.Pytree

    def leaf(x):
        x = nnx.state(x, wrt) if isinstance(x, nnx.Pytree) else x
        return nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x

    return jax.tree.map(leaf, grads, is_leaf=lambda x: isinstance(x, kinds))
