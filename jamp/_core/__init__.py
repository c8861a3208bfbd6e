"""What every other room stands on: dtypes, trees, groups, devices, warnings.

May import JAX, Flax and `pallas_kernels`, and nothing else of jamp. A change goes here
if two rooms need it and neither is its home.
"""
