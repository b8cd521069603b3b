"""NCCL by torch.distributed, one process per GPU: the peer of Crossrail's transfers.

    python benches/gpu/peers/nccl_rates.py --what latency --sizes 4K,1M
    python benches/gpu/peers/nccl_rates.py --what bandwidth --sizes 64M --window 1
    python benches/gpu/peers/nccl_rates.py --what alltoall --sizes 64M --ranks 4
    python benches/gpu/peers/nccl_rates.py --what collectives --sizes 8,64K,64M

latency: half a round trip. `samples_us` are of graph replays, where no host stands between two messages (NCCL's best);
`wall_us` are those of a host that waits for each message, as a receiver that looks at its data must.
bandwidth: `--window` messages, then an empty answer. alltoall: all_to_all_single, `size` bytes to every rank.
collectives: all_reduce and all_to_all_single of `size` bytes per rank, counted as nccl-tests does (bus bandwidth).
Settings of NCCL are the environment's. Where there are fewer GPUs than ranks, ranks share them: NCCL is told that they
are on different hosts, or it would refuse. `--backend gloo` moves host memory and needs no GPU: it tries the script
itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ranks as processes

TRIPS = 20


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--what", choices=("latency", "bandwidth", "alltoall", "collectives"), required=True)
    parser.add_argument("--window", type=int, default=16, help="messages per sample")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    processes.add_common(parser)
    arguments = parser.parse_args()
    try:
        import torch.distributed as dist
    except ImportError as error:
        print(f"nccl_rates.py: needs PyTorch: {error}", file=sys.stderr)
        return 1
    if arguments.backend == "nccl" and not dist.is_nccl_available():
        print("nccl_rates.py: this PyTorch has no NCCL", file=sys.stderr)
        return 1
    return processes.run(arguments, work)


def versions() -> dict[str, str]:
    """Measures, and returns the rows."""
    import torch

    found = {"torch": torch.__version__}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one rank."""
    with Rank(arguments, rank, folder) as here:
        several = {"collectives": (all_reduce, exchange)}
        measures = {**several, "latency": (latency,), "bandwidth": (bandwidth,), "alltoall": (all_to_all,)}
        rows = [measure(here, size) for measure in measures[arguments.what] for size in arguments.sizes]
        if rank == 0:
            processes.keep(rows, versions())


