"""The expert buffers behind a buffer: one for each kind of dispatch that the program makes, made when it first does."""

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

__all__ = ["LEAST_TOKENS", "Gpu", "Kind", "Machine", "Pool", "Room", "room_for"]

Payload: TypeAlias = Literal["bf16", "f32", "power2", "ue8m0"]
"""What rows are: bf16, or fp8 with such scales."""
PAYLOADS: tuple[Payload, ...] = ("bf16", "f32", "power2", "ue8m0")
LEAST_TOKENS = 128
MOST_TOPK = 32
"""Experts of a token, at most."""
USUAL_TOPK = 8
"""Experts of a token that kernels are compiled for before a program says how many there are."""
SPARE_RESULTS = 2
"""Results of normal dispatches that are not copied, at most."""


class Kind(NamedTuple):
    """What an expert buffer is for."""

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


class Room(NamedTuple):
    """Sizes of low-latency dispatches that share one heap."""

    hidden: int
    experts: int
    max_tokens: int

    def kind(self) -> Kind:
        """The kind that takes the most memory."""
        return Kind("expert", self.hidden, self.experts, max(1, min(MOST_TOPK, self.experts)), "bf16")


class Machine(Protocol):
    """Where the expert buffers are."""

    device: Any
    streams: Streams

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        """An ExpertBuffer, connected to those of `ranks`."""

    def token_layout(self) -> TokenLayout | None:
        """What counts tokens by where they go, in the current stream; None where nothing does."""

    def prepared_calls(self, buffer: Any, kind: Kind) -> RankCalls | None:
        """Prepared operations of an ExpertBuffer in the rank layout; None where there are none."""

    def variant(self, buffer: Any, kind: Kind) -> Any:
        """An ExpertBuffer on the heap and the connections of this one. No other rank takes part."""

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        """What that takes."""

    def dispatch(self, made: Made, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool) -> Any:
        """A dispatch in the rank layout of `given`: rows (with scales), ids, weights. The other ranks' hosts get
        `host_word` in `host_words`, if they want it to be `counted`."""

    def meet(self, buffer: Any, kind: Kind) -> None:
        """An operation in the expert layout that sends nothing: a rank that does not come to it is masked."""

    def sources(self, buffer: Any, handle: Any, rows: int) -> Tensor:
        """The token that each row of a dispatch in the rank layout was at its source, i32 [rows]."""


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
        options |= {"regions": SPARE_RESULTS, "share_node": self._share_node or kind.layout == "rank"}
        name = f"{self._joined.name}/{name}"
        # Low-latency operations continue without a rank that does not come, as DeepEP's: the mask buffer says which.
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
        """What output tensors come from."""
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
        return ExpertBuffer.plan(**options, ranks=self._joined.group.size).total

    def dispatch(self, made: Made, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool) -> Any:
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

    def meet(self, buffer: Any, kind: Kind) -> None:
        x = torch().empty((0, kind.hidden), dtype=torch().bfloat16, device=self.device)
        ids = torch().empty((0, kind.topk), dtype=torch().int64, device=self.device)
        with self.streams.turn():
            buffer.dispatch(x, ids, layout="expert")

    def sources(self, buffer: Any, handle: Any, rows: int) -> Tensor:
        if rows == 0:  # DLPack has no address for an empty array
            return torch().empty((0,), dtype=torch().int32, device=self.device)
        return torch().from_dlpack(buffer._native.sources(handle, rows)).clone()


