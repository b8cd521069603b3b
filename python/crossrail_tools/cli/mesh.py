"""`crossrail bench mesh`: transfers between every pair of GPUs (or ranks), each pair alone, then all at once."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import crossrail
from crossrail_tools.report.mesh import mesh_rows
from crossrail_tools.report.schema import Report, Row

from .cases import MeshAll, MeshPair
from .ends import ENDED
from .failure import Failure, UsageFailure
from .options import LinkOptions, Memory, Pin, check_tcp, fields_of, required
from .parsing import Command, Parser, device_list, size_list
from .placement import (
    NODE_OPTIONS,
    PinnedRanks,
    Placement,
    add_nodes,
    allowed_cpus,
    check_memory,
    known_gpus,
    pin_to,
    placement,
)
from .processes import Message
from .rails import missed, rail_of, rails_of
from .rank_process import Parent, gather, hand_over, join
from .ranks import Ranks
from .reporting import Progress, make_report, report_of_nodes

RANKS = 2
DEFAULT_SIZE = "64M"
ITERS, WARMUP, WINDOW, SMALL, TRIPS = 10, 2, 4, 8, 1000

LONG_S = 600.0
"""How long a rank may wait for others that are measuring."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions(PinnedRanks, LinkOptions):
    """`crossrail bench mesh`. What is None was not given."""

    placement: Placement
    size: int
    devices: list[str] | Literal["all"] | None = None
    memory: Memory | None = None
    iters: int = ITERS
    warmup: int = WARMUP
    window: int = WINDOW
    pin: Pin = "auto"

    def unpinned(self, ranks: int) -> bool:
        """Whether there are more processors than ranks that transfer GPU memory."""
        return self.devices is not None and ranks < len(allowed_cpus())

    def run(self) -> None:
        """Measures, and shows the report on the first node. Raises Failure and the library's errors."""
        report_of_nodes(self, self.placement, lambda progress: _report(self, progress))


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.set_defaults(outcome=_outcome)
    ranks = add_nodes(parser, RANKS, "--ranks")
    gpus = "one rank per GPU of each node: cuda:0,cuda:1, or `all`; without it ranks transfer host memory"
    ranks.add_argument("--devices", metavar="GPUS", type=_devices, help=gpus)
    work = parser.add_argument_group("the work")
    work.add_sizes(f"bytes per message ({DEFAULT_SIZE})")
    work.add_memory()
    work.add_iterations(ITERS, WARMUP)
    work.add_window(f"messages in flight to one rank ({WINDOW})", WINDOW)
    how = parser.add_argument_group("how it moves")
    how.add_links()
    how.add_secret_file("all nodes")
    how.add_timeout()
    how.add_pin("processors of the ranks here, in order, or `none`; by default one each if there are enough")
    parser.add_argument_group("what comes out").add_output()


def _devices(text: str) -> list[str] | str:
    return text if text == "all" else device_list(text)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    devices = parsed.devices
    if devices is not None:
        if parsed.num_processes is not None:
            parser.error("--devices and --ranks exclude each other: each GPU is a rank")
        if parsed.memory is not None:
            parser.error("--memory selects host memory, but --devices selects GPU memory")
        if "cpu" in devices:
            parser.error("--devices names GPUs; without it ranks transfer host memory")
        if devices != "all":
            parsed.num_processes = len(devices)
    elif parsed.unpack is not None:
        parser.error("--unpack applies to GPU memory only: give --devices too")
    if parsed.transport == "cuda_ipc" and devices is None:
        parser.error("--transport cuda_ipc is between GPUs: give --devices too")
    check_tcp(parser, parsed.transport, {"--rails": parsed.rails, "--channels": parsed.channels})
    sizes = parsed.sizes or size_list(DEFAULT_SIZE)
    if len(sizes) > 1:
        parser.error("bench mesh measures one size; give --size once, as 64M")
    where = placement(parser, parsed)
    if devices is not None and where.launch is not None and where.launch.local_size > 1:
        parser.error(
            f"--devices names GPUs for one command, and {where.launch.name} started {where.launch.local_size} here; "
            "start one on each node"
        )
    return MeshOptions(placement=where, size=sizes[0], **fields_of(parsed, *NODE_OPTIONS, "sizes"))


