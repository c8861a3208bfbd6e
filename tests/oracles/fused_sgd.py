"""Where `test_deviations.py` looks for the oracle, which is in `fused.py`."""

from tests.oracles.fused import fused_sgd as fused_sgd
