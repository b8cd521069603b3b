"""Host time of low-latency calls in the interface of DeepEP V1, by an eager program, one process per GPU.

    python benches/gpu/peers/host_calls.py --module deep_ep
    python benches/gpu/peers/host_calls.py --module crossrail.deep_ep --tokens 1,8,128

A row for each number of tokens and calling pattern: microseconds of the host in one dispatch and one combine (medians
over all iterations, the slowest rank's), of both in a loop without waits in between, and of the GPU in a replay of the
pair as a graph. `send_us`: the GPU's time of the halves that send, with a hook, by events.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ranks as processes

HIDDEN, TOPK, EXPERTS_PER_RANK = 7168, 8, 144
PATTERNS = ("plain", "stats", "hook", "stats and hook", "async_finish", "zero_copy", "wait stats", "out")
AT_ONCE = 10
"""Pairs between two waits for the GPU, so that its queue never fills."""
SPIN_CYCLES = 300_000
"""The GPU's stream is kept busy for so long before a half that is timed, until the host has enqueued it: events would
enclose the host's time, too."""


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--module", default="crossrail.deep_ep", help="what has Buffer")
    parser.add_argument("--tokens", type=processes.sizes, default=[1, 8, 128], metavar="A,B,C")
    processes.add_common(parser)
    return processes.run(parser.parse_args(), work, needs=("torch",))


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=arguments.limit)
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=arguments.ranks, timeout=limit)
    module = importlib.import_module(arguments.module)
    experts, most = EXPERTS_PER_RANK * arguments.ranks, max(arguments.tokens)
    hint = module.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, arguments.ranks, experts)
    qps = {"num_qps_per_rank": EXPERTS_PER_RANK}
    buffer = module.Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True, **qps)
    rows = []
    for tokens in arguments.tokens:
        for pattern in PATTERNS:
            layer = Layer(torch, buffer, rank, tokens, most, experts, pattern)
            rows.append(measured(torch, dist, layer, arguments) | {"tokens": tokens, "pattern": pattern})
    versions = {"torch": torch.__version__, arguments.module: str(getattr(module, "__version__", "?"))}
    if rank == 0:
        processes.keep(rows, versions)
    dist.barrier()
    del buffer
    dist.destroy_process_group()


class Layer:
    """A dispatch and a combine in one calling pattern."""

    def __init__(self, torch: Any, buffer: Any, rank: int, tokens: int, most: int, experts: int, pattern: str) -> None:
        self.buffer, self.most, self.experts = buffer, most, experts
        here = {"device": "cuda"}
        torch.manual_seed(rank)
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, **here)
        self.idx = torch.rand(tokens, experts, **here).topk(TOPK, dim=1).indices
        self.weights = torch.rand(tokens, TOPK, **here)
        local, ranks = EXPERTS_PER_RANK, experts // EXPERTS_PER_RANK
        self.y = torch.randn(local, ranks * most, HIDDEN, dtype=torch.bfloat16, **here)
        self.asynchronous = pattern == "async_finish"
        self.hook = "hook" in pattern
        self.zero_copy = pattern == "zero_copy"
        self.given: dict[str, Any] = {}
        self.back: dict[str, Any] = {}
        if "wait" in pattern:
            waits = torch.zeros(ranks, dtype=torch.int64, **here)
            self.given["dispatch_wait_recv_cost_stats"] = waits
            self.back["combine_wait_recv_cost_stats"] = waits
        elif "stats" in pattern:
            self.given["cumulative_local_expert_recv_stats"] = torch.zeros(local, dtype=torch.int32, **here)
        if pattern == "out":
            self.back["out"] = torch.empty_like(self.x)

    def dispatch(self) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x,
            self.idx,
            self.most,
            self.experts,
            async_finish=self.asynchronous,
            return_recv_hook=self.hook,
            **self.given,
        )

    def combine(self, handle: Any) -> Any:
        if self.zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle)
        return self.buffer.low_latency_combine(
            self.y,
            self.idx,
            self.weights,
            handle,
            zero_copy=self.zero_copy,
            async_finish=self.asynchronous,
            return_recv_hook=self.hook,
            **self.back,
        )

    def settle(self, event: Any, hook: Callable[[], None] | None) -> None:
        """What a program does before it uses a result."""
        if hook is not None:
            hook()
        elif self.asynchronous:
            event.current_stream_wait()

    def pair(self, note: Callable[[str], None] = lambda what: None) -> None:
        """Both, eagerly; `note` is called before and after each call."""
        note("")
        _, _, handle, event, hook = self.dispatch()
        note("dispatch")
        self.settle(event, hook)
        note("")
        _, event, hook = self.combine(handle)
        note("combine")
        self.settle(event, hook)


def measured(torch: Any, dist: Any, layer: Layer, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one pattern, of the slowest rank."""
    count = max(arguments.iters, 1) * AT_ONCE
    for _ in range(max(arguments.warmup, 3)):
        layer.pair()
    spent: dict[str, list[float]] = {"dispatch": [], "combine": []}
    began = 0.0

    def note(what: str) -> None:
        nonlocal began
        now = time.perf_counter()
        if what:
            spent[what].append(1e6 * (now - began))
        began = time.perf_counter()

    for turn in range(count):
        if turn % AT_ONCE == 0:
            together(torch, dist)
        layer.pair(note)
    figures = {name: statistics.median(values) for name, values in spent.items()}
    figures["loop"] = each_us(torch, dist, layer.pair, count)
    figures["graph"] = graph_us(torch, dist, layer, count)
    names = [*figures, *(["send_dispatch", "send_combine"] if layer.hook else [])]
    if layer.hook:
        figures |= send_us(torch, dist, layer, arguments.iters)
    worst = torch.tensor([figures[name] for name in names], device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {f"{name}_us": round(value, 2) for name, value in zip(names, worst.tolist(), strict=True)}


def graph_us(torch: Any, dist: Any, layer: Layer, count: int) -> float:
    """A replay of the captured pair."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.pair()
    for _ in range(3):
        graph.replay()
    return each_us(torch, dist, graph.replay, count)


def each_us(torch: Any, dist: Any, call: Callable[[], object], count: int) -> float:
    """The time of one of ``count`` calls in a loop, from when all ranks have met until the GPU has ended the last."""
    together(torch, dist)
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / count


def together(torch: Any, dist: Any) -> None:
    """All ranks, and their GPUs, have done everything before."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def aligned(torch: Any, dist: Any, word: Any) -> None:
    """What is enqueued from now on begins at the same time on all GPUs, and not before the host has enqueued it."""
    dist.all_reduce(word)
    torch.cuda._sleep(SPIN_CYCLES)


def send_us(torch: Any, dist: Any, layer: Layer, iters: int) -> dict[str, float]:
    """The GPU's time of the halves that send, when all ranks begin them at the same time."""
    spent: dict[str, list[float]] = {"send_dispatch": [], "send_combine": []}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    word = torch.ones(1, device="cuda")
    for _ in range(max(iters, 3)):
        aligned(torch, dist, word)
        events[0].record()
        _, _, handle, _, hook = layer.dispatch()
        events[1].record()
        hook()
        aligned(torch, dist, word)
        events[2].record()
        _, _, hook = layer.combine(handle)
        events[3].record()
        hook()
        torch.cuda.synchronize()
        spent["send_dispatch"].append(1e3 * events[0].elapsed_time(events[1]))
        spent["send_combine"].append(1e3 * events[2].elapsed_time(events[3]))
    return {name: statistics.median(values) for name, values in spent.items()}


if __name__ == "__main__":
    sys.exit(main())
