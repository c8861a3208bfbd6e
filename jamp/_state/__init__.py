"""The train state: its creation, its steps and skips, and its growth.

May import `_core`, `_autocast`, `_policy`, `_scaling` and `optimizers`. `incoming`
checks the arguments of `initialize`, `step` steps one group, and `amp_state` steps or
skips the whole state.
"""
