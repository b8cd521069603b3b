"""Checks of the way to another machine. They judge a survey: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crossrail_tools.report.stats import median
from crossrail_tools.report.units import format_size

from ..parsing import DEFAULT_PORT
from .finding import Cause, Found, Machine
from .links import Rail
from .netlink import Route
from .nics import misrouted, route_fix, shared_subnets
from .probes import LARGEST, Load
from .survey import SLOW
from .ways import Survey, Way

EXPLAINED = 0.7
"""A rail that reaches this share of the speed that its device has negotiated is as fast as it can be."""

SHARED = 0.7
"""Rails that together carry less than this share of what they carry alone share something."""

RESENT = 0.02
FAR_CLOCK_S = 1.0
BUSY = 0.1

_SHAPERS = frozenset({"tbf", "htb", "hfsc", "netem", "cake", "cbq"})


def _of(machine: Machine) -> Survey:
    assert machine.survey is not None  # the checks of this group run only with one
    return machine.survey


def down(machine: Machine) -> Iterable[Found]:
    """Both ends' links."""
    survey = _of(machine)
    for way in survey.used:
        ends = ((way.mine, "here"), (way.theirs, f"at {survey.peer}"))
        named = [(rail, where) for rail, where in ends if not rail.works]
        if not named:
            yield Found("ok", "up, with a link, at both ends", subject=way.name)
            continue
        down_ends = [(rail, where) for rail, where in named if not rail.up] or named
        text = "; ".join(f"{rail.name} {'is down' if not rail.up else 'has no link'} {where}" for rail, where in named)
        rail, where = down_ends[0]
        mends = f"ip link set {rail.interface} up" if not rail.up else f"ethtool {rail.interface}; check the cable"
        because = ("nic-link", rail.name) if where == "here" else None
        yield Found("error", text, mends if where == "here" else f"{mends}   # {where}", way.name, because)
    if not survey.used:
        theirs = ", ".join(f"{rail.name} {rail.address}" for rail in survey.theirs) or "none"
        text = f"no rail here has a counterpart; rails there: {theirs}"
        yield Found("error", text, "give both ends addresses of one family: ip addr add ADDRESS/PREFIX dev DEVICE")


def routes(machine: Machine) -> Iterable[Found]:
    """How both kernels send between the rails."""
    survey = _of(machine)
    for way in survey.used:
        if not (way.mine.works and way.theirs.works):
            continue
        wrong = False
        ways = ((way.there, way.mine, way.theirs, "here"), (way.back, way.theirs, way.mine, f"at {survey.peer}"))
        for found, rail, to, where in ways:
            if found is None or not _leaves_elsewhere(found, rail):
                continue
            wrong = True
            text = f"{where} packets from {rail.name} to {to.address} leave by {found}, not by {rail.interface}"
            if found.interface is None:
                text = f"{where} there is no way from {rail.name} to {to.address}: {found}"
            fix = route_fix(found.matched, rail)
            if where == "here":
                yield Found("error", text, fix, way.name, misrouted(machine.rails, rail))
            else:
                yield Found("error", text, f"{fix}   # {where}", way.name, _misrouted_there(survey, rail))
        if not wrong:
            yield Found("ok", "both kernels send by the rail itself", subject=way.name)


def _misrouted_there(survey: Survey, rail: Rail) -> Cause | None:
    """The finding about the first of the peer's rails in the same subnet: without rules, all of them leave by one."""
    twins = shared_subnets(survey.theirs).get(rail.subnet, [])
    wrong = [way for way in survey.used if way.theirs in twins and _leaves_elsewhere(way.back, way.theirs)]
    return ("rail-route", wrong[0].name) if wrong else None


def _leaves_elsewhere(found: Route | None, rail: Rail) -> bool:
    """Whether a kernel does not send by the rail that the packets are from."""
    # Between two addresses of one machine the kernel uses loopback, whatever device they belong to.
    return found is not None and found.interface not in (rail.interface, "lo")


def reachable(machine: Machine) -> Iterable[Found]:
    """Connections between the rails that transfers pair; what else is open, as a hint at crossed cables."""
    survey = _of(machine)
    for way in survey.used:
        if way.mine.works and way.theirs.works and way.open and not way.closed:
            yield Found("ok", f"reachable, {1e6 * (way.rtt_s or 0):.0f} us to connect", subject=way.name)
    for text, ways in _unreachable(survey).items():
        _, fix = _closed(ways, survey)
        yield Found("error", text, fix, _named(ways))


