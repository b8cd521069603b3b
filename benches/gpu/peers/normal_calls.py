"""Normal mode by a program written for DeepEP V1 (`Buffer`) or V2 (`ElasticBuffer`), one process per GPU.

    python benches/gpu/peers/normal_calls.py --module deep_ep --version 1
    python benches/gpu/peers/normal_calls.py --module crossrail.deep_ep --version 2 --tokens 8,128

A row for each number of tokens and type of rows, and with V2 with and without the host's wait for the counts. Times are
microseconds of the slowest rank. `loop_us`: layout, dispatch and combine in a chain, from the host's clock over many of
them. `dispatch_us`, `combine_us`: by GPU events, behind a barrier of the ranks. `dispatch_kernels_us`,
`combine_kernels_us`: the operation's kernels under PyTorch's profiler, added up. `host` says whether the host waits.
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
from host_calls import aligned

HIDDEN, TOPK, BLOCK = 7168, 8, 128
EXPERTS_PER_RANK = 128
"""The most that V1's normal mode takes."""
MOST_E4M3 = 448.0
NVL_BYTES = 1 << 30


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--module", default="crossrail.deep_ep", help="what has Buffer and ElasticBuffer")
    parser.add_argument("--version", type=int, choices=(1, 2), default=1, help="whose interface is used")
    parser.add_argument("--tokens", type=processes.sizes, default=[8, 128, 4096], metavar="A,B,C")
    parser.add_argument("--prepare", action="store_true", help="call each operation once, so that kernels are compiled")
    processes.add_common(parser)
    return processes.run(parser.parse_args(), work, needs=("torch",))


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=arguments.limit)
    here = {"rank": rank, "world_size": arguments.ranks, "device_id": torch.device("cuda", rank)}
    dist.init_process_group("nccl", init_method=meeting, timeout=limit, **here)
    dist.all_reduce(torch.ones(1, device="cuda"))
    module = importlib.import_module(arguments.module)
    make = First if arguments.version == 1 else Second
    rows = []
    for tokens in arguments.tokens:
        for dtype in ("bf16", "fp8"):
            layer = make(torch, dist, module, tokens, dtype)
            for waits in layer.waits:
                layer.host_waits = waits
                layer.pair()
                torch.cuda.synchronize()
                if arguments.prepare:
                    continue
                found = measured(torch, dist, layer, arguments)
                rows.append(found | {"tokens": tokens, "dtype": dtype, "host": "waits" if waits else "does not wait"})
            layer.end()
    versions = {"torch": torch.__version__, arguments.module: str(getattr(module, "__version__", "?"))}
    if rank == 0:
        processes.keep(rows, versions)
    dist.barrier()
    dist.destroy_process_group()


class Layer:
    """What a layer sends: `tokens` rows of a rank to their experts, and rows of the same routing back."""

    waits: tuple[bool, ...] = (True,)
    """With and without the host's wait for the counts, as far as the interface has both."""
    version: int

    def __init__(self, torch: Any, dist: Any, module: Any, tokens: int, dtype: str) -> None:
        self.torch, self.module, self.tokens, self.host_waits = torch, module, tokens, self.waits[0]
        self.ranks = dist.get_world_size()
        self.experts = EXPERTS_PER_RANK * self.ranks
        torch.manual_seed(dist.get_rank())
        rows = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.x = rows if dtype == "bf16" else cast(torch, rows)
        self.idx = torch.rand(tokens, self.experts, device="cuda").topk(TOPK, dim=1).indices
        self.weights = torch.rand(tokens, TOPK, device="cuda")
        self.back: dict[int, Any] = {}

    def dispatch(self) -> tuple[Any, Any, Any]:
        """Rows that came, the handle, and the weights that came."""
        raise NotImplementedError

    def combine(self, came: tuple[Any, Any, Any]) -> Any:
        """Sends as many rows back."""
        raise NotImplementedError

    def pair(self) -> Any:
        """Both, one after the other."""
        return self.combine(self.dispatch())

    def end(self) -> None:
        """Gives the memory back."""
        raise NotImplementedError

    def rows_back(self, came: Any) -> Any:
        """bf16 rows for a combine, made once."""
        rows = came[0] if isinstance(came, tuple) else came
        count = rows.shape[0]
        if count not in self.back:
            self.back[count] = self.torch.ones(count, HIDDEN, dtype=self.torch.bfloat16, device="cuda")
        return self.back[count]


