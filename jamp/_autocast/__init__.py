"""Autocast: any JAX function, each operation in the precision that suits it.

`_lists` says which operation runs in what, as data; `_region` marks parts of a program
that the user decides on; `_demand` reads a program backward, `_paint` forward;
`_control_flow` knows the operations that hold programs; `_transform` is the front.
"""
