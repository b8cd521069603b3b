"""`crossrail bench ep --plan`: starts, ends and kills ranks as the plan has it, and tells what each phase was like."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict

import crossrail
from crossrail.report import PhaseFacts, Report, Row, capture_environment, gb_per_s, with_times

from .elastic_plan import Phase, Plan, load_plan
from .ep_arguments import EpOptions
from .failure import Failure, say
from .progress import Progress
from .ranks import ENDED, Message, Ranks

START_S = 60.0
KILL_AFTER_S = (0.02, 0.2)
"""Between the first exchange of a phase and the end of those that are killed in it."""


def run_plan(options: EpOptions, progress: Progress) -> Report:
    """Carries out the plan. Raises Failure and the library's errors; UsageFailure for what is no plan."""
    assert options.plan is not None
    plan = load_plan(options.plan)
    settings: dict[str, object] = dict(options.settings())
    context = crossrail.Context(**settings)  # type: ignore[arg-type]
    with options.placement.meeting(context) as (store, group), Ranks() as ranks:
        run = _Run(options, plan, ranks, 3 * context.timeout)
        job = run.job(store, group)
        rows = [run.phase(index, job, progress) for index in range(len(plan.phases))]
        run.end(plan.phases[-1].left)
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment({}, overrides), ["crossrail", *sys.argv[1:]], rows)


class _Run:
    """One run of a plan."""

    def __init__(self, options: EpOptions, plan: Plan, ranks: Ranks, patience: float) -> None:
        self.options = options
        self.plan = plan
        self.ranks = ranks
        self.patience = patience
        self.random = random.Random(options.seed)

    def job(self, store: str, group: str) -> Message:
        """What every rank is told when it starts."""
        options = self.options
        return {
            "store": store,
            "group": group,
            "settings": options.settings(),
            "work": asdict(options.work(self.plan.ranks)),
            "share_node": options.backend != "none",
            "iters": options.iters,
            "warmup": options.warmup,
        }

    def phase(self, index: int, job: Message, progress: Progress) -> Row:
        """One phase from its beginning to its end."""
        plan, phase = self.plan, self.plan.phases[index]
        joining, leaving = plan.joining(index), plan.leaving(index)
        progress.say(f"phase {index + 1} of {len(plan.phases)}: {len(phase.active)} ranks")
        self.end(leaving)
        self.start(index, joining, job)
        gone = [
            rank for rank in range(plan.ranks) if rank in leaving or (index and rank in plan.phases[index - 1].dying)
        ]
        for rank in phase.active:
            self.ranks.tell(rank, {"do": "phase", "active": phase.active, "gone": gone})
        done = self.ranks.gather("done", phase.active, self.patience)
        facts = PhaseFacts(
            number=index + 1,
            active=list(phase.active),
            joined=list(joining),
            left=list(leaving),
            killed=list(phase.dying),
            connect_us=max(message["connect_us"] for message in done.values()),
        )
        if phase.dying:
            facts = self.kill(phase, facts)
        return self.row(facts, done)

    def start(self, index: int, joining: tuple[int, ...], job: Message) -> None:
        """Starts processes, which join one after the other so that the rank server's order is the plan's."""
        in_turn = self.plan.in_turn(index)
        if not in_turn:
            say(f"phase {index + 1}: {list(joining)} are not the lowest free ranks; they ask for them by number")
        emulated = self.options.nodes
        for rank in joining:
            node = None if emulated == 1 else f"node {rank * emulated // self.plan.ranks}"
            self.ranks.start(rank, "elastic", {**job, "rank": None if in_turn else rank, "node": node})
        self.ranks.gather("ready", joining, START_S)
        for rank in joining:
            self.ranks.tell(rank, {"do": "join"})
            given = self.ranks.gather("joined", [rank], self.patience)[rank]["rank"]
            if given != rank:
                raise Failure(f"phase {index + 1}: the rank server gave {given} where the plan has {rank}")

    def kill(self, phase: Phase, facts: PhaseFacts) -> PhaseFacts:
        """Has all exchange data, kills in the middle of it, and hears how the survivors went on."""
        for rank in phase.active:
            self.ranks.tell(rank, {"do": "exchange", "active": phase.active, "left": phase.left})
        self.ranks.gather("exchanging", phase.active, self.patience)
        killed_at: dict[int, int] = {}
        for rank in phase.dying:
            time.sleep(self.random.uniform(*KILL_AFTER_S))  # any moment will do, in the middle of something
            killed_at[rank] = time.monotonic_ns()
            self.ranks.kill(rank)
        survived = self.ranks.gather("survived", phase.left, self.patience)
        times = [
            (message["without"][str(rank)] - killed_at[rank]) / 1e3
            for message in survived.values()
            for rank in phase.dying
        ]
        faults = [fault for rank in sorted(survived) for fault in survived[rank]["faults"]]
        return PhaseFacts(**{**vars(facts), "recovery_us": max(times), "faults": faults})

    def end(self, leaving: tuple[int, ...]) -> None:
        """Has ranks leave, and waits until their processes have ended."""
        for rank in leaving:
            self.ranks.tell(rank, {"do": "leave"})
        self.ranks.gather(ENDED, leaving, self.patience)

    def row(self, facts: PhaseFacts, done: dict[int, Message]) -> Row:
        """The row of a phase: what all its ranks measured; bytes of one rank's dispatch and combine, on average."""
        measured = [done[rank]["measured"] for rank in sorted(done)]
        samples = [sample for one in measured for sample in one["total_us"]]
        logical, wire, network = (
            round(sum(one["bytes"][kind] for one in measured) / len(samples)) for kind in ("logical", "wire", "network")
        )
        work = self.options.work(self.plan.ranks)
        row = Row(
            what="e2e",
            transport="",
            size=0,
            verified=True,
            bytes_logical=logical,
            bytes_wire=wire,
            bytes_network=network,
            gb_per_s=gb_per_s(wire * len(samples), sum(samples)),
            gb_per_s_logical=gb_per_s(logical * len(samples), sum(samples)),
            ranks=len(facts.active),
            nodes=self.options.nodes,
            tokens=work.tokens,
            hidden=work.shape.hidden,
            topk=work.shape.topk,
            experts=work.shape.num_experts,
            layout=work.layout,
            dtype=self.options.dtype,
            routing=work.routing,
            ranks_passed=len(done),
            phase=facts,
        )
        return with_times(row, samples)
