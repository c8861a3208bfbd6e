"""Autocast: any JAX function, each operation in the precision that suits it.

May import `_core`. `lists` says which operation runs in what, as data; `regions` marks
parts of a program that the user decides on, `kernels` calls with half what runs in
nothing else, and `tracing` knows what a thread traces for. `consumers` reads a program
backward, `values` knows what is decided so far, `rewrite` writes the program anew,
`control_flow` what holds programs, and `islands` what the backward pass keeps.
`transform` is the front; all that JAX does not document is in `jax_internals`. The
README has the words.
"""
