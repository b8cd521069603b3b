"""`crossrail bench ep --device cuda`: one rank per GPU verifies and measures; the report.

The same processes measure every shape of a sweep. Each shape is verified before the timing and again after it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import crossrail
from crossrail._native import _DeviceEp
from crossrail.records import DeviceEpPlace
from crossrail_tools.report.build import as_peer, with_peers
from crossrail_tools.report.ep import EpRank, EpTurn, ep_row
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.units import counted
from crossrail_tools.verify.checking import Difference, Work
from crossrail_tools.verify.sampling import Judge, inputs, outputs

from ..ends import ENDED
from ..failure import Failure, UsageFailure
from ..placement import pin_to, shared_gpus
from ..processes import Message
from ..rank_process import Parent, gather, join
from ..ranks import Ranks
from ..reporting import OnProgress, Progress, make_report
from .options import NETWORK, EpOptions
from .peers import GpuPeers

LONG_S = 120.0
"""How long the command waits for a message. A rank may compile kernels, compute the reference, or wait for one that
does, and has timeouts for all of these."""

STEP_S = 100.0
"""How long ranks wait for each other. Compiling kernels and computing the reference may differ as much."""

CLOCKS = ("gpu", "host")

OURS = "ours"
"""The exchange by the options; another one may use the network alone."""


def measure(options: EpOptions, progress: Progress) -> Report:
    """Runs the bench. The report has rows on the first node only. Raises Failure and the library's errors."""
    context = options.context()
    options, gpus = _placed(options, context)
    run = _Run(options, progress, context, gpus)
    rows = run.rows()
    return make_report(options, rows, run.versions)


def _placed(options: EpOptions, context: crossrail.Context) -> tuple[EpOptions, tuple[str, ...]]:
    """The options with one rank per GPU, unless another number was requested, and the GPU of each rank here."""
    where, gpus = shared_gpus(options.placement, context, options.every_gpu)
    if where.local_size % options.nodes:
        ranks = where.local_size
        raise UsageFailure(f"--nodes {options.nodes}: {ranks} ranks cannot be divided evenly among as many nodes")
    return replace(options, placement=where), gpus


