"""One rank of the peers of `crossrail bench ep --device cuda`: DeepEP (V1), our drop-in for it, and NCCL.

They are timed like Crossrail: before each iteration the GPU's cache is overwritten and all ranks meet on the GPU; then
the operation is timed by events around it, and by the host's clock until the host knows that it has ended. Kernel times
are the profiler's. PyTorch is required; anything else that a peer lacks is the reason why it has no figure.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from crossrail_tools.report.ep import kernels_us
from crossrail_tools.verify.checking import Work

FLUSH_BYTES = 256 << 20
FLUSHES = 24
"""Number of times that this memory is overwritten. The GPU must take longer for it than Python takes to enqueue an
operation, also under the profiler: kernels of all other ranks would wait for a rank that is late."""
HOST_FLUSHES = 2
"""The same when timing by the host's clock, where nothing is enqueued ahead."""

LIMIT = timedelta(seconds=40)
PROFILED = 15
PROFILED_WARMUP = 5
"""Iterations under the profiler that are not counted, because it is slow at first."""
SMS = 24
"""Default number of multiprocessors of DeepEP in the rank layout, as in its own tests."""

CHUNKS = {"dispatch": (4, 6, 8, 12, 16, 20, 24, 28, 32), "combine": (1, 2, 4, 6, 8, 9, 10, 12, 16)}
"""Chunk sizes of DeepEP to try, in tokens; the fastest is used. They are the range of its own tests, and contain its
defaults for 2, 4 and 8 ranks."""
TUNED = 5
RECEIVED_CHUNK = 256
NVL_BYTES = int(2e9)
"""Size of DeepEP's buffer for transfers within a node, as in its own tests."""

Op = Callable[[], Any]


