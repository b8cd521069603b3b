"""`crossrail bench ep --device cuda`: one rank per GPU verifies and measures; the report.

The same processes measure every shape of a sweep. Each shape is verified before the timing and again after it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import crossrail
from crossrail._native import _DeviceEp
from crossrail_tools.report import EpDeviceRank, EpTurn, Report, Row, counted, ep_device_row, with_peers
from crossrail_tools.verify.checking import Difference, Work
from crossrail_tools.verify.sampling import Judge, inputs, outputs

from ..ends import ENDED
from ..failure import Failure, UsageFailure
from ..placement import one_gpu_each, pin_to
from ..processes import Message
from ..rank_process import Parent, gather, join
from ..ranks import Ranks
from ..reporting import OnProgress, Progress, make_report
from .options import EpOptions
from .peers import GpuPeers

LONG_S = 120.0
"""How long the command waits for a message. A rank may compile kernels, compute the reference, or wait for one that
does, and has timeouts for all of these."""

STEP_S = 100.0
"""How long ranks wait for each other. Compiling kernels and computing the reference may differ as much."""

CLOCKS = ("gpu", "host")


def measure(options: EpOptions, progress: Progress) -> Report:
    """Runs the bench. The report has rows on the first node only. Raises Failure and the library's errors."""
    context = options.context()
    options = _placed(options, context)
    run = _Run(options, progress, context)
    rows = run.rows()
    return make_report(options, rows, run.versions)


def _placed(options: EpOptions, context: crossrail.Context) -> EpOptions:
    """The options with one rank per GPU, unless fewer were requested."""
    where = one_gpu_each(options.placement, context, options.every_gpu)
    if where.local_size % options.nodes:
        ranks = where.local_size
        raise UsageFailure(f"--nodes {options.nodes}: {ranks} ranks cannot be divided evenly among as many nodes")
    return replace(options, placement=where)