def _unreachable(survey: Survey) -> dict[str, list[Way]]:
    """Closed ways (at least one port) whose links are up, grouped by symptom: a firewall may close several."""
    found: dict[str, list[Way]] = {}
    for way in survey.used:
        if not (way.mine.works and way.theirs.works) or (way.open and not way.closed):
            continue
        if not way.open and (_leaves_elsewhere(way.there, way.mine) or _leaves_elsewhere(way.back, way.theirs)):
            continue  # the check of routes names the cause
        others = [one.theirs.name for one in survey.ways if one.mine == way.mine and one.open and one is not way]
        cross = f"; {way.mine.name} does reach {', '.join(others)} there" if others and not way.open else ""
        text, _ = _closed([way], survey)
        found.setdefault(text + cross, []).append(way)
    return found


def _closed(ways: Sequence[Way], survey: Survey) -> tuple[str, str]:
    """Diagnosis and fix for closed ways whose links are up, all with the same symptom."""
    way = ways[0]
    device = way.mine.interface
    if way.open:
        text = f"TCP {_ports_text(way.closed)}: {way.why}, where others of CROSSRAIL_PORTS={survey.named} answer"
        return f"{text}: a firewall leaves only some of them open", _allow(ways, survey)
    if "no answer" in way.why:
        text = f"{way.why}: packets vanish, as by a firewall that drops them, another VLAN, or a wrong neighbour entry"
        return text, f"ip neigh show dev {device}, at both ends; {_allow(ways, survey)}"
    if "refused" in way.why or "prohibited" in way.why or "denied" in way.why:
        text = f"{way.why}, although the doctor listens there: a firewall rejects it"
        return text, _allow(ways, survey)
    if "no route to host" in way.why:
        text = f"{way.why}: nobody answers for {way.theirs.address} on that link, or a firewall rejects it"
        return text, f"ip neigh show dev {device}; check cables, VLAN and addresses at both ends"
    return way.why, f"ip route get {way.theirs.address} from {way.mine.address}"


def _named(ways: Sequence[Way]) -> str:
    return ", ".join(way.name for way in ways)


def _closed_by(way: Way, survey: Survey) -> Cause | None:
    """The finding that says that this way is closed, if there is one."""
    return next((("rail-reach", _named(ways)) for ways in _unreachable(survey).values() if way in ways), None)


def _cause(way: Way, survey: Survey) -> Cause | None:
    """The finding of an earlier check that explains what is wrong with data on this way, if there is one."""
    if _leaves_elsewhere(way.there, way.mine) or _leaves_elsewhere(way.back, way.theirs):
        return ("rail-route", way.name)
    return _closed_by(way, survey) or ("rail-mtu", way.name)


def _allow(ways: Sequence[Way], survey: Survey) -> str:
    """The rule that lets data pass over these ways. Data has the ports that are named, or any."""
    named = survey.named or f"{DEFAULT_PORT}-{DEFAULT_PORT + 22}"
    devices = list(dict.fromkeys(way.theirs.interface for way in ways))
    inputs = devices[0] if len(devices) == 1 else f"{{ {', '.join(devices)} }}"
    rule = f"iifname {inputs} tcp dport {named} accept"  # data may have another family than the probes
    allow = f"allow TCP {'ports' if '-' in named else 'port'} {named}: nft insert rule inet filter input {rule}"
    if survey.named:
        return f"{allow}   # at {survey.peer}"
    return f"CROSSRAIL_PORTS={named} at both ends, as data has any port without it; {allow}   # at {survey.peer}"


