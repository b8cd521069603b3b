"""The process of one rank, which `Ranks` starts (not meant to be called by hand), and how it joins its group."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import crossrail

from .failure import Failure
from .parsing import Command, Commands, Parser
from .processes import Message, from_parent

START_S = 30.0
RANK = "rank"
"""Name of the hidden command that runs a rank."""

KINDS = {
    "control": ".control",
    "doctor": ".doctor.second",
    "elastic": ".ep.elastic",
    "ep": ".ep.host",
    "ep-cuda": ".ep.cuda",
    "ep-peer": ".ep.peers",
    "mesh": ".mesh",
}
"""Kinds of ranks, and the module whose ``serve(parent, job)`` each runs."""

PIECE = 60_000
"""Bytes per value in the store, which accepts at most 64 KiB."""


class Parent:
    """The process that started this one, and the messages exchanged with it. Created once."""

    def __init__(self) -> None:
        # stdout is reserved for messages: any other output goes to stderr.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, event: str, **more: object) -> None:
        """Sends a message."""
        self._out.write(json.dumps({"event": event, **more}) + "\n")
        self._out.flush()

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises Failure if there is none in time."""
        try:
            message: Message = json.loads(from_parent.get(timeout=timeout))
        except queue.Empty:
            raise Failure(f"no message from the command that started this rank within {timeout:g} s") from None
        return message


@dataclass(frozen=True)
class RankOptions:
    """`crossrail rank KIND`, which other commands start."""

    serve: Callable[[Parent, Message], None]
    parent: int

    def run(self) -> None:
        """Runs the job that is the first message on stdin."""
        parent = Parent()
        try:
            self.serve(parent, parent.receive(START_S))
        except MemoryError as error:
            raise Failure(f"not enough memory: {error}") from None


def add_rank(commands: Commands) -> None:
    """Adds the parser."""
    rank = commands.add_parser(RANK, allow_abbrev=False)
    rank.add_argument("kind", choices=KINDS)
    rank.add_argument("--parent", type=int, required=True)
    rank.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    # Imported before `gc.freeze`, so that its modules are excluded from garbage collection.
    return RankOptions(serve=importlib.import_module(KINDS[parsed.kind], __package__).serve, parent=parsed.parent)


def join(job: Message, context: crossrail.Context) -> crossrail.Group:
    """Joins the group of a job as the rank of that job. Raises the library's errors."""
    return crossrail.Group(
        name=job["group"], rank=job["rank"], size=job["size"], node=job["node"], store=job["store"], context=context
    )


def gather(group: crossrail.Group, name: str, value: Any) -> list[Any] | None:
    """Gathers each rank's ``value`` (any JSON) at rank 0, through the store. A collective call.

    Returns the values by rank at rank 0, None elsewhere. ``name`` may be used once in the lifetime of a group. Raises
    the library's errors.
    """
    keys = _publish(group, name, value)
    found = [_collect(group, name, rank) for rank in range(group.size)] if group.rank == 0 else None
    group.barrier(f"{name}: taken")
    for key in keys:
        group.withdraw(key)
    return found


def hand_over(group: crossrail.Group, name: str, source: int, value: Any, timeout: float) -> Any:
    """Moves rank ``source``'s ``value`` (any JSON) to rank 0, through the store. Both call it, others need not.

    Returns the value at rank 0, which waits up to ``timeout`` seconds for it, None at another ``source``. ``name`` may
    be used once in the lifetime of a group. Raises the library's errors.
    """
    if source == 0:
        return value
    if group.rank == 0:
        found = _collect(group, name, source, timeout)
        group.barrier(f"{name}: taken", [0, source])
        return found
    keys = _publish(group, name, value)
    group.barrier(f"{name}: taken", [0, source])
    for key in keys:
        group.withdraw(key)
    return None


def _publish(group: crossrail.Group, name: str, value: Any) -> list[str]:
    """Publishes ``value`` in pieces; returns their keys."""
    data = zlib.compress(json.dumps(value).encode(), 1)
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    values = {f"{name}: pieces": str(len(pieces)).encode()}
    values |= {f"{name}: {number}": piece for number, piece in enumerate(pieces)}
    for key, piece in values.items():
        group.publish(key, piece)
    return list(values)


def _collect(group: crossrail.Group, name: str, rank: int, timeout: float | None = None) -> Any:
    count = int(group.collect(f"{name}: pieces", [rank], timeout)[0])
    pieces = [group.collect(f"{name}: {number}", [rank])[0] for number in range(count)]
    return json.loads(zlib.decompress(b"".join(pieces)))
