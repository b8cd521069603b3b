"""`crossrail bench ep --plan`: starts, stops and kills ranks as a plan says, and reports every phase.

On several nodes each command carries out the whole plan with the ranks of its node, in step with the others; the first
one has the report.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import crossrail
from crossrail_tools.report.build import with_times
from crossrail_tools.report.schema import PhaseFacts, Report, Row
from crossrail_tools.report.stats import gb_per_s
from crossrail_tools.report.units import counted
from crossrail_tools.verify.checking import Difference, Inputs, Work

from ..cases import Experts
from ..ends import ENDED
from ..failure import Failure, print_notice
from ..placement import pin_to
from ..processes import Message
from ..rank_process import Parent
from ..ranks import Ranks
from ..reporting import Progress, make_report
from .options import EpOptions, buffer_numbers
from .plan import Phase, Plan, load_plan

START_S = 600.0
"""How long the ranks that join may take to start, which on a busy machine is long. A rank that fails ends, which is
noticed at once."""

LEASE_S = 3.0
"""Lease of the ranks: on a busy machine a rank that lives may renew a shorter one too late."""

KILL_AFTER = (20, 200)
"""Range of the number of exchanges of a phase after which a rank is killed."""

IDLE_S = 600.0
"""How long a rank waits for the next request of the command."""

EXCHANGES_PER_ROUND = 16
"""Number of exchanges between two agreements on which ranks were lost."""

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Variables that a launcher set for the command. Ranks must not take them for their own."""


def measure(options: EpOptions, progress: Progress) -> Report:
    """Carries out the plan. Raises Failure, UsageFailure for an invalid plan, and the library's errors."""
    assert options.plan is not None
    plan = load_plan(options.plan)
    context = options.context()
    where = options.placement
    with where.meet(context) as met, Ranks() as ranks:
        where.announce(met.store)
        run = _Run(options, plan, ranks, Nodes(met.commands, START_S), 3 * context.timeout)
        job = run.job(met.store, met.name)
        for index in range(len(plan.phases)):
            row = run.phase(index, job, progress)
            progress.add([row] if where.node == 0 else [])
        run.end(plan.phases[-1].survivors)
    return make_report(options, progress.rows)


class Nodes:
    """Agreement between the commands of all nodes, of which this is one."""

    def __init__(self, group: crossrail.Group | None, patience: float) -> None:
        """``group``: that of the commands, or None if this is the only one."""
        self._patience = patience
        self._group = group

    def barrier(self, name: str) -> None:
        """Waits for the commands of all nodes. Raises the library's errors: one of them may have failed."""
        if self._group is not None:
            self._group.barrier(name, timeout=self._patience)

    def shared(self, name: str, mine: dict[int, Message], ranks: Sequence[int], plan: Plan) -> dict[int, Message]:
        """The messages of ``ranks`` on all nodes, of which ``mine`` are those of this one."""
        if self._group is None:
            return mine
        for rank, message in mine.items():
            self._group.publish(f"{name} {rank}", json.dumps(message).encode())
        owner = {rank: node for node in range(self._group.size) for rank in plan.of_node(node, self._group.size)}
        found = {
            rank: json.loads(self._group.collect(f"{name} {rank}", [owner[rank]], self._patience)[0]) for rank in ranks
        }
        self._group.barrier(f"{name} read", timeout=self._patience)
        for rank in mine:
            self._group.withdraw(f"{name} {rank}")
        return found


