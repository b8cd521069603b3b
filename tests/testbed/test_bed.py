"""The bed itself: links, shaping, failures, and that nothing of it stays."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from bed import Bed

MAKE = Callable[..., Bed]

_SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 7000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as s:
    print("ready", flush=True)
    connection = s.accept()[0]
    total = 0
    while data := connection.recv(1 << 20):
        total += len(data)
    print(total, flush=True)
"""
_SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=2) as s:
    start = time.monotonic()
    s.sendall(bytes(int(sys.argv[2])))
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
    print(time.monotonic() - start)
"""


def transfer(bed: Bed, nic: str, num_bytes: int, version: int = 4) -> float:
    """Seconds that a plain socket takes to move so many bytes over ``nic``."""
    address = bed.address("left", nic, 6 if version == 6 else 4)
    with subprocess.Popen(
        bed.inside("left", sys.executable, "-c", _SINK, address), stdout=subprocess.PIPE, text=True
    ) as sink:
        try:
            assert sink.stdout is not None
            assert sink.stdout.readline() == "ready\n"
            source = bed.inside("right", sys.executable, "-c", _SOURCE, address, str(num_bytes))
            done = subprocess.run(source, capture_output=True, text=True, timeout=20, check=False)
            if done.returncode != 0:
                raise ConnectionError(done.stderr)
            assert int(sink.stdout.readline()) == num_bytes
        finally:
            sink.kill()
    return float(done.stdout)


@pytest.mark.parametrize("version", [4, 6])
def test_a_link_carries_its_rate_and_no_more(make_bed: MAKE, version: int) -> None:
    bed = make_bed((400,))
    seconds = transfer(bed, "eth1", 20_000_000, version)
    assert 0.39 < seconds < 1.5, "20 MB at 400 Mbit/s take 0.4 s"
    assert bed.sent_bytes("right", "eth1") > 20_000_000
    assert bed.sent_bytes("right", "eth0") < 100_000


def test_a_link_that_is_down_carries_nothing_until_it_is_up_again(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    bed.set_down("left", "eth1")
    with pytest.raises((ConnectionError, subprocess.TimeoutExpired)):
        transfer(bed, "eth1", 1000)
    assert transfer(bed, "eth2", 1000) < 5
    bed.set_up("left", "eth1")
    assert transfer(bed, "eth1", 1000) < 5


def test_a_black_hole_keeps_its_carrier_and_swallows_everything(make_bed: MAKE) -> None:
    bed = make_bed((1000,))
    bed.swallow("eth1")
    state = subprocess.run(
        bed.inside("right", "cat", "/sys/class/net/eth1/carrier"), capture_output=True, text=True, check=True
    )
    assert state.stdout.strip() == "1"
    with pytest.raises((ConnectionError, subprocess.TimeoutExpired)):
        transfer(bed, "eth1", 1000)


def test_nothing_is_left_even_after_a_failure(make_bed: MAKE) -> None:
    def namespaces() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    make_bed((1000,))  # skips or fails where a bed cannot be made
    interfaces = {name for _, name in socket.if_nameindex()}
    bed = Bed((1000,))
    with pytest.raises(ZeroDivisionError), bed:
        assert bed.namespace["left"] in namespaces()
        _ = 1 / 0
    assert bed.namespace["left"] not in namespaces()
    assert bed.namespace["right"] not in namespaces()
    assert {name for _, name in socket.if_nameindex()} == interfaces


def test_a_bed_that_cannot_be_finished_is_removed(make_bed: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = make_bed((1000,))  # skips or fails where a bed cannot be made
    broken = Bed((1000,))
    monkeypatch.setattr(broken, "address", lambda *_, **__: "no address")
    with pytest.raises(RuntimeError, match="no address"), broken:
        pytest.fail("the bed should not exist")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert bed.namespace["left"] in left
    assert broken.namespace["left"] not in left


def test_a_queue_of_its_own_and_a_congestion_control(make_bed: MAKE) -> None:
    bed = make_bed((100, 100), queues=("1ms", "20ms"), congestion="reno")
    shown = subprocess.run(
        ["tc", "-n", bed.namespace["right"], "-j", "qdisc", "show"], capture_output=True, text=True, check=True
    )
    waits = {one["dev"]: one["options"]["lat"] for one in json.loads(shown.stdout) if one["kind"] == "tbf"}
    assert waits["eth2"] == pytest.approx(20 * waits["eth1"], rel=0.1), waits
    name = bed.inside("left", "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    assert subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip() == "reno"


def test_queues_for_other_links_are_refused() -> None:
    with pytest.raises(ValueError, match="give one for each"):
        Bed((1000, 1000), queues=("20ms",))


@pytest.mark.parametrize("mbit", [(), (0,), (1000, -1)])
def test_rates_that_make_no_sense_are_refused(mbit: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Bed(mbit)
