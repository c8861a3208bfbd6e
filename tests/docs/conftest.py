"""Pages and examples run as on a reader's machine."""

import pytest


@pytest.fixture(autouse=True)
def readers_machine(one_device):
    """It has one CPU."""