def _report(options: MeshOptions, progress: Progress) -> Report:
    where, rows = _run(options, progress)
    return make_report(dataclasses.replace(options, placement=where), rows)


@dataclass
class _Measured:
    """What rank 0 has reported: the place of each rank's memory, pairs as they are measured, and all to all at once."""

    places: Sequence[str | None] = ()
    pairs: list[tuple[int, Message]] = dataclasses.field(default_factory=list)
    everybody: Sequence[Message] = ()

    def rows(self, options: MeshOptions, where: Placement) -> list[Row]:
        """The rows of what was measured."""
        memory = None if options.devices else options.memory or "ordinary"
        like = Row("mesh", "", options.size, memory=memory, ranks=where.size, nodes=where.nodes, verified=True)
        if options.unpack:
            like = dataclasses.replace(like, unpack=options.unpack)
        found: dict[int, Mapping[str, Any]] = {}
        for rank in range(where.size):
            together = self.everybody[rank] if self.everybody else {"all_us": []}
            found[rank] = {**together, "pairs": [pair for source, pair in list(self.pairs) if source == rank]}
        return mesh_rows(found, like, [str(place) for place in self.places] if options.devices else None)


def _run(options: MeshOptions, progress: Progress) -> tuple[Placement, list[Row]]:
    """The placement of the ranks and, on the first node, the rows."""
    context = options.context()
    where = options.placement
    devices = options.devices
    if devices is not None:
        known = known_gpus(context, devices)
        where = dataclasses.replace(where, num_processes=len(known))
        devices = known
    if where.size < 2:
        only = f"only {devices[0]} is here" if devices else "this is 1 rank"
        raise UsageFailure(f"a mesh needs two or more ranks, and {only}")
    if devices is None:  # a buffer to and one from every other rank
        check_memory(where.local_size * 2 * (where.size - 1) * options.size, "the buffers of the ranks here")
    measured = _Measured()
    cpus = dataclasses.replace(options, placement=where).cpus()
    with where.rendezvous(context) as (store, group), Ranks() as ranks:
        progress.status(f"mesh: {where.size} ranks connect")
        for index, rank in enumerate(where.ranks):
            ranks.start(
                rank,
                "mesh",
                {
                    "plan": asdict(_plan(options)),
                    **where.member(rank, store, group),
                    "nodes": where.nodes,
                    "settings": options.settings(),
                    "transport": options.transport,
                    "memory": options.memory or "ordinary",
                    "device": devices[index] if devices else None,
                    "cpu": cpus[where.local_index(rank)],
                },
            )
        left = set(where.ranks)
        pairs = where.size * (where.size - 1)
        progress.running(lambda: measured.rows(options, where))
        with progress.task("mesh: pairs", pairs) as tick:
            while left:
                rank, message = ranks.next(LONG_S)
                if message["event"] == "places":
                    measured.places = message["places"]
                elif message["event"] == "pair":
                    measured.pairs.append((message["source"], message["pair"]))
                    tick(len(measured.pairs), pairs)
                elif message["event"] == "together":
                    measured.everybody = message["ranks"]
                elif message["event"] == ENDED:
                    left.discard(rank)
    if where.node != 0:
        return where, []
    if len(measured.everybody) != where.size:
        raise Failure(f"only {len(measured.everybody)} of {where.size} ranks reported their measurements")
    return where, measured.rows(options, where)


