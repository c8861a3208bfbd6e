"""Loss scales, and gradients of scaled losses.

May import `_core`, `_autocast`, `_policy` and `optimizers`. A change of when a scale
moves goes into `rules`; of how gradients are made into `value_and_grad`, and from there
into `mapped_axis`; of what they are after an overflow into `unscaled`.
"""
