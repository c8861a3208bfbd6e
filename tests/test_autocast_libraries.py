"""Equinox, Diffrax, Optimistix and Optax under autocast: plain JAX's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.programs import products

# A lent machine with a GPU may not have them.
eqx = pytest.importorskip("equinox")
eqxi = pytest.importorskip("equinox.internal")
diffrax = pytest.importorskip("diffrax")
lineax = pytest.importorskip("lineax")
optimistix = pytest.importorskip("optimistix")

pytestmark = [
    pytest.mark.standard_promotion,
    # Equinox raises its errors from a callback, into which nobody can look.
    pytest.mark.filterwarnings("ignore::jamp.AutocastWarning"),
]

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)) / 3
X = jnp.array([1.0, 2.0, -1.0, 0.5])
KEY = jax.random.key(0)


@eqx.filter_custom_vjp
def scaled(w, x, scale):
    return jnp.tanh(w @ x) * scale


@scaled.def_fwd
def _(perturbed, w, x, scale):
    y = jnp.tanh(w @ x)
    return y * scale, (y, perturbed)


@scaled.def_bwd
def _(residuals, g, perturbed, w, x, scale):
    y, known = residuals
    assert known == perturbed is True
    # Not the derivative, so that to ignore it shows.
    return 3.0 * jnp.outer(g * (1 - y**2) * scale, x)


def step(w, x):
    return jnp.tanh(w @ x)


def while_loop(w, x):
    return eqxi.while_loop(
        lambda c: c[0] < 4,
        lambda c: (c[0] + 1, step(w, c[1])),
        (0, x),
        kind="checkpointed",
        max_steps=8,
    )[1]


def scan(w, x):
    body = lambda c, _: (step(w, c), c)  # noqa: E731
    return eqxi.scan(body, x, None, length=4, kind="checkpointed", checkpoints=2)[0]


def mlp(w, x):
    return eqx.nn.MLP(4, 4, 8, 2, key=KEY)(w @ x)


def solution(adjoint, solver, controller):
    def fn(w, x):
        term = diffrax.ODETerm(lambda t, y, w: step(w, y) - y)
        solved = diffrax.diffeqsolve(
            *(term, solver, 0.0, 1.0, 0.25, x, w),
            adjoint=adjoint,
            stepsize_controller=controller,
        )
        return solved.ys[0]

    return fn


def residual(y, args):
    w, x = args
    return y - step(w, y) / 2 - x


def solved(solve, solver, fn=residual):
    return lambda w, x: solve(fn, solver, x, (w, x)).value


ADAPTIVE = diffrax.PIDController(rtol=1e-2, atol=1e-2)
FIXED = diffrax.ConstantStepSize()
PROGRAMS = {
    "filter_custom_vjp": lambda w, x: scaled(w, x, 2.0),
    "checkpointed_while_loop": while_loop,
    "checkpointed_scan": scan,
    "mlp": mlp,
    "diffeqsolve": solution(
        diffrax.RecursiveCheckpointAdjoint(), diffrax.Tsit5(), ADAPTIVE
    ),
    "backsolve": solution(diffrax.BacksolveAdjoint(), diffrax.Heun(), FIXED),
    "implicit_ode_solver": solution(
        diffrax.DirectAdjoint(), diffrax.Kvaerno3(), ADAPTIVE
    ),
    "root_find": solved(optimistix.root_find, optimistix.Newton(1e-3, 1e-3)),
    "fixed_point": solved(
        optimistix.fixed_point,
        optimistix.FixedPointIteration(1e-3, 1e-3),
        lambda y, args: step(args[0], y) / 2 + args[1],
    ),
    "least_squares": solved(
        optimistix.least_squares, optimistix.LevenbergMarquardt(1e-2, 1e-2)
    ),
    "minimise": solved(
        optimistix.minimise,
        optimistix.BFGS(1e-3, 1e-3),
        lambda y, args: (residual(y, args) ** 2).sum(),
    ),
    "linear_solve": lambda w, x: (
        lineax.linear_solve(lineax.MatrixLinearOperator(w @ w.T + jnp.eye(4)), x).value
    ),
}


def assert_close(got, expected):
    """In norm: half has 3 digits, and a solver's steps are chosen by their errors."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b) > 0, (a, b)


# XLA takes 14 s for it, as for all others together.
LONG = pytest.param("implicit_ode_solver", marks=pytest.mark.sweep)


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {*LONG.values}) + [LONG])
def test_values_and_gradients_of_a_library(name):
    def evaluated(fn):
        loss = lambda w: (fn(w, X) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(W)

    fn = PROGRAMS[name]
    cast = jamp.autocast(fn)
    assert_close(evaluated(cast), evaluated(fn))
    assert "float16" in {p.lhs for p in products(cast, W, X)}


LABELS = jnp.array([0, 3])
ONE_HOT = jax.nn.one_hot(LABELS, 4)
SIGNS = 2 * ONE_HOT - 1
LOSSES = {
    "l2_loss": ONE_HOT,
    "squared_error": ONE_HOT,
    "huber_loss": ONE_HOT,
    "log_cosh": ONE_HOT,
    "cosine_distance": ONE_HOT,
    "cosine_similarity": ONE_HOT,
    "hinge_loss": SIGNS,
    "sigmoid_binary_cross_entropy": ONE_HOT,
    "sigmoid_focal_loss": ONE_HOT,
    "softmax_cross_entropy": ONE_HOT,
    "safe_softmax_cross_entropy": ONE_HOT,
    "softmax_cross_entropy_with_integer_labels": LABELS,
    "poly_loss_cross_entropy": ONE_HOT,
    "kl_divergence": 0.9 * ONE_HOT + 0.025,
    "kl_divergence_with_log_targets": jnp.log(0.9 * ONE_HOT + 0.025),
    "generalized_kl_divergence": 0.9 * ONE_HOT + 0.025,
    "multiclass_hinge_loss": LABELS,
    "multiclass_perceptron_loss": LABELS,
    "multiclass_sparsemax_loss": LABELS,
    "sparsemax_loss": LABELS[:, None] % 2,
    "ranking_softmax_loss": ONE_HOT,
    "smooth_labels": 0.1,
    "triplet_margin_loss": (SIGNS, -SIGNS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_of_a_loss(name):
    targets = LOSSES[name]
    targets = targets if isinstance(targets, tuple) else (targets,)

    def loss(w):
        y = jnp.stack([X, X[::-1]]) @ w
        return getattr(optax.losses, name)(y, *targets).sum()

    got, expected = (jax.value_and_grad(f)(W) for f in (jamp.autocast(loss), loss))
    assert_close(got, expected)
