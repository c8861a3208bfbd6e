"""Matmuls in fp8, an extension of `_autocast`.

May import `_core` and `_autocast`. `options` has the user's options, `plan` decides
which matmuls run in fp8, `write` writes them, and `quantized` has the arithmetic and
the derivatives. `_autocast` calls a `Products`, its `Policy.fp8`, to decide on a matmul
and to write it.
"""
