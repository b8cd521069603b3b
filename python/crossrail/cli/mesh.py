"""`crossrail bench mesh`: starts this node's ranks and shows what all ranks found."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import crossrail
from crossrail.report import Report, Row, capture_environment, mesh_rows

from .failure import Failure, UsageFailure, say
from .gpus import known_gpus
from .mesh_arguments import SMALL, TRIPS, MeshOptions
from .progress import Progress
from .ranks import ENDED, Message, Ranks
from .reporting import report_of
from .setup import check_json, cpu_of

LONG_S = 600.0
"""A rank may wait so long for others that are measuring."""


def measure_mesh(options: MeshOptions) -> None:
    """Runs this node's ranks; the first node shows the report. Raises Failure and the library's errors."""
    if options.placement.node == 0:
        report_of(options.json, lambda progress: _report(options, progress))
        return
    check_json(options.json)
    with Progress() as progress:
        _run(options, progress)
    say(f"done: the report is at node 0 of {options.placement.world_size}")


def _report(options: MeshOptions, progress: Progress) -> Report:
    where, found = _run(options, progress)
    memory = None if options.devices else options.memory or "ordinary"
    like = Row("mesh", "", options.size, memory=memory, ranks=where.size, nodes=where.world_size, verified=True)
    if options.unpack:
        like = dataclasses.replace(like, unpack=options.unpack)
    places = [found[rank]["device"] for rank in sorted(found)]
    rows = mesh_rows(found, like, places if options.devices else None)
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment({}, overrides), ["crossrail", *sys.argv[1:]], rows)


def _run(options: MeshOptions, progress: Progress) -> tuple[Any, Mapping[int, Message]]:
    """Where the ranks were, and what each of all nodes' measured (nothing on nodes but the first)."""
    settings: dict[str, Any] = dict(options.settings())
    context = crossrail.Context(**settings)
    where = options.placement
    devices = options.devices
    if devices is not None:
        known = known_gpus(context, devices)
        where = dataclasses.replace(where, num_processes=len(known))
        devices = known
    if where.size < 2:
        here = f"there is only {devices[0]} here" if devices else "this is 1 rank"
        raise UsageFailure(f"a mesh is between two or more, and {here}")
    found: dict[int, Message] = {}
    with where.meeting(context) as (store, group), Ranks() as ranks:
        progress.say(f"mesh: {where.size} ranks connect")
        for index, rank in enumerate(where.ranks):
            ranks.start(
                rank,
                "mesh",
                {
                    "plan": _plan(options),
                    "rank": rank,
                    "size": where.size,
                    "node": where.label(rank),
                    "nodes": where.world_size,
                    "store": store,
                    "group": group,
                    "settings": options.settings(),
                    "transport": options.transport,
                    "memory": options.memory or "ordinary",
                    "device": devices[index] if devices else None,
                    "cpu": cpu_of(options.pin, index, len(where.ranks)),
                    "progress": progress.shown and rank == 0,
                },
            )
        left = set(where.ranks)
        with progress.task("mesh: pairs", where.size * (where.size - 1)) as tick:
            while left:
                rank, message = ranks.next(LONG_S)
                if message["event"] == "progress" and tick is not None:
                    tick(message["done"], message["total"])
                elif message["event"] == "measured":
                    found = dict(enumerate(message["ranks"]))
                elif message["event"] == ENDED:
                    left.discard(rank)
    if where.node == 0 and len(found) != where.size:
        raise Failure(f"{len(found)} of {where.size} ranks said what they measured")
    return where, found


def _plan(options: MeshOptions) -> Message:
    return {
        "size": options.size,
        "iters": options.iters,
        "warmup": options.warmup,
        "window": options.window,
        "small": min(SMALL, options.size) if options.size else 0,
        "trips": TRIPS,
        "patience": LONG_S,
    }
