"""Autocast: any JAX function, each operation in the precision that suits it.

May import `_core`. `primitives` says what is known of each operation, as data, `lists`
what the user adds, and `frames` which programs an equation holds. The README has the
order of the passes and their words.
"""
