"""Opt levels: their properties, the casts of params, and the forward pass.

May import `_core`, `_autocast` and `_fp8`. `options` parses overrides, `levels` applies
them, `casting` casts params, and `forward` rewrites a model for its level.
"""
