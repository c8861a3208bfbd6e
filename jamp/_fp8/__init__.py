"""Matmuls in fp8, beside the engine of `_autocast`.

May import `_core` and `_autocast`. `options` has the user's options, `plan` says which
matmuls run in fp8, `write` writes them, and `quantized` has the numbers and their
derivatives. The engine knows a `Products` as `Policy.fp8`: it calls it when it decides
on a product and when it writes one.
"""