class _Run:
    """One run of a plan: the part of it on this node."""

    def __init__(self, options: EpOptions, plan: Plan, ranks: Ranks, nodes: Nodes, patience: float) -> None:
        self.options = options
        self.plan = plan
        self.ranks = ranks
        self.nodes = nodes
        self.patience = patience
        self.random = random.Random(options.seed)  # with the same numbers on all nodes
        self.here = plan.of_node(options.placement.node, options.placement.world_size)

    def mine(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that are on this node."""
        return [rank for rank in ranks if rank in self.here]

    def job(self, store: str, group: str) -> Message:
        """The job of every rank."""
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
        """Runs one phase and returns its row."""
        plan, phase = self.plan, self.plan.phases[index]
        joining, leaving = plan.joining(index), plan.leaving(index)
        progress.status(f"phase {index + 1} of {len(plan.phases)}: {counted(len(phase.active), 'rank')}")
        self.end(leaving)
        self.nodes.barrier(f"phase {index + 1}: left")
        self.start(index, joining, job)
        gone = [
            rank for rank in range(plan.ranks) if rank in leaving or (index and rank in plan.phases[index - 1].killed)
        ]
        active = self.mine(phase.active)
        for rank in active:
            # A rank that joins has met nobody yet, and may have the number of one that was killed.
            left = [] if rank in joining else gone
            self.ranks.send(rank, {"do": "phase", "active": phase.active, "gone": left})
        mine = self.ranks.wait_for("done", active, self.patience)
        done = self.nodes.shared(f"phase {index + 1}: done", mine, phase.active, plan)
        facts = PhaseFacts(
            number=index + 1,
            active=list(phase.active),
            joined=list(joining),
            left=list(leaving),
            killed=list(phase.killed),
            connect_us=max(message["connect_us"] for message in done.values()),
        )
        if phase.killed:
            facts = self.kill(phase, facts)
        return self.row(facts, done)

    def start(self, index: int, joining: tuple[int, ...], job: Message) -> None:
        """Starts ranks, which join one after the other so that they get their numbers in the order of the plan."""
        takes_lowest_ranks = self.plan.takes_lowest_ranks(index)
        if not takes_lowest_ranks:
            print_notice(
                f"phase {index + 1}: ranks {list(joining)} are not the lowest free ones, so they ask by number"
            )
        nodes = self.options.nodes * self.options.placement.world_size
        cpus = self.options.cpus(len(self.here))
        for rank in self.mine(joining):
            node = None if nodes == 1 else f"node {rank * nodes // self.plan.ranks}"
            asked = None if takes_lowest_ranks else rank
            cpu = cpus[self.here.index(rank)]
            self.ranks.start(rank, "elastic", {**job, "rank": asked, "node": node, "cpu": cpu})
        self.ranks.wait_for("ready", self.mine(joining), START_S)
        for rank in joining:
            if rank in self.here:
                self.ranks.send(rank, {"do": "join"})
                given = self.ranks.wait_for("joined", [rank], self.patience)[rank]["rank"]
                if given != rank:
                    text = f"a process was assigned rank {given}, but the plan has rank {rank}"
                    raise Failure(f"phase {index + 1}: {text}")
            self.nodes.barrier(f"phase {index + 1}: rank {rank}")

    def kill(self, phase: Phase, facts: PhaseFacts) -> PhaseFacts:
        """Kills ranks while all exchange data, and collects the survivors' recovery times and faults.

        Each is killed when it has begun a random exchange, which it goes on with until the signal arrives. A recovery
        is timed by the survivors on the node of the killed rank: the clocks of nodes differ.
        """
        dues = {rank: self.random.randint(*KILL_AFTER) for rank in phase.killed}
        for rank in self.mine(phase.active):
            request = {"do": "exchange", "active": phase.active, "left": phase.survivors, "due": dues.get(rank)}
            self.ranks.send(rank, request)
        killed_at: dict[int, int] = {}
        while len(killed_at) < len(self.mine(phase.killed)):
            rank, message = self.ranks.next(self.patience)
            if message.get("event") == "due":
                killed_at[rank] = time.monotonic_ns()
                self.ranks.kill(rank)
        mine = self.ranks.wait_for("survived", self.mine(phase.survivors), self.patience)
        for message in mine.values():
            lost_at = message.pop("without")
            message["took_us"] = [(lost_at[str(rank)] - at) / 1e3 for rank, at in killed_at.items()]
        survived = self.nodes.shared(f"phase {facts.number}: survived", mine, phase.survivors, self.plan)
        times = [took for message in survived.values() for took in message["took_us"]]
        faults = [fault for rank in sorted(survived) for fault in survived[rank]["faults"]]
        return PhaseFacts(**{**vars(facts), "recovery_us": max(times, default=None), "faults": faults})

    def end(self, leaving: tuple[int, ...]) -> None:
        """Requests those ranks that are on this node to leave, and waits until their processes have ended."""
        mine = self.mine(leaving)
        for rank in mine:
            self.ranks.send(rank, {"do": "leave"})
        self.ranks.wait_for(ENDED, mine, self.patience)

    def row(self, facts: PhaseFacts, done: dict[int, Message]) -> Row:
        """The row of a phase: samples of all its ranks; bytes are averages per rank, dispatch and combine together."""
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
            nodes=self.options.nodes * self.options.placement.world_size,
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


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank: handles requests until `leave`. Raises Failure and the library's errors."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    pin_to(job["cpu"])
    rank = _Rank(job)
    parent.send("ready")
    while (request := parent.receive(IDLE_S)).get("do") != "leave":
        match request["do"]:
            case "join":
                parent.send("joined", rank=rank.join())
            case "phase":
                parent.send("done", **rank.phase(request["active"], request["gone"]))
            case "exchange":
                rank.exchange(parent, request["active"], request["left"], request["due"])
    rank.leave()


class _Rank:
    """One rank, with its group and buffer."""

    def __init__(self, job: Message) -> None:
        self.job = job
        self.context = crossrail.Context(**job["settings"])
        self.work = Work.from_dict(job["work"])
        self.group: crossrail.Group
        self.buffer: crossrail.ExpertBuffer

    def join(self) -> int:
        """Joins the group, by default as the lowest free rank, creates the buffer, and returns the rank."""
        job = self.job
        self.group = crossrail.Group(
            name=job["group"],
            rank=job["rank"],
            size=self.work.shape.ranks,
            node=job["node"],
            store=job["store"],
            lease=LEASE_S,
            context=self.context,
        )
        self.buffer = crossrail.ExpertBuffer(
            self.group, share_node=job["share_node"], connect=False, on_loss="mask", **buffer_numbers(self.work)
        )
        return self.group.rank

    def phase(self, active: list[int], gone: list[int]) -> Message:
        """Disconnects ranks that have left, connects those that joined, verifies the data and measures."""
        left = [rank for rank in gone if rank in self.buffer.connected()]
        began = time.monotonic()
        self.buffer.disconnect(left)
        self.buffer.connect(active)
        connect_us = (time.monotonic() - began) * 1e6
        self.check(active)
        self.group.barrier("phase checked", active)
        return {"connect_us": connect_us, "measured": self.measure(active)}

    def check(self, active: list[int]) -> None:
        """Compares a dispatch and a combine with the reference. Raises Failure if they differ."""
        try:
            self.work.check(self.buffer, self.group.rank, active)
        except Difference as difference:
            raise Failure(str(difference)) from None

    def measure(self, active: list[int]) -> Message:
        """Times dispatch and combine together: microseconds of each iteration, and the bytes of all of them."""
        mine, y = self.once(active)
        case = Experts("e2e", self.work.layout, False, self.job["iters"], self.job["warmup"])
        tensors = (mine.x, mine.topk_idx, mine.topk_weights, y)
        found = case.run(self.context, buffer=self.buffer._native, tensors=tensors)
        return {"total_us": [round(us, 3) for us in found["total_us"]], "bytes": found["bytes"]}

    def once(self, active: list[int]) -> tuple[Inputs, Any]:
        """This rank's inputs, and the outputs of its experts for the rows that a dispatch delivers to it."""
        work, rank = self.work, self.group.rank
        mine = work.inputs(rank, active)
        received = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=work.layout)
        return mine, work.outputs(received, rank)

    def exchange(self, parent: Parent, active: list[int], left: list[int], due: int | None) -> None:
        """Dispatches and combines until all of `left` have lost all other `active` ranks, which are killed meanwhile.

        Reports when exchange number `due` begins and, at the end, for each lost rank when the first exchange without it
        was finished, and the faults.
        """
        work, rank = self.work, self.group.rank
        mine, y = self.once(active)
        right = b""
        victims = sorted(set(active) - set(left))
        without: dict[int, int] = {}
        known = len(self.buffer.faults())
        number = 0
        while True:
            for exchange in range(number * EXCHANGES_PER_ROUND, (number + 1) * EXCHANGES_PER_ROUND):
                if exchange == due:
                    parent.send("due")
                received = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=work.layout)
                sums = self.buffer.combine(y[: len(received.x)], received.handle).x.tobytes()
                now = time.monotonic_ns()
                faults = self.buffer.faults()
                for fault in faults[known:]:
                    without.setdefault(fault.rank, now)
                right = right or sums
                if not faults[known:] and not without and sums != right:
                    raise Failure(f"rank {rank}: exchange {exchange} differs from the one before, but no rank was lost")
                known = len(faults)
            number += 1
            if self._agreed(number, left, sorted(without), victims):
                break
        self._await_deaths(victims)
        self.check(left)
        lost_ranks = [fault for fault in self.buffer.faults() if fault.rank in victims]
        parent.send("survived", without=without, faults=[f"at rank {rank}: {fault}" for fault in lost_ranks])

    def _agreed(self, number: int, left: list[int], lost: list[int], victims: list[int]) -> bool:
        """Whether every survivor has lost every victim. All survivors reach the same answer."""
        self.group.publish(f"lost {number}", json.dumps(lost).encode())
        every = [json.loads(value) for value in self.group.collect(f"lost {number}", left)]
        if number > 1:
            self.group.withdraw(f"lost {number - 1}")
        if all(one == victims for one in every):
            self.group.barrier("all lost", left)
            self.group.withdraw(f"lost {number}")
            return True
        wrong = sorted({rank for one in every for rank in one} - set(victims))
        if wrong:
            raise Failure(f"ranks {wrong} were lost although they were not killed: {self.buffer.faults()[-1]}")
        return False

    def _await_deaths(self, victims: list[int]) -> None:
        """Waits until the leases of killed ranks have expired, so that their numbers are free."""
        deadline = time.monotonic() + self.context.timeout
        while any(self.group.state(rank).state == "alive" for rank in victims):
            self.group.wait_change(max(deadline - time.monotonic(), 0.0))
            if time.monotonic() > deadline:
                raise Failure(f"the leases of ranks {victims} have not expired after {self.context.timeout:g} s")

    def leave(self) -> None:
        """Destroys the buffer and leaves the group."""
        self.buffer.destroy()
        self.group.leave()
