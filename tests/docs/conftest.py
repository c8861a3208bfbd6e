"""Run pages and examples as on a reader's machine."""

import jax
import pytest


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Shows only one of the eight devices, as on most machines."""
    first = jax.devices()[:1]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_: first)
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *_: 1)
