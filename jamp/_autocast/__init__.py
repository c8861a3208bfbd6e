"""Autocast: runs each operation of a JAX function in the precision that suits it.

This package may import `_core` and the device capabilities of `pallas_kernels`.
`primitives` holds the table of operations, `lists` the user's additions to it, and
`frames` the programs that an equation holds. README.md describes the passes and terms.
"""
