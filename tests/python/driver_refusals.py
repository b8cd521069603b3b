"""Calls in the rank layout that the native half refuses, on the driver without a GPU: prints what it says, as JSON.

LD_LIBRARY_PATH=FOLDER python driver_refusals.py FOLDER
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from driver_ranks import DriverTensors, prepare
from host_torch import torch

from crossrail import ExpertBuffer, Group, UsageError

EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512
TOKENS = 3


def main() -> None:
    prepare()
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")
    driver = ctypes.CDLL("libcuda.so.1")
    launched = ctypes.c_ulonglong.in_dll(driver, "calls_launch")
    buffer = ExpertBuffer(Group(size=1), MOST, HIDDEN, EXPERTS, TOPK, "bf16", device="cuda:0", layouts=["rank"])
    arrays, operations = DriverTensors(), buffer._operations
    operations.arrays_of = lambda value: arrays  # type: ignore[method-assign,union-attr]

    def rows(tokens: int) -> tuple[Any, Any]:
        return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, TOPK, dtype=torch.int64)

    done = buffer.dispatch(*rows(TOKENS), layout="rank", max_rows=MOST)
    fp8 = torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8).view(torch.float8_e4m3fn)
    calls: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
        "tokens": (rows(MOST + 1), {}),
        "fp8": (((fp8, torch.ones(TOKENS, HIDDEN // 128)), rows(TOKENS)[1]), {}),
        "alignment": (rows(TOKENS), {"expert_alignment": 0}),
        "handle": ((rows(TOKENS - 1)[0], None), {"handle": done.handle}),
    }
    said, before = {}, launched.value
    for name, (given, options) in calls.items():
        try:
            buffer.dispatch(*given, layout="rank", **options)
        except UsageError as error:
            said[name] = error.detail
    assert launched.value == before
    del done
    buffer.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
