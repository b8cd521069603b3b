"""The driving end: requests each measurement from the listening end, measures, and makes the report."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import crossrail
from crossrail._native import loopback
from crossrail.records import LaneReport, Transfer, TransferEnd
from crossrail_tools.report.build import Round, p2p_row, with_peers, with_raw_tcp, with_samples
from crossrail_tools.report.pipeline import Waits, stage_shares
from crossrail_tools.report.schema import Iteration, Lane, PeerResult, Report, Row, Stages
from crossrail_tools.report.stats import gb_per_s, median
from crossrail_tools.report.units import format_size

from .. import peers
from ..cases import Bandwidth, Case, NetPlugin, P2p, RawTcp, Unpack
from ..failure import Failure
from ..launcher import GROUP
from ..options import required
from ..parsing import UNPACK_MODES, parse_address, resolve
from ..placement import check_memory, known_gpus, pin_to
from ..processes import Message
from ..rails import line_rate, missed, most_connections, rail_of, rails_of
from ..reporting import OnProgress, Progress, make_report
from .channel import RAW_TCP_FAILURES, Channel
from .child import other_end, report_failure
from .options import BenchOptions, Plan, plans
from .phases import Phases

RAW_TCP_ITERS = 5

UNPACK_ITERS = 5

MOST_UNPACKED = 256 << 20
"""Maximum bytes for measuring unpacking alone. Beyond them the rate no longer depends on the size."""


def drive(options: BenchOptions, progress: Progress) -> Report:
    """Runs the bench as its driving end. Raises Failure and the library's errors."""
    for name in options.compare:
        error = peers.missing(name)
        if error is not None:
            raise error
    work = plans(options)
    _check_memory(options, work)
    progress.versions = versions = {name: peers.version(name) for name in options.compare}
    with _channel(options) as (channel, host):
        met = channel.request(_hello(options, work))
        other = str(met["device"])
        if other != "cpu":
            work = [replace(plan, other_memory=other) for plan in work]
        driver = _Driver(channel, options, host, met, progress)
        for number, plan in enumerate(work, 1):
            part = f" ({number} of {len(work)})" if len(work) > 1 else ""
            progress.add([driver.row(plan, part)], more=number < len(work))
            if progress.stopping.is_set():
                break  # the other end is killed, or sees this one leave
        else:
            channel.leave()
        if options.trace_parts is not None:
            driver.phases.write(options.trace_parts)
    return make_report(options, progress.rows, versions)


def _check_memory(options: BenchOptions, work: list[Plan]) -> None:
    """Raises Failure if the host memory of the ends that run here is more than is free."""
    both_here = options.connect is None and (options.launch is None or options.launch.machines == 1)
    places = [options.memory_device, (options.device or ["cpu"])[-1]] if both_here else [options.memory_device]
    ends = places.count("cpu")
    buffers = max(plan.case.size * (1 if isinstance(plan.case, Bandwidth | P2p) else 2) for plan in work)
    if ends:
        check_memory(ends * buffers, "the buffers of both ends" if ends == 2 else "the buffers of this end")


def _hello(options: BenchOptions, work: list[Plan]) -> Message:
    """The first message: parameters that both ends must agree on."""
    places = options.device or []
    return {
        "bench": options.what,
        "version": crossrail.__version__,
        "sizes": list(dict.fromkeys(plan.case.size for plan in work)),
        "iters": options.iters,
        "warmup": options.warmup,
        "window": work[0].window or options.window,
        "memory": work[0].other_memory,
        "unpack": options.unpack,
        "device": places[0] if places else None,
        "other_device": places[1] if len(places) > 1 else None,
        "net_plugin": options.net_plugin is not None,
    }


@contextlib.contextmanager
def _channel(options: BenchOptions) -> Iterator[tuple[Channel, str]]:
    """A channel to the other end, which is started here if ``--connect`` is missing, and the host it is reached at."""
    context = options.context()
    mine = options.device or [] if options.connect is None else [options.memory_device]
    if wanted := [place for place in mine if place != "cpu"]:
        known_gpus(context, wanted)
    cpu = options.cpu(driver=True)
    if options.launch is not None:
        pin_to(cpu)
        with crossrail.Group(name=GROUP, context=context) as group:
            (listening,) = group.collect("address", [0])
            with _connected(options, context, listening) as channel:
                yield channel, parse_address(group.store_address.removeprefix("tcp://"))[0]
        return
    if options.connect is not None:
        pin_to(cpu)
        address = resolve(options.connect)
        with _connected(options, context, address) as channel:
            yield channel, parse_address(address)[0]
        return
    with other_end(options) as (end, there):
        pin_to(cpu)
        with _connected(options, context, there) as channel:
            try:
                yield channel, loopback()
            except Exception:
                report_failure(end)
                raise


