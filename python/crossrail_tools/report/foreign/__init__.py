"""Results of other programs, as rows: what they print, or the JSON they write.

Units as those programs count them: OSU's MB and iperf3's bits are powers of ten, ucx_perftest's MB are 2^20 bytes, GB
of nccl-tests, nixlbench and DeepEP are 1e9 bytes. All become GB/s (GB = 1e9 bytes) and microseconds here.
"""

from __future__ import annotations

from .deepep import deepep
from .iperf3 import iperf3
from .nccl import nccl_json, nccl_text
from .runs import Foreign, ForeignError, Reader, without_labels
from .tables import nixlbench, osu, ucx_perftest

FOREIGN: tuple[Reader, ...] = (iperf3, nccl_json, nccl_text, osu, nixlbench, deepep, ucx_perftest)
"""The readers, in the order in which they are asked."""

__all__ = ["FOREIGN", "Foreign", "ForeignError", "Reader", "without_labels"]
