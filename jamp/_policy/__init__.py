"""Opt levels: their properties, the casts of a model, the forward under a policy.

May import `_core` and `_autocast`. A new override begins in `levels`; what is cast in
`casting`; how a model's program is written, where it begins and ends, in `forward`.
"""
