"""The way to another machine: a conversation with the doctor that listens there, and what the probes measured."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import crossrail

from ..control_link import CONNECT_S, connected, listen_text
from ..failure import Failure
from ..parsing import permitted, resolve
from ..point_to_point.channel import Channel
from ..processes import Message
from .finding import Machine, text_of
from .links import Rail, loopback_rails, pair_rails
from .netlink import Route, dropped_by_rail, route
from .probes import MOST_PORTS, REACH_S, SLACK_S, SURE_TRIES, TOKEN_LEN, Load, Ports, load, path_mtu, reach
from .transfer import DATA_S, send_data
from .ways import Survey, Way

DOCTOR_PORT = 18179
ANSWER_S = 10.0
"""How long the listening end may take to answer one request."""

MOST_RAILS = 64
MOST_WAYS = 256
CLOCK_TURNS = 16
WORKERS = 32

SLOW = 0.5
"""A rail with less than this share of the others' median is slow; a direction likewise beside the other one."""

_LEAST_WAIT_S, _MOST_WAIT_S = 0.05, 1.0

_REASON = re.compile(r"[A-Za-z0-9 ()/,.'-]{0,100}")
_NAME = re.compile(r"[A-Za-z0-9_.:@%-]{1,64}")
_NAMED = re.compile(r"([0-9]{1,5}(-[0-9]{1,5})?)?")


def longest_s(rails: int, seconds: float) -> float:
    """How long a survey of so many rails may take at most."""
    probing = REACH_S * (1 + (MOST_WAYS + rails * MOST_PORTS) / WORKERS) + 2 * _MOST_WAIT_S * (
        (1 << SURE_TRIES) + 3 * 13
    )
    return CONNECT_S + 5 * ANSWER_S + 2 * DATA_S + probing + (4 * rails + 2) * (seconds + 2 * SLACK_S)


def parse_rails(value: Any) -> list[Rail]:
    """The rails that the other end sent. Raises Failure for anything that is not a list of valid ones."""
    if not isinstance(value, list) or len(value) > MOST_RAILS:
        raise Failure(f"the other end sent no list of at most {MOST_RAILS} rails")
    found = []
    for entry in value:
        try:
            rail = Rail(**entry)
            address = ipaddress.ip_address(rail.address)
        except (TypeError, ValueError):
            raise Failure("the other end sent an invalid rail") from None
        names = all(isinstance(name, str) and _NAME.fullmatch(name) for name in (rail.name, rail.interface))
        flags = all(type(flag) is bool for flag in (rail.up, rail.carrier, rail.virtual))
        numbers = type(rail.mtu) is int and 0 <= rail.mtu < 1 << 20
        numbers = numbers and type(rail.prefix) is int and 0 <= rail.prefix <= address.max_prefixlen
        optional = all(one is None or type(one) is int for one in (rail.speed_mbps, rail.numa_node))
        texts = all(isinstance(one, str) and len(one) <= 64 for one in (rail.pci, rail.qdisc))
        if not (names and flags and numbers and optional and texts):
            raise Failure("the other end sent an invalid rail")
        found.append(rail)
    return found


def parse_route(value: Any) -> Route:
    """A route that the other end sent; parts of it become part of commands. Raises Failure if it is not valid."""
    try:
        found = Route(**value)
        for text in (found.gateway, found.matched):
            if text not in ("", "default"):
                ipaddress.ip_network(text + "", strict=False)  # a number would be an address too
        valid = found.interface is None or _NAME.fullmatch(found.interface) is not None
        if valid and _REASON.fullmatch(found.refused):
            return found
    except (TypeError, ValueError):
        pass
    raise Failure("the other end sent an invalid route")


@contextlib.contextmanager
def conversation(peer: str, secret_file: str | None) -> Iterator[tuple[Channel, Message]]:
    """The control conversation with the doctor at ``peer``, over the device that reaches it. Raises Failure."""
    address = resolve(peer, default_port=DOCTOR_PORT)
    start = f"crossrail doctor --listen {listen_text(address, permitted(DOCTOR_PORT))}"
    with connected(address, secret_file, ANSWER_S, start) as channel:
        try:
            met = channel.request({"doctor": 1, "version": crossrail.__version__}, ANSWER_S)
        except crossrail.TimeoutError:
            text = f"the doctor at {peer} did not answer within {ANSWER_S:g} s: it may be answering another machine"
            raise Failure(f"{text}; try again when that has finished") from None
        if met.get("version") != crossrail.__version__:
            raise Failure(
                f"the ends run different versions: {crossrail.__version__} here, {version_in(met)} at {peer}; "
                "install the same version at both"
            )
        yield channel, met
        with contextlib.suppress(crossrail.CrossrailError):  # everything has been measured
            channel.leave()


def version_in(message: Message) -> str:
    """The version that the other end named."""
    return ascii(str(message.get("version"))[:20]).strip("'")


