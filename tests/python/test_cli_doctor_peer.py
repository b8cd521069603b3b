"""`crossrail doctor --peer` without a test bed: both ends on loopback, bad input, and what strangers may ask for."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import listening as bench_listening
from commands import listening_command, one_error, run
from test_cli_doctor import RAIL, found, machine, refusal
from test_cli_store import store

import crossrail
from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.doctor import nics, probes, rails, table
from crossrail_tools.cli.doctor.examine import examine, within
from crossrail_tools.cli.doctor.finding import Finding, Found, Machine
from crossrail_tools.cli.doctor.links import Rail
from crossrail_tools.cli.doctor.listener import serve
from crossrail_tools.cli.doctor.netlink import Route
from crossrail_tools.cli.doctor.probes import DATAGRAM, HEAD, HELLO, TOKEN_LEN, Load, Ports, Responder
from crossrail_tools.cli.doctor.survey import parse_rails, parse_route
from crossrail_tools.cli.doctor.ways import Survey, Way
from crossrail_tools.cli.failure import Failure, exit_code_of

LO = [Rail(f"127.0.0.{n}", "lo", True, True, 65536, f"127.0.0.{n}", 32, virtual=True) for n in (1, 2)]
TWO = {"CROSSRAIL_NET_DEVICES": "127.0.0.1,127.0.0.2"}
QUICK = ("--only=settings", "--seconds=0.3")


@contextmanager
def listening(settings: Mapping[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A doctor that listens, and its address."""
    with listening_command("doctor", settings=settings) as told:
        yield told


def doctor(*options: str) -> None:
    """Runs the command in this process, which spares the start of another one."""
    parse_arguments(["doctor", *options, *QUICK]).run()


