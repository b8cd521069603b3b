"""The expert buffers behind a buffer: one for each kind of dispatch, created on first use."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from crossrail._calls import DispatchCall
from crossrail._device_arrays import TensorFrame
from crossrail._native import Outputs, RankCalls, TokenLayout
from crossrail._rank_calls import LayoutFrame, RankFrame
from crossrail.deep_ep.checks import Tensor, torch, wrong
from crossrail.deep_ep.events import Streams
from crossrail.deep_ep.ranks import Joined
from crossrail.experts import ExpertBuffer

__all__ = ["LEAST_TOKENS", "Backend", "Gpu", "Kind", "LowLatencySize", "Pool", "capacity_for"]

Payload: TypeAlias = Literal["bf16", "f32", "power2", "ue8m0"]
"""Row types: bf16, or fp8 with this kind of scales."""
PAYLOADS: tuple[Payload, ...] = ("bf16", "f32", "power2", "ue8m0")
LEAST_TOKENS = 128
MOST_TOPK = 32
"""Experts of a token, at most."""
USUAL_TOPK = 8
"""Top-k that kernels are compiled for before the first dispatch."""
SPARE_RESULTS = 2
"""Regions of a buffer for normal-dispatch results; a result in the last free one is copied."""


class Kind(NamedTuple):
    """Parameters that select an expert buffer."""

    layout: Literal["expert", "rank"]
    hidden: int
    experts: int
    topk: int
    payload: Payload

    def parameters(self, max_tokens: int) -> dict[str, Any]:
        """The arguments of an ExpertBuffer."""
        return {
            "max_tokens_per_rank": max_tokens,
            "hidden": self.hidden,
            "num_experts": self.experts,
            "topk": self.topk,
            "dispatch_dtype": "bf16" if self.payload == "bf16" else "fp8",
            "scale": "f32" if self.payload == "bf16" else self.payload,
            "layouts": (self.layout,),
        }


class LowLatencySize(NamedTuple):
    """Sizes of low-latency dispatches that share one heap."""

    hidden: int
    experts: int
    max_tokens: int

    def kind(self) -> Kind:
        """The kind that takes the most memory."""
        return Kind("expert", self.hidden, self.experts, max(1, min(MOST_TOPK, self.experts)), "bf16")


class Backend(Protocol):
    """Creates expert buffers on a device and runs operations on them."""

    device: Any
    streams: Streams

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        """An ExpertBuffer, connected to those of `ranks`."""

    def token_layout(self) -> TokenLayout | None:
        """The native counter of tokens by destination, in the current stream; None if unsupported."""

    def prepared_calls(self, buffer: Any, kind: Kind) -> RankCalls | None:
        """Prepared operations of an ExpertBuffer in the rank layout; None where there are none."""

    def variant(self, buffer: Any, kind: Kind) -> Any:
        """An ExpertBuffer on the heap and the connections of this one. No other rank takes part."""

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        """Bytes of memory that a buffer of this kind takes: of the GPU in the expert layout, for which there is a size
        hint; else of the GPU and pinned memory of the host."""

    def dispatch(
        self, made: SizedBuffer, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool
    ) -> Any:
        """Dispatches `given` (rows with scales, ids, weights) in the rank layout. Other ranks read `host_word` in the
        `host_words` of their result if theirs is `counted`, i.e. if their host waits for the row counts."""

    def barrier(self, buffer: Any, kind: Kind) -> None:
        """Runs an empty dispatch in the expert layout, as a barrier: a rank that times out is masked."""

    def sources(self, buffer: Any, handle: Any, rows: int) -> Tensor:
        """Source token index of each row of a rank-layout dispatch, i32 [rows]."""


class Gpu:
    """PyTorch's current GPU."""

    def __init__(self, joined: Joined, *, share_node: bool, timeout: float | None = None) -> None:
        """`timeout`: seconds that an operation waits for a rank; by default CROSSRAIL_TIMEOUT."""
        cuda = torch().cuda
        self.device = torch().device("cuda", cuda.current_device())
        self.streams = Streams(self.device)
        self._joined = joined
        self._share_node = share_node
        self._timeout = timeout

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> ExpertBuffer:
        options = kind.parameters(max_tokens) | {"device": self.device.index, "num_sms": num_sms}
        options |= {"regions": SPARE_RESULTS, "share_node": self._shares_node(kind)}
        name = f"{self._joined.name}/{name}"
        # Low-latency operations mask a rank that times out, as DeepEP's do: the mask buffer reports it.
        options |= {"timeout": self._timeout, "variants": kind.layout == "expert"}
        options |= {"on_loss": "mask" if kind.layout == "expert" else "raise"}
        buffer = ExpertBuffer(self._joined.group, **options, connect=False, name=name)
        try:
            buffer.connect(ranks)
        except BaseException:
            buffer.destroy()
            raise
        return buffer

    @functools.cached_property
    def outputs(self) -> Outputs:
        """The allocator of output tensors."""
        return Outputs(TensorFrame(torch(), self.streams.current_raw, self.device))

    def token_layout(self) -> TokenLayout | None:
        group, current = self._joined.group, self.streams.current_raw
        return TokenLayout(LayoutFrame(torch(), group.context, current, group.size, self.device, self.outputs))

    def prepared_calls(self, buffer: ExpertBuffer, kind: Kind) -> RankCalls | None:
        if kind.layout != "rank":
            return None
        frame = RankFrame(torch(), buffer._native, self.streams, buffer._sizes, self.device, self.outputs, whole=True)
        return RankCalls(frame)

    def variant(self, buffer: ExpertBuffer, kind: Kind) -> ExpertBuffer:
        options = kind.parameters(0)
        return buffer.variant(options["topk"], options["dispatch_dtype"], scale=options["scale"])

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        options = kind.parameters(max_tokens) | {"device": self.device.index, "regions": SPARE_RESULTS}
        plan = ExpertBuffer.plan(**options, ranks=self._joined.group.size, network_ranks=self._far(kind))
        return plan.total + (plan.pinned if kind.layout == "rank" else 0)

    def _far(self, kind: Kind) -> int:
        """Number of ranks on other nodes, or that behave so."""
        group = self._joined.group
        if not self._shares_node(kind):
            return group.size - 1
        return sum(member.node != group.node for member in group.members())

    def _shares_node(self, kind: Kind) -> bool:
        return self._share_node or kind.layout == "rank"

    def dispatch(
        self, made: SizedBuffer, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool
    ) -> Any:
        x, topk_idx, topk_weights = given
        call = DispatchCall(
            x,
            topk_idx,
            topk_weights,
            layout="rank",
            handle=None,
            expert_alignment=alignment,
            out=None,
            stats=None,
            waits=None,
            max_rows=None if counted else self._joined.group.size * made.max_tokens,
            stream=None,
            send_only=False,
            host_word=host_word,
        )
        return made.buffer._operations.dispatch(call)

    def barrier(self, buffer: Any, kind: Kind) -> None:
        x = torch().empty((0, kind.hidden), dtype=torch().bfloat16, device=self.device)
        ids = torch().empty((0, kind.topk), dtype=torch().int64, device=self.device)
        with self.streams.turn():
            buffer.dispatch(x, ids, layout="expert")

    def sources(self, buffer: Any, handle: Any, rows: int) -> Tensor:
        if rows == 0:  # DLPack has no address for an empty array
            return torch().empty((0,), dtype=torch().int32, device=self.device)
        return torch().from_dlpack(buffer._native.sources(handle, rows)).clone()


