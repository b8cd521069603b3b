"""Copies weights from one process to many: receivers read pieces from their upstream, and bypass it if it is lost."""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from crossrail._arrays import wrong
from crossrail._endings import at_end
from crossrail._native import Context, Description, Endpoint, Move, Notice, RegionKey, Request, Worker
from crossrail._untrusted import parsing
from crossrail.errors import CrossrailError, MismatchError, PeerDeadError, TimeoutError, UsageError

from ._cache import deregister, keys_of, merged_ranges, places, registered, released
from ._shape import Holder, Memory, Row, malformed, number, packed, unpacked

_ABOVE = 3  # maximum upstream receivers per receiver, before the source
_IN_FLIGHT = 2
_POLL_S = 0.1


class _Described(NamedTuple):
    """A parsed `describe` of a peer."""

    worker: Description
    places: list[tuple[RegionKey, int]]
    token: str
    """Proves possession of the description: a plan that carries it was sent by the source of this spread."""


class _Plan(NamedTuple):
    """The plan that the source sends to a receiver."""

    piece: int
    stall: float
    above: list[bytes]

    @staticmethod
    def of(message: dict[str, Any], token: str) -> _Plan:
        """The plan in a message of a peer. Raises UsageError for anything else."""
        with parsing(lambda: wrong("receive", "a malformed plan")):
            stall, above = float(message["stall"]), [bytes.fromhex(each) for each in message["above"]]
            piece = number(message["piece"])
            if message["token"] != token or not 0 < stall < math.inf or not piece or not above:
                raise ValueError("plan")
            return _Plan(piece, stall, above)


class Spread(NamedTuple):
    """Result of a spread. ``lost``: reason by receiver name; all in ``reached`` have every byte."""

    reached: list[str]
    lost: dict[str, str]
    nbytes: int
    seconds: float


