"""Firewalls in the test bed: with nothing but the named ports open, everything works; what is closed is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bed import SIDES, Bed
from commands import clean_environment
from ends import SECRET, End
from test_bench_ep import started
from test_doctor import problems

from crossrail_tools.report.schema import Report

MAKE = Callable[..., Bed]
COMMAND = (sys.executable, "-m", "crossrail")
RUN_S = 60.0


def settings(ports: str | None) -> dict[str, str]:
    """The same at both ends."""
    named = {} if ports is None else {"CROSSRAIL_PORTS": ports}
    return {"CROSSRAIL_SECRET": SECRET, "CROSSRAIL_NET_DEVICES": "^eth0", "CROSSRAIL_TLS": "tcp", **named}


def between(bed: Bed, ports: str | None, listen: list[str], connect: list[str], *words: str) -> str:
    """What one command says at the right while another listens at the left, both with what they choose by default."""
    where = bed.address("left", "eth0")
    end = End(bed.inside("left", *COMMAND, *listen, f"--listen={where}"), settings(ports))
    try:
        end.wait_to_say("listening on", *words)
        command = bed.inside("right", *COMMAND, *connect)
        environment = clean_environment(settings(ports))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    finally:
        end.kill()
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def examined(bed: Bed, ports: str | None, file: Path, *words: str) -> dict[str, Any]:
    where = bed.address("left", "eth0")
    options = ["doctor", f"--peer={where}", "--only=settings", "--seconds=0.2", f"--json={file}"]
    said = between(bed, ports, ["doctor"], options, *words)
    assert file.exists(), said
    return dict(json.loads(file.read_text()))


def named(whole: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The problems, but for rates, which firewalls do not change and a busy machine does."""
    return {of: one for of, one in problems(whole).items() if of[0] != "rail-speed"}


def rails_of_a_transfer(bed: Bed, ports: str | None, file: Path, *words: str) -> set[str]:
    where = bed.address("left", "eth0")
    said = between(
        bed, ports, ["bench", "p2p"], ["bench", "p2p", f"--connect={where}", "--size=16M", f"--json={file}"], *words
    )
    assert file.exists(), said
    (row,) = Report.loads(file.read_text()).rows
    return {lane.name for lane in row.lanes if lane.bytes}


@pytest.mark.parametrize(("ports", "doctor", "bench"), [("18180", 18180, 18180), ("18180-18183", 18182, 18180)])
def test_the_named_ports_are_all_that_a_firewall_leaves_open(
    make_bed: MAKE, tmp_path: Path, ports: str, doctor: int, bench: int
) -> None:
    bed = make_bed((200, 200, 200, 200))
    bed.firewall("left", f"tcp dport {ports} accept")
    bed.firewall("right")
    whole = examined(bed, ports, tmp_path / "doctor.json", f":{doctor}")
    assert named(whole) == {}
    used = [way for way in whole["survey"]["ways"] if way["used"]]
    assert [(way["mine"]["name"], way["open"], way["closed"]) for way in used] == [(r, True, []) for r in bed.rails]
    assert all(way["data"] > 0 for way in used)
    assert rails_of_a_transfer(bed, ports, tmp_path / "p2p.json", f":{bench}") == {f"tcp/{rail}" for rail in bed.rails}


def test_the_doctor_reports_with_its_own_port_alone(make_bed: MAKE, tmp_path: Path) -> None:
    bed = make_bed((200, 200, 200, 200))
    bed.firewall("left", "tcp dport 18179 accept")
    whole = examined(bed, None, tmp_path / "doctor.json", ":18179")
    found = named(whole)
    ((key, one),) = found.items()
    assert key == ("rail-reach", ", ".join(f"{rail} to {rail}" for rail in bed.rails)), "one firewall, one finding"
    assert "; CROSSRAIL_PORTS=18177-18199 at both ends" in one["fix"], one
    rails = ", ".join(bed.rails)
    assert f"nft insert rule inet filter input iifname {{ {rails} }} tcp dport 18177-18199 accept" in one["fix"], one


def test_a_rail_that_is_closed_for_data_is_named_before_a_transfer_runs(make_bed: MAKE, tmp_path: Path) -> None:
    ports = "18180-18183"
    bed = make_bed((200, 200, 200, 200))
    closed = ("iifname eth2 drop", "iifname eth3 tcp dport 18181-18182 reject")
    bed.firewall("left", *closed, f"tcp dport {ports} accept")
    found = named(examined(bed, ports, tmp_path / "doctor.json"))
    assert set(found) == {("rail-reach", "eth2 to eth2"), ("rail-reach", "eth3 to eth3")}
    whole, part = (found["rail-reach", f"{rail} to {rail}"] for rail in ("eth2", "eth3"))
    assert "no answer within 1 s: packets vanish" in whole["evidence"]
    assert "TCP ports 18181 to 18182: connection refused, where others of CROSSRAIL_PORTS=" in part["evidence"]
    # What it advises mends it.
    for finding in (whole, part):
        (rule,) = (piece for piece in finding["fix"].split("; ") if "nft insert" in piece)
        rule = rule.partition("nft ")[2].partition("   #")[0]
        subprocess.run(bed.inside("left", "nft", *rule.split()), check=True, capture_output=True)
    assert named(examined(bed, ports, tmp_path / "again.json")) == {}
    assert rails_of_a_transfer(bed, ports, tmp_path / "p2p.json") == {f"tcp/{rail}" for rail in bed.rails}


def test_ranks_and_their_store_have_named_ports(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    for side in SIDES:
        bed.firewall(side, "tcp dport 18180-18183 accept")
    named = {"CROSSRAIL_PORTS": "18180-18183"}
    with (
        started(bed, "left", 0, "--json=-", settings=named) as first,
        started(bed, "right", 1, settings=named) as second,
    ):
        try:
            out, said = first.communicate(timeout=90)
            _, said_there = second.communicate(timeout=20)
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (0, 0), said + said_there
    # Both rails are up; of so few bytes one may carry all.
    carried = {lane.name for row in Report.loads(out).rows for lane in row.lanes}
    assert carried and carried <= {"tcp/eth1", "tcp/eth2"}
    assert "is closed" not in said and "did not get through" not in said, said
    assert "10.77.0.1:18181" in said, said
