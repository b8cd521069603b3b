"""`crossrail bench ep` in host memory: the ranks of this node verify and measure; the report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import crossrail
from crossrail.ref import bits
from crossrail_tools.report.build import with_peers
from crossrail_tools.report.ep import EpRank, EpTurn, ep_row
from crossrail_tools.report.schema import PeerResult, Report, Row
from crossrail_tools.report.units import counted, format_bytes
from crossrail_tools.verify.checking import Difference, Work

from ..cases import Experts
from ..ends import ENDED
from ..failure import Failure
from ..placement import pin_to
from ..processes import Message
from ..rails import sent_by_rail
from ..rank_process import Parent, gather, join
from ..ranks import Ranks
from ..reporting import OnProgress, Progress, make_report
from .options import QUICK_TOKENS, EpOptions, buffer_numbers
from .peers import MpiTurns, check_mpi, mpi_version

LONG_S = 700.0
"""How long the command waits for a message. A rank may compute the reference, or wait for one that does, and has
timeouts for both."""

STEP_S = 600.0
"""How long ranks wait for each other. Computing the reference, and measuring peers in between, may differ as much."""


FIRST_PART = 10
"""Timed iterations after which rank 0 knows their pace."""

PART_S = 1.0
"""How long a part of a measurement takes, whose samples are reported together."""

WARMUP_AGAIN = 2
"""Untimed iterations at most before a part that is not the first: ranks have slept while samples were reported."""


def measure(options: EpOptions, progress: Progress) -> Report:
    """Runs the bench. The report has rows on the first node only. Raises Failure and the library's errors."""
    if options.compare:
        check_mpi(options)
    run = _Run(options, progress)
    run.check_memory()
    rows = run.rows()
    versions = {name: mpi_version() for name in options.compare}
    return make_report(options, rows, versions)