@contextlib.contextmanager
def _connected(options: BenchOptions, context: crossrail.Context, to: bytes | str) -> Iterator[Channel]:
    with crossrail.Worker(context) as worker:
        endpoint = worker.connect(to, require=required(options.transport))
        yield Channel(context, worker, endpoint)


class _Driver:
    """Measures the rows of a bench over one channel, one after the other."""

    def __init__(self, channel: Channel, options: BenchOptions, host: str, met: Message, progress: Progress) -> None:
        self.channel = channel
        self.options = options
        self.host = host
        self.addresses: dict[str, str] = met["addresses"]
        self.places = (options.memory_device, str(met["device"]))
        self.unpack = str(met["unpack"])
        # A plugin has lanes of its own.
        own = options.net_plugin is None
        self.unused = {**_other_ends(met["unused"]), **missed(channel.endpoint)} if own else {}
        self.progress = progress
        self.phases = Phases()
        settings = channel.context.settings()
        self.chunk = crossrail.parse_size(settings["CROSSRAIL_CHUNK"] or "0")
        self.lane_window = int(settings["CROSSRAIL_WINDOW"] or 0)
        channels = settings["CROSSRAIL_CHANNELS"] or "0"
        self.channels = None if channels == "auto" else int(channels)
        self.bounce = crossrail.parse_size(settings["CROSSRAIL_BOUNCE"] or "0")

    def row(self, plan: Plan, part: str = "") -> Row:
        """Measures one row: Crossrail and every peer, in turns. ``part`` says which row of how many it is."""
        case, names = plan.case, self.options.compare
        before = self.channel.endpoint.lanes()
        transport, protocol = ("", None) if isinstance(case, P2p) else self._probe(plan)
        turns: list[Measured] = []
        theirs: dict[str, list[peers.Figure]] = {name: [] for name in names}
        raw = RawSamples()
        errors: dict[str, str] = {}
        for turn in range(self.options.rounds if names else 1):
            title = f"{case.what} {format_size(case.size)}{part}" + (f" round {turn + 1}" if names else "")
            turns.append(self._measure(plan, title))
            if isinstance(case, P2p):
                rails = [lane.name for one in turns[0].transfers for lane in one.lanes if lane.bytes]
                transport = self._transports(rails, before)
                if "tcp" in transport.split("+") and not self.progress.stopping.is_set():
                    self._raw_tcp(plan, turns[-1].transfers, raw)
            if self.progress.stopping.is_set():
                break
            for name in names:
                self._turn_of(name, plan, transport, theirs, errors)
        results = {
            name: _peer_result(theirs[name], errors.get(name), self._work(name, plan, transport)) for name in names
        }
        self._check_carried_by(transport, protocol or turns[-1].transfers[-1].protocol)
        row = self._row_template(plan, transport, protocol)
        if isinstance(case, P2p):
            transfers = [turn.transfers for turn in turns]
            row = replace(row, chunk=self.chunk, window=self.lane_window, channels=self._connections())
            row = with_raw_tcp(replace(row, notes=raw.notes), raw.samples_us, case.size)
            row = self._with_unpack_rates(row)
            dead = self._dead(before, transfers)
            # A plugin has as many connections as it is asked for.
            measured = self.channels is None and self.options.net_plugin is None
            row = p2p_row(row, transfers, self._lanes(before), dead, channels_found=measured)
        else:
            trips = turns[-1].batch if plan.window is None else None
            row = replace(row, window=plan.window, iterations_per_sample=trips)
            row = with_samples(row, [Round(turn.samples_us, turn.bytes_per_sample) for turn in turns])
            row = replace(row, lanes=self._carried_since(before))
        return with_peers(row, results)

    def _connections(self) -> int:
        """Connections per rail: as set, or as many as there are by now."""
        if self.channels is not None:
            return self.channels
        return most_connections(self.channel.endpoint.lanes())

    def _row_template(self, plan: Plan, transport: str, protocol: str | None) -> Row:
        """A row with the fields that identify it."""
        case = plan.case
        row = Row(what=case.what, transport=transport, size=case.size, protocol=protocol, verified=True)
        row = replace(row, unused=self._unused(transport))
        if isinstance(case, P2p):
            row = replace(row, verified=case.verify != "none", verification=case.verify)
        if "cpu" in self.places:
            row = replace(row, memory=self.options.memory or "ordinary")
        if self.places == ("cpu", "cpu"):
            return row
        row = replace(row, device=",".join(dict.fromkeys(self.places)))
        into_gpu = self.places[1] != "cpu" and transport != "cuda_ipc"
        return replace(row, unpack=self.unpack, bounce=self.bounce) if into_gpu else row

    def _unused(self, transport: str) -> dict[str, str]:
        """What was expected to carry data over ``transport`` and did not, and why."""
        used = transport.split("+")
        single_copies = self.places == ("cpu", "cpu") and self.options.memory != "shared"
        rails = [] if self.options.rails is None or "tcp" in used else self.options.rails.split(",")
        return {
            **{f"tcp/{rail}": f"{transport} carried the data; rails need --transport tcp" for rail in rails},
            **{name: why for name, why in self.unused.items() if single_copies or not name.startswith("shm(")},
        }

    def _check_carried_by(self, transport: str, protocol: str) -> None:
        """Raises Failure if cuda_ipc was required and another transport carried the data as a fallback."""
        if self.options.transport == "cuda_ipc" and transport != "cuda_ipc":
            why = [way["reason"] for way in self.channel.endpoint.explain().candidates if way["lane"] == "cuda_ipc"]
            reasons = "; ".join(reason for reason in why if reason) or "see the messages above, and `crossrail info`"
            raise Failure(f"data went over {transport} ({protocol}), not over cuda_ipc: {reasons}")

    def _raw_tcp(self, plan: Plan, transfers: list[Iteration], raw: RawSamples) -> None:
        """Measures plain TCP sockets over the rails that ``transfers`` used, in the same run."""
        channel = self.channel
        known = {rail_of(lane): lane for lane in channel.endpoint.lanes() if lane["transport"] == "tcp"}
        used = dict.fromkeys(lane.name for one in transfers for lane in one.lanes if lane.bytes)
        devices = [known[rail]["device"] for rail in used if rail in known and known[rail]["alive"]]
        size = plan.case.size
        if raw.notes or not devices or not size:
            return
        self.progress.status(f"plain TCP sockets: {format_size(size)}")
        case = RawTcp(size, RAW_TCP_ITERS, max(self._connections(), 1))
        channel.order(case, "ordinary")
        try:
            raw.samples_us += channel.measure(replace(case, devices=tuple(devices)))["samples_us"]
        except RAW_TCP_FAILURES as error:
            raw.notes.append(f"plain TCP sockets were not measured: {error}")

    def _with_unpack_rates(self, row: Row) -> Row:
        """``row`` with the rate of each mode of unpacking alone, on the receiving GPU, in pieces as large as chunks."""
        if row.unpack is None or not row.size or self.progress.stopping.is_set():
            return row
        self.progress.status(f"unpacking alone on {self.places[1]}")
        size = min(row.size, MOST_UNPACKED)
        fragment = min(self.chunk or size, size)
        case = Unpack(self.places[1], size, fragment, "pinned", UNPACK_MODES, UNPACK_ITERS, 2)
        found = self.channel.request({"do": "unpack-rates", "case": case.order()})
        return replace(row, unpack_gb_per_s=found["rates"], notes=[*row.notes, *found["notes"]])

    def _transports(self, rails: list[str], before: list[LaneReport]) -> str:
        """The transports of ``rails``, without duplicates, including rails that were lost since ``before``."""
        lanes = [*before, *self.channel.endpoint.lanes()]
        known = {rail_of(lane): lane["transport"] for lane in lanes}
        return "+".join(dict.fromkeys(known.get(rail, rail.partition("/")[0]) for rail in rails))

    def _turn_of(
        self, name: str, plan: Plan, transport: str, figures: dict[str, list[peers.Figure]], errors: dict[str, str]
    ) -> None:
        if name in errors:
            return
        reason = peers.unsuited(name, plan.case.what, transport)
        if reason is None:
            self.progress.status(f"{name}: {plan.case.what} {format_size(plan.case.size)}")
            try:
                figures[name].append(self._run_peer(self._work(name, plan, transport)))
            except peers.PeerFailure as error:
                reason = str(error)
        if reason is not None:
            errors[name] = reason

    def _run_peer(self, work: peers.PeerJob) -> peers.Figure:
        ports = self.channel.request({"do": "peer", "work": vars(work)}, work.timeout)["ports"]
        try:
            return peers.run_client(work, ports)
        finally:
            self.channel.request({"do": "peer-stop"}, work.timeout)

    def _work(self, name: str, plan: Plan, transport: str) -> peers.PeerJob:
        rails = {rail_of(lane) for lane in self.channel.endpoint.lanes() if lane["transport"] == "tcp"}
        devices = sorted(rail.partition("/")[2] for rail in rails) if transport == "tcp" else []
        # One rail, too, may be another link than the one that the control connection takes.
        of_rails = devices if isinstance(plan.case, P2p) else []
        hosts = [self.addresses[device] for device in of_rails if device in self.addresses]
        return peers.PeerJob(
            peer=name,
            what=plan.case.what,
            size=plan.case.size,
            transport=transport,
            iterations=_peer_iterations(plan),
            hosts=hosts if hosts and name == "iperf3" else [self.host],
            devices=_interfaces(devices) if self.options.rails is not None else [],
        )

    def _probe(self, plan: Plan) -> tuple[str, str]:
        """Sends one message of this size, twice, and returns the transport and protocol of its receipt."""
        what, size = plan.case.what, plan.case.size
        once = replace(plan, case=P2p(size, iters=1, warmup=1))
        (one,) = self._measure(once, f"{what} {format_size(size)}, first messages").transfers
        rails = [lane.name for lane in one.lanes if lane.bytes or not size]
        return self._transports(rails, []), one.protocol

    def _measure(self, plan: Plan, title: str) -> Measured:
        case, path = plan.case, self.options.net_plugin
        self.channel.order(case, plan.other_memory)
        with self.progress.task(title, case.iters) as show, self.phases.watched(title, case.warmup, show) as tick:
            mine: Case = case
            if isinstance(case, P2p):
                self.progress.hands_over = True
                tick = self._with_rates(tick)
                mine = case if path is None else NetPlugin(path, case)
            found = self.channel.measure(mine, memory=plan.memory, on_progress=tick)
        if isinstance(case, P2p):
            transfers = [_iteration(one, case.size, own=path is None) for one in found]
            return Measured([one.us_sender for one in transfers], 1, case.size, transfers)
        moved = found["bytes_per_sample"] if plan.window is not None else 0
        return Measured(found["samples_us"], found["batch"], moved, [])

    def _with_rates(self, tick: OnProgress) -> OnProgress:
        """``tick`` that also shows the rate of every rail since the tick before."""
        if not self.progress.visible:
            return tick
        last = {"at": time.monotonic(), **self._sent()}

        def advance(done: int, total: int) -> object:
            now, sent = time.monotonic(), self._sent()
            span = now - last["at"]
            rates = [f"{rail} {(bytes_ - last.get(rail, 0)) / span / 1e9:.2f}" for rail, bytes_ in sent.items()]
            if rates:
                self.progress.live(f"GB/s now: {', '.join(rates)}")
            last.update(sent, at=now)
            return tick(done, total)

        return advance

    def _sent(self) -> dict[str, float]:
        """Bytes sent so far by each rail."""
        sent: dict[str, float] = {}
        for lane in self.channel.endpoint.lanes():
            sent[rail_of(lane)] = sent.get(rail_of(lane), 0) + lane["tx_bytes"]
        return sent

    def _lanes(self, before: list[LaneReport]) -> dict[str, Lane]:
        """Counters and line rates of the rails; retransmits are those since ``before``."""
        known: dict[str, Lane] = {}
        if self.options.net_plugin is not None:
            return known  # a plugin's lanes have no counters
        start = {lane["name"]: lane["retransmits"] for lane in before}
        lanes = self.channel.endpoint.lanes()
        now = {lane["name"] for lane in lanes}
        for lane in [*lanes, *(lane for lane in before if lane["name"] not in now)]:
            rail = rail_of(lane)
            retransmits = max(lane["retransmits"] - start.get(lane["name"], 0), 0)
            if rail in known:
                retransmits += known[rail].retransmits or 0
            known[rail] = Lane(
                name=rail,
                bytes=0,
                share=0.0,
                retransmits=retransmits if lane["transport"] == "tcp" else None,
                line_gb_per_s=line_rate(rail),
                transport=lane["transport"],
                device=rail.partition("/")[2] or None,
            )
        return known

    def _carried_since(self, before: list[LaneReport]) -> list[Lane]:
        """The rails with what this end sent over each, heads included, where there are several."""
        known = self._lanes(before)
        start: dict[str, int] = {}
        for lane in before:
            start[rail_of(lane)] = start.get(rail_of(lane), 0) + lane["tx_bytes"]
        sent = {rail: max(int(count) - start.get(rail, 0), 0) for rail, count in self._sent().items() if rail in known}
        total = sum(sent.values())
        if len(sent) < 2 or not total:
            return []
        return [replace(known[rail], bytes=count, share=count / total) for rail, count in sent.items()]

    def _dead(self, before: list[LaneReport], transfers: list[list[Iteration]]) -> list[str]:
        """Rails that failed during the transfers: dead now, or named in the notes of a receipt."""
        if self.options.net_plugin is not None:
            return []
        notes = " ".join(note for turn in transfers for one in turn for note in one.notes)
        lanes = [*before, *self.channel.endpoint.lanes()]
        words = set(re.split(r"[\s,;]+", notes))
        lost = [rail_of(lane) for lane in lanes if not lane["alive"] or words & {lane["name"], rail_of(lane)}]
        return list(dict.fromkeys(lost))


