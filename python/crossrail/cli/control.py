"""`crossrail bench control`: starts this node's ranks and shows what all ranks found."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import crossrail
from crossrail.report import Report, Row, capture_environment, control_rows

from .control_arguments import ControlOptions
from .etcd import running_etcd
from .failure import Failure, UsageFailure, say
from .gpus import shared_out
from .nodes import Placement
from .progress import Progress
from .ranks import ENDED, Message, Ranks
from .reporting import report_of
from .setup import check_json

COMPILING_S = 60.0
"""More than compiling kernels takes, in the first round of each number of experts."""

STEP_S = 1.0
"""More than any step takes; a rank may be silent for as long as all of its steps take."""


def measure_control(options: ControlOptions) -> None:
    """Runs this node's ranks; the first node shows the report. Raises Failure and the library's errors."""
    if options.placement.node == 0:
        report_of(options.json, lambda progress: _drive(options, progress))
        return
    check_json(options.json)
    with Progress() as progress:
        _run(_placed(options), progress)
    say(f"done: the report is at node 0 of {options.placement.world_size}")


def _drive(options: ControlOptions, progress: Progress) -> Report:
    options = _placed(options)
    store, found = _run(options, progress)
    rows: list[Row] = []
    for message in found:
        samples = {int(rank): steps for rank, steps in message["samples"].items()}
        if len(samples) != options.placement.size:
            raise Failure(f"{len(samples)} of {options.placement.size} ranks said what they measured")
        like = Row("", "", 0, verified=True, experts_per_rank=message["experts_per_rank"], store=store)
        device = options.work.device if options.work.device == "cuda" else None
        like = replace(like, ranks=len(samples), nodes=options.placement.world_size, device=device)
        rows += control_rows(samples, like)
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment({}, overrides), ["crossrail", *sys.argv[1:]], rows)


def _placed(options: ControlOptions) -> ControlOptions:
    """On GPUs a rank for each, unless another number was asked for. Raises Failure."""
    if options.work.device == "cpu":
        return options
    settings: dict[str, Any] = dict(options.settings())
    where, gpus = shared_out(options.placement, crossrail.Context(**settings), options.every_gpu)
    return replace(options, placement=where, gpus=gpus)


def _run(options: ControlOptions, progress: Progress) -> tuple[str, list[Message]]:
    """The kind of store, and what rank 0 tells of all ranks (nothing on other nodes)."""
    settings: dict[str, Any] = dict(options.settings())
    context = crossrail.Context(**settings)
    where, found = options.placement, list[Message]()
    rounds = options.work.warmup + options.work.rounds
    patience = 2 * context.timeout + len(options.work.experts_per_rank) * (rounds * 5 * STEP_S + COMPILING_S)
    with _meeting(options, context) as (store, group), Ranks() as ranks:
        say(f"{where.size} ranks meet at {store}")
        job = {"work": asdict(options.work), "size": where.size, "store": store, "group": group}
        for rank in where.ranks:
            more = {"rank": rank, "node": where.label(rank), "settings": options.settings()}
            more["device"] = options.gpus[rank - where.ranks[0]] if options.gpus else None
            ranks.start(rank, "control", {**job, **more})
        progress.say(f"control: {where.size} ranks")
        left = set(where.ranks)
        while left:
            rank, message = ranks.next(patience)
            if message["event"] == "samples":
                found.append(message)
            elif message["event"] == ENDED:
                left.discard(rank)
    return store.partition("://")[0], found


@contextlib.contextmanager
def _meeting(options: ControlOptions, context: crossrail.Context) -> Iterator[tuple[str, str]]:
    """The store's address and the group's name. The kind of store that was asked for wins over CROSSRAIL_STORE."""
    where = options.placement
    known = (where.store or "tcp://").partition("://")[0]
    if options.store in (None, known):
        with where.meeting(context) as met:
            yield met
    elif where.world_size > 1:
        raise UsageFailure(f"--store {options.store} for several nodes: say where it is, by CROSSRAIL_STORE")
    elif options.store == "etcd":
        with running_etcd() as address:
            say("a real etcd was started for this run")
            yield address, "bench"
    else:
        with Placement(where.num_processes).meeting(context) as met:
            yield met
