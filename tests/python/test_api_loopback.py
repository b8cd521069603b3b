"""Where loopback has only IPv6, workers, stores and the ends of benches listen at ::1 by default."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

WORKERS = """
import crossrail

context = crossrail.Context(tls="tcp", timeout=20)
a, b = crossrail.Worker(context), crossrail.Worker(context)
assert all(address.startswith("[::1]:") for address in a.control_addresses()), a
to_b = a.connect(b.address())
b.accept()
target = bytearray(8)
inbound = b.recv(target)
to_b.send(b"12345678").wait()
assert inbound.wait().bytes == 8 and target == b"12345678"
"""

GROUP = """
import crossrail

with crossrail.Group(size=1) as group:
    assert group.store_address.startswith("tcp://[::1]:"), group.store_address
"""

STORE = """
import subprocess, sys
import crossrail

command = [sys.executable, "-m", "crossrail", "store", "--listen", ":0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("tcp://[::1]:"), address
        with crossrail.Group(store=address, rank=0, size=1):
            pass
    finally:
        process.terminate()
"""

BENCHES = [
    ["latency", "--iters", "20", "--warmup", "1", "--transport", "tcp", "--size", "8"],
    ["p2p", "--iters", "2", "--warmup", "1", "--transport", "tcp", "--size", "64K"],
    ["ep", "--num-processes", "2", "--tokens", "8", "--hidden", "128", "--iters", "5", "--warmup", "1"],
    ["control", "--num-processes", "2", "--rounds", "1", "--tokens", "8", "--hidden", "128", "--experts-per-rank", "4"],
    ["mesh", "--num-processes", "2", "--iters", "2", "--warmup", "1", "--size", "64K"],
]


ONLY_IPV6 = "ip link set lo up && ip -4 address flush dev lo"


def run_there(*command: str, prepare: str = ONLY_IPV6) -> None:
    done = end_there(*command, prepare=prepare)
    assert done.returncode == 0, done.stderr


def end_there(*command: str, prepare: str) -> subprocess.CompletedProcess[str]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and iproute2")
    command = ("unshare", "--net", "sh", "-c", f'{prepare} && exec "$@"', "sh", *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", [WORKERS, GROUP, STORE], ids=["workers", "a group", "a store"])
def test_they_meet_where_loopback_has_only_ipv6(script: str) -> None:
    run_there(sys.executable, "-c", script)


@pytest.mark.parametrize("options", BENCHES, ids=lambda options: options[0])
def test_benches_run_where_loopback_has_only_ipv6(options: list[str]) -> None:
    run_there(sys.executable, "-m", "crossrail", "bench", *options)


def test_latency_over_shared_memory_needs_no_address() -> None:
    bench = [sys.executable, "-m", "crossrail", "bench", "latency", "--size", "8", "--iters", "20", "--warmup", "1"]
    run_there("env", "CROSSRAIL_TLS=shm", *bench, prepare="ip link set lo down")


@pytest.mark.parametrize("options", BENCHES, ids=lambda options: options[0])
def test_loopback_that_is_down_is_named(options: list[str]) -> None:
    done = end_there(sys.executable, "-m", "crossrail", "bench", *options, prepare="ip link set lo down")
    assert done.returncode == 1
    assert "etwork is unreachable" in done.stderr and "another process" not in done.stderr
    assert "ip link set lo up" in done.stderr and "firewall" not in done.stderr


def test_a_group_does_not_wait_for_loopback_that_is_down() -> None:
    done = end_there(sys.executable, "-c", "import crossrail; crossrail.Group(size=1)", prepare="ip link set lo down")
    assert "etwork is unreachable" in done.stderr and "ip link set lo up" in done.stderr
    assert "tried for" not in done.stderr
