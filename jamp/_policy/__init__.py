"""What an opt level means: properties, what goes half, the forward under a policy.

May import `_core` and `_autocast`. A new override begins in `levels`; what is cast in
`casting`; what happens while a model runs in `forward`, and in `linen` for Flax's.
"""