def test_two_ends_measure_every_rail_one_run_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROSSRAIL_NET_DEVICES", TWO["CROSSRAIL_NET_DEVICES"])
    file = tmp_path / "doctor.json"
    with listening(TWO) as (_, address):
        for _ in range(2):
            with contextlib.suppress(Failure):  # the rates of a busy machine may be a problem
                doctor(f"--peer={address}", f"--json={file}")
            whole = json.loads(file.read_text())
            used = [way for way in whole["survey"]["ways"] if way["used"]]
            assert [(way["mine"]["name"], way["open"]) for way in used] == [("127.0.0.1", True), ("127.0.0.2", True)]
            assert len(whole["survey"]["ways"]) == 4
            assert all(load["gbit_per_s"] > 0 for way in used for load in way["alone"])
            assert all(len(way["together"]) == 2 for way in used)
            assert abs(whole["survey"]["offset_s"]) < 1
            assert {one["severity"] for one in whole["findings"] if one["id"] in ("rail-down", "rail-mtu")} == {"ok"}
            file.unlink()
    shown = capsys.readouterr().out
    assert "every rail here to every rail there" in shown and "127.0.0.2 to 127.0.0.2" in shown


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--peer=nosuch.invalid",), 1, ("nosuch.invalid", "does not resolve")),
        (("--peer=127.0.0.1:99999",), 2, ("99999", "not a port")),
        (("--peer=1234",), 2, ("1234", "not a host")),
        (("--listen=0.0.0.0:0",), 2, ("CROSSRAIL_SECRET",)),
        (("--listen=192.0.2.77:0",), 2, ("--listen", "192.0.2.77 is not an address of this machine")),
        (("--listen", "--peer=127.0.0.1"), 2, ("--listen", "tests nothing itself")),
        (("--seconds=2",), 2, ("--seconds", "--peer")),
        (("--peer=127.0.0.1", "--seconds=60"), 2, ("'60'", "0.1 to 10")),
        (("--peer=127.0.0.1", "--secret-file=/nonexistent/secret"), 2, ("/nonexistent/secret",)),
    ],
)
def test_nonsense_is_one_error(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    text = refusal(capsys, code, *options)
    assert all(word in text for word in words), text


def refused(address: str, *words: str) -> None:
    """The doctor of the other end cannot be asked, and the error says why with these words."""
    with pytest.raises((Failure, crossrail.CrossrailError)) as caught:
        doctor(f"--peer={address}")
    assert exit_code_of(caught.value) == 1
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_port_where_nobody_or_something_else_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        refused(f"127.0.0.1:{port}", "connection refused", f"start `crossrail doctor --listen 127.0.0.1:{port}` there")
    with bench_listening("latency") as (_, address):
        refused(address, "bench latency")
    with store("--listen=127.0.0.1:0") as (_, address):
        refused(address.removeprefix("tcp://"), "not a Crossrail peer")


def test_a_port_that_is_taken_and_wrong_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening({"CROSSRAIL_SECRET": "the right one for this test"}) as (_, address):
        one_error(run("doctor", f"--listen={address}"), 2, address, "in use")
        refused(address, "secret")
        monkeypatch.setenv("CROSSRAIL_SECRET", "a wrong one for this test")
        refused(address, "secret")


def test_without_a_secret_only_loopback_is_offered_and_only_to_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "doctor.json"
    with listening() as (_, address):
        with contextlib.suppress(Failure):
            doctor(f"--peer={address}", f"--json={file}")
        monkeypatch.setattr(crossrail, "__version__", "9.9.9")
        refused(address, "9.9.9 at the other; install the same version at both")
    (way,) = json.loads(file.read_text())["survey"]["ways"]
    assert (way["mine"]["interface"], way["theirs"]["address"], way["open"]) == ("lo", "127.0.0.1", True)


class Told:
    """A channel whose other end sends these messages."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.sent: list[dict[str, Any]] = []

    def receive(self, timeout: float) -> dict[str, Any]:
        assert timeout > 0
        return self.messages.pop(0)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


HELLO_THERE = {"doctor": 1, "version": crossrail.__version__}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (({"bench": "p2p", "version": crossrail.__version__},), "crossrail doctor --peer"),
        (({"doctor": 1, "version": "0.0.9"},), "0.0.9 at the other; install the same version"),
        ((HELLO_THERE, {"do": "format"}), "'format', which this version does not support"),
        ((HELLO_THERE, {"do": "routes", "to": "all"}), "without a list of at most"),
        ((HELLO_THERE, {"do": "routes", "to": [["127.0.0.1"] * 2] * 65}), "without a list of at most"),
        ((HELLO_THERE, {"do": "routes", "to": [["eth9", "127.0.0.1"]]}), "'eth9', which is no rail here"),
        ((HELLO_THERE, {"do": "routes", "to": [["127.0.0.1", "x"]]}), "route to 'x'"),
        ((HELLO_THERE, {"do": "routes", "to": [[1, 2]]}), "other than a pair of a rail"),
    ],
)
def test_what_the_listening_end_refuses(messages: tuple[dict[str, Any], ...], said: str) -> None:
    with pytest.raises(Failure, match=re.escape(said)):
        serve(Told(*messages), LO)  # type: ignore[arg-type]


def test_what_the_listening_end_answers() -> None:
    channel = Told(HELLO_THERE, {"do": "clock"}, {"do": "routes", "to": [["127.0.0.1", "127.0.0.2"]]}, {"do": "bye"})
    serve(channel, LO)  # type: ignore[arg-type]
    met, clock, routes = channel.sent
    assert parse_rails(met["rails"]) == LO and set(met["ports"]) == {"127.0.0.1", "127.0.0.2"}
    assert isinstance(clock["time"], float)
    assert routes["routes"][0]["interface"] == "lo"


GOOD = asdict(RAIL)


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [GOOD] * 65,
        ["eth1"],
        [{**GOOD, "more": 1}],
        [{**GOOD, "address": "localhost"}],
        [{**GOOD, "name": "a; reboot"}],
        [{**GOOD, "interface": "x" * 65}],
        [{**GOOD, "mtu": 1 << 40}],
        [{**GOOD, "prefix": 33}],
        [{**GOOD, "up": 1}],
        [{**GOOD, "speed_mbps": "fast"}],
        [{**GOOD, "qdisc": "\x1b[2J" * 99}],
    ],
)
def test_rails_of_the_other_end_are_not_trusted(entries: Any) -> None:
    assert parse_rails([GOOD]) == [RAIL]
    with pytest.raises(Failure):
        parse_rails(entries)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"interface": "eth1"},
        {"interface": "eth1", "gateway": "", "matched": "10.0.0.0/8; reboot"},
        {"interface": "eth1; reboot", "gateway": "", "matched": ""},
        {"interface": "eth1", "gateway": "there", "matched": ""},
        {"interface": None, "gateway": "", "matched": "", "refused": "\x1b[2J"},
        {"interface": 7, "gateway": "", "matched": ""},
        {"interface": "eth1", "gateway": "", "matched": 10},
    ],
)
def test_routes_of_the_other_end_are_not_trusted(value: Any) -> None:
    good = Route("eth0", "10.0.0.1", "10.77.3.2/32")
    assert parse_route(asdict(good)) == good
    assert parse_route(asdict(Route(None, "", "", "no route (Network is unreachable)"))).interface is None
    with pytest.raises(Failure, match="invalid route"):
        parse_route(value)


def test_strangers_get_nothing_from_the_probes() -> None:
    with Responder(LO[:1]) as responder:
        ports = responder.ports["127.0.0.1"]
        wrong = bytes(TOKEN_LEN)
        for head in (HEAD.pack(wrong, b"p", 0), HEAD.pack(responder.token, b"s", probes.MOST_MS + 1), b"short"):
            with socket.create_connection(("127.0.0.1", ports.tcp), timeout=30) as to:
                to.sendall(head)
                to.shutdown(socket.SHUT_WR)
                assert to.recv(1) == b""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(10)
            udp.connect(("127.0.0.1", ports.udp))
            for number, token in enumerate((wrong, wrong, responder.token)):
                udp.send(b"junk")
                udp.send(DATAGRAM.pack(token, number, 100))
            assert udp.recv(1000) == (responder.token + (2).to_bytes(4, "big")).ljust(100, b"\0")
        assert probes.reach(LO[1], LO[0], ports, responder.token) > 0
    with pytest.raises(ConnectionRefusedError):
        probes.reach(LO[1], LO[0], ports, responder.token)
    assert len(HELLO) == 16


@contextmanager
def flooded(port: int, idle: int) -> Iterator[None]:
    """That many connections that say nothing, from all of loopback: a new one takes the oldest's place all the time."""
    stop = threading.Event()
    held = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(idle)]

    def flood() -> None:
        while held and not stop.is_set():
            with held.pop(0), contextlib.suppress(OSError):  # the end that listened is over
                held.append(socket.create_connection(("127.0.0.1", port), 60, (f"127.0.0.{random.randint(2, 250)}", 0)))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        yield
    finally:
        stop.set()
        flooding.join()
        for one in held:
            one.close()


