"""The train state: its creation, its steps and skips, and its growth.

May import `_core`, `_autocast`, `_policy`, `_scaling` and `optimizers`. `incoming`
checks the arguments of `initialize`, `group` has the leaves of one group, `grads` reads
its gradients, `step` steps it, and `amp_state` steps or skips the whole state.
"""