class _Run:
    """One run with all ranks that this command starts."""

    def __init__(self, options: EpOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.where = options.placement
        self.work = options.work(self.where.size)
        self.number = 0

    def check_memory(self) -> None:
        """Raises UsageError for invalid sizes, and Failure if a buffer takes more memory than is free."""
        here = self.where.local_size
        numbers = buffer_numbers(self.work)
        plan = crossrail.ExpertBuffer.plan(ranks=self.work.shape.ranks, local_ranks=here, **numbers)
        if plan.free is not None and plan.total * here > plan.free:
            ranks = "" if here == 1 else f", those of {here} ranks {format_bytes(plan.total * here)}"
            raise Failure(
                f"each rank's buffer takes {format_bytes(plan.total)}{ranks}, and {format_bytes(plan.free)} are free: "
                f"at most {plan.largest_tokens} tokens per rank fit"
            )

    def rows(self) -> list[Row]:
        """Verifies, measures, and returns one row per mode."""
        with self.where.rendezvous(self.options.context()) as (store, group), Ranks() as ranks:
            self.where.announce(store)
            self.progress.status(f"{counted(self.where.size, 'rank')}: verification against the reference")
            for rank in self.where.ranks:
                ranks.start(rank, "ep", self._job(rank, store, group))
            ranks.wait_for("passed", self.where.ranks, LONG_S)
            rows = self._measure(ranks)
            ranks.send_all({"do": "end"})
            ranks.wait_for(ENDED, self.where.ranks, LONG_S)
        return rows

    def _job(self, rank: int, store: str, group: str) -> Message:
        return {
            "work": asdict(self.work),
            **self.where.member(rank, store, group, self.options.nodes),
            "settings": self.options.settings(),
            "share_node": self.options.backend != "none",
            "verify": self.options.verification(self.work),
            "cpu": self.options.cpus(self.where.local_size)[self.where.local_index(rank)],
            "progress": self.progress.visible and rank == 0,
        }

    def _measure(self, ranks: Ranks) -> list[Row]:
        options = self.options
        turns: dict[str, list[EpTurn]] = {mode: [] for mode in options.modes}
        theirs = MpiTurns(options, self.work) if options.compare else None
        for turn in range(options.rounds if options.compare else 1):
            for mode in options.modes:
                title = mode + (f" round {turn + 1}" if options.compare else "")
                with self.progress.task(title, options.warmup + options.iters) as tick:
                    found = self._one(ranks, mode, tick)
                if found is not None:
                    turns[mode].append(found)
                    self.progress.add([ep_row(options.row(self.work, mode), [found])], more=mode != options.modes[-1])
            if theirs is not None:
                self.progress.status(f"mpi round {turn + 1}")
                theirs.run()
        if self.where.node != 0:
            return []
        rows = [ep_row(options.row(self.work, mode), turns[mode]) for mode in options.modes]
        if theirs is None:
            return rows
        results = theirs.results()
        return [with_peers(row, _of_mode(results, row.what)) for row in rows]

    def _one(self, ranks: Ranks, mode: str, tick: OnProgress | None) -> EpTurn | None:
        """Runs one measurement; None on nodes other than the first."""
        options = self.options
        self.number += 1
        plan = Experts(mode, options.layout, options.cached, options.iters, options.warmup)
        parts: list[list[Message]] = []
        like = options.row(self.work, mode)
        self.progress.running(lambda: [ep_row(like, [turn])] if (turn := _turn(parts)) is not None else [])
        ranks.send_all({"do": "measure", "number": self.number, "plan": asdict(plan)})
        left = set(self.where.ranks)
        while left:
            rank, message = ranks.next(LONG_S)
            if message["event"] == "progress" and tick is not None:
                tick(message["done"], message["total"])
            elif message["event"] == "part":
                parts.append(message["ranks"])
            elif message["event"] == "measured":
                left.discard(rank)
        return _turn(parts)


def _turn(parts: Sequence[list[Message]]) -> EpTurn | None:
    """The samples of all ranks, from those of each part; None without parts. Another thread may append to them."""
    ranks = list(zip(*list(parts), strict=True))
    return EpTurn([EpRank.of(one) for one in ranks]) if ranks else None


def _of_mode(results: Sequence[tuple[str, str, PeerResult]], mode: str) -> dict[str, PeerResult]:
    return {name: result for name, of, result in results if of == mode}


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank: handles requests until `end`. Rank 0 reports the measurements of all ranks.

    Raises Failure if data did not verify, and the library's errors.
    """
    pin_to(job["cpu"])
    context = crossrail.Context(**job["settings"])
    with join(job, context) as group:
        group.wait_members()
        rank = _Rank(parent, job, group)
        with rank.buffer:
            rank.verify()
            parent.send("passed")
            while (request := parent.receive(STEP_S))["do"] == "measure":
                rank.measure(request)
            group.barrier("end", timeout=STEP_S)
        group.barrier("gone", timeout=STEP_S)  # a process that ends while others are closing would look dead to them


class _Rank:
    """One rank, with its buffer."""

    def __init__(self, parent: Parent, job: Message, group: crossrail.Group) -> None:
        self.parent = parent
        self.group = group
        self.work = Work.from_dict(job["work"])
        self.verification: str = job["verify"]
        self.progress: bool = job["progress"]
        self.inputs = self.work.inputs(group.rank, range(group.size))
        group.barrier("here", timeout=STEP_S)
        self.buffer = crossrail.ExpertBuffer(group, share_node=job["share_node"], **buffer_numbers(self.work))
        self.y: Any = None

    def verify(self) -> None:
        """Compares one dispatch and one combine with the reference, and keeps the experts' outputs for measuring."""
        if self.verification == "quick":
            self._exchange(replace(self.work, tokens=min(self.work.tokens, QUICK_TOKENS)), judged=True)
        self.y = self._exchange(self.work, judged=self.verification == "full")
        if faults := self.buffer.faults():
            raise Failure(f"{faults[0]}")

    def _exchange(self, work: Work, *, judged: bool) -> Any:
        """Dispatches and combines ``work`` once; returns the experts' outputs. Raises Failure if it is wrong."""
        group, active = self.group, range(self.group.size)
        mine = work.inputs(group.rank, active)
        group.barrier("dispatch", timeout=STEP_S)
        received = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=work.layout)
        y = work.outputs(received, group.rank)
        group.barrier("combine", timeout=STEP_S)
        sums = self.buffer.combine(y, received.handle)
        try:
            if judged:
                work.judge_dispatch(received, group.rank, active)
                work.judge_combine(bits(sums.x), group.rank, active)
        except Difference as difference:
            raise Failure(f"did not verify: {difference}") from None
        group.barrier("verified", timeout=STEP_S)
        return y

    def measure(self, request: Message) -> None:
        """Runs one measurement; rank 0 reports the samples of all ranks to the command that started it.

        It does so in parts, which take a second or so each, so that an interrupted run has those before.
        """
        group = self.group
        plan = Experts(**request["plan"])
        iters, done, part = plan.iters, 0, min(plan.iters, FIRST_PART)
        group.barrier("measure", timeout=STEP_S)
        for number in itertools.count():
            name = f"samples {request['number']}.{number}"
            warmup = plan.warmup if number == 0 else min(plan.warmup, WARMUP_AGAIN)
            found = self._part(replace(plan, iters=part, warmup=warmup), plan, done)
            done += part
            if group.rank == 0 and done < iters:
                pace = sum(found["total_us"]) / 1e6 / part
                group.publish(f"{name}: next", str(min(iters - done, max(int(PART_S / pace), 1))).encode())
            if done < iters:
                part = int(group.collect(f"{name}: next", [0], timeout=STEP_S)[0])
            everybody = gather(group, name, found)
            if everybody is not None:
                group.withdraw(f"{name}: next")
                self.parent.send("part", ranks=everybody)
            if done >= iters:
                break
        self.parent.send("measured")

    def _part(self, plan: Experts, whole: Experts, before: int) -> dict[str, Any]:
        """Measures a part of the iterations of ``whole``, after ``before`` of them."""
        mine, group = self.inputs, self.group

        def tick(done: int, total: int) -> None:
            if before == 0 or done > plan.warmup:
                at = done if before == 0 else whole.warmup + before + done - plan.warmup
                self.parent.send("progress", done=at, total=whole.warmup + whole.iters)

        found: dict[str, Any] = plan.run(
            group.context,
            buffer=self.buffer._native,
            tensors=(mine.x, mine.topk_idx, mine.topk_weights, self.y),
            on_progress=tick if self.progress and group.rank == 0 else None,
        )
        found["rails"] = sent_by_rail(found.pop("lanes"))
        links = self.buffer.links()
        found["links"] = [link.kind for link in links]
        found["unused"] = {name: why for link in links if link.kind == "network" for name, why in link.missed}
        return found