class Rank:
    """A process of the group, its device, and its timers."""

    def __init__(self, arguments: argparse.Namespace, rank: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.options = torch, dist, rank, arguments
        self.cuda = arguments.backend == "nccl"
        gpus = torch.cuda.device_count() if self.cuda else 0
        self.device = torch.device(f"cuda:{rank % gpus}" if gpus else "cpu")
        if 0 < gpus < arguments.ranks:
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            arguments.backend,
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=arguments.ranks,
            timeout=timedelta(seconds=arguments.limit),
            device_id=self.device if self.cuda else None,
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.dist.destroy_process_group()

    def bytes(self, count: int, fill: int | None = None) -> Any:
        """A buffer of bytes, random unless filled with a value."""
        if fill is not None:
            return self.torch.full((count,), fill, dtype=self.torch.uint8, device=self.device)
        return self.torch.randint(0, 256, (count,), dtype=self.torch.uint8, device=self.device)

    def wait(self) -> None:
        """Waits until the GPU has finished all work."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def together(self) -> None:
        """Waits until all ranks have called this."""
        self.dist.barrier()
        self.wait()

    def timed(self, work: Any) -> float:
        """Microseconds of the work that `work` enqueues, by events; without a GPU by the clock."""
        if not self.cuda:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e6
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def graph(self, work: Any) -> Any:
        """`work` captured as a graph, so that a replay does not involve the host."""
        if not self.cuda:
            return work
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay


def latency(here: Rank, size: int) -> dict[str, Any]:
    """Measures half a round trip between ranks 0 and 1."""
    out, into = here.bytes(size), here.bytes(size, 0)

    def trip() -> None:
        if here.rank == 0:
            here.dist.send(out, 1)
            here.dist.recv(into, 1)
        else:
            here.dist.recv(into, 0)
            here.dist.send(into, 0)

    for _ in range(3):
        trip()
    here.wait()
    if here.rank == 0 and not here.torch.equal(out, into):
        raise SystemExit("nccl_rates.py: the data returned differs from the data sent")
    samples = batches(here, here.graph(lambda: [trip() for _ in range(TRIPS)]), TRIPS * 2)
    wall = []
    for _ in range(here.options.warmup + here.options.iters):
        here.together()
        start = time.perf_counter()
        trip()
        here.wait()
        wall.append((time.perf_counter() - start) * 1e6 / 2)
    return {"what": "latency", "size": size, "samples_us": samples, "wall_us": wall[here.options.warmup :]}


def batches(here: Rank, replay: Any, messages: int) -> list[float]:
    """Microseconds per message of each replay."""
    samples = []
    for _ in range(here.options.warmup + here.options.iters):
        here.together()
        samples.append(here.timed(replay) / messages)
    return samples[here.options.warmup :]


def bandwidth(here: Rank, size: int) -> dict[str, Any]:
    """Measures windows of messages from rank 0 to rank 1."""
    window = here.options.window
    data = here.bytes(size, 7 if here.rank == 0 else 0)
    answer = here.bytes(4, 1)

    def sample() -> None:
        for _ in range(window):
            if here.rank == 0:
                here.dist.send(data, 1)
            else:
                here.dist.recv(data, 0)
        if here.rank == 0:
            here.dist.recv(answer, 1)
        else:
            here.dist.send(answer, 0)

    samples = []
    for _ in range(here.options.warmup + here.options.iters):
        here.together()
        samples.append(here.timed(sample))
    if not bool((data == 7).all()):
        raise SystemExit("nccl_rates.py: the data received differs from the data sent")
    return rated({"what": "bandwidth", "size": size, "window": window}, samples[here.options.warmup :], size * window)


def all_to_all(here: Rank, size: int) -> dict[str, Any]:
    """Measures `size` bytes from each rank to each other; a rank's own part is not counted."""
    ranks = here.options.ranks
    out, into = here.bytes(size * ranks, here.rank + 1), here.bytes(size * ranks, 0)
    samples = []
    for _ in range(here.options.warmup + here.options.iters):
        here.together()
        samples.append(here.timed(lambda: here.dist.all_to_all_single(into, out)))
    if [int(part[-1]) for part in into.view(ranks, size)] != [rank + 1 for rank in range(ranks)]:
        raise SystemExit("nccl_rates.py: the data received differs from the data sent")
    sent = size * (ranks - 1)
    return rated({"what": "alltoall", "size": size, "ranks": ranks}, samples[here.options.warmup :], sent)


def all_reduce(here: Rank, size: int) -> dict[str, Any]:
    """Measures the sum of `size` bytes over all ranks, as float32."""
    torch, ranks = here.torch, here.options.ranks
    ramp = torch.arange(max(size // 4, 1), device=here.device) % 1000
    data = (ramp + here.rank).float()
    here.dist.all_reduce(data)
    if not torch.equal(data, (ramp * ranks + ranks * (ranks - 1) / 2).float()):
        raise SystemExit("nccl_rates.py: a sum over all ranks is wrong")
    data.zero_()
    samples = repeated(here, size, lambda: here.dist.all_reduce(data))
    return rated({"what": "all_reduce", "size": size, "ranks": ranks}, samples, 2 * (ranks - 1) * size // ranks)


def exchange(here: Rank, size: int) -> dict[str, Any]:
    """Measures `size` bytes per rank, an equal part to each."""
    ranks = here.options.ranks
    part = max(size // ranks, 1)
    out, into = here.bytes(part * ranks, here.rank + 1), here.bytes(part * ranks, 0)
    here.dist.all_to_all_single(into, out)
    if not all(bool((piece == rank + 1).all()) for rank, piece in enumerate(into.view(ranks, part))):
        raise SystemExit("nccl_rates.py: an all-to-all is wrong")
    samples = repeated(here, size, lambda: here.dist.all_to_all_single(into, out))
    return rated({"what": "all_to_all", "size": size, "ranks": ranks}, samples, part * (ranks - 1))


def repeated(here: Rank, size: int, collective: Any) -> list[float]:
    """Microseconds per call of several calls in a row: more of short ones, as nccl-tests does."""
    calls = 20 if size <= 1 << 20 else 2
    samples = []
    for _ in range(here.options.warmup + here.options.iters):
        here.together()
        samples.append(here.timed(lambda: [collective() for _ in range(calls)]) / calls)
    return samples[here.options.warmup :]


def rated(row: dict[str, Any], samples: list[float], bytes_each: int) -> dict[str, Any]:
    """A row with its samples and its rate: all bytes over all time."""
    return {**row, "samples_us": samples, "gb_per_s": bytes_each * len(samples) / sum(samples) / 1e3}


if __name__ == "__main__":
    sys.exit(main())
