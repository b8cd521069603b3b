"""crossrail.deep_ep without a GPU: ranks are threads, tensors are the host's, and the reference moves the rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_gpu import STREAM, World
from host_torch import torch

from crossrail import ref
from crossrail._calls import Sizes
from crossrail.deep_ep import Buffer, ElasticBuffer, EventOverlap
from crossrail.deep_ep.events import Turn

PATIENCE_S = 30.0


class Meeting:
    """Where the threads hand each other what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.worlds: dict[Any, World] = {}
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def gather(self, rank: int, said: Any) -> list[Any]:
        """What each rank says at this point."""
        self._said[rank] = said
        self._barrier.wait(PATIENCE_S)
        heard = list(self._said)
        self._barrier.wait(PATIENCE_S)
        return heard

    def abort(self) -> None:
        """Nobody waits for a rank that failed."""
        self._barrier.abort()


class TwinRanks:
    """See `deep_ep.ranks.Ranks`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def exchange(self, message: bytes) -> list[bytes]:
        return self.meeting.gather(self.rank, message)

    def step(self) -> None:
        pass

    def close(self) -> None:
        pass


class TwinStreams:
    """See `deep_ep.events.Streams`: there is only one, and everything in it is done."""

    communication = None
    capturing = False
    last_handle = STREAM

    def is_capturing(self) -> bool:
        return self.capturing

    def settle(self) -> None:
        pass

    @staticmethod
    def current_raw(ordinal: int) -> int:
        return STREAM

    def beside(self) -> int:
        return STREAM

    def overlap(self, event: Any, tensors: Any) -> EventOverlap:
        return EventOverlap(None, tensors)

    def capture(self) -> None:
        return None

    @contextlib.contextmanager
    def turn(self, previous: EventOverlap | None = None, beside: bool = False) -> Iterator[Turn]:
        turn = Turn(0)
        yield turn
        if beside:
            turn.overlap = EventOverlap(None, (*turn.inputs, *turn.outputs))


@dataclass
class Native:
    """A handle: the reference's, and who it is of."""

    routed: ref.Handle
    rows: int
    order: list[tuple[int, int]]


class Together:
    """The native half of a low-latency buffer: an operation is over when all ranks have put it in."""

    def __init__(self, native: Any, meeting: Meeting) -> None:
        self.native, self.meeting, self.calls = native, meeting, 0
        self.order, self.is_capturing = native.order, native.is_capturing

    def _over(self, begun: Any, send_only: bool) -> Any:
        self.calls += 1
        if not send_only:
            self.meeting.gather(self.native.rank, None)
            return begun
        finish = begun.finish

        def finished(stream: int) -> None:
            finish(stream)
            self.meeting.gather(self.native.rank, None)

        begun.finish = finished
        return begun

    def dispatch_expert(self, args: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.dispatch_expert(args, stream, send_only), send_only)

    def combine_expert(self, args: Any, handle: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.combine_expert(args, handle, stream, send_only), send_only)


class TwinExperts:
    """An ExpertBuffer for low-latency mode: its native half is a fake GPU that all ranks share."""

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int, name: str = "") -> None:
        """`name`: that of the buffer which the ranks made together."""
        fp8, packed = kind.payload != "bf16", kind.payload == "ue8m0"
        self.sizes = Sizes(meeting.size, max_tokens, kind.hidden, kind.experts, kind.topk, fp8, packed)
        scale: Any = kind.payload if fp8 else None
        self.world = meeting.worlds.setdefault((name, kind), World(self.sizes, payload=scale))
        self.meeting, self.rank, self.most, self.name = meeting, rank, max_tokens, name
        self.out: set[int] = set()
        self.destroyed = False
        self._native = Together(self.world.buffers[rank], meeting)

    def connected(self) -> list[int]:
        return list(range(self.meeting.size))

    def mask(self, ranks: list[int]) -> None:
        self.out |= set(ranks)

    def unmask(self, ranks: list[int]) -> None:
        self.out -= set(ranks)

    def masked(self) -> list[int]:
        return sorted(self.out)

    def destroy(self) -> None:
        self.destroyed = True


