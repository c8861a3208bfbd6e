"""The lists of torch.autocast on CUDA (`aten/src/ATen/autocast_mode.h`), as in JAX.

By the names of primitives, and of functions that JAX jits by name.
"""

FLOAT32 = frozenset(
    # AT_FORALL_FP32
    "exp exp2 expm1 log log1p pow integer_pow square rsqrt acos asin cosh sinh tan "
    "erf_inv "
    # AT_FORALL_FP32_SET_OPT_DTYPE
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp "
    # torch has no half kernel for these, and raises
    "cholesky eig eigh svd qr lu triangular_solve tridiagonal_solve fft "
    "householder_product geqrf custom_linear_solve "
    "lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad "
    "bessel_i0e bessel_i1e regularized_incomplete_beta".split()
)
FUNCTIONS = frozenset("softmax log_softmax logsumexp softplus standardize norm".split())
ONE_KERNEL = frozenset(
    "silu gelu elu selu celu relu6 hard_tanh leaky_relu hard_sigmoid mish "
    "log_sigmoid".split()
)
MOVES = frozenset("reshape squeeze transpose expand_dims copy copy_p".split())
