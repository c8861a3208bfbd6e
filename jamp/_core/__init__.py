"""What every other room stands on: dtypes, trees, groups, devices, warnings, compat.

May import JAX, Flax and optax, and nothing of jamp. A change goes here if two rooms
need it and neither is its home; what depends on the version of JAX goes into `compat`.
"""