def _other_ends(unused: dict[str, str]) -> dict[str, str]:
    """What the other end was expected to use: rails by its name, anything else is the same at both ends."""
    return {
        f"{name} at the listening end" if "/" in name else name: _seen_from_here(why) for name, why in unused.items()
    }


def _seen_from_here(why: str) -> str:
    """A reason that the other end gave: its peer is this end, and what it calls its own is not ours."""
    for theirs, ours in (("the peer", "this end"), ("our other", "its other"), ("of this device", "of that device")):
        why = re.sub(rf"\b{theirs}\b", ours, why)
    return why


@dataclass
class RawSamples:
    """Samples of plain TCP sockets over all turns, or the reason why there are none."""

    samples_us: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """The result of the native loop for one turn."""

    samples_us: list[float]
    batch: int
    bytes_per_sample: int
    transfers: list[Iteration]


def _iteration(one: Transfer, size: int, own: bool) -> Iteration:
    """The records of both ends of one transfer as one. Stages are the sender's, which sees all but copying.

    ``own``: it was carried by Crossrail, which knows what it waited for; a plugin's transfers are seen from outside.
    """
    sender, receiver = one["sender"], one["receiver"]
    sent, received = sender["receipt"], receiver["receipt"]
    return Iteration(
        us_sender=sender["us"],
        us_receiver=receiver["us"],
        gb_per_s_sender=gb_per_s(size, sender["us"]),
        gb_per_s_receiver=gb_per_s(size, receiver["us"]),
        protocol=sent["protocol"],
        lanes=rails_of(sent["lanes"]),
        stages=Stages(
            match_us=sent["match_us"],
            window_us=sent["window_us"],
            wire_us=sent["wire_us"],
            copy_us=max(sent["copy_us"], received["copy_us"]),
            pack_us=sent["pack_us"],
            unpack_us=received["unpack_us"],
            slot_us=max(sent["slot_us"], received["slot_us"]),
            slowest=_slowest(sender, receiver) if own else {},
        ),
        notes=list(dict.fromkeys([*sent["notes"], *received["notes"]])),
    )