def test_a_flood_that_says_nothing_keeps_no_measuring_end_out() -> None:
    with bench_listening("latency", "--transport=tcp", "--timeout=60s") as (_, address):
        with flooded(int(address.rpartition(":")[2]), 600):
            done = run(
                "bench", "latency", f"--connect={address}", "--size=8", "--iters=20", "--transport=tcp", "--timeout=60s"
            )
        assert done.returncode == 0, done.stderr


def test_a_flood_that_says_nothing_keeps_no_probe_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REACH_S", 60.0)
    with Responder(LO[:1]) as responder, flooded(responder.ports["127.0.0.1"].tcp, 2 * probes.MOST_CONNECTIONS):
        ports = responder.ports["127.0.0.1"]
        for _ in range(40):
            assert probes.reach(LO[1], LO[0], ports, responder.token) > 0


def test_the_probes_are_answered_on_every_named_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        taken = one.getsockname()[1]
        named = range(taken - 1, taken + 2)
        monkeypatch.setattr(probes, "ports_at", lambda host: named)
        with Responder(LO) as responder:
            free, whole = responder.ports["127.0.0.1"], responder.ports["127.0.0.2"]
            assert taken not in (free.tcp, *free.others) and {free.tcp, *free.others} <= set(named)
            assert (whole.tcp, whole.udp, whole.others) == (taken + 1, taken + 1, (taken, taken - 1))
            for port in (whole.tcp, *whole.others):
                assert probes.reach(LO[0], LO[1], Ports(port, 0), responder.token) > 0
        monkeypatch.setattr(probes, "ports_at", lambda host: range(taken, taken + 1))
        with Responder(LO[:1]) as responder:
            assert responder.ports == {}
            assert f"127.0.0.1: no port of {taken} to {taken}" in responder.why_not["127.0.0.1"]


