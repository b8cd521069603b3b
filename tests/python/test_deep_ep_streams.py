"""Which stream an operation of crossrail.deep_ep runs in and what it waits for, with streams that only take notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail.deep_ep import EventOverlap, events
from crossrail.deep_ep.events import EventHandle, Streams, no_event

DEVICE = SimpleNamespace(index=0)


class Stream:
    """Notes what is put into it."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name, self.cuda_stream = cuda, name, len(name)
        self.capturing = False

    def wait_event(self, event: Event) -> None:
        self.cuda.notes.append(f"{self.name} waits for {event.at}")

    def wait_stream(self, other: Stream) -> None:
        assert self.capturing == other.capturing, "a capture and what is outside of it"
        self.cuda.notes.append(f"{self.name} waits for {other.name}")


class Event:
    cuda: Cuda

    def record(self, stream: Stream | None) -> None:
        self.at = f"an event in {(stream or self.cuda.current).name}"


class Cuda:
    """As much of torch.cuda as is used."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = self.default = Stream(self, "default")
        self.made = 0
        self.Event = type("Event", (Event,), {"cuda": self})

    def Stream(self, device: Any) -> Stream:
        self.made += 1
        return Stream(self, "own")

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return self.current.capturing

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Tensor:
    def __init__(self) -> None:
        self.used: list[str] = []

    def record_stream(self, stream: Stream) -> None:
        self.used.append(stream.name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(events, "torch", lambda: SimpleNamespace(cuda=made))
    return made


def turn(streams: Streams, *arguments: Any, **options: Any) -> tuple[EventOverlap, list[Tensor], str]:
    """One operation; what it reads, gives and shows is used in which streams."""
    tensors = [Tensor(), Tensor(), Tensor()]
    with streams.turn(*arguments, **options) as made:
        made.add_inputs(tensors[0], None)
        made.add_outputs(None, tensors[1])
        made.add_result(tensors[2])
        ran = made.keeper.cuda.current.name
        assert made.stream == made.keeper.cuda.current.cuda_stream
    return made.overlap, tensors, ran


def test_an_operation_runs_in_the_current_stream(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    overlap, tensors, ran = turn(streams)
    overlap.current_stream_wait()
    assert (ran, overlap.event, cuda.notes, cuda.made) == ("default", None, [], 0)
    assert all(not tensor.used for tensor in tensors)


def test_one_beside_the_current_stream(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    overlap, tensors, ran = turn(streams, None, True)
    assert ran == "own"
    assert [tensor.used for tensor in tensors] == [["own"], ["default"], ["default"]]
    assert cuda.notes == ["own waits for default"]
    assert overlap.extra_tensors == tuple(tensors[:2])
    with overlap:
        assert cuda.notes == ["own waits for default"]
    assert cuda.notes.pop() == "default waits for an event in own"
    assert streams.communication is streams.communication
    assert cuda.made == 1


def test_one_that_comes_after_an_event(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    overlap, _, ran = turn(streams, streams_end := EventOverlap(streams.capture()))
    assert (ran, overlap.event) == ("own", None)
    assert cuda.notes == ["own waits for an event in default", "default waits for own"]
    turn(streams, streams_end, beside=True)
    assert cuda.notes[2:] == ["own waits for an event in default"]


def test_an_event_that_is_none_is_no_reason_for_another_stream(cuda: Cuda) -> None:
    assert turn(Streams(DEVICE), EventOverlap())[2] == "default"


def test_operations_run_one_after_the_other(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    turn(streams, beside=True)
    turn(streams)
    assert cuda.notes == ["own waits for default", "default waits for own"]
    with cuda.stream(Stream(cuda, "third")):
        turn(streams)
    assert cuda.notes.pop() == "third waits for default"
    turn(streams)
    turn(streams)
    assert cuda.notes[2:] == ["default waits for third"]


def test_a_capture_waits_for_nothing_outside_of_it(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    turn(streams)
    captured = Stream(cuda, "captured")
    captured.capturing = True
    with cuda.stream(captured):
        assert streams.is_capturing()
        turn(streams)
        turn(streams)
    turn(streams)
    assert cuda.notes == []
    captured.capturing = False
    with cuda.stream(captured):
        turn(streams)
    assert cuda.notes == ["captured waits for default"]


def test_a_handle_is_of_the_current_stream(cuda: Cuda) -> None:
    with cuda.stream(Stream(cuda, "third")):
        handle = EventHandle()
    handle.current_stream_wait()
    assert cuda.notes == ["default waits for an event in third"]


def test_a_stream_that_is_not_the_last_operations_waits_for_it(cuda: Cuda) -> None:
    streams = Streams(DEVICE)
    assert streams.last_handle is None
    turn(streams)
    assert streams.last_handle == streams.current() == cuda.current.cuda_stream
    streams.follow(streams.beside())
    assert (cuda.notes, streams.last_handle) == (["own waits for default"], streams.beside())
    streams.follow(streams.current())
    assert (cuda.notes.pop(), streams.last_handle) == ("default waits for own", streams.current())


def test_completion_of_an_operation(cuda: Cuda) -> None:
    streams, waits = Streams(DEVICE), []
    overlap = streams.overlap(SimpleNamespace(wait=waits.append), (kept := Tensor(),))
    overlap.current_stream_wait()
    assert waits == [cuda.current.cuda_stream] and overlap.extra_tensors == (kept,)
    for nothing in (no_event(), EventOverlap()):
        assert isinstance(nothing, EventOverlap) and nothing.event is nothing.extra_tensors is None
        with nothing(release_handle=True):
            pass
    turn(streams, overlap)
    assert waits[1:] == [streams.beside()]
    streams.record([kept])
    assert kept.used == ["own"]
