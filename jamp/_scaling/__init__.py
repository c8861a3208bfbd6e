"""Loss scales, and the gradients of scaled losses.

May import `_core`, `_autocast`, `_policy` and `pallas_kernels`. `rules` moves a scale.
`loss` and `value_and_grad` compute gradients, and `mapped_axis` averages them over
devices. `unscaled` makes them NaN after an overflow.
"""
