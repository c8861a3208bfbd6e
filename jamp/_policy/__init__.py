"""Opt levels: their properties, the casts of params, and the forward pass.

May import `_core` and `_autocast`. `options` parses overrides, `levels` applies them,
`casting` casts params, and `forward` rewrites a model for its level.
"""
