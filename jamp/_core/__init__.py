"""The foundation of all packages: dtypes, trees, layouts, groups, devices, warnings.

May import JAX, Flax and `pallas_kernels`, but no other package of jamp. Code belongs
here if two packages need it and it is specific to neither.
"""