def _slowest(sender: TransferEnd, receiver: TransferEnd) -> dict[str, float]:
    """The share of the time in which each stage of a transfer in chunks was the slowest, if that is known."""
    sent, received = sender["receipt"], receiver["receipt"]
    if sent["protocol"] != "chunks":
        return {}
    held = [Waits(one["pack_us"], one["unpack_us"], one["slot_us"]) for one in (sent["held"], received["held"])]
    return stage_shares(sender["us"], sent["match_us"], sent["window_us"], *held)


def _peer_result(figures: list[peers.Figure], error: str | None, work: peers.PeerJob) -> PeerResult:
    if error is not None or not figures:
        return PeerResult(what=work.peer, error=error or "it was not run")
    gigabytes = [figure.gb_per_s for figure in figures if figure.gb_per_s is not None]
    averages = [figure.avg_us for figure in figures if figure.avg_us is not None]
    halves = [figure.p50_us for figure in figures if figure.p50_us is not None]
    return PeerResult(
        what=peers.describe(work),
        p50_us=median(halves) if halves else None,
        avg_us=median(averages) if averages else None,
        gb_per_s=median(gigabytes) if gigabytes else None,
        rounds=gigabytes or averages,
    )


def _peer_iterations(plan: Plan) -> int:
    """As many messages as Crossrail sends: each window counts with all its messages."""
    return max(plan.case.iters * (plan.window or 1), 10)


def _interfaces(devices: list[str]) -> list[str]:
    """Devices that are interfaces. Other programs do not accept an address such as 127.0.0.2 as a device."""
    return [device for device in devices if Path("/sys/class/net", device).exists()]
