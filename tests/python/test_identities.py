"""A peer is its endpoint, not what it calls itself; and whatever it sends raises nothing but Crossrail's errors."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from nixl_engines import until

import crossrail
from crossrail._untrusted import parsing
from crossrail.deep_ep.agreement import Call
from crossrail.deep_ep.size_hints import agreed_sizes
from crossrail.kv import PagedCache, Receiver, _spread, spread
from crossrail.kv._shape import packed, unpacked
from crossrail.mooncake import engine as mooncake
from crossrail.nixl import _bindings as bindings
from crossrail.nixl import _lists
from crossrail.nixl._api import nixl_agent
from crossrail.nixl._kinds import ERRORS
from crossrail.nixl._remotes import MAGIC

SIZE = 1 << 20


def context() -> crossrail.Context:
    return crossrail.Context(log="error", timeout=20)


def test_a_notice_names_endpoint_and_worker() -> None:
    with (
        crossrail.Worker(context(), name="a", admit=True) as a,
        crossrail.Worker(context(), name="b", admit=True) as b,
        crossrail.Worker(context(), name="b", admit=True) as other,
    ):
        b.connect(a.address()).notify(b"real").wait()
        other.connect(a.address()).notify(b"forged").wait()
        notices = {notice.data: notice for notice in until(lambda: a.notices(2), "a notice") + a.notices()}
        until(lambda: notices.update({one.data: one for one in a.notices()}) or len(notices) == 2, "both notices")
        real, forged = notices[b"real"], notices[b"forged"]
        assert real == ("b", b"real") and forged == ("b", b"forged")
        assert real.endpoint != forged.endpoint and real.generation != forged.generation
        assert real.generation == crossrail.Description(b.describe([])).generation
        endpoint = a.endpoint(real.endpoint)
        assert endpoint is not None and (endpoint.id, endpoint.generation) == (real.endpoint, real.generation)
        assert a.endpoint(1 << 31) is None


def forge(victim: nixl_agent, name: str, message: bytes) -> None:
    address = crossrail.Description(victim.get_agent_metadata()[len(MAGIC) :]).address
    with crossrail.Worker(context(), name=name) as forger:
        forger.connect(address).notify(message).wait()


@pytest.mark.parametrize("known", [True, False])
def test_a_notification_in_another_agents_name_is_ignored(known: bool) -> None:
    a, b = nixl_agent("A"), nixl_agent("B")
    if known:
        a.add_remote_agent(b.get_agent_metadata())
    b.add_remote_agent(a.get_agent_metadata())
    b.send_notif("A", b"first")
    got: list[bytes] = []
    until(lambda: got.extend(a.get_new_notifs().get("B", [])) or got, "a notification")
    forge(a, "B", b"forged")
    b.send_notif("A", b"second")
    until(lambda: got.extend(a.get_new_notifs().get("B", [])) or len(got) >= 2, "the next notification")
    forge(a, "A", b"from itself")
    assert got == [b"first", b"second"]
    assert a.get_new_notifs() == {}


def test_an_agent_that_was_started_again_is_heard() -> None:
    a, b = nixl_agent("A"), nixl_agent("B")
    b.add_remote_agent(a.get_agent_metadata())
    b.send_notif("A", b"before")
    until(lambda: a.get_new_notifs() == {"B": [b"before"]}, "a notification")
    del b
    again = nixl_agent("B")
    again.add_remote_agent(a.get_agent_metadata())

    def heard() -> bool:  # the first agent's end may be detected after the second one's message
        again.send_notif("A", b"after")
        return bool(a.get_new_notifs())

    until(heard, "a notification of the second one")


class Spread:
    """A spread in this process: a source, and a receiver that does not receive yet."""

    def __init__(self, size: int, stall: float = 20.0) -> None:
        self.target = np.zeros(size, np.uint8)
        self.receiver = Receiver(context(), [self.target], name="recv")
        self.stall = stall
        self.done: list[Any] = []

    def source(self, **options: Any) -> None:
        try:
            data = [np.full(len(self.target), 7, np.uint8)]
            self.done.append(spread(context(), data, [self.receiver.describe()], stall=self.stall, **options))
        except crossrail.CrossrailError as error:
            self.done.append(error)


def test_have_of_a_process_that_calls_itself_a_receiver_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Spread(SIZE)
    sources: list[_spread._Source] = []
    made = _spread._Source.__init__

    def remembered(self: _spread._Source, *arguments: Any) -> None:
        made(self, *arguments)
        sources.append(self)

    monkeypatch.setattr(_spread._Source, "__init__", remembered)
    thread = threading.Thread(target=pair.source, kwargs={"name": "source"})
    thread.start()
    until(lambda: sources and sources[0].have, "the plan")
    with crossrail.Worker(context(), name="recv") as forger:
        forger.connect(sources[0].weights.worker.address()).notify(packed("spread", do="have", pieces=1 << 40)).wait()
        time.sleep(0)
        assert sources[0].waiting() == ["recv"]
        pair.receiver.receive(20)
    thread.join(30)
    assert pair.done[0].reached == ["recv"] and (pair.target == 7).all()
    pair.receiver.close()


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "piece 0": lambda token: packed("spread", do="plan", token=token, piece=0, stall=1.0, above=["00"]),
    "piece of 2**62": lambda token: packed("spread", do="plan", token=token, piece=1 << 62, stall=1.0, above=["00"]),
    "stall of 400 digits": lambda token: packed("spread", do="plan", token=token, piece=1, stall=10**400, above=["00"]),
    "stall nan": lambda token: packed("spread", do="plan", token=token, piece=1, stall=float("nan"), above=["00"]),
    "stall inf": lambda token: packed("spread", do="plan", token=token, piece=1, stall=float("inf"), above=["00"]),
    "stall -1": lambda token: packed("spread", do="plan", token=token, piece=1, stall=-1, above=["00"]),
    "above empty": lambda token: packed("spread", do="plan", token=token, piece=1 << 20, stall=1.0, above=[]),
    "above none": lambda token: packed("spread", do="plan", token=token, piece=1 << 20, stall=1.0, above=None),
    "do a list": lambda token: packed("spread", do=[1]),
    "no do": lambda token: packed("spread"),
    "deep": lambda token: b"CRKV1" + b'{"kind":"spread","do":' + b"[" * 200_000,
    "a plan without the token": lambda token: packed("spread", do="plan", piece=1, stall=1.0, above=["00"]),
    "a plan with another token": lambda token: packed(
        "spread", do="plan", token="00" * 16, piece=1, stall=1.0, above=["00"]
    ),
    "over of a list": lambda token: packed("spread", do="over", lost=[1, 2]),
    "lost of a name": lambda token: packed("spread", do="lost", generation="x"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_messages_do_not_disturb_a_receiver(what: str) -> None:
    pair = Spread(SIZE)
    token = unpacked("weights", pair.receiver.describe(), "test")["token"]
    address = crossrail.Description(bytes.fromhex(unpacked("weights", pair.receiver.describe(), "test")["worker"]))
    with crossrail.Worker(context(), name="evil") as evil:
        evil.connect(address.address).notify(HOSTILE[what](token)).wait()
        thread = threading.Thread(target=pair.source)
        if what != "piece of 2**62":
            thread.start()
            assert pair.receiver.receive(20) == {}
            thread.join(30)
            assert pair.done[0].reached == ["recv"] and (pair.target == 7).all()
        else:  # a valid plan: receiving by it fails with one of our errors
            with pytest.raises(crossrail.CrossrailError):
                pair.receiver.receive(2)
    pair.receiver.close()


# ---- every parser of a peer's bytes

NUMBERS = (0, 1, -1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**400, 0.5, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (None, True, "", "x", "00", [], {}, [[]], [1, 2, 3], {"a": 1}, "\ud800", "0" * 5000)


def changed(said: Any, rng: random.Random) -> Any:
    """`said` with one value, somewhere within, replaced, repeated or left out."""
    if isinstance(said, dict) and said and rng.random() < 0.9:
        name = rng.choice(list(said))
        rest = {key: value for key, value in said.items() if key != name}
        return rest if rng.random() < 0.1 else {**rest, name: changed(said[name], rng)}
    if isinstance(said, list) and said and rng.random() < 0.85:
        at = rng.randrange(len(said))
        match rng.randrange(8):
            case 0:
                return said[:at] + said[at + 1 :]
            case 1:
                return said[:at] + [said[at]] * rng.randint(1, 5) + said[at:]
            case _:
                return [*said[:at], changed(said[at], rng), *said[at + 1 :]]
    return rng.choice(NUMBERS if rng.random() < 0.6 else OTHERS)


def mangled(data: bytes, rng: random.Random) -> bytes:
    """A magic and JSON, with one value or some bytes changed."""
    binary = data.endswith(b"{}")  # with a suffix of JSON
    start = len(data) - 2 if binary else min(at for at in (data.find(b"{"), data.find(b"[")) if at >= 0)
    match rng.randrange(10):
        case 0:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(rng.randint(0, 5)) + data[at + rng.randint(0, 5) :]
        case 1:
            return data[:start] + rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b"", b"\xff", b"NaN"))
        case _:
            said = changed(json.loads(data[start:]), rng)
            if rng.random() < 0.3:
                said = changed(said, rng)
            return data[:start] + json.dumps(said).encode()


class OneMessage:
    """Ranks of which another one sends the given bytes."""

    rank, size = 0, 2

    def __init__(self, message: bytes) -> None:
        self.message = message

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine, self.message]

    def next_call(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def parsers() -> Iterator[dict[str, tuple[bytes, Callable[[bytes], Any]]]]:
    """By name: good bytes, and what reads them."""
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(crossrail.Worker(context(), name="a", admit=True))
        b = stack.enter_context(crossrail.Worker(context(), name="b", admit=True))

        def cache(worker: crossrail.Worker, heads: int, **options: Any) -> PagedCache:
            layers = [np.zeros((6, 4, heads, 8), np.uint16) for _ in range(3)]
            return stack.enter_context(PagedCache(worker, layers, head_axis=2, **options))

        its, mine = cache(a, 4), cache(b, 2, shard=(0, 2))
        endpoint = b.connect(a.address())
        remote = mine.remote(its.describe(), endpoint)
        weights = [np.zeros(1000, np.uint8), np.zeros(77, np.uint8)]
        receiver = stack.enter_context(Receiver(context(), weights, name="r"))
        own = receiver._weights
        relay = _spread._Relay(own)
        plan = packed("spread", do="plan", token=own.token, piece=64, stall=1.0, above=[own.describe().hex()])
        handled = _handler(relay)
        agent = nixl_agent("reader")
        described = nixl_agent("writer").get_agent_metadata()
        rows = bindings.nixlRegDList(bindings.DRAM_SEG, [(1, 2, 3, "abc"), (4, 5, 6, "")])
        call = Call(7, 8, 2)._FORM.pack(7, 8, 2, 0, 0, 0, 0, 0, 3, b"abc")
        yield {
            "cache": (its.describe(), lambda data: mine.remote(data, endpoint).prepare("pull", [0], [0])),
            "lease": (
                bytes(stack.enter_context(its.lend([1, 2]))),
                lambda data: remote.borrow(data).prepare("pull", [0, 1]),
            ),
            "weights": (own.describe(), lambda data: own.parse(data, "receive")),
            "plan": (plan, handled),
            "have": (packed("spread", do="have", pieces=3), handled),
            "lost": (packed("spread", do="lost", generation=3), handled),
            "over": (packed("spread", do="over", lost={"r1": "why"}), handled),
            "notification": (json.dumps(["name", "message"]).encode(), mooncake._notification),
            "metadata": (described + b"{}", agent.add_remote_agent),
            "rows": (_lists.to_bytes(rows) + b"{}", agent.deserialize_descs),
            "call": (call + b"{}", lambda data: Call(7, 8, 2).exchange(OneMessage(data))),
            "sizes": (b"[[1,2,3,4]]", lambda data: agreed_sizes(OneMessage(data), 100)),
        }


def _handler(relay: _spread._Relay) -> Callable[[bytes], None]:
    """Handles one message as if the connection to source and upstream had received it."""

    class From:
        peer, endpoint, generation = "r", 0, 1

    class Upstream:
        id, peer, is_alive = 0, "r", True

        def close(self, timeout: float) -> None:
            pass

    def handle(data: bytes) -> None:
        relay.origin = relay.origin and "r"
        relay.endpoint, relay.upstream, relay.source_id = Upstream(), 3, 0  # type: ignore[assignment]
        relay._handle(From(), unpacked("spread", data, "spread"))  # type: ignore[arg-type]

    return handle


NAMES = [
    "cache",
    "lease",
    "weights",
    "plan",
    "have",
    "lost",
    "over",
    "notification",
    "metadata",
    "rows",
    "call",
    "sizes",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_parser_raises_our_errors_only(
    parsers: dict[str, tuple[bytes, Callable[[bytes], Any]]], name: str
) -> None:
    assert set(NAMES) == set(parsers)
    good, parse = parsers[name]
    rng, refused = random.Random(name), 0
    for _ in range(600):
        data = mangled(good, rng)
        try:
            parse(data)
        except (crossrail.CrossrailError, *ERRORS):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {data[:2000]!r}") from error
    assert refused > 20


def test_our_own_errors_pass_a_parser() -> None:
    def never() -> crossrail.CrossrailError:
        raise AssertionError

    with pytest.raises(crossrail.MismatchError), parsing(never):
        raise crossrail.MismatchError("as it was")
    for error in (ZeroDivisionError, MemoryError, RecursionError, KeyError):
        with pytest.raises(crossrail.UsageError), parsing(lambda: crossrail.UsageError("instead")):
            raise error


def test_a_description_does_not_cost_more_than_its_bytes_could_mean() -> None:
    tokens, items, layers = 512, 128, 16
    with (
        crossrail.Worker(context(), name="a", admit=True) as a,
        crossrail.Worker(context(), name="b", admit=True) as b,
    ):
        here = [np.zeros((2, tokens, 1, items), np.uint8) for _ in range(layers)]
        there = [np.zeros((2, tokens, 2, items), np.uint8) for _ in range(layers)]
        flat = [np.zeros((2, tokens * items), np.uint8) for _ in range(layers)]
        with PagedCache(a, there, head_axis=2) as its:
            data = its.describe()
            start = data.index(b"{")
            said = json.loads(data[start:])
            for part in said["shape"][2]:
                part[3], part[5] = tokens * items, 1  # `before`, `rest`: each item is a row
            bomb = data[:start] + json.dumps(said).encode()
            # With its own axes named and without.
            for mine in (
                PagedCache(b, here, head_axis=2, shard=(0, 2)),
                PagedCache(b, flat, head_axis=1, shard=(0, 2)),
            ):
                with mine:
                    tracemalloc.start()
                    try:
                        with pytest.raises(crossrail.CrossrailError):
                            mine.remote(bomb).prepare("pull", [0], [0])
                        assert tracemalloc.get_traced_memory()[1] < 32 << 20
                    finally:
                        tracemalloc.stop()
