"""One rank of an elastic run: joins, does its part of each phase, and leaves or is killed."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import crossrail
from crossrail._native import bench_ep
from crossrail.records import EpPlan
from crossrail.ref import Shape
from crossrail.ref.checking import Difference, Inputs, Work

from .failure import Failure
from .rank_process import Parent
from .ranks import Message

IDLE_S = 600.0
"""The command says something to each rank more often than this."""

TOGETHER = 16
"""Exchanges that the ranks make before they tell each other whom they miss."""

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""A launcher's word for the command itself, which would be taken for that of each rank."""


def serve(parent: Parent, job: Message) -> None:
    """Does what the command asks for until it says to leave. Raises Failure and the library's errors."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    rank = _Rank(job)
    parent.tell("ready")
    while (request := parent.hear(IDLE_S)).get("do") != "leave":
        match request["do"]:
            case "join":
                parent.tell("joined", rank=rank.join())
            case "phase":
                parent.tell("done", **rank.phase(request["active"], request["gone"]))
            case "exchange":
                rank.exchange(parent, request["active"], request["left"])
    rank.leave()


class _Rank:
    """What it has."""

    def __init__(self, job: Message) -> None:
        self.job = job
        self.context = crossrail.Context(**job["settings"])
        self.work = Work(**{**job["work"], "shape": Shape(**job["work"]["shape"])})
        self.group: crossrail.Group
        self.buffer: crossrail.ExpertBuffer

    def join(self) -> int:
        """Joins the group, by the rank server unless a number is given, and makes the buffer; gives the rank."""
        job, work, shape = self.job, self.work, self.work.shape
        self.group = crossrail.Group(
            name=job["group"],
            rank=job["rank"],
            size=shape.ranks,
            node=job["node"],
            store=job["store"],
            context=self.context,
        )
        self.buffer = crossrail.ExpertBuffer(
            self.group,
            shape.max_tokens,
            shape.hidden,
            shape.num_experts,
            shape.topk,
            "bf16" if work.scale is None else "fp8",
            scale=work.scale or "f32",
            layouts=(work.layout,),
            prereduce=work.prereduce,
            share_node=job["share_node"],
            connect=False,
        )
        return self.group.rank

    def phase(self, active: list[int], gone: list[int]) -> Message:
        """Takes leave of ranks that went, connects those that came, checks the data and measures."""
        left = [rank for rank in gone if rank in self.buffer.connected()]
        began = time.monotonic()
        self.buffer.disconnect(left)
        self.buffer.connect(active)
        connect_us = (time.monotonic() - began) * 1e6
        self.check(active)
        self.group.barrier("phase checked", active)
        return {"connect_us": connect_us, "measured": self.measure(active)}

    def check(self, active: list[int]) -> None:
        """Dispatches and combines, against the reference. Raises Failure when it differs."""
        try:
            self.work.check(self.buffer, self.group.rank, active)
        except Difference as difference:
            raise Failure(str(difference)) from None

    def measure(self, active: list[int]) -> Message:
        """The native loop over a dispatch and its combine: microseconds of each, and the bytes of all of them."""
        mine, y = self.once(active)
        plan = EpPlan(
            mode="e2e", layout=self.work.layout, cached=False, iters=self.job["iters"], warmup=self.job["warmup"]
        )
        found = bench_ep(self.buffer._native, self.context, plan, mine.x, mine.topk_idx, mine.topk_weights, y)
        return {"total_us": found["total_us"], "bytes": found["bytes"]}

    def once(self, active: list[int]) -> tuple[Inputs, Any]:
        """This rank's inputs, and what its experts answer to what a dispatch of all ranks brings."""
        work, rank = self.work, self.group.rank
        mine = work.inputs(rank, active)
        came = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=work.layout)
        return mine, work.outputs(came, rank)

    def exchange(self, parent: Parent, active: list[int], left: list[int]) -> None:
        """Dispatches and combines until all of `left` have lost all other `active` ranks, which are killed meanwhile.

        Tells when it has begun; and in the end when, for each rank that was lost, the first exchange without it was
        finished, and what was said of it.
        """
        work, rank = self.work, self.group.rank
        mine, y = self.once(active)
        right = b""
        parent.tell("exchanging")
        victims = sorted(set(active) - set(left))
        without: dict[int, int] = {}
        known = len(self.buffer.faults())
        number = 0
        while True:
            for _ in range(TOGETHER):
                came = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=work.layout)
                sums = self.buffer.combine(y[: len(came.x)], came.handle).x.tobytes()
                now = time.monotonic_ns()
                faults = self.buffer.faults()
                for fault in faults[known:]:
                    without.setdefault(fault.rank, now)
                right = right or sums
                if not faults[known:] and not without and sums != right:
                    raise Failure(f"rank {rank}: exchange {number} differs from the one before, and nobody was lost")
                known = len(faults)
            number += 1
            if self._agreed(number, left, sorted(without), victims):
                break
        self._await_deaths(victims)
        self.check(left)
        said = [fault for fault in self.buffer.faults() if fault.rank in victims]
        texts = [f"rank {rank} lost rank {one.rank} in {one.operation}, {one.stage}: {one.why}" for one in said]
        parent.tell("survived", without=without, faults=texts)

    def _agreed(self, number: int, left: list[int], lost: list[int], victims: list[int]) -> bool:
        """Whether every survivor has lost every victim; all survivors come to the same answer."""
        self.group.publish(f"lost {number}", json.dumps(lost).encode())
        told = [json.loads(value) for value in self.group.collect(f"lost {number}", left)]
        if number > 1:
            self.group.withdraw(f"lost {number - 1}")
        if all(one == victims for one in told):
            self.group.barrier("all lost", left)
            self.group.withdraw(f"lost {number}")
            return True
        wrong = sorted({rank for one in told for rank in one} - set(victims))
        if wrong:
            raise Failure(f"ranks {wrong} were lost, which nobody killed: {self.buffer.faults()[-1]}")
        return False

    def _await_deaths(self, victims: list[int]) -> None:
        """Until the group knows too, by their leases, so that their numbers are free."""
        deadline = time.monotonic() + self.context.timeout
        while any(self.group.state(rank).state == "alive" for rank in victims):
            self.group.wait_change(max(deadline - time.monotonic(), 0.0))
            if time.monotonic() > deadline:
                raise Failure(f"the leases of {victims} do not end")

    def leave(self) -> None:
        """Leaves as it should be."""
        self.buffer.destroy()
        self.group.leave()
