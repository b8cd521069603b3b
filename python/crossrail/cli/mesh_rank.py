"""One rank of `crossrail bench mesh`: connects with every other, then measures with them."""

from __future__ import annotations

from typing import Any

import crossrail
from crossrail._native import bench_mesh

from .failure import Failure
from .gathering import gather
from .parsing import required
from .rails import rail_of, rails_of
from .rank_process import Parent
from .ranks import Message
from .setup import pin


def serve(parent: Parent, job: Message) -> None:
    """Measures; rank 0 tells what all ranks found. Raises Failure and the library's errors."""
    pin(job["cpu"])
    context = crossrail.Context(**job["settings"])
    rank: int = job["rank"]
    listen = "0.0.0.0:0" if job["nodes"] > 1 else None
    with (
        crossrail.Group(
            name=job["group"], rank=rank, size=job["size"], node=job["node"], store=job["store"], context=context
        ) as group,
        crossrail.Worker(context, name=f"rank {rank}", listen=listen) as worker,
    ):
        peers = _connected(group, worker, required(job["transport"]))
        group.barrier("connected")
        measured: dict[str, Any] = dict(
            bench_mesh(
                context,
                worker,
                peers,
                job["plan"],
                rank=rank,
                memory=job["device"] or job["memory"],
                on_progress=_tick(parent) if job["progress"] else None,
            )
        )
        found = {**measured, "pairs": [_pair(pair, peers) for pair in measured["pairs"]], "device": job["device"]}
        for pair in found["pairs"]:
            _check(pair, rank, job["transport"])
        everybody = gather(group, "samples", found)
        if everybody is not None:
            parent.tell("measured", ranks=everybody)
        group.barrier("all done")


def _connected(
    group: crossrail.Group, worker: crossrail.Worker, require: str | None
) -> list[crossrail.Endpoint | None]:
    """An endpoint to each rank, by number: the greater rank connects."""
    group.publish("address", worker.address())
    addresses = group.collect("address")
    peers: list[crossrail.Endpoint | None] = [None] * group.size
    for rank in range(group.rank):
        peers[rank] = worker.connect(addresses[rank], require=require)
    for _ in range(group.rank + 1, group.size):
        endpoint = worker.accept()
        number = endpoint.peer.removeprefix("rank ")
        if not number.isdecimal() or not group.rank < int(number) < group.size or peers[int(number)] is not None:
            raise Failure(f"{endpoint.peer!r} connected, which is no rank that was to come")
        peers[int(number)] = endpoint
    return peers


def _pair(pair: dict[str, Any], peers: list[crossrail.Endpoint | None]) -> dict[str, Any]:
    """One pair's samples, with the rails that carried its data."""
    endpoint = peers[pair["target"]]
    receipt = pair["receipt"]
    known = {rail_of(lane): lane["transport"] for lane in endpoint.lanes()} if endpoint is not None else {}
    lanes = [
        {
            "name": rail.name,
            "bytes": rail.bytes,
            "share": rail.share,
            "transport": known.get(rail.name, rail.name.partition("/")[0]),
        }
        for rail in rails_of(receipt["lanes"])
    ]
    return {
        "target": pair["target"],
        "rate": dict(pair["rate"]),
        "latency": dict(pair["latency"]),
        "lanes": lanes,
        "protocol": receipt["protocol"],
        "notes": list(receipt["notes"]),
    }


def _check(pair: dict[str, Any], rank: int, transport: str | None) -> None:
    """Whoever asked for cuda_ipc does not want the figures of what stood in for it."""
    used = {lane["transport"] for lane in pair["lanes"]}
    if transport == "cuda_ipc" and used - {"cuda_ipc"}:
        notes = "; ".join(pair["notes"]) or "see `crossrail info`"
        raise Failure(f"{rank} -> {pair['target']} went over {', '.join(sorted(used))}, not over cuda_ipc: {notes}")


def _tick(parent: Parent) -> Any:
    return lambda done, total: parent.tell("progress", done=done, total=total)
