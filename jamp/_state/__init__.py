"""The train state: how it is made, how it steps or skips, how it grows.

May import `_core`, `_autocast`, `_policy`, `_scaling` and `optimizers`. What
`initialize` is given is checked in `incoming`; one group's step is in `step`; what must
hold for a skip of the whole state is in `amp_state`.
"""
