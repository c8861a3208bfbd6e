"""A state on disk: as any opt level can read it, and as apex wrote it.

May import `_core`, `_scaling` and `_state`. The form that any level reads
is in `portable`, with its version; apex's in `apex`.
"""