def survey(
    peer: str, secret_file: str | None, machine: Machine, seconds: float, on_step: Callable[[str], object]
) -> Survey:
    """Probes every rail here with every rail at ``peer``. Raises Failure and the library's errors."""
    on_step(f"connecting to {peer}")
    with conversation(peer, secret_file) as (channel, met):
        theirs, mine = parse_rails(met.get("rails")), machine.rails
        if any(rail.loopback for rail in theirs):
            mine = loopback_rails(mine)  # on this machine, without a secret
        ports, token = _ports(met), _token(met)
        offset, uncertainty = _clock(channel)
        used = pair_rails(mine, theirs)
        ways = [Way(one, other, (one, other) in used) for one in mine for other in theirs]
        ways.sort(key=lambda way: not way.used)
        ways = [way for way in ways if _same_family(way)][: max(MOST_WAYS, len(used))]
        found = Survey(_peer_name(met, peer), ways, offset, uncertainty, theirs, _named(met))
        on_step(f"{len(ways)} ways between {len(mine)} rails here and {len(theirs)} there")
        _routes(channel, found)
        raw = met.get("why_not")
        why_not: dict[str, Any] = raw if isinstance(raw, dict) else {}
        _reach(ways, ports, token, why_not)
        on_step("packet sizes")
        _in_parallel(lambda way: _sizes(way, ports, token), [way for way in found.used if way.open])
        _rates(channel, found, machine, token, seconds, on_step)
        if whole := [way for way in found.used if way.open and not way.closed]:
            on_step("a transfer over all rails at once")
            _transfer(channel, whole, secret_file)
        return found


def _transfer(channel: Channel, ways: list[Way], secret_file: str | None) -> None:
    """Sends data over these ways as a program does. It is the last request: a failure may leave none possible."""
    try:
        carried, why = send_data(channel, [way.mine for way in ways], [way.theirs for way in ways], secret_file)
    except (Failure, crossrail.CrossrailError) as error:
        carried, why = {}, {way.mine.name: " ".join(str(error).split()) for way in ways}
    for way in ways:
        way.data, way.data_why = carried.get(way.mine.name), why.get(way.mine.name, "")


def _named(met: Message) -> str:
    """CROSSRAIL_PORTS of the other end; empty if it is not set there."""
    named = met.get("named")
    return named if isinstance(named, str) and _NAMED.fullmatch(named) else ""


def _peer_name(met: Message, peer: str) -> str:
    """The other machine's name as it introduced itself; as it was addressed, if that is no name or our own."""
    name = met.get("host")
    return name if isinstance(name, str) and _NAME.fullmatch(name) and name != os.uname().nodename else peer


def _same_family(way: Way) -> bool:
    return (":" in way.mine.address) == (":" in way.theirs.address)


def _ports(met: Message) -> dict[str, Ports]:
    raw = met.get("ports")
    ports = {}
    for name, pair in raw.items() if isinstance(raw, dict) and len(raw) <= MOST_RAILS else ():
        valid = isinstance(pair, list) and 2 <= len(pair) <= MOST_PORTS + 1
        if valid and all(type(port) is int and 0 < port < 1 << 16 for port in pair):
            ports[str(name)] = Ports(pair[0], pair[1], tuple(pair[2:]))
    return ports


def _token(met: Message) -> bytes:
    try:
        token = bytes.fromhex(str(met.get("token")))
    except ValueError:
        token = b""
    if len(token) != TOKEN_LEN:
        raise Failure("the other end sent no token for the probes")
    return token


