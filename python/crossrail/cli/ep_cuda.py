"""`crossrail bench ep --device cuda`: starts a rank for each GPU, has them verify and measure, and makes the report.

One set of processes serves every shape of a sweep. Each shape is verified before it is timed, and again after that.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import crossrail
from crossrail.ref.checking import Work
from crossrail.report import (
    EpDeviceRank,
    EpDeviceTurn,
    Report,
    Row,
    capture_environment,
    ep_device_row,
    with_peers,
)

from .ep import row_like
from .ep_arguments import EpOptions
from .ep_peers import Peers
from .failure import UsageFailure, say
from .gpus import one_each
from .progress import OnProgress, Progress
from .ranks import ENDED, Message, Ranks

LONG_S = 120.0
"""A rank may compile kernels, work out what should come, or wait for one that does; it bounds all of that itself."""

CLOCKS = ("gpu", "host")


def measure(options: EpOptions, progress: Progress) -> Report:
    """Runs the whole bench; on nodes but the first the report has no rows. Raises Failure and the library's errors."""
    settings: dict[str, Any] = dict(options.settings())
    context = crossrail.Context(**settings)
    options = _placed(options, context)
    run = _Run(options, progress, context)
    rows = run.rows()
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment(run.versions, overrides), ["crossrail", *sys.argv[1:]], rows)


def _placed(options: EpOptions, context: crossrail.Context) -> EpOptions:
    """With a rank for each GPU, unless fewer were asked for."""
    where = one_each(options.placement, context, options.every_gpu)
    if where.num_processes % options.nodes:
        raise UsageFailure(f"--nodes {options.nodes}: {where.num_processes} ranks cannot be spread evenly over as many")
    return replace(options, placement=where)


class _Run:
    """One run of all ranks that this command starts."""

    def __init__(self, options: EpOptions, progress: Progress, context: crossrail.Context) -> None:
        self.options = options
        self.progress = progress
        self.context = context
        self.where = options.placement
        self.versions: dict[str, str] = {}
        self.number = 0

    def rows(self) -> list[Row]:
        """Rows of every shape."""
        shapes = [(one, one.work(self.where.size)) for one in self.options.swept()]
        rows: list[Row] = []
        with self.where.meeting(self.context) as (store, group), Ranks() as ranks, Peers(self.options) as peers:
            if self.where.world_size > 1:
                say(
                    f"node {self.where.node} of {self.where.world_size}, store {store} ({self.where.said or 'options'})"
                )
            for rank in self.where.ranks:
                ranks.start(rank, "ep-cuda", self._job(rank, store, group))
            for number, (options, work) in enumerate(shapes):
                rows += self._shape(ranks, peers, (number, options, work))
            ranks.tell_all({"do": "end"})
            self._until(ranks, ENDED)
            self.versions = peers.versions
        return rows

    def _job(self, rank: int, store: str, group: str) -> Message:
        return {
            "rank": rank,
            "size": self.where.size,
            "ordinal": rank - self.where.ranks[0],
            "node": self.where.label(rank, self.options.nodes),
            "store": store,
            "group": group,
            "settings": self.options.settings(),
            "progress": self.progress.shown and rank == 0,
        }

    def _shape(self, ranks: Ranks, peers: Peers, one: tuple[int, EpOptions, Work]) -> list[Row]:
        """Verifies and measures one shape, in turns with the peers."""
        number, options, work = one
        self.progress.say(f"{self.where.size} ranks verify against the reference")
        how = {"number": number, "num_sms": options.num_sms, "cast_before": options.cast_before}
        peers.begin(work)
        ranks.tell_all({"do": "open", "work": asdict(work), **how})
        passed = self._until(ranks, "passed")
        self.progress.say("peers start")
        peers.ready()
        turns: dict[str, list[EpDeviceTurn]] = {mode: [] for mode in options.modes}
        for turn in range(options.rounds if options.compare else 1):
            for mode in options.modes:
                found = self._turn(ranks, mode, turn)
                if found is not None:
                    turns[mode].append(found)
            if options.compare:
                self.progress.say(f"peers round {turn + 1}")
                peers.measure()
        ranks.tell_all({"do": "close"})
        self._until(ranks, "closed")
        if self.where.node != 0:
            return []
        facts = passed[self.where.ranks[0]]
        rows = []
        for mode in options.modes:
            like = replace(row_like(options, work, mode), device="cuda", num_sms=facts["num_sms"])
            like = replace(like, heap_bytes=facts["heap_bytes"], given="fp8" if options.cast_before else "bf16")
            rows.append(with_peers(ep_device_row(like, turns[mode]), peers.results(mode)))
        return rows

    def _turn(self, ranks: Ranks, mode: str, turn: int) -> EpDeviceTurn | None:
        """One mode by both clocks; None on nodes but the first."""
        found = []
        for clock in CLOCKS:
            title = f"{mode}, the {clock}'s clock" + (f", round {turn + 1}" if self.options.compare else "")
            with self.progress.task(title, self.options.warmup + self.options.iters) as tick:
                found.append(self._one(ranks, mode, clock, tick))
        gpu, host = found
        if gpu is None or host is None:
            return None
        return EpDeviceTurn([EpDeviceRank.of(*both) for both in zip(gpu, host, strict=True)])

    def _one(self, ranks: Ranks, mode: str, clock: str, tick: OnProgress | None) -> list[Message] | None:
        self.number += 1
        options = self.options
        plan = {"mode": mode, "clock": clock, "cached": options.cached, "iters": options.iters}
        ranks.tell_all({"do": "measure", "number": self.number, "plan": {**plan, "warmup": options.warmup}})
        measured = self._until(ranks, "measured", tick)
        every: list[list[Message]] = [message["ranks"] for message in measured.values() if message["ranks"]]
        return every[0] if every else None

    def _until(self, ranks: Ranks, event: str, tick: OnProgress | None = None) -> dict[int, Message]:
        """That event of each rank here."""
        missing, found = set(self.where.ranks), dict[int, Message]()
        while missing:
            rank, message = ranks.next(LONG_S)
            if message["event"] == "progress" and tick is not None:
                tick(message["done"], message["total"])
            if message["event"] == event:
                missing.discard(rank)
                found[rank] = message
        return found