class _Run:
    """One run with all ranks that this command starts."""

    def __init__(self, options: EpOptions, progress: Progress, context: crossrail.Context) -> None:
        self.options = options
        self.progress = progress
        self.context = context
        self.where = options.placement
        self.versions: dict[str, str] = {}
        self.number = 0

    def rows(self) -> list[Row]:
        """The rows of all shapes."""
        shapes = [(one, one.work(self.where.size)) for one in self.options.swept()]
        rows: list[Row] = []
        with self.where.rendezvous(self.context) as (store, group), Ranks() as ranks, GpuPeers(self.options) as peers:
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
            "ordinal": self.where.local_index(rank),
            "settings": self.options.settings(),
            "progress": self.progress.visible and rank == 0,
        }

    def _shape(self, ranks: Ranks, peers: GpuPeers, one: tuple[int, EpOptions, Work]) -> list[Row]:
        """Verifies and measures one shape, in turns with the peers."""
        number, options, work = one
        self.progress.status(f"{counted(self.where.size, 'rank')}: verification against the reference")
        how = {"number": number, "num_sms": options.num_sms, "cast_before": options.cast_before}
        peers.begin(work)
        ranks.send_all({"do": "open", "work": asdict(work), **how})
        passed = ranks.collect("passed", self.where.ranks, LONG_S)
        self.progress.status("peers start")
        peers.ready()
        facts = passed[self.where.ranks[0]]
        own: dict[str, Any] = {"device": "cuda", "num_sms": facts["num_sms"], "heap_bytes": facts["heap_bytes"]}
        own["given"] = "fp8" if options.cast_before else "bf16"
        likes = {mode: replace(options.row(work, mode), **own) for mode in options.modes}
        turns: dict[str, list[EpTurn[EpDeviceRank]]] = {mode: [] for mode in options.modes}
        for turn in range(options.rounds if options.compare else 1):
            for mode in options.modes:
                found = self._turn(ranks, mode, turn)
                if found is not None:
                    turns[mode].append(found)
                    self.progress.add([ep_device_row(likes[mode], [found])], more=mode != options.modes[-1])
            if options.compare:
                self.progress.status(f"peers round {turn + 1}")
                peers.measure()
        ranks.send_all({"do": "close"})
        ranks.collect("closed", self.where.ranks, LONG_S)
        if self.where.node != 0:
            return []
        return [with_peers(ep_device_row(likes[mode], turns[mode]), peers.results(mode)) for mode in options.modes]

    def _turn(self, ranks: Ranks, mode: str, turn: int) -> EpTurn[EpDeviceRank] | None:
        """Measures one mode by both clocks; None on nodes other than the first."""
        found = []
        for clock in CLOCKS:
            title = f"{mode}, the {clock}'s clock" + (f", round {turn + 1}" if self.options.compare else "")
            with self.progress.task(title, self.options.warmup + self.options.iters) as tick:
                found.append(self._one(ranks, mode, clock, tick))
        gpu, host = found
        if gpu is None or host is None:
            return None
        return EpTurn([EpDeviceRank.of(*both) for both in zip(gpu, host, strict=True)])

    def _one(self, ranks: Ranks, mode: str, clock: str, tick: OnProgress | None) -> list[Message] | None:
        self.number += 1
        options = self.options
        plan = {"mode": mode, "clock": clock, "cached": options.cached, "iters": options.iters}
        ranks.send_all({"do": "measure", "number": self.number, "plan": {**plan, "warmup": options.warmup}})
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
        self.work: Work | None = None
        self.judges: dict[int, Judge] = {}
        self.rig: _DeviceEp | None = None

    def handle(self, request: Message) -> bool:
        """Handles one request of the command; False for the last one."""
        if request["do"] == "open":
            self.open(request)
        elif request["do"] == "measure":
            self.measure(request)
        elif request["do"] == "close":
            self.verify(turn=1)
            self.close()
            self.parent.send("closed")
        return bool(request["do"] != "end")

    def open(self, request: Message) -> None:
        """Creates and verifies the buffer for one shape."""
        work = Work.from_dict(request["work"])
        group = self.group
        mine = inputs(work)[group.rank]
        rows = outputs(work, group.rank)
        group.barrier("here", timeout=STEP_S)
        if work != self.work:
            self.work, self.judges = work, {}
        self.rig = _DeviceEp(
            group._native,
            group.context,
            f"bench {request['number']}",
            work.parameters(group.context.timeout),
            {"ordinal": self.ordinal, "num_sms": request["num_sms"], "cast_before": request["cast_before"]},
            mine.x.tobytes(),
            mine.topk_idx.tobytes(),
            mine.topk_weights.tobytes(),
            rows.tobytes(),
        )
        self.verify(turn=0)
        self.parent.send("passed", **self.rig.facts())

    def verify(self, turn: int) -> None:
        """Compares one dispatch and one combine with the reference. Raises Failure."""
        assert self.work is not None
        assert self.rig is not None
        judge = self.judges.setdefault(turn, Judge(self.work, self.group.rank, turn))
        self.group.barrier("dispatch", timeout=STEP_S)
        parts = self.rig.dispatch()
        self.group.barrier("combine", timeout=STEP_S)
        sums = self.rig.combine()
        try:
            judge.judge_dispatch(parts)
            judge.judge_combine(sums)
        except Difference as difference:
            when = "after it was measured" if turn else "before anything was measured"
            raise Failure(f"did not verify {when}: {difference}") from None
        self.group.barrier("verified", timeout=STEP_S)

    def measure(self, request: Message) -> None:
        """Runs one measurement; rank 0 reports the samples of all ranks to the command that started it."""
        assert self.rig is not None
        tick = self._tick if self.progress and self.group.rank == 0 else None
        self.group.barrier("measure", timeout=STEP_S)
        found = {**self.rig.measure(request["plan"], tick), "links": self.rig.facts()["links"]}
        everybody = gather(self.group, f"samples {request['number']}", found)
        self.parent.send("measured", ranks=everybody)

    def close(self) -> None:
        """Releases the buffer and all memory."""
        if self.rig is not None:
            self.rig.close()
            self.rig = None

    def _tick(self, done: int, total: int) -> None:
        self.parent.send("progress", done=done, total=total)
