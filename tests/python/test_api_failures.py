"""What fails, and how: dead peers, unreachable ones, secrets, settings; and the exceptions themselves."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from free_ports import free_port
from pairs import Pair

import crossrail
from crossrail import errors

PEER = """
import sys, crossrail
worker = crossrail.Worker(crossrail.Context(tls=sys.argv[2], log="error"), name="doomed")
endpoint = worker.connect(sys.argv[1])
endpoint.send(b"before", tag=1).wait()
region = worker.register(bytearray(1 << 20))
endpoint.send(bytes(region.key()), tag=2).wait()
worker.recv(bytearray(1), tag=99).wait(60)
"""


@contextlib.contextmanager
def peer(worker: crossrail.Worker, transport: str) -> Iterator[tuple[subprocess.Popen[bytes], crossrail.Endpoint]]:
    """A process with one endpoint to ``worker``; killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", PEER, worker.control_addresses()[0], transport])
    try:
        yield process, worker.accept()
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("ucx")
def test_a_killed_peer_fails_what_is_in_flight_over_ucx(connected: Callable[..., Pair]) -> None:
    pair = connected(tls="ucx:tcp")
    with peer(pair.b, "ucx:tcp") as (process, doomed):
        pair.b.recv(bytearray(10), tag=1, source=doomed).wait()
        raw = bytearray(100)
        size = pair.b.recv(raw, tag=2, source=doomed).wait().bytes
        key = crossrail.RegionKey.from_bytes(bytes(raw[:size]))
        # Reads and writes of its memory, one behind the other, until it is gone.
        megabyte = bytearray(1 << 20)
        requests = [doomed.write(megabyte, key) if at % 2 else doomed.read(megabyte, key) for at in range(64)]
        requests[0].wait()
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(crossrail.PeerDeadError, match="doomed"):
            [request.wait() for request in [*requests, doomed.write(megabyte, key)]]
        assert time.monotonic() - began < 20
        pair.to_b.send(b"alive", tag=4)
        assert pair.b.recv(bytearray(10), tag=4).wait().peer == "a"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_peer_fails_its_own_requests_only(connected: Callable[..., Pair], transport: str) -> None:
    pair = connected(tls=transport)
    with peer(pair.b, transport) as (process, doomed):
        early = pair.b.recv(bytearray(10), tag=1, source=doomed)
        assert early.wait().bytes == 6
        raw = bytearray(100)
        size = pair.b.recv(raw, tag=2, source=doomed).wait().bytes
        key = crossrail.RegionKey.from_bytes(bytes(raw[:size]))
        doomed.write(b"fine", key).wait()
        from_doomed = pair.b.recv(bytearray(10), tag=3, source=doomed)
        from_anybody = pair.b.recv(bytearray(10), tag=4)
        to_doomed = [doomed.send(bytes(size), tag=5) for size in (8, 4 << 20)]
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        for request in [from_doomed, *to_doomed]:
            with pytest.raises(crossrail.PeerDeadError) as caught:
                request.wait()
            assert caught.value.peer == "doomed" and "doomed" in str(caught.value)
        assert time.monotonic() - began < 30
        assert not doomed.is_alive
        for attempt in (
            lambda: doomed.send(b"x").wait(),
            lambda: doomed.write(b"x", key).wait(),
            lambda: doomed.read(bytearray(1), key).wait(),
            lambda: pair.b.recv(bytearray(1), source=doomed).wait(),
        ):
            with pytest.raises((crossrail.PeerDeadError, crossrail.ClosedError)):
                attempt()
        # Everybody else goes on, and the receive from anybody still waits.
        assert not from_anybody.is_done()
        pair.to_b.send(b"alive", tag=4).wait()
        assert from_anybody.wait().peer == "a"
        assert [endpoint.peer for endpoint in pair.b.endpoints()] == ["a"]


def test_a_peer_that_stands_still_for_a_while_is_not_lost(connected: Callable[..., Pair]) -> None:
    """Its kernel answers for it: with nothing under way, and with its buffers full."""
    pair = connected(tls="tcp")
    with peer(pair.b, "tcp") as (process, still):
        pair.b.recv(bytearray(10), tag=1, source=still).wait()
        raw = bytearray(100)
        size = pair.b.recv(raw, tag=2, source=still).wait().bytes
        key = crossrail.RegionKey.from_bytes(bytes(raw[:size]))
        for writes in ([bytes(8)], [bytes(1 << 20)] * 32):
            process.send_signal(signal.SIGSTOP)
            # Its threads stop one by one; the last one's stop is reported.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            requests = [still.write(one, key) for one in writes]
            with pytest.raises(crossrail.TimeoutError):
                requests[0].wait(1.5)  # several times as long as a silent lane is given
            assert still.is_alive and len(still.lanes()) == 2, still.lanes()
            process.send_signal(signal.SIGCONT)
            assert sum(request.wait().bytes for request in requests) == sum(map(len, writes))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_dead_peer_sent_is_still_received(connected: Callable[..., Pair], transport: str) -> None:
    pair = connected(tls=transport)
    with peer(pair.b, transport) as (process, doomed):
        # Its first message has been matched, so it is alive and sends; the second waits unexpected.
        pair.b.recv(bytearray(10), tag=1).wait()
        deadline = time.monotonic() + 30
        while doomed.lanes()[0]["rx_bytes"] < 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        while doomed.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not doomed.is_alive
        assert pair.b.recv(bytearray(100), tag=2).wait().bytes > 20


