"""One rank of `crossrail bench ep`: verifies its part, then measures what it is told to."""

from __future__ import annotations

from typing import Any

import crossrail
from crossrail._native import bench_ep
from crossrail.ref import Shape, bits
from crossrail.ref.checking import Difference, Work

from .failure import Failure
from .gathering import gather
from .rails import rail_of
from .rank_process import Parent
from .ranks import Message
from .setup import pin

LONG_S = 600.0
"""Working out the reference may take longer on one rank than on another, as may what others measure meanwhile."""


def serve(parent: Parent, job: Message) -> None:
    """Does what the command says until it says `end`; rank 0 tells what all ranks found.

    Raises Failure when something did not verify, and the library's errors.
    """
    pin(job["cpu"])
    context = crossrail.Context(**job["settings"])
    work = Work(**{**job["work"], "shape": Shape(**job["work"]["shape"])})
    with crossrail.Group(
        name=job["group"], rank=job["rank"], size=job["size"], node=job["node"], store=job["store"], context=context
    ) as group:
        group.wait_members()
        rank = _Rank(parent, job, group, work)
        with rank.buffer:
            rank.verify()
            parent.tell("passed")
            while (request := parent.hear(LONG_S))["do"] == "measure":
                rank.measure(request)
            group.barrier("end", timeout=LONG_S)
        group.barrier("gone", timeout=LONG_S)  # a process that ends while others still close looks like one that died


class _Rank:
    def __init__(self, parent: Parent, job: Message, group: crossrail.Group, work: Work) -> None:
        self.parent = parent
        self.group = group
        self.work = work
        self.progress: bool = job["progress"]
        shape = work.shape
        self.inputs = work.inputs(group.rank, range(group.size))
        group.barrier("here", timeout=LONG_S)
        self.buffer = crossrail.ExpertBuffer(
            group,
            shape.max_tokens,
            shape.hidden,
            shape.num_experts,
            shape.topk,
            "bf16" if work.scale is None else "fp8",
            scale=work.scale or "f32",
            layouts=[work.layout],
            prereduce=work.prereduce,
            share_node=job["share_node"],
        )
        self.y: Any = None

    def verify(self) -> None:
        """One dispatch and one combine against the reference; the outputs are kept for what is measured."""
        group, active = self.group, range(self.group.size)
        mine = self.inputs
        group.barrier("dispatch", timeout=LONG_S)
        came = self.buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=self.work.layout)
        self.y = self.work.outputs(came, group.rank)
        group.barrier("combine", timeout=LONG_S)
        sums = self.buffer.combine(self.y, came.handle)
        try:
            self.work.judge_dispatch(came, group.rank, active)
            self.work.judge_combine(bits(sums.x), group.rank, active)
        except Difference as difference:
            raise Failure(f"did not verify: {difference}") from None
        group.barrier("verified", timeout=LONG_S)
        if faults := self.buffer.faults():
            raise Failure(f"{faults[0]}")

    def measure(self, request: Message) -> None:
        """One measurement; what all ranks found goes to the command that started rank 0."""
        before = self._sent()
        mine, group = self.inputs, self.group
        tick = self._tick if self.progress and group.rank == 0 else None
        group.barrier("measure", timeout=LONG_S)
        found: dict[str, Any] = dict(
            bench_ep(
                self.buffer._native,
                group.context,
                request["plan"],
                mine.x,
                mine.topk_idx,
                mine.topk_weights,
                self.y,
                on_progress=tick,
            )
        )
        after = self._sent()
        found["rails"] = {rail: sent - before.get(rail, 0) for rail, sent in after.items()}
        found["links"] = [link.kind for link in self.buffer.links()]
        everybody = gather(group, f"samples {request['number']}", found)
        self.parent.tell("measured", ranks=everybody)

    def _tick(self, done: int, total: int) -> None:
        self.parent.tell("progress", done=done, total=total)

    def _sent(self) -> dict[str, int]:
        """Bytes that left by each rail to ranks that are reached over the network."""
        sent: dict[str, int] = {}
        for link in self.buffer.links():
            for lane in link.lanes if link.kind == "network" else []:
                sent[rail_of(lane)] = sent.get(rail_of(lane), 0) + lane["tx_bytes"]
        return sent
