"""Loss scales, and the gradients of scaled losses.

May import `_core`, `_autocast` and `_policy`. A change of when a scale
moves goes into `rules`; of how gradients are made into `value_and_grad`, and from there
into `mapped_axis`; of what they are after an overflow into `unscaled`; of
what may not be scaled twice into `twice`; of their sums in float32 over a batch or
devices into `reduction`.
"""
