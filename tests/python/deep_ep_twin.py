"""crossrail.deep_ep without a GPU: ranks are threads, tensors are the host's, and the reference moves the rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from host_torch import torch

from crossrail import ref
from crossrail.deep_ep import Buffer, EventOverlap
from crossrail.deep_ep.events import Turn

PATIENCE_S = 30.0


class Meeting:
    """Where the threads hand each other what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
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

    def is_capturing(self) -> bool:
        return self.capturing

    def unchanged(self) -> int | None:
        return None

    def settle(self) -> None:
        pass

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


class TwinBuffer:
    """As much of an ExpertBuffer on a GPU as deep_ep uses."""

    regions = 2
    _native = None

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int) -> None:
        self.meeting, self.rank, self.kind, self.most = meeting, rank, kind, max_tokens
        self.shape = ref.Shape(meeting.size, max_tokens, kind.hidden, kind.experts, kind.topk)
        self.out: set[int] = set()
        self.destroyed = False
        self.lent: list[Any] = []
        self.recorded: list[Any] = []

    @property
    def spare_regions(self) -> int:
        return self.regions - len(self.lent)

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

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        layout: str = "expert",
        *,
        handle: Native | None = None,
        expert_alignment: int = 1,
        out: Any = None,
        stats: Any = None,
        waits: Any = None,
        max_rows: int | None = None,
        send_only: bool = False,
    ) -> Any:
        assert layout == self.kind.layout
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert (scales is None) == (layout == "expert" or self.kind.payload == "bf16")
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
        if layout == "rank":
            return self._by_rank(given, came, max_rows)
        assert (out is None) == (self.kind.payload == "bf16")
        most, dtype = self.shape.ranks * self.most, torch.bfloat16 if out is None else torch.float8_e4m3fn
        parts = (out or {}) | {
            "x": torch.empty((self.shape.local_experts, most, self.kind.hidden), dtype=dtype),
            "counts": torch.empty(self.shape.local_experts, dtype=torch.int32),
            "ranges": torch.empty((self.shape.local_experts, self.shape.ranks), dtype=torch.int64),
            "source": torch.empty((self.shape.local_experts, most), dtype=torch.int32),
        }
        finish = lambda: self._by_expert(given, came, parts, stats)  # noqa: E731
        result = SimpleNamespace(handle=Native(came.handle, 0, []), **parts)
        if not send_only:
            finish()
            return result
        poison(parts.values())
        return SimpleNamespace(result=result, finish=lambda stream: finish())

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
            count_list=came.counts.tolist() if max_rows is None else None,
            handle=Native(came.handle, rows, order),
            record_stream=lambda stream: None,
            stream_recorder=lambda: self.recorded.append,
        )

    def _by_expert(self, given: list[Any], came: Any, out: dict[str, Any], stats: Any) -> None:
        poison(out.values())
        scale: Any = {"bf16": None}.get(self.kind.payload, self.kind.payload)
        there = [(one[0], None) if scale is None else ref.cast_rows(one[0], scale) for one in given]
        for expert, count in enumerate(came.counts):
            for row in range(count):
                rank, token = (int(i) for i in came.x[expert, row, :2])
                values = there[rank][0][token]
                out["x"][expert, row] = torch.from_numpy(values.view(f"i{values.itemsize}").copy()).view(out["x"].dtype)
                if scale is not None:
                    at = there[rank][1][token]
                    out["scales"][expert, row] = torch.from_numpy(at.view(np.int32) if scale == "ue8m0" else at)
        out["counts"].copy_(torch.from_numpy(came.counts))
        out["ranges"].copy_(torch.from_numpy(came.ranges))
        out["source"].copy_(torch.from_numpy(came.source))
        if stats is not None:
            stats += torch.from_numpy(came.counts)

    def combine(
        self,
        y: Any,
        handle: Native,
        *,
        topk_weights: Any = None,
        bias: Any = None,
        out: Any = None,
        waits: Any = None,
        send_only: bool = False,
    ) -> Any:
        expert = self.kind.layout == "expert"
        tokens = len(handle.routed.topk_idx[self.rank])  # type: ignore[arg-type]
        said = self.meeting.gather(self.rank, (bits(y), topk_weights, handle.order, bias or []))
        biases = [[bits(one) for one in four[3]] for four in said]
        # The reference's handle is of narrow rows; sums do not look at that.
        wide = ref.Handle(self.shape, *(getattr(handle.routed, name) for name in FIELDS))
        ys = [one[0] if expert else one[0][: len(one[2])] for one in said]
        weights = [one[1].numpy() for one in said] if expert else None
        sums: Any = ref.combine(ys, wide, weights, biases=biases if any(biases) else None)[self.rank]
        x = torch.empty((tokens, self.kind.hidden), dtype=torch.bfloat16) if out is None else out
        result = SimpleNamespace(x=x, topk_weights=None)
        if topk_weights is not None and not expert:
            result.topk_weights = torch.zeros((tokens, self.kind.topk))
            for one in said:
                for row, (rank, token) in enumerate(one[2]):
                    if rank == self.rank:
                        result.topk_weights[token] += one[1][row]

        def finish(stream: Any = None) -> None:
            x.copy_(torch.from_numpy(sums.view(np.int16)).view(torch.bfloat16))

        if not send_only:
            finish()
            return result
        return SimpleNamespace(result=result, finish=finish)


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


def poison(tensors: Any) -> None:
    """Nobody may rely on what new memory holds."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0x7B) if tensor.is_contiguous() else tensor.fill_(0x7B)


class TwinMachine:
    """See `deep_ep.pool.Machine`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.device = torch.device("cpu")
        self.streams = TwinStreams()
        self.meeting, self.rank = meeting, rank
        self.made: list[TwinBuffer] = []

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> TwinBuffer:
        assert (
            self.meeting.gather(self.rank, (kind, max_tokens, name)) == [(kind, max_tokens, name)] * self.meeting.size
        )
        self.made.append(TwinBuffer(self.meeting, self.rank, kind, max_tokens))
        return self.made[-1]

    def bytes(self, kind: Any, max_tokens: int) -> int:
        return 1000 + 10 * max_tokens

    def dispatch(self, made: Any, given: tuple[Any, ...], alignment: int, say: int, *, counted: bool) -> Any:
        said = self.meeting.gather(self.rank, say)
        result = made.buffer.dispatch(*given, "rank", expert_alignment=alignment)
        result.said = said if counted else None
        return result

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


def on_ranks(
    size: int, work: Callable[[TwinDeepEp], Any], kind: type[TwinDeepEp] = TwinDeepEp, **options: Any
) -> list[Any]:
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