def test_closing_an_endpoint(pair: Pair) -> None:
    inbound = pair.b.recv(bytearray(5))
    outbound = pair.to_b.send(b"first")
    pair.to_b.close()
    assert outbound.wait().bytes == 5 and inbound.wait().bytes == 5, "what was under way is finished"
    with pytest.raises((crossrail.ClosedError, crossrail.PeerDeadError)):
        pair.to_b.send(b"second").wait()
    deadline = time.monotonic() + 30
    while pair.to_a.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises((crossrail.ClosedError, crossrail.PeerDeadError)):
        pair.to_a.send(b"third").wait()
    pair.to_b.close()


def test_closing_with_something_unfinished_says_so(pair: Pair) -> None:
    outbound = pair.to_b.send(b"nobody receives this")
    began = time.monotonic()
    with pytest.raises(crossrail.TimeoutError):
        pair.to_b.close(timeout=0.1)
    assert time.monotonic() - began < 20
    with pytest.raises(crossrail.CrossrailError):
        outbound.wait()


def test_a_closed_worker(shm: Pair) -> None:
    request = shm.b.recv(bytearray(1))
    shm.b.close()
    shm.b.close()
    with pytest.raises(crossrail.ClosedError):
        request.wait()
    for call in (
        lambda: shm.b.recv(bytearray(1)),
        lambda: shm.b.accept(1),
        lambda: shm.b.register(bytearray(1)),
        lambda: shm.b.connect(shm.a.address()),
    ):
        with pytest.raises(crossrail.ClosedError):
            call()


def test_a_closed_worker_dials_nobody(connected: Callable[..., Pair], capfd: pytest.CaptureFixture[str]) -> None:
    pair = connected(log="warn")
    pair.b.close()
    with pytest.raises(crossrail.ClosedError):
        pair.b.connect(pair.a.address())
    pair.a.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("to", [5, None, 1.5])
def test_what_is_no_address(shm: Pair, to: Any) -> None:
    with pytest.raises(crossrail.UsageError, match=rf"an? {type(to).__name__} is not an address; pass 'host:port'"):
        shm.a.connect(to)


def test_nobody_there(shm: Pair) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(crossrail.UnreachableError) as caught:
        shm.a.connect(address, timeout=5)
    assert address in str(caught.value)
    assert caught.value.reason == "not_listening"


