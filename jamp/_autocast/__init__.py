"""Autocast: runs each operation of a JAX function in the precision that suits it.

This package may import `_core` and the device capabilities of `pallas_kernels`.
`primitives` has the table of operations, `lists` the user's additions to it, and
`subjaxprs` finds the jaxprs in an equation. `reduction` rewrites gradient programs for
`reduce_dtype`. README.md describes the passes.
"""