def capacity_for(tokens: int) -> int:
    """Capacity for `tokens`, rounded up so that buffers are rarely reallocated: to a multiple of `LEAST_TOKENS`, or by
    up to an eighth if that is more."""
    step = max(LEAST_TOKENS, 1 << max(tokens.bit_length() - 4, 0))
    return -(-max(tokens, 1) // step) * step


@dataclass
class SizedBuffer:
    """An expert buffer and the maximum tokens of a dispatch. `calls`: prepared calls, if any."""

    buffer: Any
    max_tokens: int
    calls: RankCalls | None = None


class Pool:
    """A buffer's expert buffers. All ranks ask for the same ones in the same order."""

    def __init__(self, backend: Backend, ranks: int, budget: int, low_latency_bytes: int = 0) -> None:
        """`budget`: initial size in bytes of each rank-layout buffer. `low_latency_bytes`: maximum bytes for dispatches
        of one size in the expert layout; 0: no limit."""
        self._backend = backend
        self._ranks = ranks
        self._budget = budget
        self._low_latency_bytes = low_latency_bytes
        self._bases: dict[LowLatencySize, Any] = {}
        self._made: dict[tuple[Kind, int], SizedBuffer] = {}
        self._count = 0
        self._out: set[int] = set()

    def prepare(self, size: LowLatencySize) -> None:
        """Allocates memory, with all ranks, and compiles kernels of every row type, for dispatches of this size."""
        topk, units = max(1, min(USUAL_TOPK, size.experts)), {"bf16": 1, "ue8m0": 512}
        payloads = [payload for payload in PAYLOADS if size.hidden % units.get(payload, 128) == 0]
        kinds = [Kind("expert", size.hidden, size.experts, topk, payload) for payload in payloads]
        self.expert_layout(kinds[0], size.max_tokens)
        if others := kinds[1:]:  # whose kernels may have to be compiled
            with ThreadPoolExecutor(len(others)) as threads:
                list(threads.map(lambda kind: self.expert_layout(kind, size.max_tokens), others))

    def expert_layout(self, kind: Kind, max_tokens: int) -> Any:
        """The expert-layout buffer for up to `max_tokens`. Created by all ranks together, unless it can be a variant of
        one with another row type or top-k."""
        made = self._made.get((kind, max_tokens))
        if made is not None:
            return made.buffer
        size = LowLatencySize(kind.hidden, kind.experts, max_tokens)
        if (base := self._bases.get(size)) is not None:
            made = SizedBuffer(self._backend.variant(base, kind), max_tokens)
        else:
            self._check(size)
            out = self.masked()
            ranks = [rank for rank in range(self._ranks) if rank not in out]
            made = self._make(kind, max_tokens, None, ranks)
            if not out:
                self._bases[size] = made.buffer
        self._made[kind, max_tokens] = made
        return made.buffer

    def _check(self, size: LowLatencySize) -> None:
        """Raises UsageError for sizes that take more memory than the program allows."""
        needed = self._backend.bytes(size.kind(), size.max_tokens) if self._low_latency_bytes else 0
        if needed > self._low_latency_bytes:
            detail = f"{needed} bytes are needed, and num_rdma_bytes is {self._low_latency_bytes}"
            hint = "get_low_latency_rdma_size_hint returns the bytes that dispatches of a size take"
            raise wrong("low_latency_dispatch", detail, hint)

    def made(self, kind: Kind) -> SizedBuffer | None:
        """The rank-layout buffer of this kind; None on all ranks alike if it does not exist."""
        return self._made.get((kind, 0))

    def of_rank_layout(self) -> Iterator[tuple[Kind, SizedBuffer]]:
        """All rank-layout buffers, the same on all ranks."""
        return ((kind, made) for (kind, _), made in self._made.items() if kind.layout == "rank")

    def rank_layout(self, kind: Kind, tokens: int, num_sms: int) -> SizedBuffer:
        """A rank-layout buffer with room for `tokens`, the same number on all ranks. Replaces a smaller one, which
        lives as long as a handle of its dispatches."""
        made = self._made.get((kind, 0))
        if made is None or made.max_tokens < tokens:
            most = max(capacity_for(tokens), self._affordable(kind) if made is None else made.max_tokens)
            made = self._make(kind, most, num_sms, list(range(self._ranks)))
            self._made[kind, 0] = made
        return made

    def drop(self, kind: Kind) -> None:
        """Drops a buffer whose last operation some rank missed; on all ranks the next dispatch creates another one."""
        self._made.pop((kind, 0), None)

    def _make(self, kind: Kind, max_tokens: int, num_sms: int | None, ranks: list[int]) -> SizedBuffer:
        if self._backend.streams.is_capturing():
            raise wrong(
                "Buffer",
                f"the first dispatch of this kind allocates a buffer for {max_tokens} tokens, which a capture cannot",
                "run it once before the capture",
            )
        self._count += 1
        buffer = self._backend.make(kind, max_tokens, num_sms, str(self._count), ranks)
        return SizedBuffer(buffer, max_tokens, self._backend.prepared_calls(buffer, kind))

    def _affordable(self, kind: Kind) -> int:
        """The maximum tokens that fit the budget, in steps of `LEAST_TOKENS`."""
        one, two = (self._backend.bytes(kind, tokens) for tokens in (LEAST_TOKENS, 2 * LEAST_TOKENS))
        steps = (self._budget - one) // max(two - one, 1) + 1
        return max(steps, 0) * LEAST_TOKENS

    def mask(self, rank: int) -> None:
        """Masks `rank` in expert-layout operations from now on."""
        for buffer in self._of_expert_layout():
            if rank in buffer.connected():
                buffer.mask([rank])
        self._out.add(rank)

    def unmask(self, rank: int) -> None:
        """Unmasks `rank` in expert-layout operations, or reconnects it."""
        for buffer in self._of_expert_layout():
            if rank in buffer.connected():
                buffer.unmask([rank])
            else:
                buffer.connect([rank])
        self._out.discard(rank)

    def masked(self) -> set[int]:
        """Ranks that are masked (by the caller or after a timeout) or disconnected."""
        out, everyone = set(self._out), set(range(self._ranks))
        for buffer in self._of_expert_layout():
            out |= everyone.difference(buffer.connected()).union(buffer.masked())
        return out

    def barrier(self) -> None:
        """A barrier of all ranks by an expert-layout operation, if there was one; ranks that time out are masked."""
        for (kind, _), made in self._made.items():
            if kind.layout == "expert":
                self._backend.barrier(made.buffer, kind)
                return

    def _of_expert_layout(self) -> list[Any]:
        return [made.buffer for (kind, _), made in self._made.items() if kind.layout == "expert"]

    def destroy(self) -> None:
        """Ends them all."""
        for made in self._made.values():
            made.buffer.destroy()
        self._made.clear()
        self._bases.clear()
