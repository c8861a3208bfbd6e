"""Autocast and all of JAX: no crash, no other type, no new infinity. See `sweep`."""

import zlib

import pytest

from tests import sweep

# JAX and optax promote, and warn of short inputs and of what they will drop.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

# In CI, one of so many; all by `make sweep`.
SAMPLE = 32
NAMES = sorted({*sweep.FUNCTIONS} - sweep.excluded())
SAMPLED = [name for name in NAMES if zlib.crc32(name.encode()) % SAMPLE == 0]

# Hazards of `narrowest` that docs/autocast.md lists, by words of what `check` says, and
# in which functions: what a product gave makes half of numbers beyond its range.
HAZARDS = (
    ("float16 narrowest", "losses.ctc_loss"),  # a log of 0 that is -1e5, in a carry
    ("float16 narrowest", "random.f"),  # a ratio of small numbers
    ("float16 narrowest", "random.t"),
)


def new(name, found):
    """What is no hazard."""
    known = [words for words, at in HAZARDS if f"{name}_".startswith(f"{at}_")]
    return [text for text in found if not any(words in text for words in known)]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_functions(name):
    assert new(name, sweep.check(name, sweep.MODES[1:3])) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_every_function(name):
    assert new(name, sweep.check(name)) == []
