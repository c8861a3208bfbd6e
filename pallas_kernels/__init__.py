"""GPU kernels for mixed-precision training, in Pallas; they know nothing of jamp.

Each operation is one file that holds its formula once: XLA runs it on whole arrays,
Pallas the same function block by block. Nothing here keeps state, and every function
takes plain arrays or trees of arrays, so that the package is of use without jamp.
"""