class _Run:
    """One run with all ranks that this command starts."""

    def __init__(
        self, options: EpOptions, progress: Progress, context: crossrail.Context, gpus: tuple[str, ...]
    ) -> None:
        self.options = options
        self.gpus = gpus
        self.progress = progress
        self.context = context
        self.where = options.placement
        self.versions: dict[str, str] = {}
        self.number = 0
        self.ways = [OURS, *(name for name in options.compare if name == NETWORK)]
        others = [name for name in options.compare if name != NETWORK]
        self.peer_options = replace(options, compare=others)

    def rows(self) -> list[Row]:
        """The rows of all shapes."""
        shapes = [(one, one.work(self.where.size)) for one in self.options.swept()]
        rows: list[Row] = []
        with (
            self.where.rendezvous(self.context) as (store, group),
            Ranks() as ranks,
            GpuPeers(self.peer_options) as peers,
        ):
            self.where.announce(store)
            for rank in self.where.ranks:
                ranks.start(rank, "ep-cuda", self._job(rank, store, group))
            for number, (options, work) in enumerate(shapes):
                rows += self._shape(ranks, peers, (number, options, work))
            ranks.send_all({"do": "end"})
            ranks.collect(ENDED, self.where.ranks, LONG_S)
            self.versions = peers.versions
        return rows

    def _job(self, rank: int, store: str, group: str) -> Message:
        return {
            **self.where.member(rank, store, group, self.options.nodes),
            "cpu": self.options.cpus(self.where.local_size)[self.where.local_index(rank)],
            "ordinal": int(self.gpus[self.where.local_index(rank)].removeprefix("cuda:")),
            "settings": self._settings(rank),
            "progress": self.progress.visible and rank == 0,
            "per_node": self.where.size // (self.where.nodes * self.options.nodes),
        }

    def _settings(self, rank: int) -> dict[str, str]:
        """Settings of a rank's process: emulated nodes share no memory, and each has NVLink within it."""
        label = self.where.node_label(rank, self.options.nodes) if self.options.nodes > 1 else None
        return self.options.settings() | ({} if label is None else {"node": label.replace(" ", "-")})

    def _shape(self, ranks: Ranks, peers: GpuPeers, one: tuple[int, EpOptions, Work]) -> list[Row]:
        """Verifies and measures one shape, in turns with the peers."""
        number, options, work = one
        self.progress.status(f"{counted(self.where.size, 'rank')}: verification against the reference")
        how: Message = {"number": number, "num_sms": options.num_sms, "cast_before": options.cast_before}
        how |= {"ways": self.ways, "share_node": options.backend != "none", "send": options.send}
        peers.begin(work)
        ranks.send_all({"do": "open", "work": asdict(work), **how})
        passed = ranks.collect("passed", self.where.ranks, LONG_S)
        self.progress.status("peers start")
        peers.ready()
        likes = {way: self._likes(options, work, passed[self.where.ranks[0]][way], way) for way in self.ways}
        turns: dict[tuple[str, str], list[EpTurn]] = {}
        for turn in range(options.rounds if options.compare else 1):
            for mode in options.modes:
                for way in self.ways:
                    found = self._turn(ranks, (way, mode), turn)
                    if found is not None:
                        turns.setdefault((way, mode), []).append(found)
                        more = (way, mode) != (self.ways[-1], options.modes[-1])
                        self.progress.add([ep_row(likes[way][mode], [found])], more=more)
            if self.peer_options.compare:
                self.progress.status(f"peers round {turn + 1}")
                peers.measure()
        ranks.send_all({"do": "close"})
        ranks.collect("closed", self.where.ranks, LONG_S)
        if self.where.node != 0:
            return []
        made = {way: [ep_row(likes[way][mode], turns[way, mode]) for mode in options.modes] for way in self.ways}
        beside = {row.what: {NETWORK: as_peer(row, "the same over the network alone")} for row in made.get(NETWORK, [])}
        ours = [with_peers(row, peers.results(row.what) | beside.get(row.what, {})) for row in made[OURS]]
        return ours + made.get(NETWORK, [])

    def _likes(self, options: EpOptions, work: Work, facts: Message, way: str) -> dict[str, Row]:
        """The rows of each mode, without figures."""
        own: dict[str, Any] = {"device": "cuda", "num_sms": facts["num_sms"], "heap_bytes": facts["heap_bytes"]}
        own["given"] = "fp8" if options.cast_before else "bf16"
        own["send"] = facts["send"]
        own |= {} if way == OURS else {"backend": "none"}
        return {mode: replace(options.row(work, mode), **own) for mode in options.modes}

    def _turn(self, ranks: Ranks, which: tuple[str, str], turn: int) -> EpTurn | None:
        """Measures one mode of one way by both clocks; None on nodes other than the first."""
        found = []
        way, mode = which
        for clock in CLOCKS:
            title = f"{mode}, the {clock}'s clock" + (f", round {turn + 1}" if self.options.compare else "")
            title += "" if way == OURS else f", {way} only"
            with self.progress.task(title, self.options.warmup + self.options.iters) as tick:
                found.append(self._one(ranks, which, clock, tick))
        gpu, host = found
        if gpu is None or host is None:
            return None
        return EpTurn([EpRank.on_gpu(*both) for both in zip(gpu, host, strict=True)])

    def _one(self, ranks: Ranks, which: tuple[str, str], clock: str, tick: OnProgress | None) -> list[Message] | None:
        self.number += 1
        options = self.options
        way, mode = which
        plan = {"mode": mode, "clock": clock, "cached": options.cached, "iters": options.iters}
        request = {"do": "measure", "number": self.number, "way": way}
        ranks.send_all({**request, "plan": {**plan, "warmup": options.warmup}})
        measured = ranks.collect("measured", self.where.ranks, LONG_S, tick)
        every: list[list[Message]] = [message["ranks"] for message in measured.values() if message["ranks"]]
        return every[0] if every else None


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank: handles requests until `end`. Rank 0 reports the measurements of all ranks.

    Raises Failure if data did not verify, and the library's errors.
    """
    pin_to(job["cpu"])
    context = crossrail.Context(**job["settings"])
    with join(job, context) as group:
        group.wait_members()
        rank = _Rank(parent, job, group)
        try:
            while rank.handle(parent.receive()):
                pass
        finally:
            rank.close()
        group.barrier("gone", timeout=STEP_S)  # a process that ends while others are closing would look dead to them


class _Rank:
    """One rank, with its buffer."""

    def __init__(self, parent: Parent, job: Message, group: crossrail.Group) -> None:
        self.parent = parent
        self.group = group
        self.ordinal: int = job["ordinal"]
        self.progress: bool = job["progress"]
        self.settings: dict[str, str] = job["settings"]
        self.work: Work | None = None
        self.judges: dict[tuple[int, int], Judge] = {}
        self.per_node: int = job["per_node"]
        self.rigs: dict[str, _DeviceEp] = {}

    def handle(self, request: Message) -> bool:
        """Handles one request of the command; False for the last one."""
        if request["do"] == "open":
            self.open(request)
        elif request["do"] == "measure":
            self.measure(request)
        elif request["do"] == "close":
            for way in self.rigs:
                self.verify(way, turn=1)
            self.close()
            self.parent.send("closed")
        return bool(request["do"] != "end")

    def open(self, request: Message) -> None:
        """Creates and verifies the buffers for one shape: one for each way that is measured."""
        work = Work.from_dict(request["work"])
        group = self.group
        mine = inputs(work)[group.rank]
        rows = outputs(work, group.rank)
        group.barrier("here", timeout=STEP_S)
        if work != self.work:
            self.work, self.judges = work, {}
        for way in request["ways"]:
            context, shares = group.context, request["share_node"]
            if way == NETWORK:
                settings: dict[str, Any] = {**self.settings, "tls": "tcp"}
                context, shares = crossrail.Context(**settings), False
            on: DeviceEpPlace = {
                "ordinal": self.ordinal,
                "num_sms": request["num_sms"],
                "cast_before": request["cast_before"],
                "send": request["send"] if shares else "rank",
            }
            self.rigs[way] = _DeviceEp(
                group._native,
                context,
                f"bench {request['number']} {way}",
                {**work.parameters(group.context.timeout), "share_node": shares},
                on,
                mine.x.tobytes(),
                mine.topk_idx.tobytes(),
                mine.topk_weights.tobytes(),
                rows.tobytes(),
            )
            self.verify(way, turn=0)
        self.parent.send("passed", **{way: rig.facts() for way, rig in self.rigs.items()})

    def verify(self, way: str, turn: int) -> None:
        """Compares one dispatch and one combine with the reference. Raises Failure."""
        assert self.work is not None
        rig = self.rigs[way]
        node = self.per_node if rig.facts()["send"] == "node" else 1
        judge = self.judges.setdefault((turn, node), Judge(self.work, self.group.rank, turn, node))
        self.group.barrier("dispatch", timeout=STEP_S)
        parts = rig.dispatch()
        self.group.barrier("combine", timeout=STEP_S)
        sums = rig.combine()
        try:
            judge.judge_dispatch(parts)
            judge.judge_combine(sums)
        except Difference as difference:
            when = "after it was measured" if turn else "before anything was measured"
            over = "" if way == OURS else f" over the {way} alone"
            raise Failure(f"did not verify{over} {when}: {difference}") from None
        self.group.barrier("verified", timeout=STEP_S)

    def measure(self, request: Message) -> None:
        """Runs one measurement; rank 0 reports the samples of all ranks to the command that started it."""
        rig = self.rigs[request["way"]]
        tick = self._tick if self.progress and self.group.rank == 0 else None
        self.group.barrier("measure", timeout=STEP_S)
        found = json.loads(rig.measure(json.dumps(request["plan"]), tick))
        facts = rig.facts()
        found |= {"links": facts["links"], "rails": facts["rails"]}
        everybody = gather(self.group, f"samples {request['number']}", found)
        self.parent.send("measured", ranks=everybody)

    def close(self) -> None:
        """Releases the buffers and all memory."""
        while self.rigs:
            self.rigs.popitem()[1].close()

    def _tick(self, done: int, total: int) -> None:
        self.parent.send("progress", done=done, total=total)
