"""One rank of a PyTorch job whose collectives go over NCCL: `python nccl_rank.py TASK RANK RANKS FOLDER`.

Everything a task receives is compared with what was sent. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = (1, 1000, 65_536, 1_000_003, 16 << 20)
"""Elements of a tensor: less than a line, odd, and more than all of NCCL's buffers."""
LONG_S = 8.0


def main() -> None:
    task, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    # Where there are fewer GPUs than ranks, they share.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=25),
        device_id=device,
    )
    result = TASKS[task](rank, ranks, folder)
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def collectives(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Every collective, in several sizes and types."""
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if dtype is not torch.float32 and count > 1_000_003:
                continue
            check(rank, ranks, count, dtype)
    torch.cuda.synchronize()
    return {"sizes": len(SIZES)}


def check(rank: int, ranks: int, count: int, dtype: torch.dtype) -> None:
    """All collectives of one size. The values are small, so that every sum is exact."""

    def ramp(start: int, length: int = count) -> torch.Tensor:
        return ((torch.arange(length, device="cuda") + start) % 61).to(dtype)

    def same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(got, expected):
            wrong = int((got != expected).nonzero()[0][0])
            raise SystemExit(f"{what} of {count} {dtype}: element {wrong} is {got[wrong]}, not {expected[wrong]}")

    total = sum((ramp(other).to(torch.float64) for other in range(ranks)), torch.zeros(count, device="cuda"))
    tensor = ramp(rank)
    dist.all_reduce(tensor)
    same("all_reduce", tensor, total.to(dtype))
    tensor = ramp(5) if rank == 0 else torch.zeros(count, dtype=dtype, device="cuda")
    dist.broadcast(tensor, 0)
    same("broadcast", tensor, ramp(5))
    gathered = torch.empty(count * ranks, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, ramp(rank))
    same("all_gather", gathered, torch.cat([ramp(other) for other in range(ranks)]))
    part = torch.empty(count, dtype=dtype, device="cuda")
    dist.reduce_scatter_tensor(part, torch.cat([ramp(rank + to) for to in range(ranks)]))
    whole = sum((ramp(other + rank).to(torch.float64) for other in range(ranks)), torch.zeros(count, device="cuda"))
    same("reduce_scatter", part, whole.to(dtype))
    out = torch.cat([ramp(rank * 10 + to) for to in range(ranks)])
    into = torch.empty_like(out)
    dist.all_to_all_single(into, out)
    same("all_to_all", into, torch.cat([ramp(other * 10 + rank) for other in range(ranks)]))
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    got = torch.empty(count, dtype=dtype, device="cuda")
    both = [dist.P2POp(dist.isend, ramp(rank), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    same("send and receive", got, ramp(left))


def long(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """All-reduces for some seconds, each verified; announces that they have begun, so that a rail can be set down."""
    ones = torch.ones(16 << 20, device="cuda")
    times, began = [], time.monotonic()
    more = torch.ones(1, device="cuda")
    while True:
        start = time.monotonic()
        tensor = ones * (rank + 1)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        times.append(time.monotonic() - start)
        if not bool((tensor == ranks * (ranks + 1) / 2).all()):
            raise SystemExit("an all_reduce is wrong")
        if len(times) == 3:
            (folder / f"begun.{rank}").touch()
        # All ranks stop after the same number.
        more.fill_(time.monotonic() - began < LONG_S)
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not bool(more):
            return {"times": times}


def killed(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The last rank dies in the middle; what the others see is in NCCL's log, and ends them."""
    tensor = torch.ones(16 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return {"survived": True}


TASKS = {"collectives": collectives, "long": long, "killed": killed}

if __name__ == "__main__":
    main()
