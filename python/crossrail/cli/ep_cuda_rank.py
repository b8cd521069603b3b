"""One rank of `crossrail bench ep --device cuda`: makes a buffer for each shape, verifies and measures."""

from __future__ import annotations

from typing import Any

import crossrail
from crossrail._native import _DeviceEp
from crossrail.ref import Shape
from crossrail.ref.checking import Difference, Work
from crossrail.ref.sampling import Judge, inputs, outputs

from .failure import Failure
from .gathering import gather
from .rank_process import Parent
from .ranks import Message

LONG_S = 100.0
"""Kernels may be compiled, and what should come worked out, on one rank longer than on another."""


def serve(parent: Parent, job: Message) -> None:
    """Does what the command says until it says `end`; rank 0 tells what all ranks found.

    Raises Failure when something did not verify, and the library's errors.
    """
    context = crossrail.Context(**job["settings"])
    with crossrail.Group(
        name=job["group"], rank=job["rank"], size=job["size"], node=job["node"], store=job["store"], context=context
    ) as group:
        group.wait_members()
        rank = _Rank(parent, job, group)
        try:
            while rank.does(parent.hear()):
                pass
        finally:
            rank.close()
        group.barrier("gone", timeout=LONG_S)  # a process that ends while others still close looks like one that died


class _Rank:
    def __init__(self, parent: Parent, job: Message, group: crossrail.Group) -> None:
        self.parent = parent
        self.group = group
        self.ordinal: int = job["ordinal"]
        self.progress: bool = job["progress"]
        self.work: Work | None = None
        self.judges: dict[int, Judge] = {}
        self.rig: _DeviceEp | None = None

    def does(self, request: Message) -> bool:
        """What the command asks for; False when it asks for no more."""
        if request["do"] == "open":
            self.open(request)
        elif request["do"] == "measure":
            self.measure(request)
        elif request["do"] == "close":
            self.verify(turn=1)
            self.close()
            self.parent.tell("closed")
        return bool(request["do"] != "end")

    def open(self, request: Message) -> None:
        """A buffer and its memory, verified."""
        work = Work(**{**request["work"], "shape": Shape(**request["work"]["shape"])})
        group, shape = self.group, work.shape
        mine = inputs(work)[group.rank]
        rows = outputs(work, group.rank)
        group.barrier("here", timeout=LONG_S)
        parameters: Any = {
            "ranks": shape.ranks,
            "max_tokens": shape.max_tokens,
            "hidden": shape.hidden,
            "experts": shape.num_experts,
            "topk": shape.topk,
            "dispatch_dtype": "bf16" if work.scale is None else "fp8",
            "scale": work.scale or "f32",
            "layouts": [work.layout],
            "prereduce": work.prereduce,
            "share_node": True,
            "timeout": group.context.timeout,
        }
        if work != self.work:
            self.work, self.judges = work, {}
        self.rig = _DeviceEp(
            group._native,
            group.context,
            f"bench {request['number']}",
            parameters,
            {"ordinal": self.ordinal, "num_sms": request["num_sms"], "cast_before": request["cast_before"]},
            mine.x.tobytes(),
            mine.topk_idx.tobytes(),
            mine.topk_weights.tobytes(),
            rows.tobytes(),
        )
        self.verify(turn=0)
        self.parent.tell("passed", **self.rig.facts())

    def verify(self, turn: int) -> None:
        """One dispatch and one combine against the reference. Raises Failure."""
        assert self.work is not None
        assert self.rig is not None
        judge = self.judges.setdefault(turn, Judge(self.work, self.group.rank, turn))
        self.group.barrier("dispatch", timeout=LONG_S)
        parts = self.rig.dispatch()
        self.group.barrier("combine", timeout=LONG_S)
        sums = self.rig.combine()
        try:
            judge.judge_dispatch(parts)
            judge.judge_combine(sums)
        except Difference as difference:
            when = "after it was measured" if turn else "before anything was measured"
            raise Failure(f"did not verify {when}: {difference}") from None
        self.group.barrier("verified", timeout=LONG_S)

    def measure(self, request: Message) -> None:
        """One measurement; what all ranks found goes to the command that started rank 0."""
        assert self.rig is not None
        tick = self._tick if self.progress and self.group.rank == 0 else None
        self.group.barrier("measure", timeout=LONG_S)
        found = {**self.rig.measure(request["plan"], tick), "links": self.rig.facts()["links"]}
        everybody = gather(self.group, f"samples {request['number']}", found)
        self.parent.tell("measured", ranks=everybody)

    def close(self) -> None:
        """Gives the buffer and all memory back."""
        if self.rig is not None:
            self.rig.close()
            self.rig = None

    def _tick(self, done: int, total: int) -> None:
        self.parent.tell("progress", done=done, total=total)