def _ports_text(ports: list[int]) -> str:
    """``port 5``, ``ports 5, 7 to 9``."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and port == runs[-1][-1] + 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"port {shown}" if len(ports) == 1 else f"ports {shown}"


def transfers(machine: Machine) -> Iterable[Found]:
    """What a transfer of the library sent over each rail."""
    survey = _of(machine)
    for way in survey.used:
        if way.data_why:
            text = f"a transfer does not use it: {way.data_why}"
            yield Found("error", text, _allow([way], survey), way.name, _cause(way, survey))
        elif way.data is not None:
            yield Found("ok", f"carried {format_size(way.data)} of a transfer, verified", subject=way.name)


def packet_sizes(machine: Machine) -> Iterable[Found]:
    """The largest packets that pass, compared with both ends' MTUs and with the other rails."""
    survey = _of(machine)
    open_ways = [way for way in survey.used if way.open]
    for way in open_ways:
        mine, theirs = way.mine, way.theirs
        alike = [one for one in open_ways if one.mine.speed_mbps == mine.speed_mbps]
        usual = max(min(one.mine.mtu, one.theirs.mtu) for one in alike)
        small = mine if mine.mtu <= theirs.mtu else theirs
        where = "" if small is mine else f"   # at {survey.peer}"
        largest = max(mine.mtu, theirs.mtu, usual)
        fix = f"ip link set {small.interface} mtu {largest}{where}"
        passing = [size for size in (way.mtu_there, way.mtu_back) if size is not None]
        if mine.mtu != theirs.mtu:
            text = f"the MTU is {mine.mtu} here and {theirs.mtu} there"
            lost = f"; packets above {min(passing)} bytes do not arrive" if passing else ""
            yield Found("error", text + lost, fix, way.name, ("nic-mtu", mine.name) if small is mine else None)
        elif passing and min(passing) < min(mine.mtu, LARGEST):
            text = f"packets above {min(passing)} bytes do not arrive, although both ends have an MTU of {mine.mtu}"
            between = (
                f"raise the MTU of the switches between, or ip link set {mine.interface} mtu {min(passing)} at both"
            )
            yield Found("error", text, between, way.name)
        elif mine.mtu < usual:
            text = f"the MTU is {mine.mtu} at both ends, where another rail of its speed has {usual}"
            fix = f"ip link set {mine.interface} mtu {usual}, at both ends"
            yield Found("warning", text, fix, way.name, ("nic-mtu", mine.name))
        elif not passing:
            text = f"no datagram passes, so that packets up to the MTU of {mine.mtu} could not be tried"
            fix = f"allow UDP port {way.port} from {mine.address} to {theirs.address}"
            yield Found("note", text, fix, way.name, _closed_by(way, survey))
        else:
            yield Found("ok", f"packets of {min(passing)} bytes pass unfragmented", subject=way.name)


def speeds(machine: Machine) -> Iterable[Found]:
    """Each rail alone, beside the other rails and its own negotiated speed; both directions beside each other."""
    survey = _of(machine)
    for way in (one for one in survey.used if one.alone is not None):
        assert way.alone is not None
        there, back = way.alone
        failed = next((one.why for one in way.alone if one.why), "")
        if failed:
            text = f"connects, but carries no data: {failed}"
            fix = f"ethtool -S {way.mine.interface}; look for packets that are lost"
            yield Found("error", text, fix, way.name, _cause(way, survey))
            continue
        others = [
            (one.alone[0].gbit_per_s + one.alone[1].gbit_per_s) / 2
            for one in survey.used
            if one is not way and one.alone is not None
        ]
        usual = median(others) if others else 0.0
        best = max(there.gbit_per_s, back.gbit_per_s)
        rates = f"{_rate(there)} there, {_rate(back)} back"
        fix = _slow_fix(way, survey)
        if best < SLOW * usual and not _explained(way, best):
            text = f"{rates}, where the others carry {usual:.3g} Gbit/s{_shaped(way)}"
            yield Found("warning", text, fix, way.name, _cause(way, survey))
        elif min(there.gbit_per_s, back.gbit_per_s) < SLOW * best:
            text = f"{rates}: one direction is slow{_shaped(way)}"
            yield Found("warning", text, fix, way.name, _cause(way, survey))
        else:
            yield Found("ok", rates, subject=way.name)


def _rate(one: Load) -> str:
    return f"{one.gbit_per_s:.3g} Gbit/s"


def _explained(way: Way, best: float) -> bool:
    """Whether the negotiated speed is the reason of a low rate."""
    known = [rail.speed_mbps for rail in (way.mine, way.theirs) if rail.speed_mbps is not None]
    return bool(known) and best >= EXPLAINED * min(known) / 1e3


def _shaped(way: Way) -> str:
    ends = [
        f"{rail.name} {where} by the qdisc {rail.qdisc}"
        for rail, where in ((way.mine, "here"), (way.theirs, "there"))
        if rail.qdisc in _SHAPERS
    ]
    return f"; shaped: {', '.join(ends)}" if ends else ""


