"""GPU kernels for mixed-precision training, written in Pallas; they know nothing of jamp.

Each operation is one file that holds its formula once: XLA runs it on whole arrays, and
Pallas runs the same function block by block. Nothing here keeps state, and every function
works on plain arrays and trees of arrays, so that the package is of use without jamp.
"""
