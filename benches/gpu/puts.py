"""Puts with signals between two GPUs, captured in graphs: one way, from a GPU's stream to the other's, without a host.

    python benches/gpu/puts.py --sizes 4K,64K,1M

Each end maps the other's memory and puts its bytes there with a signal that the other's stream awaits. A sample is one
replay of a graph of many round trips, by events; it is counted as NCCL's is by peers/nccl_rates.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

import ranks as processes  # noqa: E402
from ranks import exchange  # noqa: E402

TRIPS = 50
DATA_AT = 256
LIMIT_S = 30.0


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    processes.add_common(parser)
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"puts.py: needs PyTorch for its graphs: {error}", file=sys.stderr)
        return 1
    if torch.cuda.device_count() < 2:
        print(f"puts.py: needs 2 GPUs, and there are {torch.cuda.device_count()}", file=sys.stderr)
        return 1
    return processes.run(arguments, work)


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """One end's part."""
    import torch

    import crossrail

    torch.cuda.set_device(rank)
    context = crossrail.Context(tls="shm,cuda_ipc", timeout=LIMIT_S, log="error")
    with crossrail.Worker(context, name=f"rank{rank}") as worker:
        theirs = exchange(folder, rank, "address", worker.address())
        endpoint = worker.connect(theirs) if rank == 0 else worker.accept(LIMIT_S)
        memory = context.alloc(DATA_AT + max(arguments.sizes), device=f"cuda:{rank}")
        mapped = endpoint.map(exchange(folder, rank, "memory", bytes(endpoint.share(memory))))
        rows = [measure(rank, folder, memory, mapped, size, arguments) for size in arguments.sizes]
        if rank == 0:
            processes.keep(rows, {"crossrail": crossrail.__version__, "torch": torch.__version__})
        exchange(folder, rank, "end", b"")


def measure(
    rank: int, folder: Path, memory: Any, mapped: Any, size: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measures one size by replays of the graph, and verifies the received data."""
    import torch

    here = torch.from_dlpack(memory)
    signal, inbox = here[:8].view(torch.int64), here[DATA_AT : DATA_AT + size]
    out = numbers(size, rank).to(f"cuda:{rank}")
    signal.zero_()
    inbox.zero_()
    torch.cuda.synchronize()
    exchange(folder, rank, f"ready{size}", b"")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        awaited = trips(rank, memory, mapped, out, signal)
    samples = []
    for _ in range(arguments.warmup + arguments.iters):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        samples.append(float(first.elapsed_time(last)) * 1e3 / (2 * TRIPS))
    if any(each.outcome != "reached" for each in awaited):
        raise SystemExit(f"puts.py: a signal did not arrive within {LIMIT_S:g} s")
    if not torch.equal(inbox.cpu(), numbers(size, 1 - rank)):
        raise SystemExit("puts.py: the data received differs from the data put")
    return {"what": "put", "size": size, "samples_us": samples[arguments.warmup :]}


def trips(rank: int, memory: Any, mapped: Any, out: Any, signal: Any) -> list[Any]:
    """Round trips on the current stream. Each end's signal counts them, and is 0 again before the next replay's."""
    import torch

    stream, awaited = torch.cuda.current_stream(), []
    for trip in range(1, TRIPS + 1):
        if rank == 0:
            mapped.put(out, DATA_AT, stream=stream, signal=(0, trip))
        awaited.append(memory.await_signal(0, trip, stream=stream, timeout=LIMIT_S))
        if trip == TRIPS:
            signal.zero_()
        if rank == 1:
            mapped.put(out, DATA_AT, stream=stream, signal=(0, trip))
    return awaited


def numbers(size: int, rank: int) -> Any:
    """What a rank puts."""
    import torch

    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


if __name__ == "__main__":
    sys.exit(main())