def room_for(tokens: int) -> int:
    """Tokens that a buffer is made for when so many are wanted: at most an eighth more, so that it is seldom remade."""
    step = max(LEAST_TOKENS, 1 << max(tokens.bit_length() - 4, 0))
    return -(-max(tokens, 1) // step) * step


@dataclass
class Made:
    """An expert buffer and the most tokens that one of its dispatches may send. `calls`: prepared ones, if any."""

    buffer: Any
    max_tokens: int
    calls: RankCalls | None = None


class Pool:
    """A buffer's expert buffers. All ranks ask for the same ones in the same order."""

    def __init__(self, machine: Machine, ranks: int, budget: int, low_latency_bytes: int = 0) -> None:
        """`budget`: bytes that those of the rank layout are made to fill at first, each. `low_latency_bytes`: the most
        that dispatches of one size in the expert layout may take, 0 for any number."""
        self._machine = machine
        self._ranks = ranks
        self._budget = budget
        self._low_latency_bytes = low_latency_bytes
        self._bases: dict[Room, Any] = {}
        self._made: dict[tuple[Kind, int], Made] = {}
        self._count = 0
        self._out: set[int] = set()

    def prepare(self, room: Room) -> None:
        """Makes what dispatches of this size need: memory, with all ranks, and kernels for every kind of rows."""
        topk, units = max(1, min(USUAL_TOPK, room.experts)), {"bf16": 1, "ue8m0": 512}
        payloads = [payload for payload in PAYLOADS if room.hidden % units.get(payload, 128) == 0]
        kinds = [Kind("expert", room.hidden, room.experts, topk, payload) for payload in payloads]
        self.expert_layout(kinds[0], room.max_tokens)
        if others := kinds[1:]:  # whose kernels may have to be compiled
            with ThreadPoolExecutor(len(others)) as threads:
                list(threads.map(lambda kind: self.expert_layout(kind, room.max_tokens), others))

    def expert_layout(self, kind: Kind, max_tokens: int) -> Any:
        """The one for up to `max_tokens`. All ranks make it together, except where there is one for other rows or
        another number of experts per token."""
        made = self._made.get((kind, max_tokens))
        if made is not None:
            return made.buffer
        room = Room(kind.hidden, kind.experts, max_tokens)
        if (base := self._bases.get(room)) is not None:
            made = Made(self._machine.variant(base, kind), max_tokens)
        else:
            self._check(room)
            out = self.left_out()
            ranks = [rank for rank in range(self._ranks) if rank not in out]
            made = self._make(kind, max_tokens, None, ranks)
            if not out:
                self._bases[room] = made.buffer
        self._made[kind, max_tokens] = made
        return made.buffer

    def _check(self, room: Room) -> None:
        """Raises UsageError for sizes that take more memory than the program allows."""
        needed = self._machine.bytes(room.kind(), room.max_tokens) if self._low_latency_bytes else 0
        if needed > self._low_latency_bytes:
            detail = f"{needed} bytes are needed, and num_rdma_bytes is {self._low_latency_bytes}"
            hint = "get_low_latency_rdma_size_hint says how many a program's dispatches take"
            raise wrong("low_latency_dispatch", detail, hint)

    def made(self, kind: Kind) -> Made | None:
        """The one in the rank layout, if there is one: there is on all ranks, or on none."""
        return self._made.get((kind, 0))

    def of_rank_layout(self) -> Iterator[tuple[Kind, Made]]:
        """Those in the rank layout: the same on all ranks."""
        return ((kind, made) for (kind, _), made in self._made.items() if kind.layout == "rank")

    def rank_layout(self, kind: Kind, tokens: int, num_sms: int) -> Made:
        """One with room for `tokens`, which is the same number on all ranks. A smaller one is replaced, and stays as
        long as a handle of its dispatches."""
        made = self._made.get((kind, 0))
        if made is None or made.max_tokens < tokens:
            most = max(room_for(tokens), self._affordable(kind) if made is None else made.max_tokens)
            made = self._make(kind, most, num_sms, list(range(self._ranks)))
            self._made[kind, 0] = made
        return made

    def forget(self, kind: Kind) -> None:
        """The next dispatch of the kind makes another one, as on all ranks: not all have come to its last operation."""
        self._made.pop((kind, 0), None)

    def _make(self, kind: Kind, max_tokens: int, num_sms: int | None, ranks: list[int]) -> Made:
        if self._machine.streams.is_capturing():
            raise wrong(
                "Buffer",
                f"a buffer for {max_tokens} tokens of this kind is made at the first dispatch, which is being captured",
                "run it once before the capture",
            )
        self._count += 1
        buffer = self._machine.make(kind, max_tokens, num_sms, str(self._count), ranks)
        return Made(buffer, max_tokens, self._machine.prepared_calls(buffer, kind))

    def _affordable(self, kind: Kind) -> int:
        """The most tokens for which the budget is enough, in steps."""
        one, two = (self._machine.bytes(kind, tokens) for tokens in (LEAST_TOKENS, 2 * LEAST_TOKENS))
        steps = (self._budget - one) // max(two - one, 1) + 1
        return max(steps, 0) * LEAST_TOKENS

    def leave_out(self, rank: int) -> None:
        """Operations in the expert layout leave `rank` out from now on."""
        for buffer in self._of_expert_layout():
            if rank in buffer.connected():
                buffer.mask([rank])
        self._out.add(rank)

    def take_back(self, rank: int) -> None:
        """Operations in the expert layout include `rank` again."""
        for buffer in self._of_expert_layout():
            if rank in buffer.connected():
                buffer.unmask([rank])
            else:
                buffer.connect([rank])
        self._out.discard(rank)

    def left_out(self) -> set[int]:
        """Ranks that are left out, by hand, as they did not come, or as they have left."""
        out, everyone = set(self._out), set(range(self._ranks))
        for buffer in self._of_expert_layout():
            out |= everyone.difference(buffer.connected()).union(buffer.masked())
        return out

    def meet(self) -> None:
        """All ranks come to an operation in the expert layout, if there was one; who does not come is left out."""
        for (kind, _), made in self._made.items():
            if kind.layout == "expert":
                self._machine.meet(made.buffer, kind)
                return

    def _of_expert_layout(self) -> list[Any]:
        return [made.buffer for (kind, _), made in self._made.items() if kind.layout == "expert"]

    def destroy(self) -> None:
        """Ends them all."""
        for made in self._made.values():
            made.buffer.destroy()
        self._made.clear()
        self._bases.clear()
