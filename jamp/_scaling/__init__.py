"""Loss scales, and the gradients of scaled losses.

May import `_core`, `_autocast` and `_policy`. `rules` says when a scale moves,
`value_and_grad` and `mapped_axis` make the gradients, `reduction` sums them in float32,
`unscaled` makes them NaN after an overflow, and `twice` refuses to scale twice.
"""