def test_a_survey_that_fails_or_hangs_is_one_line() -> None:
    hold = threading.Event()
    with pytest.raises(Failure, match=r"it did not end within 0.05 s"):
        within(0.05, "it", lambda: hold.wait(20))
    hold.set()
    with pytest.raises(Failure, match=r"it failed: KeyError: 'x'; report this"):
        within(5, "it", lambda: {}["x"])
    with pytest.raises(ConnectionError):
        within(5, "it", lambda: probes.receive_exactly(*ended()))
    assert within(5, "it", lambda: 7) == 7


def ended() -> tuple[socket.socket, int]:
    """A connection whose other end is closed."""
    one, other = socket.socketpair()
    other.close()
    return one, 1


def test_the_probes_end_with_the_run() -> None:
    threads = threading.active_count()
    with Responder(LO) as responder:
        loads = [socket.create_connection(("127.0.0.1", responder.ports["127.0.0.1"].tcp)) for _ in range(3)]
        for one in loads:
            one.sendall(HEAD.pack(responder.token, b"o", probes.MOST_MS))
        assert loads[0].recv(1)
    assert threading.active_count() == threads
    for one in loads:
        one.close()


def test_path_mtu_over_loopback() -> None:
    small = [replace(rail, mtu=3000) for rail in LO]
    with Responder(small) as responder:
        ports = responder.ports["127.0.0.1"]
        assert probes.path_mtu(small[1], small[0], ports, responder.token, 0.2) == (3000, 3000)
        nobody = Ports(ports.tcp, 9)
        assert probes.path_mtu(small[1], small[0], nobody, responder.token, 0.01) == (None, None)
        pretended = replace(small[1], mtu=65_535 + 20)  # its datagram would be too long for UDP
        there, back = probes.path_mtu(pretended, small[0], ports, responder.token, 0.2)
        assert there is not None and 65_000 < there <= 65_535 and back == 3000


def ways(*rates: tuple[float, float, float, float], **changes: Any) -> Survey:
    """A survey of rails that carry this alone (there, back) and together (there, back), in Gbit/s."""
    made = []
    for number, (there, back, all_there, all_back) in enumerate(rates, 1):
        rail = replace(RAIL, name=f"eth{number}", interface=f"eth{number}", address=f"10.0.{number}.1", speed_mbps=None)
        other = replace(rail, address=f"10.0.{number}.2")
        way = Way(rail, other, True, open=True, rtt_s=1e-4, mtu_there=9000, mtu_back=9000)
        way.there = way.back = Route(rail.interface, "", "")
        way.alone = (Load(there, 0.0), Load(back))
        way.together = (Load(all_there, 0.0), Load(all_back))
        made.append(way)
    return Survey("beta", made, 0.0, 1e-4, [way.theirs for way in made], **changes)


def judged(check: Any, survey: Survey) -> list[Found]:
    return [one for one in found(check, surveyed(survey)) if one.severity != "ok"]


def surveyed(survey: Survey) -> Machine:
    return machine(survey=survey)


EVEN = (10.0, 10.0, 10.0, 10.0)


def test_even_rails_have_no_problem() -> None:
    for check in (rails.down, rails.routes, rails.reachable, rails.packet_sizes, rails.speeds, rails.shared):
        assert judged(check, ways(EVEN, EVEN, EVEN)) == []
    assert judged(rails.losses, ways(EVEN)) == judged(rails.clocks, ways(EVEN)) == []
    assert judged(rails.shared, ways(EVEN))[0].severity == "note"


