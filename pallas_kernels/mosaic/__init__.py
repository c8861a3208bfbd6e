"""Mosaic GPU kernels: the only folder that imports Pallas.

No default runs it. `_run` imports it when it is asked for.
"""

from pallas_kernels.mosaic.shard import run_in_mosaic as run_in_mosaic
