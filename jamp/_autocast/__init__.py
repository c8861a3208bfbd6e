"""Autocast: any JAX function, each operation in the precision that suits it.

May import `_core`, and from `pallas_kernels` what a device can do. `primitives` says
what is known of each operation, as data, `lists` what the user adds, and `frames` which
programs an equation holds. The README has the order of the passes and their words.
"""
