"""`crossrail doctor --peer` in the test bed: the faults of rails are named, with what mends each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bed import SIDES, Bed, Side
from commands import clean_environment
from ends import SECRET, End, Pair

MAKE = Callable[..., Bed]
DOCTOR = (sys.executable, "-m", "crossrail", "doctor")
SETTINGS = {"CROSSRAIL_SECRET": SECRET, "CROSSRAIL_NET_DEVICES": "^eth0"}
PORT = 18179
RUN_S = 60.0


@contextmanager
def listening(bed: Bed) -> Iterator[str]:
    """A doctor that listens at the left; its address on the control link."""
    where = bed.address("left", "eth0")
    end = End(bed.inside("left", *DOCTOR, f"--listen={where}"), SETTINGS)
    try:
        end.wait_to_say(f"listening on {where}:{PORT}")
        yield where
    finally:
        end.kill()


def examined(bed: Bed, only: str = "settings", status: int = 1) -> dict[str, Any]:
    """Lines about rails that the right doctor prints for the left one; checks that it ends with ``status``."""
    with listening(bed) as where:
        command = bed.inside("right", *DOCTOR, f"--peer={where}", f"--only={only}", "--seconds=0.2", "--json=-")
        environment = clean_environment(SETTINGS)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return dict(json.loads(done.stdout))


def problems(whole: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The problems by check and rail, but for what a busy machine shares."""
    bad = [one for one in whole["findings"] if one["severity"] in ("error", "warning")]
    return {(one["id"], one["subject"]): one for one in bad if one["id"] not in ("rail-shared", "rail-loss")}


def ip(bed: Bed, side: Side, *words: str) -> None:
    subprocess.run(bed.inside(side, "ip", *words), check=True, capture_output=True)


def test_four_faults_are_named_with_what_mends_them(make_bed: MAKE) -> None:
    bed = make_bed((200, 20, 200, 200))
    bed.set_down("left", "eth1")
    ip(bed, "right", "route", "add", f"{bed.address('left', 'eth3')}/32", "dev", "eth0")
    ip(bed, "left", "link", "set", "eth4", "mtu", "1000")
    whole = examined(bed)
    found = problems(whole)
    rails = {"down": "eth1", "speed": "eth2", "route": "eth3", "mtu": "eth4"}
    assert set(found) == {(f"rail-{fault}", f"{rail} to {rail}") for fault, rail in rails.items()}, found
    by_fault = {fault: found[f"rail-{fault}", f"{rail} to {rail}"] for fault, rail in rails.items()}
    there = f"   # at {bed.address('left', 'eth0')}"
    assert by_fault["down"]["fix"] == f"ip link set eth1 up{there}"
    assert "eth1 is down at" in by_fault["down"]["evidence"]
    assert by_fault["route"]["fix"] == "ip route del 10.77.3.1/32"
    assert "leave by eth0 (routing entry 10.77.3.1/32), not by eth3" in by_fault["route"]["evidence"]
    assert by_fault["mtu"]["fix"] == f"ip link set eth4 mtu 1500{there}"
    assert "1500 here and 1000 there; packets above 1000 bytes do not arrive" in by_fault["mtu"]["evidence"]
    assert by_fault["speed"]["fix"].startswith("tc qdisc show dev eth2; tc qdisc del dev eth2 root")
    assert "where the others carry" in by_fault["speed"]["evidence"]
    rates = {way["mine"]["name"]: way["alone"] for way in whole["survey"]["ways"] if way["used"]}
    assert rates["eth1"] is None
    assert rates["eth2"][0]["gbit_per_s"] < 0.05 < rates["eth4"][0]["gbit_per_s"]


def test_what_devices_and_rails_show_of_one_fault_is_one_finding(make_bed: MAKE) -> None:
    bed = make_bed((200, 200, 200, 200))
    bed.set_down("right", "eth1")
    ip(bed, "right", "route", "replace", "10.77.2.0/24", "dev", "eth0")
    ip(bed, "right", "link", "set", "eth3", "mtu", "1000")
    found = problems(examined(bed, "nic-link,nic-mtu,nic-address,nic-route"))
    ids = {key: [(one["id"], one["subject"]) for one in finding["also"]] for key, finding in found.items()}
    assert ids == {
        ("nic-link", "eth1"): [("rail-down", "eth1 to eth1")],
        ("nic-route", "eth2"): [("rail-route", "eth2 to eth2")],
        ("nic-mtu", "eth3"): [("rail-mtu", "eth3 to eth3")],
    }
    assert {finding["severity"] for finding in found.values()} == {"error"}


def test_black_holes_and_routes_of_the_other_end(make_bed: MAKE) -> None:
    bed = make_bed((200, 200, 200))
    bed.swallow("eth2")
    ip(bed, "left", "route", "add", "unreachable", f"{bed.address('right', 'eth3')}/32")
    whole = examined(bed)
    found = problems(whole)
    hole = found.pop(("rail-reach", "eth2 to eth2"))
    assert "no answer within 1 s: packets vanish" in hole["evidence"]
    assert hole["fix"].startswith("ip neigh show dev eth2")
    back = found.pop(("rail-route", "eth3 to eth3"))
    assert "there is no way from eth3 to 10.77.3.2" in back["evidence"]
    assert back["fix"].endswith(f"# at {bed.address('left', 'eth0')}")
    assert found == {}
    fine = {one["id"] for one in whole["findings"] if (one["severity"], one["subject"]) == ("ok", "eth1 to eth1")}
    assert fine == {f"rail-{what}" for what in ("down", "route", "reach", "data", "mtu", "speed", "loss")}


def test_an_address_that_both_ends_have_cuts_off_neither_programs_nor_the_doctor(make_bed: MAKE) -> None:
    """As of a bridge for containers: it does not mean that both ends share a network namespace and its loopback."""
    bed = make_bed((400, 400))
    for side in SIDES:
        ip(bed, side, "link", "add", "docker0", "type", "bridge")
        ip(bed, side, "address", "add", "172.17.0.1/16", "dev", "docker0")
        ip(bed, side, "link", "set", "docker0", "up")
    row = Pair(bed, rails=["^eth0"]).run("--size=4M", "--iters=2").row
    assert {lane.device for lane in row.lanes if lane.bytes} == {"eth1", "eth2"}
    seen = examined(bed, status=0)
    carried = {one["subject"] for one in seen["findings"] if one["id"] == "rail-data" and one["severity"] == "ok"}
    assert carried == {"eth1 to eth1", "eth2 to eth2"}
    assert not problems(seen)
