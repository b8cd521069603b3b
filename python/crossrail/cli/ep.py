"""`crossrail bench ep`: starts this node's ranks, has them verify and measure, and makes the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import crossrail
from crossrail.ref.checking import Work
from crossrail.report import (
    EpRank,
    EpTurn,
    PeerResult,
    Report,
    Row,
    capture_environment,
    ep_row,
    format_bytes,
    with_peers,
)

from . import mpi
from .ep_arguments import EpOptions
from .failure import Failure, say
from .progress import OnProgress, Progress
from .ranks import ENDED, Message, Ranks
from .setup import cpu_of

LONG_S = 700.0
"""A rank may work on the reference, or wait for one that does, as long as it bounds that itself."""


def measure(options: EpOptions, progress: Progress) -> Report:
    """Runs the whole bench; on nodes but the first the report has no rows. Raises Failure and the library's errors."""
    if options.compare:
        mpi.check(options)
    run = _Run(options, progress)
    run.check_memory()
    rows = run.rows()
    versions = {name: mpi.version() for name in options.compare}
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment(versions, overrides), ["crossrail", *sys.argv[1:]], rows)


class _Run:
    """One run of all ranks that this command starts."""

    def __init__(self, options: EpOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.where = options.placement
        self.work = options.work(self.where.size)
        self.number = 0

    def check_memory(self) -> None:
        """Raises what is wrong with the numbers, and Failure when a buffer takes more than is free."""
        shape = self.work.shape
        plan = crossrail.ExpertBuffer.plan(
            shape.max_tokens,
            shape.hidden,
            shape.num_experts,
            shape.topk,
            shape.ranks,
            "bf16" if self.work.scale is None else "fp8",
            scale=self.work.scale or "f32",
            layouts=[self.work.layout],
            prereduce=self.work.prereduce,
        )
        if plan.free is not None and plan.total > plan.free:
            raise Failure(
                f"each rank's buffer takes {format_bytes(plan.total)}, and {format_bytes(plan.free)} are free: "
                f"at most {plan.largest_tokens} tokens per rank fit"
            )

    def rows(self) -> list[Row]:
        """Verifies, measures, and gives a row for each mode."""
        settings: dict[str, Any] = dict(self.options.settings())
        context = crossrail.Context(**settings)
        with self.where.meeting(context) as (store, group), Ranks() as ranks:
            if self.where.world_size > 1:
                say(
                    f"node {self.where.node} of {self.where.world_size}, store {store} ({self.where.said or 'options'})"
                )
            self.progress.say(f"{self.where.size} ranks verify against the reference")
            for rank in self.where.ranks:
                ranks.start(rank, "ep", self._job(rank, store, group))
            ranks.gather("passed", self.where.ranks, LONG_S)
            rows = self._measure(ranks)
            ranks.tell_all({"do": "end"})
            ranks.gather(ENDED, self.where.ranks, LONG_S)
        return rows

    def _job(self, rank: int, store: str, group: str) -> Message:
        return {
            "work": asdict(self.work),
            "rank": rank,
            "size": self.where.size,
            "node": self.where.label(rank, self.options.nodes),
            "store": store,
            "group": group,
            "settings": self.options.settings(),
            "share_node": self.options.backend != "none",
            "cpu": cpu_of(self.options.pin, rank - self.where.ranks[0], len(self.where.ranks)),
            "progress": self.progress.shown and rank == 0,
        }

    def _measure(self, ranks: Ranks) -> list[Row]:
        options = self.options
        turns: dict[str, list[EpTurn]] = {mode: [] for mode in options.modes}
        theirs = mpi.Turns(options, self.work) if options.compare else None
        for turn in range(options.rounds if options.compare else 1):
            for mode in options.modes:
                title = mode + (f" round {turn + 1}" if options.compare else "")
                with self.progress.task(title, options.warmup + options.iters) as tick:
                    found = self._one(ranks, mode, tick)
                if found is not None:
                    turns[mode].append(found)
            if theirs is not None:
                self.progress.say(f"mpi round {turn + 1}")
                theirs.run()
        if self.where.node != 0:
            return []
        rows = [ep_row(row_like(options, self.work, mode), turns[mode]) for mode in options.modes]
        if theirs is None:
            return rows
        results = theirs.results()
        return [with_peers(row, _of_mode(results, row.what)) for row in rows]

    def _one(self, ranks: Ranks, mode: str, tick: OnProgress | None) -> EpTurn | None:
        """One measurement; None on nodes but the first."""
        options = self.options
        self.number += 1
        plan = {"mode": mode, "layout": options.layout, "cached": options.cached}
        plan |= {"iters": options.iters, "warmup": options.warmup}
        ranks.tell_all({"do": "measure", "number": self.number, "plan": plan})
        missing, found = set(self.where.ranks), None
        while missing:
            rank, message = ranks.next(LONG_S)
            if message["event"] == "progress" and tick is not None:
                tick(message["done"], message["total"])
            if message["event"] == "measured":
                missing.discard(rank)
                found = message["ranks"] or found
        return None if found is None else EpTurn([EpRank.from_dict(one) for one in found])


def row_like(options: EpOptions, work: Work, mode: str) -> Row:
    """What identifies a row."""
    shape = work.shape
    sent = mode != "combine"
    scales = {None: 0, "f32": 4, "power2": 4, "ue8m0": 1}[work.scale] * (shape.hidden // 128)
    return Row(
        what=mode,
        transport="",
        size=shape.hidden + scales if sent and work.scale else 2 * shape.hidden,
        ranks=shape.ranks,
        nodes=options.placement.world_size * options.nodes,
        tokens=options.tokens,
        hidden=shape.hidden,
        topk=shape.topk,
        experts=shape.num_experts,
        layout=options.layout,
        dtype=options.dtype if work.scale in (None, "f32") else f"fp8 {work.scale}",
        routing=options.routing,
        prereduce=options.prereduce,
        cached=options.cached,
        backend=options.backend,
        ranks_passed=shape.ranks,
        verified=True,
    )


def _of_mode(results: Sequence[tuple[str, str, PeerResult]], mode: str) -> dict[str, PeerResult]:
    return {name: result for name, of, result in results if of == mode}