def _clock(channel: Channel) -> tuple[float, float]:
    """How far the peer's clock is ahead, and to within what, by the shortest of some round trips."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_TURNS):
        before = time.time()
        answer = channel.request({"do": "clock"}, ANSWER_S).get("time")
        after = time.time()
        if not isinstance(answer, float) or not math.isfinite(answer):
            raise Failure("the other end sent no time")
        if (after - before) / 2 < best[1]:
            best = (answer - (before + after) / 2, (after - before) / 2)
    return best


def _routes(channel: Channel, found: Survey) -> None:
    """Asks both kernels how they would send between the rails that transfers pair."""
    for way in found.used:
        way.there = route(way.theirs.address, way.mine.address)
    answer = channel.request(
        {"do": "routes", "to": [[way.theirs.name, way.mine.address] for way in found.used]}, ANSWER_S
    )
    routes = answer.get("routes")
    if not isinstance(routes, list) or len(routes) != len(found.used):
        raise Failure("the other end sent no routes")
    for way, raw in zip(found.used, routes, strict=True):
        way.back = parse_route(raw)


def _reach(ways: Sequence[Way], ports: dict[str, Ports], token: bytes, why_not: dict[str, Any]) -> None:
    """Connects over each way; over those that transfers use, to every port at which the other end answers."""
    probes: list[tuple[Way, int]] = []
    for way in ways:
        way.why = _unusable(way, ports, why_not)
        if not way.why:
            known = ports[way.theirs.name]
            way.port = known.tcp
            probes += [(way, port) for port in (known.tcp, *(known.others if way.used else ()))]
    times = _in_parallel(lambda probe: _try(probe[0], probe[1], token), probes)
    for (way, port), (seconds, reason) in zip(probes, times, strict=True):
        if seconds is None:
            way.closed.append(port)
            way.why = way.why or reason
        elif not way.open:
            way.open, way.port, way.rtt_s = True, port, seconds


def _unusable(way: Way, ports: dict[str, Ports], why_not: dict[str, Any]) -> str:
    """Why no probe of the way can succeed; empty if one may."""
    for rail, where in ((way.mine, "here"), (way.theirs, "there")):
        if not rail.works:
            return f"{rail.name} {'is down' if not rail.up else 'has no link'} {where}"
    if way.theirs.name not in ports:
        reason = str(why_not.get(way.theirs.name))
        return f"the doctor there cannot listen: {reason if _REASON.fullmatch(reason) else 'it gave no reason'}"
    return ""


def _try(way: Way, port: int, token: bytes) -> tuple[float | None, str]:
    """The seconds that a connection to ``port`` took, or why there is none."""
    try:
        return reach(way.mine, way.theirs, Ports(port, 0), token), ""
    except TimeoutError:
        return None, f"no answer within {REACH_S:g} s"
    except OSError as error:
        return None, (error.strerror or str(error)).lower()


def _sizes(way: Way, ports: dict[str, Ports], token: bytes) -> None:
    wait = min(max(4 * (way.rtt_s or 0.0), _LEAST_WAIT_S), _MOST_WAIT_S)
    with contextlib.suppress(OSError):
        to = ports[way.theirs.name]
        way.mtu_there, way.mtu_back = path_mtu(way.mine, way.theirs, to, token, wait)


def _rates(
    channel: Channel,
    found: Survey,
    machine: Machine,
    token: bytes,
    seconds: float,
    on_step: Callable[[str], object],
) -> None:
    """Each way alone, there and back, then all at once; with the packets that were lost at either end meanwhile."""
    ways = [way for way in found.used if way.open]
    if not ways:
        return

    def measure(way: Way, back: bool) -> Load:
        return load(way.mine, way.theirs, Ports(way.port or 0, 0), token, seconds, back=back)

    before = _dropped(channel, found)
    for way in ways:
        on_step(f"{way.name} alone")
        way.alone = (measure(way, False), measure(way, True))
    for way in (one for one in ways if _suspicious(one.alone)):
        on_step(f"{way.name} again")
        way.alone = _better(way.alone, (measure(way, False), measure(way, True)))
    if len(ways) > 1:
        on_step(f"{len(ways)} rails at once")
        busy = _busy(machine)
        there = _in_parallel(lambda way: measure(way, False), ways)
        back = _in_parallel(lambda way: measure(way, True), ways)
        found.idle = _idle_since(machine, busy)
        for way, one, other in zip(ways, there, back, strict=True):
            way.together = (one, other)
    after = _dropped(channel, found)
    found.dropped = {rail: after[rail] - before[rail] for rail in after if after[rail] > before.get(rail, after[rail])}


def _suspicious(alone: tuple[Load, Load] | None) -> bool:
    """Whether one direction is so much slower that it is measured again: a busy processor may have been the cause."""
    rates = [load.gbit_per_s for load in alone or ()]
    return bool(rates) and min(rates) < SLOW * max(rates)


def _better(one: tuple[Load, Load] | None, other: tuple[Load, Load]) -> tuple[Load, Load]:
    """The faster of two measurements, for each direction."""
    if one is None:
        return other
    there, back = (max(pair, key=lambda load: load.gbit_per_s) for pair in zip(one, other, strict=True))
    return there, back


def _dropped(channel: Channel, found: Survey) -> dict[str, int]:
    """Packets lost so far, by rail and end."""
    counts = {f"{name} here": count for name, count in dropped_by_rail().items()}
    theirs = channel.request({"do": "dropped"}, ANSWER_S).get("dropped")
    for rail in found.theirs:
        if isinstance(theirs, dict) and type(theirs.get(rail.interface)) is int:
            counts[f"{rail.interface} there"] = theirs[rail.interface]
    mine = {f"{way.mine.interface} here" for way in found.used}
    return {name: count for name, count in counts.items() if name.endswith("there") or name in mine}


def _busy(machine: Machine) -> tuple[int, int]:
    """Ticks that the processors were idle, and all ticks, so far."""
    words = text_of(machine.proc / "stat").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words if word.isdigit()]
    return (ticks[3], sum(ticks[:8])) if len(ticks) >= 8 else (0, 0)


def _idle_since(machine: Machine, before: tuple[int, int]) -> float | None:
    idle, total = (after - then for after, then in zip(_busy(machine), before, strict=True))
    return idle / total if total else None


def _in_parallel(work: Callable[[Any], Any], over: Sequence[Any]) -> list[Any]:
    if not over:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(over), WORKERS), "crossrail-probe") as pool:
        return list(pool.map(work, over))


def as_record(found: Survey) -> dict[str, Any]:
    """The survey as plain data, for JSON: rates in Gbit/s, times in seconds."""
    return dataclasses.asdict(found)
