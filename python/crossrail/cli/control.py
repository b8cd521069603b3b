"""`crossrail bench control`: starts this node's ranks and shows what all ranks found."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import crossrail
from crossrail.report import Report, Row, capture_environment, control_rows

from .control_arguments import ControlOptions
from .failure import Failure, say
from .nodes import shared_store
from .progress import Progress
from .ranks import ENDED, Message, Ranks
from .reporting import report_of
from .setup import check_json

STEP_S = 1.0
"""More than any step takes; a rank may be silent for as long as all of its steps take."""


def measure_control(options: ControlOptions) -> None:
    """Runs this node's ranks; the first node shows the report. Raises Failure and the library's errors."""
    if options.nodes.node == 0:
        report_of(options.json, lambda progress: _drive(options, progress))
        return
    check_json(options.json)
    with Progress() as progress:
        _run(options, progress)
    say(f"done: the report is at node 0 of {options.nodes.world_size}")


def _drive(options: ControlOptions, progress: Progress) -> Report:
    store, found = _run(options, progress)
    rows: list[Row] = []
    for message in found:
        samples = {int(rank): steps for rank, steps in message["samples"].items()}
        if len(samples) != options.nodes.ranks:
            raise Failure(f"{len(samples)} of {options.nodes.ranks} ranks said what they measured")
        like = Row("", "", 0, experts_per_rank=message["experts_per_rank"], store=store, verified=True)
        rows += control_rows(samples, like)
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment({}, overrides), ["crossrail", *sys.argv[1:]], rows)


def _run(options: ControlOptions, progress: Progress) -> tuple[str, list[Message]]:
    """The kind of store, and what rank 0 tells of all ranks (nothing on other nodes)."""
    settings: dict[str, Any] = dict(options.settings())
    context = crossrail.Context(**settings)
    nodes, found = options.nodes, []
    patience = 2 * context.timeout + len(options.work.experts_per_rank) * options.work.rounds * 5 * STEP_S
    with shared_store(nodes, context, options.store) as store, Ranks() as ranks:
        job = {"work": asdict(options.work), "size": nodes.ranks, "store": store, "settings": options.settings()}
        progress.say(f"control: {nodes.ranks} ranks, store {store}")
        for rank in nodes.here:
            ranks.start(rank, "control", {**job, "rank": rank, "node": nodes.label})
        left = set(nodes.here)
        while left:
            rank, message = ranks.next(patience)
            if message["event"] == "samples":
                found.append(message)
            elif message["event"] == ENDED:
                left.discard(rank)
    return store.partition("://")[0], found