class First(Layer):
    """By DeepEP V1's `Buffer`."""

    def __init__(self, torch: Any, dist: Any, module: Any, tokens: int, dtype: str) -> None:
        super().__init__(torch, dist, module, tokens, dtype)
        self.buffer = module.Buffer(dist.group.WORLD, NVL_BYTES, 0, explicitly_destroy=True)

    def dispatch(self) -> tuple[Any, Any, Any]:
        to_ranks, to_nodes, to_experts, in_rank, _ = self.buffer.get_dispatch_layout(self.idx, self.experts)
        rows, _, weights, _, handle, _ = self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_experts,
            topk_idx=self.idx,
            topk_weights=self.weights,
        )
        return rows, handle, weights

    def combine(self, came: tuple[Any, Any, Any]) -> Any:
        rows, handle, weights = came
        return self.buffer.combine(self.rows_back(rows), handle, topk_weights=weights)

    def end(self) -> None:
        self.buffer.destroy()


class Second(Layer):
    """By DeepEP V2's `ElasticBuffer`."""

    waits = (True, False)

    def __init__(self, torch: Any, dist: Any, module: Any, tokens: int, dtype: str) -> None:
        super().__init__(torch, dist, module, tokens, dtype)
        sizes = {"num_max_tokens_per_rank": tokens, "hidden": HIDDEN, "num_topk": TOPK}
        options = {"use_fp8_dispatch": dtype == "fp8", "allow_hybrid_mode": False, "explicitly_destroy": True}
        self.buffer = module.ElasticBuffer(dist.group.WORLD, **sizes, **options)

    def dispatch(self) -> tuple[Any, Any, Any]:
        rows, _, weights, handle, _ = self.buffer.dispatch(
            self.x,
            topk_idx=self.idx,
            topk_weights=self.weights,
            num_experts=self.experts,
            num_max_tokens_per_rank=self.tokens,
            expert_alignment=1,
            do_handle_copy=False,
            do_cpu_sync=self.host_waits,
        )
        return rows, handle, weights

    def combine(self, came: tuple[Any, Any, Any]) -> Any:
        rows, handle, weights = came
        return self.buffer.combine(self.rows_back(rows), handle=handle, topk_weights=weights)

    def end(self) -> None:
        self.buffer.destroy()


def cast(torch: Any, rows: Any) -> tuple[Any, Any]:
    """e4m3 rows and a scale for each block, as DeepEP takes them."""
    blocks = rows.float().view(rows.shape[0], -1, BLOCK)
    scales = blocks.abs().amax(dim=2).clamp(1e-4) / MOST_E4M3
    return (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(rows.shape), scales


def measured(torch: Any, dist: Any, layer: Layer, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one layer, of the slowest rank."""
    iters = max(arguments.iters, 3)
    figures = {"loop": loop_us(torch, dist, layer, 5 * iters if layer.tokens < 1024 else 2 * iters)}
    came = layer.dispatch()
    for name, call in (("dispatch", layer.dispatch), ("combine", lambda: layer.combine(came))):
        figures[name] = events_us(torch, dist, call, iters)
        figures[f"{name}_kernels"] = kernels_us(torch, dist, call, min(iters, 10))
    worst = torch.tensor(list(figures.values()), device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {f"{name}_us": round(value, 2) for name, value in zip(figures, worst.tolist(), strict=True)}


def loop_us(torch: Any, dist: Any, layer: Layer, count: int) -> float:
    """The time of one of `count` chained pairs."""
    for _ in range(3):
        layer.pair()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        layer.pair()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / count


def events_us(torch: Any, dist: Any, call: Callable[[], object], iters: int) -> float:
    """An operation, from one event to another."""
    word, spent = torch.ones(1, device="cuda"), []
    for _ in range(iters):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        aligned(torch, dist, word)
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        spent.append(1e3 * begun.elapsed_time(ended))
    return statistics.median(spent)


def kernels_us(torch: Any, dist: Any, call: Callable[[], object], iters: int) -> float:
    """The operation's kernels, added up; the barrier's are not its own."""
    word = torch.ones(1, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(iters):
            aligned(torch, dist, word)
            call()
            torch.cuda.synchronize()
    kernels = [event for event in profile.events() if is_kernel(torch, event)]
    kernels.sort(key=lambda event: event.time_range.start)
    each, rest = divmod(len(kernels), iters)
    times = [event.time_range.elapsed_us() for event in kernels]
    if rest:
        return sum(times) / iters
    return statistics.median(sum(times[at : at + each]) for at in range(0, len(times), each)) if each else 0.0


def is_kernel(torch: Any, event: Any) -> bool:
    """A kernel of the operation: none of the barrier, and no copy."""
    # By what a name begins with: DeepEP V2's own kernels have NCCL's types among their parameters.
    on_gpu, name = event.device_type == torch.autograd.DeviceType.CUDA, event.name.removeprefix("void ")
    return on_gpu and "spin_kernel" not in name and not name.startswith(("nccl", "Memcpy", "Memset"))


if __name__ == "__main__":
    sys.exit(main())
