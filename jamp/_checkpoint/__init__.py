"""Checkpoints that any opt level can read, and apex's form.

May import `_core`, `_policy`, `_scaling` and `_state`. `portable` has the versioned
form for all levels, and `apex` has apex's form.
"""
