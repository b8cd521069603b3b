"""What a chain of normal mode allocates where the GPU takes its time, on the driver without a GPU: prints, as JSON, the
dtypes of new tensors.

    LD_LIBRARY_PATH=FOLDER python driver_ahead.py FOLDER
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from driver_ranks import MAIN, OWN, NormalRank, Streams, prepare
from host_torch import torch

EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512
plain_empty = torch.empty


class Noted:
    """`torch.empty`, which notes what it makes; the GPU reports its counts when `most` were made in a wait."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.untold = driver, ctypes.c_void_p.in_dll(driver, "untold")
        self.made: list[str] = []
        self.waited: list[str] = []
        self.most = 5

    def __call__(self, *shape: Any, dtype: Any = torch.float32, device: Any = None) -> Any:
        tensor = plain_empty(*shape, dtype=dtype)
        waits = self.untold.value is not None
        (self.waited if waits else self.made).append(dtype.name)
        if waits and len(self.waited) == self.most:
            self.driver.tell_late()
        return tensor

    def since(self) -> list[str]:
        """The dtypes of those made since the last call, outside of waits."""
        names, self.made = self.made, []
        return names

    def in_wait(self) -> list[str]:
        """The same of waits."""
        names, self.waited = self.waited, []
        return names


def main() -> None:
    prepare()
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")
    driver = ctypes.CDLL("libcuda.so.1")
    late, capturing = (ctypes.c_int.in_dll(driver, name) for name in ("late", "in_capture"))
    current = [MAIN]
    Streams.current_raw = staticmethod(lambda ordinal: current[0])  # type: ignore[method-assign,assignment]
    torch.empty = noted = Noted(driver)
    buffer = NormalRank(None)
    results: list[Any] = []
    handles: list[Any] = []
    said: dict[str, Any] = {}

    def chain(name: str, tokens: int = MOST) -> None:
        x, idx = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, TOPK, dtype=torch.int64)
        noted.since()
        *counted, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        found = {"layout": noted.since()}
        per_rank, _, per_expert, in_rank = counted
        given = {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        weights = torch.ones(tokens, TOPK)
        rows, _, weights, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **given)
        # Those of the test's own results are float32 or bf16, and of ids int64.
        found |= {"dispatch": [one for one in noted.since() if one == "uint8"], "in the wait": noted.in_wait()}
        sums, weight_sums, _ = buffer.combine(rows, handle, topk_weights=weights)
        said[name] = found | {"combine": noted.since()}
        results.extend((per_rank, per_expert, in_rank, sums, weight_sums))
        if name == "second":
            handles.append(handle)

    chain("first")
    late.value = 1
    chain("second")
    chain("with handles that are held")
    chain("with fewer tokens", MOST - 1)
    chain("with fewer tokens again", MOST - 1)
    del said["with fewer tokens again"]
    noted.most = 1
    chain("interrupted", MOST - 1)
    noted.most, capturing.value = 5, 1
    *counted, _ = buffer.get_dispatch_layout(torch.zeros(MOST - 1, TOPK, dtype=torch.int64), EXPERTS)
    said["captured"] = {"layout": noted.since()}
    results.extend(one for one in counted if one is not None)
    capturing.value, current[0], noted.most = 0, OWN, 3
    chain("in another stream", MOST - 1)
    places = [tensor.data_ptr() for tensor in results]
    said["two of one memory"] = len(places) - len(set(places))
    late.value = 0
    buffer.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
