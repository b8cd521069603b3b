"""NIXL over UCX, one process per GPU: half a round trip of one-sided writes, each seen by the other end's notification.

    python benches/gpu/peers/nixl.py --sizes 4K,64K,1M

`--progress-thread` has NIXL's own thread make progress; without it the loops do, as they poll. `--device cpu` moves
host memory and needs no GPU: it tries the script itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import ranks as processes

DONE = "DONE"
WORD = b"written"


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--progress-thread", action="store_true")
    processes.add_common(parser)
    return processes.run(parser.parse_args(), work, needs=("nixl_cu13", "torch"))


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one end."""
    import importlib.metadata

    import torch

    rows = []
    device = torch.device(f"cuda:{rank}" if arguments.device == "cuda" else "cpu")
    if arguments.device == "cuda":
        torch.cuda.set_device(device)  # the agent's threads use the context that is current when it is created
    largest = max(arguments.sizes)
    out = torch.randint(0, 256, (largest,), dtype=torch.uint8, device=device)
    into = torch.zeros(largest, dtype=torch.uint8, device=device)
    if arguments.device == "cuda":
        torch.cuda.synchronize(device)
    agent = make_agent(rank, arguments.progress_thread)
    registered = agent.register_memory([out, into])
    peer = meet(agent, folder, rank, into)
    for size in arguments.sizes:
        end = End(agent, peer, out[:size], size, arguments.limit)
        rows.append(measure(end, rank, size, arguments))
        if not torch.equal(into[:size].cpu(), expected(folder, rank, out, size)):
            raise SystemExit("nixl.py: the data received differs from the data sent")
        end.close()
    if rank == 0:
        try:
            version = importlib.metadata.version("nixl-cu13")
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        processes.keep(rows, {"nixl": version, "torch": torch.__version__})
    processes.exchange(folder, rank, "end", b"")
    agent.deregister_memory(registered)


def make_agent(rank: int, thread: bool) -> Any:
    """An agent with only the UCX backend."""
    import nixl_cu13

    config = nixl_cu13.nixl_agent_config(enable_prog_thread=thread, backends=["UCX"])
    return nixl_cu13.nixl_agent(f"rank{rank}", config)


class Peer:
    """The other agent, and the memory it receives into."""

    def __init__(self, name: str, address: int, device: int, kind: str) -> None:
        self.name, self.address, self.device, self.kind = name, address, device, kind


def meet(agent: Any, folder: Path, rank: int, into: Any) -> Peer:
    """Exchanges the descriptions of both ends."""
    metadata = processes.exchange(folder, rank, "metadata", agent.get_agent_metadata())
    kind = "cuda" if into.is_cuda else "cpu"
    mine = f"{into.data_ptr()} {max(into.get_device(), 0)}"
    address, device = processes.exchange(folder, rank, "address", mine.encode()).split()
    name = agent.add_remote_agent(metadata)
    return Peer(name.decode() if isinstance(name, bytes) else name, int(address), int(device), kind)


def expected(folder: Path, rank: int, out: Any, size: int) -> Any:
    """Compares the data received with the data that the other end sent."""
    import torch

    theirs = processes.exchange(folder, rank, f"sent{size}", bytes(out[:size].cpu().numpy()))
    return torch.frombuffer(bytearray(theirs), dtype=torch.uint8)


class End:
    """The writes of one direction."""

    def __init__(self, agent: Any, peer: Peer, out: Any, size: int, limit_s: float) -> None:
        self.agent, self.peer, self.limit_s = agent, peer, limit_s
        remote = agent.get_xfer_descs([(peer.address, size, peer.device)], mem_type=peer.kind)
        self.handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs([out]), remote, peer.name, WORD)

    def write(self) -> None:
        """Starts a write with a notification for the other end."""
        if self.agent.transfer(self.handle, WORD) == "ERR":
            raise SystemExit("nixl.py: the transfer failed")

    def written(self) -> None:
        """Waits until the write is complete at this end."""
        self.until(lambda: self.agent.check_xfer_state(self.handle) == DONE, "a write")

    def seen(self) -> None:
        """Waits until the write of the other end has arrived."""
        self.until(lambda: self.agent.check_remote_xfer_done(self.peer.name, WORD), "the other end's write")

    def until(self, done: Any, what: str) -> None:
        deadline = time.perf_counter() + self.limit_s
        while not done():
            if time.perf_counter() > deadline:
                raise SystemExit(f"nixl.py: {what} did not complete within {self.limit_s:g} s")

    def trip(self, first: bool) -> None:
        """One round trip. NIXL sends the notification from the call that finds the write complete, so wait first."""
        if not first:
            self.seen()
        self.write()
        self.written()
        if first:
            self.seen()

    def close(self) -> None:
        self.agent.release_xfer_handle(self.handle)


def measure(end: End, rank: int, size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of half a round trip."""
    samples = []
    for _ in range(arguments.warmup + arguments.iters):
        start = time.perf_counter()
        end.trip(rank == 0)
        samples.append((time.perf_counter() - start) * 1e6 / 2)
    return {"what": "latency", "size": size, "samples_us": samples[arguments.warmup :]}


if __name__ == "__main__":
    sys.exit(main())
