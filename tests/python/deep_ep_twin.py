"""crossrail.deep_ep without a GPU: ranks are threads, tensors are the host's, and the reference moves the rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fake_gpu import STREAM, FakeBuffer, HostOperations, World
from host_torch import torch

from crossrail._calls import Sizes
from crossrail.deep_ep import Buffer, ElasticBuffer, EventOverlap
from crossrail.deep_ep.events import Turn
from crossrail.deep_ep.pool import Gpu
from crossrail.experts import ExpertBuffer

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

    def next_call(self) -> None:
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


class Together:
    """The native half of an expert buffer: an operation is over when all ranks have put it in."""

    def __init__(self, native: FakeBuffer, meeting: Meeting) -> None:
        self.native, self.meeting, self.calls = native, meeting, 0
        self.ordinal, self.rank = native.ordinal, native.rank
        self.order, self.is_capturing = native.order, native.is_capturing
        self.take_region, self.sources = native.take_region, native.sources
        self.out: set[int] = set()
        self.destroyed = False

    def _over(self, begun: Any, send_only: bool) -> Any:
        self.calls += 1
        if not send_only:
            self.meeting.gather(self.rank, None)
            return begun
        finish = begun.finish

        def finished(stream: int) -> None:
            finish(stream)
            self.meeting.gather(self.rank, None)

        begun.finish = finished
        return begun

    def dispatch_expert(self, args: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.dispatch_expert(args, stream, send_only), send_only)

    def dispatch_rank(self, args: Any, *rest: Any) -> Any:
        return self._over(self.native.dispatch_rank(args, *rest), rest[-1])

    def combine(self, args: Any, handle: Any, stream: int, send_only: bool) -> Any:
        return self._over(self.native.combine(args, handle, stream, send_only), send_only)

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


class TwinExperts(ExpertBuffer):
    """An ExpertBuffer whose native half is a fake GPU that all ranks share. `lent`: results that others hold."""

    regions = 2

    def __init__(self, meeting: Meeting, rank: int, kind: Any, max_tokens: int, name: str) -> None:
        """`name`: that of the buffer which the ranks made together."""
        fp8, packed = kind.payload != "bf16", kind.payload == "ue8m0"
        sizes = Sizes(meeting.size, max_tokens, kind.hidden, kind.experts, kind.topk, fp8, packed)
        scale: Any = kind.payload if fp8 else None
        self.world = meeting.worlds.setdefault((name, kind), World(sizes, payload=scale))
        self.meeting, self.kind, self.most, self.name = meeting, kind, max_tokens, name
        self.lent: list[Any] = []
        self._sizes, self._ordinal = sizes, 0
        native: Any = Together(self.world.buffers[rank], meeting)
        no_context: Any = None
        self._native = self._buffer = native
        self._operations = HostOperations(native, sizes, no_context)

    @property
    def destroyed(self) -> bool:
        return bool(self._native.destroyed)

    @property
    def spare_regions(self) -> int:
        return self.regions - len(self.lent)


class TwinBackend(Gpu):
    """See `deep_ep.pool.Backend`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.device = torch.device("cpu")
        self.streams: Any = TwinStreams()
        self._joined: Any = SimpleNamespace(group=SimpleNamespace(size=meeting.size))
        self.meeting, self.rank = meeting, rank
        self.made: list[Any] = []
        self.met: list[str] = []

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        said = (kind, max_tokens, name)
        assert self.meeting.gather(self.rank, said) == [said] * self.meeting.size
        self.made.append(TwinExperts(self.meeting, self.rank, kind, max_tokens, name))
        return self.made[-1]

    def prepared_calls(self, buffer: Any, kind: Any) -> None:
        """None are prepared."""

    def token_layout(self) -> None:
        """PyTorch counts."""

    def variant(self, buffer: Any, kind: Any) -> Any:
        return type(buffer)(self.meeting, self.rank, kind, buffer.most, buffer.name)

    def bytes(self, kind: Any, max_tokens: int) -> int:
        return 1000 + 10 * max_tokens

    def barrier(self, buffer: Any, kind: Any) -> None:
        self.met.append(kind.layout)
        super().barrier(buffer, kind)

    def sources(self, buffer: Any, handle: Any, rows: int) -> Any:
        return torch.from_numpy(buffer._native.sources(handle, rows)).clone()


class TwinDeepEp(Buffer):
    """`deep_ep.Buffer` of a thread. `group`: the Meeting and the rank."""

    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), TwinBackend(*group)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()


class TwinElastic(ElasticBuffer):
    """`deep_ep.ElasticBuffer` of a thread, on two hosts. `group`: the Meeting and the rank."""

    def _meet(self, group: Any, timeout: float) -> Any:
        meeting, rank = group
        hosts = [b"one" if one < 2 else b"two" for one in range(meeting.size)]
        return rank, meeting.size, TwinBackend(*group), hosts

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