def _slow_fix(way: Way, survey: Survey) -> str:
    device = way.mine.interface
    for rail, where in ((way.mine, ""), (way.theirs, f"   # at {survey.peer}")):
        if rail.qdisc in _SHAPERS:
            return f"tc qdisc show dev {rail.interface}; tc qdisc del dev {rail.interface} root{where}"
    return f"ethtool {device}; ethtool -S {device}; or leave it out: CROSSRAIL_NET_DEVICES=^{device}"


def shared(machine: Machine) -> Iterable[Found]:
    """All rails at once, beside the sum of each alone."""
    survey = _of(machine)
    ways = [way for way in survey.used if way.alone is not None and way.together is not None]
    if len(ways) < 2:
        yield Found("note", "fewer than two rails carry data: there is nothing to share")
        return
    alone = sum(_best(way.alone) for way in ways)
    together = sum(_best(way.together) for way in ways)
    if together >= SHARED * alone:
        yield Found("ok", f"{alone:.3g} Gbit/s one by one, {together:.3g} at once")
        return
    parts = "; ".join(
        f"{way.name} alone {_best(way.alone):.3g} Gbit/s, together {_best(way.together):.3g}"
        for way in ways
        if _best(way.together) < SHARED * _best(way.alone)
    )
    text = f"{alone:.3g} Gbit/s one by one, but {together:.3g} at once: {_what_is_shared(ways, survey)} ({parts})"
    yield Found("warning", text, "crossrail info; lspci -tv; ethtool -l DEVICE; or fewer rails: CROSSRAIL_NET_DEVICES")


def _best(loads: tuple[Load, Load] | None) -> float:
    return max(one.gbit_per_s for one in loads) if loads else 0.0


def _what_is_shared(ways: list[Way], survey: Survey) -> str:
    if survey.idle is not None and survey.idle < BUSY:
        return f"the processors here were {1 - survey.idle:.0%} busy, and are the limit"
    for rails in ([way.mine for way in ways], [way.theirs for way in ways]):
        if twins := _same_card(rails):
            return f"{' and '.join(twins)} are ports of one PCI device, and share its slot"
    return "they share a PCIe switch, a queue, a link behind, or the other end's processors"


def _same_card(rails: list[Rail]) -> list[str]:
    """Rails that are functions of one PCI device."""
    by_slot: dict[str, list[str]] = {}
    for rail in rails:
        if "." in rail.pci:
            by_slot.setdefault(rail.pci.rpartition(".")[0], []).append(rail.name)
    return next((names for names in by_slot.values() if len(names) > 1), [])


def losses(machine: Machine) -> Iterable[Found]:
    """Segments that were sent again, and packets that interfaces dropped, while the rails carried data."""
    survey = _of(machine)
    for way in survey.used:
        loads = [load for pair in (way.alone, way.together) for load in pair or () if load.resent is not None]
        if not loads:
            continue
        worst = max(load.resent or 0.0 for load in loads)
        names = (f"{way.mine.interface} here", f"{way.theirs.interface} there")
        dropped = {name: survey.dropped[name] for name in names if name in survey.dropped}
        drops = "".join(f"; {name} dropped {count} packets" for name, count in dropped.items())
        if worst > RESENT:
            text = f"{worst:.1%} of the segments were sent again{drops}"
            fix = f"ethtool -S {way.mine.interface}; ethtool -G {way.mine.interface} rx 4096; check cable and switch"
            yield Found("warning", text, fix, way.name, ("rail-speed", way.name))
        else:
            yield Found("ok", f"{worst:.2%} of the segments were sent again{drops}", subject=way.name)


def clocks(machine: Machine) -> Iterable[Found]:
    """The peer's clock beside this machine's."""
    survey = _of(machine)
    ahead = "ahead of" if survey.offset_s >= 0 else "behind"
    text = (
        f"its clock is {abs(survey.offset_s) * 1e3:.3f} ms {ahead} ours, to within {survey.uncertainty_s * 1e3:.3f} ms"
    )
    if abs(survey.offset_s) - survey.uncertainty_s > FAR_CLOCK_S:
        yield Found("warning", text, "systemctl enable --now chrony, at both ends", survey.peer)
    else:
        yield Found("ok", text, subject=survey.peer)