def test_slow_rails_and_slow_directions() -> None:
    (slow,) = judged(rails.speeds, ways(EVEN, (1.0, 1.2, 1, 1), EVEN))
    assert (slow.severity, slow.subject) == ("warning", "eth2 to eth2") and "others carry 10 Gbit/s" in slow.evidence
    (one_way,) = judged(rails.speeds, ways(EVEN, (10.0, 2.0, 1, 1), EVEN))
    assert "one direction is slow" in one_way.evidence
    explained = ways(EVEN, (0.9, 0.9, 1, 1))
    explained.ways[1].mine = replace(explained.ways[1].mine, speed_mbps=1000)
    assert judged(rails.speeds, explained) == []
    dead = ways(EVEN, EVEN)
    dead.ways[0].alone = (Load(why="broken pipe"), Load(1.0))
    (none,) = judged(rails.speeds, dead)
    assert none.severity == "error" and "carries no data: broken pipe" in none.evidence


def test_what_rails_share_is_said_in_words() -> None:
    half = (10.0, 10.0, 3.0, 3.0)
    (one,) = judged(rails.shared, ways(half, half, EVEN))
    assert "30 Gbit/s one by one, but 16 at once" in one.evidence
    assert "eth2 to eth2 alone 10 Gbit/s, together 3" in one.evidence and "eth3 to eth3" not in one.evidence
    assert "PCIe switch" in one.evidence
    (busy,) = judged(rails.shared, ways(half, half, idle=0.02))
    assert "98% busy" in busy.evidence
    card = ways(half, half)
    for number, way in enumerate(card.ways):
        way.mine = replace(way.mine, pci=f"0000:81:00.{number}")
    assert "eth1 and eth2 are ports of one PCI device" in judged(rails.shared, card)[0].evidence


def test_packets_that_do_not_fit() -> None:
    hole = ways(EVEN, EVEN)
    hole.ways[0].mtu_back = 1500
    (one,) = judged(rails.packet_sizes, hole)
    assert "packets above 1500 bytes do not arrive, although both ends have an MTU of 9000" in one.evidence
    small = ways(EVEN, EVEN)
    small.ways[1].mine = replace(small.ways[1].mine, mtu=1500)
    small.ways[1].theirs = replace(small.ways[1].theirs, mtu=1500)
    small.ways[1].mtu_there = small.ways[1].mtu_back = 1500
    (other,) = judged(rails.packet_sizes, small)
    assert (other.severity, other.fix) == ("warning", "ip link set eth2 mtu 9000, at both ends")
    silent = ways(EVEN)
    silent.ways[0].mtu_there = silent.ways[0].mtu_back = None
    assert judged(rails.packet_sizes, silent)[0].severity == "note"


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("no answer within 1 s", "packets vanish"),
        ("connection refused", "a firewall rejects it"),
        ("no route to host", "nobody answers for 10.0.1.2"),
    ],
)
def test_why_a_rail_does_not_reach(why: str, said: str) -> None:
    survey = ways(EVEN)
    way = survey.ways[0]
    way.open, way.why = False, why
    elsewhere = replace(way, theirs=replace(way.theirs, name="eth7"), used=False, open=True)
    survey.ways.append(elsewhere)
    (one,) = judged(rails.reachable, survey)
    assert said in one.evidence and "eth1 does reach eth7 there" in one.evidence and one.fix


def by_cause(survey: Survey) -> list[Finding]:
    """The problems that all checks of devices and rails find, one per cause."""
    here = machine(survey=survey, rails=[way.mine for way in survey.ways])
    checks = [check for check in table.CHECKS if check.group == "rails" or check.id in NIC_CHECKS]
    return [one for one in examine(checks, here) if one.severity in ("error", "warning")]


