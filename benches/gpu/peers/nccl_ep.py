"""NCCL EP between two hosts: dispatch and combine, compared with PyTorch, then timed by events.

    python benches/gpu/peers/nccl_ep.py --kind low-latency --tokens 8,128
    python benches/gpu/peers/nccl_ep.py --kind low-latency-fp8 --tokens 128
    python benches/gpu/peers/nccl_ep.py --kind high-throughput --tokens 4096

The number of received rows and their sum are compared for each expert (low latency) or rank, and the combined rows with
the sum that PyTorch computes from the same weights. Each rank is a host of its own, so that only the network is between
them.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import ranks as processes

TOPK, HIDDEN = 8, 7168
EXPERTS = {"low-latency": 288, "low-latency-fp8": 288, "high-throughput": 256}
TIMEOUT_NS = 20_000_000_000


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--kind", choices=tuple(EXPERTS), default="low-latency")
    parser.add_argument("--tokens", type=processes.sizes, default=[128], metavar="A,B,C", help="of a rank")
    parser.add_argument("--num-sms", type=int, default=0, metavar="N", help="multiprocessors of each rank (NCCL EP's)")
    processes.add_common(parser)
    return processes.run(parser.parse_args(), work, needs=("torch", "nccl"))


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one rank."""
    become_host(f"rank-{rank}")
    here = Rank(arguments, rank, folder)
    rows = [here.measure(tokens) for tokens in arguments.tokens]
    if rank == 0:
        processes.keep(rows, {"nccl_ep": str(here.ep.get_lib_version()), "torch": here.torch.__version__})
    here.dist.barrier()


def become_host(name: str) -> None:
    """A host of its own: NCCL tells hosts apart by this variable, but NCCL EP by their names. If it counts one where
    NCCL counts two, high throughput writes to address 0."""
    os.environ["NCCL_HOSTID"] = name
    try:
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(name)
    except PermissionError as error:
        raise SystemExit(f"nccl_ep.py: only root gives two ranks of one machine the names of two: {error}") from error


class Rank:
    """A process, its communicator, and what it dispatches."""

    def __init__(self, arguments: argparse.Namespace, rank: int, folder: Path) -> None:
        import nccl.core as core
        import nccl.ep as ep
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.ep, self.rank, self.options = torch, dist, ep, rank, arguments
        torch.cuda.set_device(rank % torch.cuda.device_count())
        limit = timedelta(seconds=arguments.limit)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=arguments.ranks, timeout=limit
        )
        box = [core.get_unique_id().as_bytes if rank == 0 else None]
        dist.broadcast_object_list(box)
        self.comm = core.Communicator.init(arguments.ranks, rank, core.UniqueId.from_bytes(box[0]))
        self.experts = EXPERTS[arguments.kind]
        self.local = self.experts // arguments.ranks
        self.low, self.fp8 = arguments.kind != "high-throughput", arguments.kind == "low-latency-fp8"
        self.stream = torch.cuda.current_stream()

    def measure(self, tokens: int) -> dict[str, Any]:
        """One batch size: checked, then timed."""
        torch, ep = self.torch, self.ep
        drawn = torch.Generator(device="cuda").manual_seed(1000 * self.rank + tokens)
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=drawn).to(torch.bfloat16)
        topk = torch.rand(tokens, self.experts, device="cuda", generator=drawn).topk(TOPK, dim=1).indices.contiguous()
        weights = torch.rand(tokens, TOPK, device="cuda", generator=drawn) + 0.1
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY if self.low else ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=self.experts,
            max_dispatch_tokens_per_rank=tokens,
            max_recv_tokens_per_rank=0 if self.low else tokens * self.options.ranks,
            max_token_bytes=HIDDEN * 2,
            num_qp_per_rank=4 if self.low else 0,
            max_num_sms=self.options.num_sms,
            timeout_ns=TIMEOUT_NS,
        )
        group = ep.Group.create(self.comm, config)
        layout = ep.Layout.EXPERT_MAJOR if self.low else ep.Layout.FLAT
        handle = group.create_handle(layout, ep.Tensor(topk), stream=self.stream)
        batch = LowLatency(self, handle, x, topk, weights) if self.low else Flat(self, handle, x, topk, weights)
        batch.dispatch()
        torch.cuda.synchronize()
        batch.check_rows()
        batch.combine()
        torch.cuda.synchronize()
        worst = self.close("the combined rows", batch.result.cpu(), batch.expected(), 0.08 if self.fp8 else 0.03)
        samples = [self.timed(batch) for _ in range(self.options.warmup + self.options.iters)]
        handle.destroy()
        group.destroy()
        names = ("dispatch_us", "combine_us", "pair_us")
        columns = dict(zip(names, map(list, zip(*samples[self.options.warmup :], strict=True)), strict=True))
        return {"what": "nccl_ep", "kind": self.options.kind, "tokens": tokens, "worst": worst, **columns}

    def timed(self, batch: Any) -> tuple[float, float, float]:
        """Microseconds of a dispatch, of a combine, and of both."""
        self.dist.barrier()
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        batch.dispatch()
        marks[1].record()
        batch.combine()
        marks[2].record()
        self.torch.cuda.synchronize()
        first, second = (1e3 * marks[at].elapsed_time(marks[at + 1]) for at in (0, 1))
        return first, second, first + second

    def gathered(self, value: Any) -> list[Any]:
        """The tensors of all ranks, on the host."""
        rows: list[Any] = [None] * self.options.ranks
        self.dist.all_gather_object(rows, value.cpu())
        return rows

    def close(self, what: str, got: Any, expected: Any, tolerance: float) -> float:
        """The largest difference, as a part of the largest value."""
        scale = expected.float().abs().max().item() or 1.0
        worst = (got.float() - expected.float()).abs().max().item() / scale
        if not worst < tolerance:
            raise SystemExit(f"nccl_ep.py: {what} differ by {worst:.3g} of the largest value")
        return float(worst)