class Rank:
    """This process as a rank of all peers. A context manager."""

    def __init__(self, rank: int, size: int, folder: str, peers: Sequence[str]) -> None:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise ImportError("this PyTorch has no CUDA or no NCCL")
        self.rank, self.size = rank, size
        gpus = torch.cuda.device_count()
        if gpus < size:
            # NCCL refuses two ranks of one host that share a GPU.
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        self.device = torch.device(f"cuda:{rank % gpus}")
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/peers",
            rank=rank,
            world_size=size,
            timeout=LIMIT,
            device_id=self.device,
        )
        self.group = dist.new_group(list(range(size)))
        self.names = list(peers)
        self._errors: dict[str, str] = {}
        self._peers: dict[str, Peer] = {}
        self._left: list[Peer] = []
        self._word = torch.ones(1, device=self.device)
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *unused: object) -> None:
        self._close()
        dist.destroy_process_group()

    def open(self, work: Work, num_sms: int | None) -> dict[str, Any]:
        """Prepares every peer for ``work``. Returns their versions, and the reasons of those that cannot run."""
        self._close()
        made: dict[str, Callable[[], Peer]] = {
            "deepep": lambda: DeepEp(self, "deep_ep", work, num_sms),
            "drop-in": lambda: DeepEp(self, "crossrail.deep_ep", work, num_sms),
            "nccl": lambda: Nccl(self, work),
        }
        for name in self.names:
            if name in self._errors:
                continue
            try:
                self._peers[name] = made[name]()
                self._peers[name].start()
            except Exception as error:  # third-party code may raise anything
                self._errors[name] = reason(error)
                self._peers.pop(name, None)
            self._agree(name)
        versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        for name in ("tokenspeed-deepep", "deep-ep"):
            try:
                versions["deepep"] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return {"versions": versions, "errors": self._errors}

    def measure(self, modes: Sequence[str], iters: int, warmup: int, *, last: bool) -> dict[str, Any]:
        """Runs a turn of every peer. Returns the times of each mode, by name and variant.

        Kernel times in the last turn only, after all others: what a profiler leaves behind makes launches longer.
        """
        found: dict[str, Any] = {name: {} for name in self._peers}
        for name, peer in list(self._peers.items()):
            with self._failing(name):
                for variant, ops in _chosen(peer, modes):
                    times = {mode: self._times(op, iters, warmup) for mode, op in ops.items()}
                    found[name][variant] = {"what": peer.what, "heap_bytes": peer.heap_bytes, "modes": times}
        for name, peer in list(self._peers.items()) if last else ():
            with self._failing(name):
                for variant, ops in _chosen(peer, modes) if peer.profiled else ():
                    for mode, op in ops.items():
                        found[name][variant]["modes"][mode]["kernel_us"] = self.by_kernels(op, min(iters, PROFILED))
        return {"found": found, "errors": self._errors}

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Records an error of a peer as the reason why it has no figure, on every rank."""
        try:
            yield
        except Exception as error:  # whatever its code may raise
            self._errors[name] = reason(error)
            self._left.append(self._peers.pop(name))
        self._agree(name)

    def _times(self, op: Op, iters: int, warmup: int) -> dict[str, Any]:
        return {
            "gpu_us": self.by_events(op, iters, warmup),
            "host_us": self.by_host(op, iters, warmup),
            "kernel_us": None,
        }

    def meet(self, flushes: int = FLUSHES) -> None:
        """Overwrites the GPU's cache, then meets all ranks on the GPU."""
        for _ in range(flushes):
            self._flush.zero_()
        dist.all_reduce(self._word, group=self.group)

    def by_events(self, op: Op, iters: int, warmup: int) -> list[float]:
        """Microseconds of each iteration by the GPU's clock."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for _ in range(warmup + iters):
            self.meet()
            began.record()
            op()
            ended.record()
            torch.cuda.synchronize()
            samples.append(began.elapsed_time(ended) * 1e3)
        return samples[warmup:]

    def by_host(self, op: Op, iters: int, warmup: int) -> list[float]:
        """Microseconds of each iteration by the host's clock."""
        samples = []
        for _ in range(warmup + iters):
            self.meet(HOST_FLUSHES)
            torch.cuda.synchronize()
            start = time.perf_counter()
            op()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples[warmup:]

    def by_kernels(self, op: Op, iters: int) -> float | None:
        """Microseconds of all kernels of an operation: the median of iterations, in each of which all ranks meet.

        None when the profiler saw none of them.
        """
        # Equivalent to torch.profiler, which would import a compiler.
        with torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True) as profile:
            for _ in range(PROFILED_WARMUP + iters):
                self.meet()
                op()
                torch.cuda.synchronize()
        seen = [event for event in profile.function_events if event.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(event.time_range.start, event.time_range.elapsed_us(), event.name) for event in seen]
        try:
            return kernels_us(spans, "nccl", FLUSHES, PROFILED_WARMUP) or None
        except ValueError:
            return None

    def _agree(self, name: str) -> None:
        """Agrees among all ranks that a peer that cannot run on one rank runs on none."""
        failed = torch.tensor([int(name in self._errors)], device=self.device)
        dist.all_reduce(failed, group=self.group)
        if int(failed.item()) and name not in self._errors:
            self._errors[name] = "another rank has no figure"
            # Kept alive: closing it would wait for ranks that do not have it.
            self._left.append(self._peers.pop(name))

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        torch.cuda.empty_cache()


class Peer:
    """One peer, with a buffer for the work."""

    what = ""
    profiled = True
    heap_bytes: int | None = None

    def start(self) -> None:
        """Work to be done once before measuring."""

    def variants(self) -> dict[str, dict[str, Op]]:
        """The operation of each mode, by the name of the variant."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases its resources."""


