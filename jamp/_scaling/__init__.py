"""Loss scales, and gradients of scaled losses.

May import `_core`, `_policy` and `optimizers`. A change of when a scale moves goes into
`rules`; of what gradients are into `scaled_grads`; of how they are made into
`value_and_grad`, and from there into `retry` and `mapped_axis`.
"""