class TwinBuffer:
    """As much of an ExpertBuffer on a GPU as deep_ep uses in normal mode."""

    regions = 2

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int) -> None:
        self.meeting, self.rank, self.kind, self.most = meeting, rank, kind, max_tokens
        self.shape = ref.Shape(meeting.size, max_tokens, kind.hidden, kind.experts, kind.topk)
        self.destroyed = False
        self.lent: list[Any] = []
        self.recorded: list[Any] = []

    @property
    def spare_regions(self) -> int:
        return self.regions - len(self.lent)

    def destroy(self) -> None:
        self.destroyed = True

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        layout: str = "rank",
        *,
        handle: Native | None = None,
        expert_alignment: int = 1,
        stats: Any = None,
        max_rows: int | None = None,
    ) -> Any:
        assert layout == self.kind.layout
        assert max_rows != 0, "an expert buffer refuses that"
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert (scales is None) == (self.kind.payload == "bf16")
        assert len(rows) <= self.most and rows.shape[1] == self.kind.hidden
        ids = None if topk_idx is None else topk_idx.numpy().astype(np.int64)
        weights = None if topk_weights is None else topk_weights.numpy()
        given = self.meeting.gather(self.rank, (bits(rows), scales, ids, weights))
        marks = [numbered(rank, len(one[0])) for rank, one in enumerate(given)]
        small = ref.Shape(self.shape.ranks, self.most, 128, self.kind.experts, self.kind.topk)
        if handle is not None:
            came: Any = ref.dispatch(small, marks, None, handle=handle.routed)[self.rank]
        else:
            filled = [
                np.zeros((len(one[0]), self.kind.topk), np.float32) if one[3] is None else one[3] for one in given
            ]
            all_weights = None if weights is None else filled  # where some have none, an error follows
            routed = [one[2] for one in given]
            came = ref.dispatch(small, marks, routed, all_weights, layout, expert_alignment=expert_alignment)[self.rank]
        if stats is not None:
            stats += torch.from_numpy(came.counts)
        return self._by_rank(given, came, max_rows if handle is None else handle.rows)

    def _by_rank(self, given: list[Any], came: Any, max_rows: int | None) -> Any:
        order = [(int(mark[0]), int(mark[1])) for mark in came.x]
        rows = len(order) if max_rows is None else max_rows
        assert rows >= len(order)

        def filled(parts: list[Any], fill: int) -> Any:
            whole = torch.full((rows, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
            for row, (rank, token) in enumerate(order):
                whole[row] = parts[rank][token]
            return whole

        sent = [torch.from_numpy(one[0].view(f"i{one[0].dtype.itemsize}").copy()) for one in given]
        x = filled(sent, 1).view(torch.bfloat16 if self.kind.payload == "bf16" else torch.float8_e4m3fn)
        scales = None
        if self.kind.payload != "bf16":
            scales = filled([one[1] for one in given], 1)
            scales = scales.view(torch.uint8) if self.kind.payload == "ue8m0" else scales

        def padded(array: Any, fill: int) -> Any:
            whole = np.full((rows, self.kind.topk), fill, array.dtype)
            whole[: len(order)] = array
            return torch.from_numpy(whole)

        weights = None if came.topk_weights is None else padded(came.topk_weights, 7)
        return SimpleNamespace(
            x=x,
            scales=scales,
            topk_idx=padded(came.topk_idx, -1),
            topk_weights=weights,
            offsets=torch.from_numpy(came.offsets.copy()),
            counts=None if came.counts is None else torch.from_numpy(came.counts.astype(np.int32)),
            host_words=None,
            count_list=came.counts.tolist() if max_rows is None else None,
            handle=Native(came.handle, rows, order),
            record_stream=lambda stream: None,
            stream_recorder=lambda: self.recorded.append,
        )

    def combine(self, y: Any, handle: Native, *, topk_weights: Any = None, bias: Any = None) -> Any:
        tokens = len(handle.routed.topk_idx[self.rank])  # type: ignore[arg-type]
        said = self.meeting.gather(self.rank, (bits(y), topk_weights, handle.order, bias or []))
        biases = [[bits(one) for one in four[3]] for four in said]
        # The reference's handle is of narrow rows; sums do not look at that.
        wide = ref.Handle(self.shape, *(getattr(handle.routed, name) for name in FIELDS))
        ys = [one[0][: len(one[2])] for one in said]
        sums: Any = ref.combine(ys, wide, None, biases=biases if any(biases) else None)[self.rank]
        result = SimpleNamespace(x=torch.from_numpy(sums.view(np.int16)).view(torch.bfloat16), topk_weights=None)
        if topk_weights is not None:
            result.topk_weights = torch.zeros((tokens, self.kind.topk))
            for one in said:
                for row, (rank, token) in enumerate(one[2]):
                    if rank == self.rank:
                        result.topk_weights[token] += one[1][row]
        return result


FIELDS = ("layout", "active", "topk_idx", "topk_weights", "rows")


def bits(tensor: Any) -> Any:
    """bf16 as u16, e4m3 as u8."""
    if tensor.element_size() == 2:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def numbered(rank: int, tokens: int) -> Any:
    """Rows that say where they are from, for the reference to move."""
    rows = np.zeros((tokens, 128), np.uint16)
    rows[:, 0], rows[:, 1] = rank, np.arange(tokens)
    return rows


class TwinMachine:
    """See `deep_ep.pool.Machine`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.device = torch.device("cpu")
        self.streams = TwinStreams()
        self.meeting, self.rank = meeting, rank
        self.made: list[Any] = []
        self.met: list[str] = []

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        assert (
            self.meeting.gather(self.rank, (kind, max_tokens, name)) == [(kind, max_tokens, name)] * self.meeting.size
        )
        if kind.layout == "rank":
            self.made.append(TwinBuffer(self.meeting, self.rank, kind, max_tokens))
        else:
            self.made.append(TwinExperts(self.meeting, self.rank, kind, max_tokens, name))
        return self.made[-1]

    def prepared_calls(self, buffer: Any, kind: Any) -> None:
        """None are prepared."""

    def token_layout(self) -> None:
        """PyTorch counts."""

    def variant(self, buffer: TwinExperts, kind: Any) -> TwinExperts:
        return type(buffer)(self.meeting, self.rank, kind, buffer.most, buffer.name)

    def bytes(self, kind: Any, max_tokens: int) -> int:
        return 1000 + 10 * max_tokens

    def dispatch(self, made: Any, given: tuple[Any, ...], alignment: int, host_word: int, *, counted: bool) -> Any:
        said = self.meeting.gather(self.rank, host_word)
        result = made.buffer.dispatch(*given, "rank", expert_alignment=alignment)
        result.host_words = said if counted else None
        return result

    def meet(self, buffer: Any, kind: Any) -> None:
        self.met.append(kind.layout)
        self.meeting.gather(self.rank, kind)

    def sources(self, buffer: Any, handle: Any, rows: int) -> Any:
        tokens = torch.full((rows,), 7, dtype=torch.int32)
        for row, (_, token) in enumerate(handle.order):
            tokens[row] = token
        return tokens


class TwinDeepEp(Buffer):
    """`deep_ep.Buffer` of a thread. `group`: the Meeting and the rank."""

    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), TwinMachine(*group)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()


class TwinElastic(ElasticBuffer):
    """`deep_ep.ElasticBuffer` of a thread, on two hosts. `group`: the Meeting and the rank."""

    def _meet(self, group: Any, timeout: float) -> Any:
        meeting, rank = group
        hosts = [b"one" if one < 2 else b"two" for one in range(meeting.size)]
        return rank, meeting.size, TwinMachine(*group), hosts

    def get_theoretical_num_sms(self, *arguments: Any, **options: Any) -> int:
        return 24

    @staticmethod
    def capture() -> Any:
        return None


def on_ranks(size: int, work: Callable[[Any], Any], kind: Callable[..., Any] = TwinDeepEp, **options: Any) -> list[Any]:
    """What `work` gives on each of so many ranks, which have a `kind`. The first error is raised."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(kind((meeting, rank), **options))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    return results