class _Weights:
    """A worker of its own, and tensors that its peers read."""

    def __init__(self, context: Context, tensors: Sequence[Any], name: str | None, listen: Any, operation: str) -> None:
        memories = [Memory.of(tensor, f"tensors[{at}]", operation) for at, tensor in enumerate(tensors)]
        self.sizes = [memory.end - memory.address for memory in memories]
        if not memories:
            raise wrong(operation, "no tensors")
        if any(
            size != math.prod(memory.shape) * memory.item for size, memory in zip(self.sizes, memories, strict=True)
        ):
            raise wrong(operation, "a tensor that is not contiguous")
        self._keep, self._ranges = memories, merged_ranges(memories)
        self.worker = Worker(context, name=name, listen=listen, admit=True)
        self._poll = select.poll()
        self._poll.register(self.worker.event_fd(), select.POLLIN)  # creating it enables events
        self._regions = registered(self.worker, self._ranges)
        self._places = places(self._ranges, [memory.address for memory in memories])
        self.token = os.urandom(16).hex()

    def describe(self) -> bytes:
        keys = [bytes(region.key()).hex() for region in self._regions]
        worker = self.worker.describe([])
        return packed("weights", worker=worker, sizes=self.sizes, places=self._places, keys=keys, token=self.token)

    def parse(self, data: bytes, operation: str) -> _Described:
        """Parses a peer's `describe`. Raises MismatchError if sizes differ, UsageError for anything else."""
        fields = unpacked("weights", data, operation)
        with parsing(lambda: malformed("weights", data, operation)):
            worker, keys = Description(bytes.fromhex(fields["worker"])), keys_of(fields["keys"], len(fields["keys"]))
            places = [(keys[number(key, len(keys))], number(offset)) for key, offset in fields["places"]]
            sizes, token = list(map(number, fields["sizes"])), str(fields["token"])
        if sizes != self.sizes or len(places) != len(sizes):
            at = next((at for at, (a, b) in enumerate(zip(self.sizes, sizes, strict=False)) if a != b), None)
            here, there = (f"{len(of)} tensors" if at is None else f"{of[at]} bytes" for of in (self.sizes, sizes))
            which = "" if at is None else f" of tensors[{at}]"
            detail = f"{here}{which} here, {there} at {worker.name}"
            raise MismatchError(f"{operation}: {detail}", operation=operation, detail=detail, peer=worker.name)
        return _Described(worker, places, token)

    def own(self) -> list[tuple[Any, int]]:
        return [(self._regions[at], offset) for at, offset in self._places]

    def rows(self, places: Sequence[tuple[Holder, int]], piece: int) -> list[Row[Holder]]:
        """The pieces of all tensors, in their order, as strides."""
        rows: list[Row[Holder]] = []
        for (holder, offset), size in zip(places, self.sizes, strict=True):
            count, rest = divmod(size, piece)
            rows += [(holder, offset, piece, piece, count)] if count else []
            rows += [(holder, offset + size - rest, rest, rest, 1)] if rest else []
        return rows

    def pieces(self, piece: int) -> int:
        return sum(-(-size // piece) for size in self.sizes)

    def poll(self) -> list[tuple[Notice, dict[str, Any]]]:
        """Makes progress, waits up to `_POLL_S` for an event, and returns the peers' messages since the last call."""
        self.worker.progress()
        self._poll.poll(1000 * _POLL_S)
        self.worker.drain_events()
        messages = []
        for notice in self.worker.notices():
            with suppress(UsageError):
                messages.append((notice, unpacked("spread", notice.data, "spread")))
        return messages

    def disconnect(self, generation: int) -> None:
        """Closes the connections to a lost peer, which may be stopped in the middle of a read."""
        for endpoint in self.worker.endpoints():
            if endpoint.generation == generation:
                with suppress(CrossrailError):
                    endpoint.close(0)

    def close(self) -> None:
        """Revokes all access. On return no peer accesses the tensors. Raises TimeoutError if one may; the worker stays
        then, which another call needs to find out whether it still does."""
        deregister(self._regions)
        self.worker.close()

    @at_end
    def __del__(self) -> None:
        if hasattr(self, "_regions"):
            released(self._regions, self._keep)  # before the tensors are


def _pieces(message: dict[str, Any], count: int) -> int:
    """The number of pieces in a peer's report, at most `count`. Raises UsageError."""
    with parsing(lambda: wrong("spread", "a malformed message")):
        return min(number(message["pieces"]), count)


def _notify(endpoint: Endpoint | None, **what: Any) -> None:
    """Notifies a peer; the loss of a peer is detected elsewhere."""
    if endpoint is not None:
        with suppress(CrossrailError):
            endpoint.notify(packed("spread", **what))


def spread(
    context: Context,
    tensors: Sequence[Any],
    receivers: Iterable[bytes],
    *,
    fanout: int = 1,
    piece: int = 4 << 20,
    stall: float = 5.0,
    timeout: float | None = None,
    name: str | None = None,
    listen: Any = None,
) -> Spread:
    """Copy tensors to all receivers that live, over a chain or a tree of them.

    Receivers read pieces from their upstream as soon as it has them; if it is lost, from the next one up, finally from
    the source. Returns when every receiver has every byte or is lost.

    Parameters
    ----------
    tensors : sequence
        Contiguous, on the host or GPUs, as for `PagedCache`. Not to be written to until it returns; GPU work that
        writes them has finished.
    receivers : sequence of bytes
        Of each `Receiver.describe`, in the order of the chain.
    fanout : int
        Downstreams per process: 1 is a chain, which takes as long as one copy; 2 and more a tree, for small tensors.
    piece : int
        Bytes of a piece.
    stall : float
        Seconds without a report after which a receiver is lost. A killed one is detected at once.
    timeout : float, optional
        Seconds after which incomplete receivers are lost; CROSSRAIL_TIMEOUT by default.
    name, listen
        As for `Worker`.

    Raises
    ------
    MismatchError
        A receiver's tensors differ in number or size; nothing was copied.
    UsageError
        Two receivers have the same name, or bytes do not describe a receiver.
    """
    if fanout < 1 or piece < 1 or not stall > 0:
        raise wrong("spread", f"fanout {fanout}, piece {piece}, stall {stall}")
    began = time.monotonic()
    until = began + (context.timeout if timeout is None else timeout)
    weights = _Weights(context, tensors, name, listen, "spread")
    try:
        receivers = list(receivers)
        parsed = [weights.parse(described, "spread") for described in receivers]
        if len({one.worker.name for one in parsed}) < len(parsed):
            raise wrong("spread", "two receivers have the same name", "Receiver(context, tensors, name=...)")
        source = _Source(weights, stall)
        for one, described in zip(parsed, receivers, strict=True):
            source.connect(one, described, until)
        source.plan(fanout, piece)
        while source.waiting() and time.monotonic() < until:
            source.turn()
        for late in source.waiting():
            have = f"{source.have[late]} of {source.all}"
            source.lose(late, f"not complete after {time.monotonic() - began:.1f} s: {have}")
        source.end()
        reached = [name for name in source.peers if name not in source.lost]
        return Spread(reached, source.lost, sum(weights.sizes), time.monotonic() - began)
    finally:
        weights.close()


class _Source:
    """The source's view of its receivers. The connection over which a message arrives identifies the receiver; the
    sender's name does not."""

    def __init__(self, weights: _Weights, stall: float) -> None:
        self.weights, self.stall, self.all = weights, stall, 0
        self.peers: dict[str, tuple[Endpoint, bytes]] = {}
        self.by_endpoint: dict[int, str] = {}
        self.described: dict[str, _Described] = {}
        self.have: dict[str, int] = {}
        self.last_message: dict[str, float] = {}
        self.lost: dict[str, str] = {}

    def connect(self, parsed: _Described, described: bytes, until: float) -> None:
        limit, name = max(0.0, min(self.stall, until - time.monotonic())), parsed.worker.name
        self.described[name] = parsed
        try:
            endpoint = self.weights.worker.connect(parsed.worker.address, timeout=limit)
        except CrossrailError as error:
            self.lost[name] = str(error)
        else:
            self.peers[name], self.by_endpoint[endpoint.id] = (endpoint, described), name

    def plan(self, fanout: int, piece: int) -> None:
        """Sends each receiver its upstreams: the nearest first, and this process last."""
        self.all, order, own = self.weights.pieces(piece), list(self.peers), self.weights.describe()
        for at, name in enumerate(order):
            above: list[bytes] = []
            one = at // fanout - 1
            while one >= 0 and len(above) < _ABOVE:
                above.append(self.peers[order[one]][1])
                one = one // fanout - 1
            plan = {"piece": piece, "stall": self.stall, "above": [each.hex() for each in [*above, own]]}
            self.have[name], self.last_message[name] = 0, time.monotonic()
            _notify(self.peers[name][0], do="plan", token=self.described[name].token, **plan)

    def waiting(self) -> list[str]:
        return [name for name in self.peers if name not in self.lost and self.have[name] < self.all]

    def turn(self) -> None:
        for notice, message in self.weights.poll():
            name = self.by_endpoint.get(notice.endpoint)
            if name is not None:
                self.last_message[name] = time.monotonic()
            if message.get("do") == "have" and name is not None:
                with suppress(UsageError):
                    self.have[name] = _pieces(message, self.all)
            elif message.get("do") == "join":
                _notify(self.weights.worker.endpoint(notice.endpoint), do="have", pieces=self.all)
        for name in [name for name in self.peers if name not in self.lost]:
            if not self.peers[name][0].is_alive:
                self.lose(name, "it has ended, or its lanes are lost")
            elif self.have[name] < self.all and time.monotonic() - self.last_message[name] > self.stall:
                self.lose(name, f"no progress report for {self.stall:g} s")

    def lose(self, name: str, why: str) -> None:
        self.lost[name] = why
        for one, (endpoint, _) in self.peers.items():
            if one not in self.lost:
                _notify(endpoint, do="lost", generation=self.described[name].worker.generation)

    def end(self) -> None:
        """Announces the end to all receivers, which serve their downstreams until then."""
        requests: dict[str, Request] = {}
        for name, (endpoint, _) in self.peers.items():
            with suppress(CrossrailError):
                requests[name] = endpoint.notify(packed("spread", do="over", lost=self.lost))
        until = time.monotonic() + self.stall
        for name in self.peers:
            with suppress(CrossrailError, KeyError):
                requests[name].wait(0 if name in self.lost else max(0.0, until - time.monotonic()))
        for name in self.lost:
            self.weights.disconnect(self.described[name].worker.generation)


class Receiver:
    """Tensors that a `spread` fills. Makes a worker of its own; for use on one thread.

    Parameters
    ----------
    tensors : sequence
        Same number and sizes as the source's, contiguous, writable. Their bytes are undefined until `receive` returns.
    name : str, optional
        Of the worker; different for each receiver.
    listen : str or sequence of str, optional
        As for `Worker`.
    """

    def __init__(
        self, context: Context, tensors: Sequence[Any], *, name: str | None = None, listen: Any = None
    ) -> None:
        self._weights = _Weights(context, tensors, name, listen, "Receiver")
        self._timeout = context.timeout

    def describe(self) -> bytes:
        """Description for the source, sent by any means. It grants read and write access to the tensors."""
        return self._weights.describe()

    def receive(self, timeout: float | None = None) -> dict[str, str]:
        """Fill the tensors, and serve downstreams until the source ends. Returns the lost receivers, and why.

        Raises
        ------
        PeerDeadError
            The source is lost, and bytes are missing.
        TimeoutError
            After ``timeout`` seconds, CROSSRAIL_TIMEOUT by default, or earlier if the source considers this end lost.
        """
        limit = self._timeout if timeout is None else timeout
        until = time.monotonic() + limit
        relay = _Relay(self._weights)
        try:
            while relay.over is None:
                relay.turn()
                if time.monotonic() > until:
                    detail = f"{relay.have} of {relay.all} pieces have arrived"
                    raise TimeoutError(f"receive: {detail}", operation="receive", detail=detail, waited=limit)
            return relay.over
        finally:
            relay.leave()

    def close(self) -> None:
        """Revokes all access to the tensors. Raises TimeoutError if a peer may still access them; call it again."""
        self._weights.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


class _Relay:
    """State of a receiver that reads from its upstream and serves its downstreams."""

    def __init__(self, weights: _Weights) -> None:
        self.weights = weights
        self.have = self.all = self.offered = self.piece = 0
        self.stall, self.reported_at = 1.0, 0.0
        self.above: deque[bytes] = deque()
        self.below: set[int] = set()
        """Endpoints of downstreams."""
        self.gone: set[int] = set()
        """Workers that the source has called lost."""
        self.origin = ""
        self.source: Endpoint | None = None
        self.source_id = 0
        self.endpoint: Endpoint | None = None
        self.upstream = 0
        self.moves: list[Move] = []
        self.reading: deque[tuple[Request, int]] = deque()
        self.over: dict[str, str] | None = None

    def turn(self) -> None:
        for notice, message in self.weights.poll():
            with suppress(UsageError):
                self._handle(notice, message)
        if not self.origin or self.over is not None:
            return
        if self.source is None or not self.source.is_alive:
            self._orphaned()
        elif self.have < self.all:
            self._read()
        if time.monotonic() - self.reported_at > self.stall / 8:
            self._report()

    def _handle(self, notice: Notice, message: dict[str, Any]) -> None:
        """Raises UsageError for a malformed message, which is ignored."""
        do, worker = message.get("do"), self.weights.worker
        if do == "plan" and not self.origin:
            plan = _Plan.of(message, self.weights.token)
            self.piece, self.stall, self.above = plan.piece, plan.stall, deque(plan.above)
            self.all = self.weights.pieces(plan.piece)
            self.origin, self.source, self.source_id = notice.peer, worker.endpoint(notice.endpoint), notice.endpoint
        elif do == "join":
            self.below.add(notice.endpoint)
            _notify(worker.endpoint(notice.endpoint), do="have", pieces=self.have)
        elif do == "have" and self.endpoint is not None and notice.endpoint == self.endpoint.id:
            self.offered = _pieces(message, self.all)
        elif self.origin and notice.endpoint == self.source_id:
            if do == "lost":
                with parsing(lambda: wrong("receive", "a malformed message")):
                    lost = number(message["generation"], 1 << 64)
                self.gone.add(lost)
                if self.endpoint is not None and self.upstream == lost and self.have < self.all:
                    self._drop_upstream()
                self.weights.disconnect(lost)
            elif do == "over":
                with parsing(lambda: wrong("receive", "a malformed message")):
                    self.over = {str(one): str(why) for one, why in message["lost"].items()}
                if self.have < self.all:
                    detail = f"{self.origin} has given this end up, at {self.have} of {self.all} pieces"
                    raise TimeoutError(f"receive: {detail}", operation="receive", detail=detail, peer=self.origin)

    def _read(self) -> None:
        """Completes finished reads, starts reads of offered pieces, and switches upstream if it is lost."""
        try:
            if self.endpoint is None:
                self._join()
            while self.reading and self.reading[0][0].is_done():
                self.reading[0][0].test()
                self.have = self.reading.popleft()[1]
                for below in self.below:
                    _notify(self.weights.worker.endpoint(below), do="have", pieces=self.have)
                if self.have == self.all:
                    self._report()
            begun = self.have + len(self.reading)
            while begun < self.offered and len(self.reading) < _IN_FLIGHT:
                request = self.moves[begun % _IN_FLIGHT].start(rows=range(begun, begun + 1))
                begun += 1
                self.reading.append((request, begun))
            if self.endpoint is not None and not self.endpoint.is_alive:
                self._drop_upstream()
        except CrossrailError as error:
            if not self.above:
                raise
            self._drop_upstream(error)

    def _join(self) -> None:
        """Connects to the nearest upstream that is left."""
        worker, places, _ = self.weights.parse(self.above[0], "receive")
        if worker.generation in self.gone:
            self._drop_upstream()
            return
        self.upstream = worker.generation
        endpoint = self.endpoint = self.weights.worker.connect(worker.address, timeout=self.stall / 2)
        local = self.weights.worker.layout(self.weights.rows(self.weights.own(), self.piece))
        remote = endpoint.layout(self.weights.rows(places, self.piece))
        self.moves = [endpoint.prepare("read", local, remote) for _ in range(_IN_FLIGHT)]
        _notify(endpoint, do="join")

    def _drop_upstream(self, why: CrossrailError | None = None) -> None:
        """Drops a lost upstream; on return no more of its bytes arrive. The next `_read` joins another one."""
        self._drop()
        if self.above:
            self.above.popleft()
        if not self.above:
            self._orphaned(why)

    def _orphaned(self, why: CrossrailError | None = None) -> None:
        name = self.origin
        if self.have == self.all:
            self.over = {name: "the source ended before it announced completion"}
            return
        detail = f"{name} is lost, {self.have} of {self.all} pieces have arrived"
        raise PeerDeadError(f"receive: {detail}", operation="receive", detail=detail, peer=name) from why

    def _drop(self) -> None:
        if self.endpoint is not None:
            with suppress(CrossrailError):
                self.endpoint.close(0)
        for request, _ in self.reading:
            with suppress(CrossrailError):
                request.cancel()
                request.wait(self.stall / 2)
        self.endpoint, self.offered = None, 0
        self.reading.clear()
        self.moves = []

    def _report(self) -> None:
        self.reported_at = time.monotonic()
        _notify(self.source, do="have", pieces=self.have)

    def leave(self) -> None:
        self._drop()