def test_somebody_who_says_nothing(shm: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(crossrail.TimeoutError):
            shm.a.connect(address, timeout=0.3)
        assert time.monotonic() - began < 20


def test_somebody_who_says_something_else(shm: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                connection.settimeout(30)
                with contextlib.suppress(ConnectionResetError):
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(crossrail.ProtocolError):
            shm.a.connect(f"127.0.0.1:{server.getsockname()[1]}", timeout=30)
        thread.join()


@pytest.mark.parametrize("to", ["", "127.0.0.1:99999", b"", b"\x00\x01\x02"])
def test_what_is_no_address_is_refused(shm: Pair, to: str | bytes) -> None:
    with pytest.raises(crossrail.UsageError):
        shm.a.connect(to, timeout=5)


def test_a_host_nobody_knows(shm: Pair) -> None:
    with pytest.raises(crossrail.UnreachableError, match="no-such-host"):
        shm.a.connect("no-such-host.invalid:7000", timeout=5)


def test_a_wrong_secret(connected: Callable[..., Pair]) -> None:
    right = connected(secret="one")
    wrong = crossrail.Context(secret="another", timeout=10, log="error")
    with crossrail.Worker(wrong) as worker, pytest.raises(crossrail.RefusedError) as caught:
        worker.connect(right.b.control_addresses()[0])
    assert caught.value.reason == "secret_wrong"
    pair_still_talks = right.b.recv(bytearray(1))
    right.to_b.send(b"!").wait()
    assert pair_still_talks.wait().bytes == 1


def test_listening_beyond_loopback_needs_a_secret() -> None:
    with pytest.raises(crossrail.ConfigError, match=r"(?i)secret"):
        crossrail.Worker(crossrail.Context(log="error"), listen="0.0.0.0:0")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(crossrail.UsageError) as caught:
            crossrail.Worker(crossrail.Context(log="error"), listen=address)
        assert str(taken.getsockname()[1]) in str(caught.value)
        assert caught.value.reason == "port_in_use"


def test_a_listening_address_that_is_none() -> None:
    for listen in ("7000", "localhost", ["127.0.0.1:0", "127.0.0.1"]):
        with pytest.raises(crossrail.UsageError, match="address with a port"):
            crossrail.Worker(crossrail.Context(), listen=listen)


def test_require_fails_instead_of_falling_back(shm: Pair) -> None:
    with pytest.raises(crossrail.CrossrailError, match="tcp") as caught:
        shm.a.connect(shm.b.address(), require="tcp", timeout=5)
    assert isinstance(caught.value, (crossrail.UnsupportedError, crossrail.ConfigError, crossrail.MismatchError))
    with pytest.raises((crossrail.ConfigError, crossrail.UsageError), match="carrier-pigeon"):
        shm.a.connect(shm.b.address(), require="carrier-pigeon", timeout=5)
    with pytest.raises(crossrail.UnsupportedError, match=r"require=cuda_ipc: (no GPU|CROSSRAIL_TLS=shm leaves it out)"):
        shm.a.connect(shm.b.address(), require="cuda_ipc", timeout=5)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tls": "smoke"}, "CROSSRAIL_TLS"),
        ({"chunk": "2MB"}, "CROSSRAIL_CHUNK"),
        ({"window": 0}, "CROSSRAIL_WINDOW"),
        ({"timeout": -1}, "CROSSRAIL_TIMEOUT"),
        ({"net_devices": "eth99"}, "eth99"),
        ({"chunks": 1}, "chunks"),
        ({"window": True}, "bool"),
        ({"secret": ""}, "CROSSRAIL_SECRET"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], names: str) -> None:
    with pytest.raises(crossrail.ConfigError, match=names) as caught:
        crossrail.Context(**settings)  # type: ignore[arg-type]
    assert caught.value.kind == "config"


def test_settings_from_keywords_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_CHUNK", "1M")
    monkeypatch.setenv("CROSSRAIL_WINDOW", "8")
    shown = crossrail.Context(window=4, net_devices=["127.0.0.1", "127.0.0.2"], secret="hush").settings()
    assert shown["CROSSRAIL_CHUNK"] == "1M" and shown["CROSSRAIL_WINDOW"] == "4"
    assert shown["CROSSRAIL_NET_DEVICES"] == "127.0.0.1,127.0.0.2"
    assert "hush" not in str(shown)
    assert crossrail.Context(environment=False).settings()["CROSSRAIL_CHUNK"] == "2M"
    assert "chunk=1M" in repr(crossrail.Context())
    monkeypatch.setenv("CROSSRAIL_CHUNKS", "1M")
    with pytest.raises(crossrail.ConfigError, match=r"CROSSRAIL_CHUNKS.*did you mean CROSSRAIL_CHUNK"):
        crossrail.Context()
    reference = crossrail.settings_reference()
    assert {setting["name"] for setting in reference} == set(shown)
    assert all(setting["doc"] and setting["accepts"] for setting in reference)


def test_sizes() -> None:
    assert crossrail.parse_size("64K") == 65536 and crossrail.format_size(65536) == "64K"
    assert crossrail.parse_sizes("1:8") == [1, 2, 4, 8] and crossrail.parse_sizes("3,1K") == [3, 1024]
    with pytest.raises(crossrail.UsageError):
        crossrail.parse_size("64KB")


def test_explain_lanes_and_info(pair: Pair) -> None:
    why = pair.to_b.explain()
    assert why.peer == "b" and why.small and why.large and "selected" in str(why)
    chosen = [candidate for candidate in why.candidates if candidate["chosen_for"]]
    out = [candidate for candidate in why.candidates if candidate["reason"]]
    assert chosen and all(candidate["score_us_8b"] is not None for candidate in chosen)
    assert {candidate["transport"] for candidate in chosen} <= {"shm", "tcp"}
    assert len(out) + len(chosen) >= len(why.candidates) - 1
    pair.b.recv(bytearray(1 << 16))
    pair.to_b.send(bytes(1 << 16)).wait()
    lanes = pair.to_b.lanes()
    assert lanes and all(lane["alive"] for lane in lanes) and sum(lane["tx_bytes"] for lane in lanes) > 0
    info = pair.context.info()
    assert {transport["name"] for transport in info["transports"]} == {
        "self",
        "shm",
        "tcp",
        "cuda_ipc",
        "fabric",
        "ucx",
    }
    assert info["cpus"] and info["machine"]["memory_total"] > 0 and info["settings"]


def test_every_error_has_a_class_and_survives_pickling() -> None:
    assert len(errors.__all__) == 16
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.CrossrailError) and getattr(crossrail, name) is kind
        error = kind("it failed; try again", operation="send", peer="b", progress=(1, 2), hint="try again")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind and str(copy) == "it failed; try again"
        assert (copy.operation, copy.peer, copy.lane, copy.progress) == ("send", "b", None, (1, 2))
        assert kind.__doc__


AT_EXIT = """
import crossrail
context = crossrail.Context(log="error")
a, b = crossrail.Worker(context), crossrail.Worker(context)
to_b = a.connect(b.address())
memory, region = context.alloc(1 << 20), b.register(bytearray(10))
b.recv(bytearray(5), tag=1).on_complete(print)
pending = [b.recv(bytearray(1 << 20), tag=2), to_b.send(bytes(1 << 20), tag=3)]
print("end")
"""


def test_the_interpreter_ends_with_everything_open() -> None:
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 and ended.stdout.startswith("end") and not ended.stderr, ended
