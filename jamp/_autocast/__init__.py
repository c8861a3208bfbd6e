"""Autocast: any JAX function, each operation in the precision that suits it.

May import `_core`. `lists` says which operation runs in what, as data; `regions` marks
parts of a program that the user decides on; `demand` reads a program backward, `paint`
forward; `control_flow` knows the operations that hold programs; `transform` is the
front.
"""
