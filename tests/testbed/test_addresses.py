"""Addresses to listen at: the IPv6 wildcard, link-local addresses, and this machine's own; and none at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from bed import SIDES, Bed
from ends import PORT, SECRET, Pair

LOCAL = """
import crossrail
context = crossrail.Context(tls="tcp", timeout=10)
with crossrail.Worker(context, listen="0.0.0.0:0") as a, crossrail.Worker(context, listen="0.0.0.0:0") as b:
    lanes = a.connect(b.address()).lanes()
    print(*(lane["name"] for lane in lanes if "messages" not in lane["name"]))
"""

MISSED = """
import crossrail
there = crossrail.Context(tls="tcp", timeout=10)
here = crossrail.Context(tls="tcp", net_devices={}, timeout=10, log="error")
with crossrail.Worker(there, listen="127.0.0.1:0") as a, crossrail.Worker(here) as b:
    ways = b.connect(a.address()).explain().candidates
    print(*(way["lane"] for way in ways if way["missed"]))
"""

BEYOND = """
import crossrail
there = crossrail.Context(tls="tcp", timeout=10)
here = crossrail.Context(tls="tcp", net_devices="eth0", timeout=10)
with crossrail.Worker(there, listen="127.0.0.1:0") as a, crossrail.Worker(here) as b:
    try:
        b.connect(a.address())
    except crossrail.CrossrailError as error:
        print(error)
"""


def exchange(bed: Bed, listen: str, connect: str) -> None:
    """A transfer between two ends with these addresses."""
    pair = Pair(bed, "latency", settings={"CROSSRAIL_LOG": "warn"})
    listening = pair.start("left", f"--listen={listen}", without="CROSSRAIL_CONTROL_DEVICE")
    try:
        listening.wait_to_say("listening on")
        driving = pair.start(
            "right", f"--connect={connect}", "--sizes=8", "--iters=20", without="CROSSRAIL_CONTROL_DEVICE"
        )
        try:
            ended = driving.end()
        finally:
            driving.kill()
        assert ended.code == 0, ended.said
        assert listening.end(10).code == 0
    finally:
        listening.kill()


@pytest.mark.parametrize("version", [4, 6])
def test_the_ipv6_wildcard_stands_for_all_addresses(make_bed: Callable[..., Bed], version: int) -> None:
    bed = make_bed((2000,))
    address = bed.address("left", "eth0", 6 if version == 6 else 4)
    exchange(bed, f"[::]:{PORT}", f"[{address}]:{PORT}" if version == 6 else f"{address}:{PORT}")


def test_link_local_addresses_with_their_zone(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    for number, side in enumerate(SIDES, 1):
        # Addresses that the kernel itself has made cannot be used until it knows that nobody else has them.
        add = ["ip", "-n", bed.namespace[side], "addr", "add", f"fe80::77:{number}/64", "dev", "eth0", "nodad"]
        subprocess.run(add, check=True)
    address = f"[fe80::77:1%eth0]:{PORT}"
    exchange(bed, address, address)


def inside(bed: Bed, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    return subprocess.run(
        bed.inside("left", sys.executable, *command),
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_secret_does_not_move_a_run_on_one_machine_from_loopback(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    done = inside(bed, "-c", LOCAL, CROSSRAIL_SECRET=SECRET)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["tcp/lo"], ""), done


def test_a_peer_on_loopback_leaves_out_only_rails_that_were_asked_for(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    for asked, missed in ("None", []), ("'^eth1'", []), ("'lo,eth0'", ["tcp/eth0"]):
        done = inside(bed, "-c", MISSED.format(asked), CROSSRAIL_SECRET=SECRET)
        assert (done.returncode, done.stdout.split()) == (0, missed), done


def test_a_peer_on_loopback_only_is_told_how_to_listen_beyond(make_bed: Callable[..., Bed]) -> None:
    done = inside(make_bed((2000,)), "-c", BEYOND, CROSSRAIL_SECRET=SECRET)
    assert done.returncode == 0, done.stderr
    assert "no rail: our devices are eth0, the peer offers lo" in done.stdout
    assert "listens on loopback only" in done.stdout
    assert "--listen 0.0.0.0" in done.stdout and "CROSSRAIL_SECRET" in done.stdout


def test_without_loopback_shared_memory_works_and_info_prints(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    for nic in ("lo", "eth0", "eth1"):
        bed.set_down("left", nic)
    info = inside(bed, "-m", "crossrail", "info", "--json=-")
    assert info.returncode == 0, info.stderr
    shown = json.loads(info.stdout)["info"]
    tcp = next(one for one in shown["transports"] if one["name"] == "tcp")
    assert not tcp["usable"] and "no network device is up" in tcp["reason"] and "ip link set" in tcp["fix"]
    assert {device["reason"] for device in shown["devices"]} == {"it is down"}
    for tls in ("shm", "all"):
        done = inside(bed, "-m", "crossrail", "bench", "latency", "--sizes=8", "--iters=20", CROSSRAIL_TLS=tls)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "shm" in done.stdout
    failed = inside(bed, "-m", "crossrail", "bench", "latency", "--sizes=8", "--timeout=2s", CROSSRAIL_TLS="tcp")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
