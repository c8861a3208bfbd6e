"""Autocast: any JAX function, each operation in the precision that suits it.

May import `_core`. `primitives` says what is known of each operation, as data, `lists`
what the user adds, and `frames` which programs an equation holds. `regions` marks parts
of a program that the user decides on, `kernels` calls with half what runs in nothing
else, `tracing` knows what a thread traces for, and `model` marks the params of a half
model. `facts` reads a program forward and `consumers` backward, `values` chooses
dtypes, `rewrite` writes the new program, `control_flow` what holds programs,
`derivatives` what the user differentiates by hand, `sums` and `loops` sums of
gradients, and `islands` what the backward pass keeps. `transform` is the front; what
JAX does not document is in `frames`, `jax_internals` and `derivatives`. The README has
the words.
"""
