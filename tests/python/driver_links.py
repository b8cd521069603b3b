"""Bytes by link on the driver without a GPU: prints the rows of the page, as JSON.

    LD_LIBRARY_PATH=FOLDER CROSSRAIL_PAGES=PAGES python driver_links.py FOLDER

Kernels do nothing, so all bytes are 0: what this shows is when the host counts them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

from driver_calls import EXPERTS, HIDDEN, MOST, TOPK, OneRank
from driver_ranks import prepare
from host_torch import torch

from crossrail._native import read_pages


def rows() -> dict[str, int]:
    """The number of operations that were counted, by kind."""
    page = next(seen["page"] for seen in read_pages(os.environ["CROSSRAIL_PAGES"]) if seen["page"])
    return {row["peer"]: row["values"]["counted"] for row in page["rows"] if row["kind"] == "exchange"}


def main() -> None:
    """Counts by `sync` and `traffic`."""
    prepare()
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")  # which is taken as it is loaded
    buffer = OneRank()
    x, idx = torch.ones(MOST, HIDDEN, dtype=torch.bfloat16), torch.zeros(MOST, TOPK, dtype=torch.int64)
    found = [rows()]
    buffer.experts.sync()
    found.append(rows())
    *_, handle, event, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    event.current_stream_wait()
    for _ in range(2):
        buffer.experts.sync()
        found.append(rows())
    del handle
    buffer.destroy()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