class Nccl(Peer):
    """all_to_all_single of rows: one per selection, the same number to each rank; and one per token and rank."""

    profiled = False

    def __init__(self, here: Rank, work: Work) -> None:
        shape = work.shape
        scales = {None: 0, "f32": 4, "power2": 4, "ue8m0": 1}[work.scale] * (shape.hidden // 128)
        row = 2 * shape.hidden if work.scale is None else shape.hidden + scales
        self.group = here.group
        self.what = "all_to_all_single, a row per selection (nccl) or per token and rank (nccl-tokens)"
        self.there, self.back = (self._pair(here, work.tokens * shape.topk * one) for one in (row, 2 * shape.hidden))
        reached = [self._reached(work, rank) for rank in range(shape.ranks)]
        self.sent, self.received = reached[here.rank], [counts[here.rank] for counts in reached]
        self.out, self.home = (
            [self._rows(here, sum(counts), one) for counts in (self.sent, self.received)]
            for one in (row, 2 * shape.hidden)
        )

    @staticmethod
    def _pair(here: Rank, size: int) -> tuple[Any, Any]:
        whole = -(-size // (16 * here.size)) * 16 * here.size
        first, second = (torch.zeros(whole, dtype=torch.uint8, device=here.device) for _ in range(2))
        return first, second

    @staticmethod
    def _rows(here: Rank, count: int, row: int) -> Any:
        return torch.zeros((count, row), dtype=torch.uint8, device=here.device)

    @staticmethod
    def _reached(work: Work, rank: int) -> list[int]:
        """The number of tokens of `rank` that go to each rank."""
        shape = work.shape
        ranks = work.selections(rank, range(shape.ranks)) // shape.local_experts
        return [int((ranks == other).any(axis=1).sum()) for other in range(shape.ranks)]

    def variants(self) -> dict[str, dict[str, Op]]:
        """Both."""
        return {
            "nccl": {"dispatch": self._dispatch, "combine": self._combine, "e2e": self._both},
            "nccl-tokens": {"dispatch": self._tokens, "combine": self._sums, "e2e": self._tokens_and_sums},
        }

    def _dispatch(self) -> None:
        dist.all_to_all_single(self.there[1], self.there[0], group=self.group)

    def _combine(self) -> None:
        dist.all_to_all_single(self.back[1], self.back[0], group=self.group)

    def _both(self) -> None:
        self._dispatch()
        self._combine()

    def _tokens(self) -> None:
        dist.all_to_all_single(self.out[1], self.out[0], self.received, self.sent, group=self.group)

    def _sums(self) -> None:
        dist.all_to_all_single(self.home[0], self.home[1], self.sent, self.received, group=self.group)

    def _tokens_and_sums(self) -> None:
        self._tokens()
        self._sums()


class DeepEp(Peer):
    """A module with DeepEP's V1 interface."""

    def __init__(self, here: Rank, module: str, work: Work, num_sms: int | None) -> None:
        self.module: Any = importlib.import_module(module)
        self.here, self.work = here, work
        self.name = "deepep" if module == "deep_ep" else "drop-in"
        self.what = f"{module}, {'low latency' if work.layout == 'expert' else 'normal'}"
        self.sms = (num_sms or SMS) // 2 * 2
        # Low latency mode requires a multiple of four.
        self.most = -(-work.shape.max_tokens // 4) * 4
        mine = work.inputs(here.rank, range(here.size))
        self.x = torch.from_numpy(mine.x.view(np.int16)).view(torch.bfloat16).to(here.device)
        self.idx = torch.from_numpy(mine.topk_idx).to(here.device, getattr(self.module, "topk_idx_t", torch.int64))
        self.weights = torch.from_numpy(mine.topk_weights).to(here.device)
        self.sums = torch.empty_like(self.x)
        self.handle: Any = None
        self.y: Any = None
        self.configs: dict[str, Any] = {}
        self.buffer = self._low_latency() if work.layout == "expert" else self._normal()

    def _low_latency(self) -> Any:
        shape, buffer = self.work.shape, self.module.Buffer
        self.heap_bytes = int(
            buffer.get_low_latency_rdma_size_hint(self.most, shape.hidden, shape.ranks, shape.num_experts)
        )
        return buffer(
            self.here.group,
            num_rdma_bytes=self.heap_bytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.local_experts,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )

    def _normal(self) -> Any:
        self.module.Buffer.set_num_sms(self.sms)
        # The drop-in allocates what the tokens need.
        self.heap_bytes = NVL_BYTES if self.name == "deepep" else None
        return self.module.Buffer(self.here.group, self.heap_bytes or 0, explicitly_destroy=True)

    def start(self) -> None:
        """Runs a dispatch, checks its counts, and chooses the best settings."""
        if self.work.layout == "expert":
            y, counts, self.handle = self._dispatch_low()
            self.y = torch.randn((y[0] if isinstance(y, tuple) else y).shape, device=self.here.device).bfloat16()
            self._check(counts.tolist())
            return
        self.given = self.x if self.work.scale is None else _cast(self.x)
        received, counts, self.handle = self._dispatch_uncached()
        rows = received[0] if isinstance(received, tuple) else received
        self.y = torch.randn(rows.shape, device=self.here.device).bfloat16()
        self._check(list(counts))
        self.configs["dispatch"] = self._tuned("dispatch", self._dispatch_cached)
        self.configs["combine"] = self._tuned("combine", self._combine_normal)

    def variants(self) -> dict[str, dict[str, Op]]:
        """In the rank layout also a variant that does not repeat its routing, which DeepEP's own figures do."""
        if self.work.layout == "expert":
            return {
                self.name: {"dispatch": self._dispatch_low, "combine": self._combine_low, "e2e": self._both_low},
            }

        def cached() -> None:
            self._dispatch_cached()
            self._combine_normal()

        def uncached() -> None:
            _, _, handle = self._dispatch_uncached()
            self.buffer.combine(self.y, handle, config=self.configs.get("combine"))

        return {
            self.name: {"dispatch": self._dispatch_cached, "combine": self._combine_normal, "e2e": cached},
            f"{self.name}-uncached": {"dispatch": self._dispatch_uncached, "e2e": uncached},
        }

    def close(self) -> None:
        """Destroys the buffer, on all ranks together."""
        torch.cuda.synchronize()
        dist.barrier(group=self.here.group)
        self.buffer.destroy()

    def _dispatch_low(self) -> tuple[Any, Any, Any]:
        shape, scale = self.work.shape, self.work.scale
        options = {} if scale in (None, "f32") else {"round_scale": True, "use_ue8m0": scale == "ue8m0"}
        received, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.idx, self.most, shape.num_experts, use_fp8=scale is not None, **options
        )
        return received, counts, handle

    def _combine_low(self, handle: Any = None) -> None:
        self.buffer.low_latency_combine(self.y, self.idx, self.weights, handle or self.handle, out=self.sums)

    def _both_low(self) -> None:
        _, _, handle = self._dispatch_low()
        self._combine_low(handle)

    def _dispatch_uncached(self) -> tuple[Any, Any, Any]:
        """Layout, counts and rows; the host waits for the counts."""
        ranks, rdma, experts, is_in, _ = self.buffer.get_dispatch_layout(self.idx, self.work.shape.num_experts)
        received, _, _, counts, handle, _ = self.buffer.dispatch(
            self.given,
            num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=rdma,
            is_token_in_rank=is_in,
            num_tokens_per_expert=experts,
            topk_idx=self.idx,
            topk_weights=self.weights,
            config=self.configs.get("dispatch"),
        )
        return received, counts, handle

    def _dispatch_cached(self) -> None:
        self.buffer.dispatch(self.given, handle=self.handle, config=self.configs.get("dispatch"))

    def _combine_normal(self) -> None:
        self.buffer.combine(self.y, self.handle, config=self.configs.get("combine"))

    def _tuned(self, mode: str, op: Op) -> Any:
        """The fastest settings, the same on every rank; None for the module's own defaults."""
        if self.name != "deepep":
            return None
        times = []
        for chunk in CHUNKS[mode]:
            self.configs[mode] = self.module.Config(self.sms, chunk, RECEIVED_CHUNK)
            times.append(float(np.median(self.here.by_events(op, TUNED, 1))))
        every = torch.tensor(times, device=self.here.device)
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=self.here.group)
        best = CHUNKS[mode][int(every.argmin().item())]
        self.what += f", {mode} in chunks of {best}" + ("" if mode == "combine" else f", {self.sms} SMs")
        return self.module.Config(self.sms, best, RECEIVED_CHUNK)

    def _check(self, counts: list[int]) -> None:
        """Raises RuntimeError if the row counts are not those of the routing."""
        shape = self.work.shape
        every = [self.work.selections(rank, range(shape.ranks)).reshape(-1) for rank in range(shape.ranks)]
        chosen = np.concatenate(every) - self.here.rank * shape.local_experts
        here = chosen[(chosen >= 0) & (chosen < shape.local_experts)]
        expected = np.bincount(here, minlength=shape.local_experts).tolist()
        if counts != expected:
            raise RuntimeError(f"{self.module.__name__} reports row counts {counts}, but the routing has {expected}")


def _chosen(peer: Peer, modes: Sequence[str]) -> list[tuple[str, dict[str, Op]]]:
    """The variants of a peer that have any of these modes, with the operation of each mode."""
    every = peer.variants().items()
    chosen = [(variant, {mode: op for mode, op in ops.items() if mode in modes}) for variant, ops in every]
    return [(variant, ops) for variant, ops in chosen if ops]


def _cast(x: Any) -> tuple[Any, Any]:
    """Casts bf16 rows to e4m3 with one scale per block of 128."""
    blocks = x.float().view(x.shape[0], -1, 128)
    most = blocks.abs().amax(dim=2).clamp(1e-4)
    rows = (blocks * (448.0 / most.unsqueeze(2))).to(torch.float8_e4m3fn).view(x.shape)
    return rows, (most / 448.0).contiguous()


def reason(error: BaseException) -> str:
    """The type and first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"[:300]
