"""Checks the version of JAX at import."""

import os

import jax

OLDEST_JAX, FIRST_UNTESTED_JAX = (0, 11), (0, 13)  # pyproject.toml has the same bounds


def jax_problem(version: tuple[int, ...] | None = None) -> str | None:
    """Returns an error if this JAX is outside the range that jamp's tests cover.

    Autocast reads parts of JAX that no release promises to keep, so an untested JAX
    could change results silently. JAMP_UNTESTED_JAX=1 tries anyway.
    """
    version = jax.__version_info__ if version is None else version
    if OLDEST_JAX <= version[:2] < FIRST_UNTESTED_JAX:
        return None
    if os.environ.get("JAMP_UNTESTED_JAX") == "1":
        return None
    bounds = "jax>={}.{},<{}.{}".format(*OLDEST_JAX, *FIRST_UNTESTED_JAX)
    return (
        f"jamp needs {bounds}; this is JAX {'.'.join(map(str, version))}. "
        f'Install another version of jamp, or run `pip install "{bounds}"`. '
        "To try this JAX anyway, set JAMP_UNTESTED_JAX=1 and compare a run with O0."
    )