def _plan(options: MeshOptions) -> MeshAll:
    small = min(SMALL, options.size) if options.size else 0
    return MeshAll(options.size, options.iters, options.warmup, options.window, small, TRIPS, LONG_S)


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank; rank 0 reports the measurements of all ranks. Raises Failure and the library's errors."""
    pin_to(job["cpu"])
    context = crossrail.Context(**job["settings"])
    rank: int = job["rank"]
    listen = "0.0.0.0:0" if job["nodes"] > 1 else None
    with (
        join(job, context) as group,
        crossrail.Worker(context, name=f"rank {rank}", listen=listen) as worker,
    ):
        peers = _connected(group, worker, required(job["transport"]))
        places = gather(group, "places", job["device"])
        if places is not None:
            parent.send("places", places=places)
        everybody_at_once = MeshAll(**job["plan"])
        end: dict[str, Any] = {"rank": rank, "memory": job["device"] or job["memory"]}
        # Each pair is reported before the next one is measured, so that an interrupted run has those before.
        for source, target in itertools.permutations(range(group.size), 2):
            samples = MeshPair((source, target), everybody_at_once).run(context, worker, peers, **end)
            pair = None if samples is None else _pair(samples, peers, job["memory"])
            if pair is not None:
                _check(pair, rank, job["transport"])
            if rank in (0, source):
                pair = hand_over(group, f"pair {source} {target}", source, pair, LONG_S)
            if rank == 0:
                parent.send("pair", source=source, pair=pair)
        everybody = gather(group, "samples", everybody_at_once.run(context, worker, peers, **end))
        if everybody is not None:
            parent.send("together", ranks=everybody)
        group.barrier("all done")


def _connected(
    group: crossrail.Group, worker: crossrail.Worker, require: str | None
) -> list[crossrail.Endpoint | None]:
    """An endpoint to each rank, by number. Of two ranks the higher one connects."""
    group.publish("address", worker.address())
    addresses = group.collect("address")
    peers: list[crossrail.Endpoint | None] = [None] * group.size
    for rank in reversed(range(group.rank)):  # the nearest first, so that no rank serves all at once
        peers[rank] = worker.connect(addresses[rank], require=require)
    for _ in range(group.rank + 1, group.size):
        endpoint = worker.accept()
        number = endpoint.peer.removeprefix("rank ")
        if not number.isdecimal() or not group.rank < int(number) < group.size or peers[int(number)] is not None:
            raise Failure(f"{endpoint.peer!r} connected, which is not an expected rank")
        peers[int(number)] = endpoint
    return peers


def _pair(pair: Message, peers: list[crossrail.Endpoint | None], memory: str) -> dict[str, Any]:
    """The samples of one pair, with the rails that carried its data, and those that should have."""
    endpoint = peers[pair["target"]]
    receipt = pair["receipt"]
    known = {rail_of(lane): lane["transport"] for lane in endpoint.lanes()} if endpoint is not None else {}
    lanes = [
        {
            "name": rail.name,
            "bytes": rail.bytes,
            "share": rail.share,
            "transport": known.get(rail.name, rail.name.partition("/")[0]),
        }
        for rail in rails_of(receipt["lanes"])
    ]
    return {
        "target": pair["target"],
        "rate": pair["rate"],
        "latency": pair["latency"],
        "lanes": lanes,
        "protocol": receipt["protocol"],
        "notes": receipt["notes"],
        "unused": {} if endpoint is None or memory == "shared" else missed(endpoint),
    }


def _check(pair: dict[str, Any], rank: int, transport: str | None) -> None:
    """Raises Failure if cuda_ipc was required and another transport carried the data as a fallback."""
    used = {lane["transport"] for lane in pair["lanes"]}
    if transport == "cuda_ipc" and used - {"cuda_ipc"}:
        notes = "; ".join(pair["notes"]) or "see `crossrail info`"
        ways = ", ".join(sorted(used))
        raise Failure(f"data from rank {rank} to {pair['target']} went over {ways}, not over cuda_ipc: {notes}")