class LowLatency:
    """Rows by local expert."""

    def __init__(self, rank: Rank, handle: Any, x: Any, topk: Any, weights: Any) -> None:
        torch, ep = rank.torch, rank.ep
        slots = len(x) * rank.options.ranks
        self.rank, self.handle, self.x, self.topk, self.weights = rank, handle, x, topk, weights
        dtype = torch.float8_e4m3fn if rank.fp8 else torch.bfloat16
        self.out = torch.zeros(rank.local, slots, HIDDEN, device="cuda", dtype=dtype)
        self.scales = torch.zeros(rank.local, slots, HIDDEN // 128, device="cuda") if rank.fp8 else None
        self.received = torch.zeros(rank.local, device="cuda", dtype=torch.int32)
        self.back = torch.zeros(rank.local, slots, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.result = torch.zeros(len(x), HIDDEN, device="cuda", dtype=torch.bfloat16)
        recipes = ep.DispatchQuantizationRecipe
        self.inputs = ep.DispatchInputs(tokens=ep.Tensor(x))
        scales = None if self.scales is None else ep.Tensor(self.scales)
        self.outputs = ep.DispatchOutputs(tokens=ep.Tensor(self.out), scales=scales)
        self.info = ep.LayoutInfo(expert_counters=ep.Tensor(self.received))
        self.how = ep.DispatchConfig(quantization_recipe=recipes.DS_FP8E3M4 if rank.fp8 else recipes.NONE)
        self.combined = ep.CombineInputs(tokens=ep.Tensor(self.back))
        self.into = ep.CombineOutputs(tokens=ep.Tensor(self.result), topk_weights=ep.Tensor(weights))

    def dispatch(self) -> None:
        """Enqueues it."""
        stream = self.rank.stream
        self.handle.dispatch(self.inputs, self.outputs, layout_info=self.info, config=self.how, stream=stream)

    def combine(self) -> None:
        """Enqueues it."""
        self.handle.combine(self.combined, self.into, stream=self.rank.stream)

    def check_rows(self) -> None:
        """Compares what each expert received, and computes its outputs."""
        rank, torch = self.rank, self.rank.torch
        xs, topks = rank.gathered(self.x), rank.gathered(self.topk)
        for local in range(rank.local):
            expert = rank.rank * rank.local + local
            sent = torch.cat([x[(topk == expert).any(1)] for x, topk in zip(xs, topks, strict=True)]).float()
            count = int(self.received[local])
            if count != len(sent):
                raise SystemExit(f"nccl_ep.py: expert {expert} received {count} of {len(sent)} rows")
            if count == 0:
                continue
            rows = self.out[local, :count].float()
            if self.scales is not None:
                scaled = rows.view(count, -1, 128) * self.scales[local, :count].unsqueeze(-1)
                rows = scaled.view(count, HIDDEN)
            tolerance = 0.08 if rank.fp8 else 0.01
            rank.close(f"the sums of expert {expert}", rows.sum(0).cpu(), sent.sum(0), tolerance)
            self.back[local, :count] = (rows * (1 + expert % 4)).to(torch.bfloat16)

    def expected(self) -> Any:
        """The combined rows: expert e multiplies by 1 + e % 4."""
        factor = (self.weights * (1 + self.topk % 4)).sum(1)
        return (self.x.float() * factor[:, None]).cpu()


class Flat(LowLatency):
    """Rows by source, each once."""

    def __init__(self, rank: Rank, handle: Any, x: Any, topk: Any, weights: Any) -> None:
        torch, ep = rank.torch, rank.ep
        slots = len(x) * rank.options.ranks
        self.rank, self.handle, self.x, self.topk, self.weights, self.scales = rank, handle, x, topk, weights, None
        self.out = torch.zeros(slots, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.got_weights = torch.zeros(slots, TOPK, device="cuda")
        self.got_topk = torch.full((slots, TOPK), -1, device="cuda", dtype=torch.int64)
        self.back, self.result = torch.zeros_like(self.out), torch.zeros_like(x)
        self.inputs = ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=ep.Tensor(weights))
        self.outputs = ep.DispatchOutputs(
            tokens=ep.Tensor(self.out), topk_weights=ep.Tensor(self.got_weights), topk_idx=ep.Tensor(self.got_topk)
        )
        self.info, self.how = None, ep.DispatchConfig()
        self.combined = ep.CombineInputs(tokens=ep.Tensor(self.back))
        self.into = ep.CombineOutputs(tokens=ep.Tensor(self.result))

    def check_rows(self) -> None:
        """Compares what the rank received, and computes the outputs, weighted and summed over its experts."""
        rank, torch = self.rank, self.rank.torch
        pairs = zip(rank.gathered(self.x), rank.gathered(self.topk), strict=True)
        sent = torch.cat([x[(topk // rank.local == rank.rank).any(1)] for x, topk in pairs]).float()
        valid = (self.got_topk >= 0).any(1)
        if int(valid.sum()) != len(sent):
            raise SystemExit(f"nccl_ep.py: {int(valid.sum())} of {len(sent)} rows were received")
        rank.close("the sums of the received rows", self.out[valid].float().sum(0).cpu(), sent.sum(0), 0.01)
        expert = self.got_topk + rank.rank * rank.local
        factor = torch.where(self.got_topk >= 0, self.got_weights * (1 + expert % 4), 0).sum(1)
        self.back[:] = (self.out.float() * factor[:, None]).to(torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