NIC_CHECKS = ("nic-link", "nic-mtu", "nic-address", "nic-route")


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sends to each subnet by the device that is in it; of several the first."""
    monkeypatch.setattr(nics, "route", lambda to, _: Route(f"eth{to.split('.')[2]}", "", ""))


@pytest.mark.usefixtures("by_itself")
def test_a_device_that_is_down_or_short_is_one_finding() -> None:
    survey = ways(EVEN, EVEN, EVEN, EVEN)
    down, short, *_ = survey.ways
    down.mine = replace(down.mine, up=False, carrier=False)
    down.open, down.why, down.alone, down.together = False, "no answer within 1 s", None, None
    short.mine = replace(short.mine, mtu=1500)
    short.mtu_there = short.mtu_back = 1500
    short.alone = (Load(why="broken pipe"), Load(why="broken pipe"))
    link, mtu = by_cause(survey)
    assert (link.id, link.subject, link.severity) == ("nic-link", "eth1", "error")
    assert [each.id for each in link.also] == ["rail-down"]
    assert (mtu.id, mtu.subject, mtu.severity) == ("nic-mtu", "eth2", "error")
    assert [each.id for each in mtu.also] == ["rail-mtu", "rail-speed"]


@pytest.mark.usefixtures("by_itself")
def test_devices_that_share_a_subnet_are_one_finding_at_each_end() -> None:
    survey = ways(EVEN, EVEN, EVEN)
    for number, way in enumerate(survey.ways, 1):
        way.mine = replace(way.mine, address=f"10.0.1.{number}")
        way.theirs = replace(way.theirs, address=f"10.0.1.{10 + number}")
        way.there = way.back = Route("eth1", "", "10.0.1.0/24")
    survey.theirs = [way.theirs for way in survey.ways]
    here, there = by_cause(survey)
    assert (here.id, here.subject, here.severity) == ("nic-address", "eth1 and eth2 and eth3", "error")
    assert {each.id for each in here.also} == {"nic-route", "rail-route"}
    assert "ip rule add from 10.0.1.2 table 101" in here.fix
    assert there.id == "rail-route" and there.evidence.startswith("at beta packets from eth2")
    assert [each.subject for each in there.also] == ["eth3 to eth3"]


@pytest.mark.usefixtures("by_itself")
def test_a_firewall_is_one_finding_for_all_rails_that_it_closes() -> None:
    survey = ways(EVEN, EVEN, EVEN, named="18180-18183")
    for way in survey.ways[:2]:
        way.open, way.why, way.alone, way.together = False, "no answer within 1 s", None, None
    survey.ways[2].closed, survey.ways[2].why = [18181], "connection refused"
    survey.ways[2].data_why = "no lane came up"
    closed, part = by_cause(survey)
    assert (closed.id, closed.subject, closed.also) == ("rail-reach", "eth1 to eth1, eth2 to eth2", [])
    assert "nft insert rule inet filter input iifname { eth1, eth2 } tcp dport 18180-18183 accept" in closed.fix
    assert (part.id, part.subject, [each.id for each in part.also]) == ("rail-reach", "eth3 to eth3", ["rail-data"])


@pytest.mark.usefixtures("by_itself")
def test_a_rail_that_loses_packets_and_is_slow_is_one_finding() -> None:
    survey = ways(EVEN, (1.0, 1.0, 1.0, 1.0), EVEN)
    assert survey.ways[1].alone is not None
    survey.ways[1].alone[0].resent = 0.2
    (one,) = by_cause(survey)
    assert (one.id, one.subject, [each.id for each in one.also]) == ("rail-speed", "eth2 to eth2", ["rail-loss"])


def test_losses_and_clocks_and_no_counterpart() -> None:
    lossy = ways(EVEN, dropped={"eth1 there": 7})
    assert lossy.ways[0].alone is not None
    lossy.ways[0].alone[0].resent = 0.05
    (one,) = judged(rails.losses, lossy)
    assert "5.0% of the segments" in one.evidence and "eth1 there dropped 7 packets" in one.evidence
    late = ways(EVEN)
    late.offset_s = -7.5
    (clock,) = judged(rails.clocks, late)
    assert "7500.000 ms behind ours" in clock.evidence
    (none,) = judged(rails.down, Survey("beta", [], 0.0, 0.0, [RAIL]))
    assert none.severity == "error" and "eth1 10.0.1.1" in none.evidence
