"""Mosaic GPU kernels: the only folder that imports Pallas.

No default uses it. `_run` imports it for `backend="mosaic"` and `"interpret"`.
"""

from pallas_kernels.mosaic.shard import run_in_mosaic as run_in_mosaic
