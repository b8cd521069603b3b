"""A rank's own side: the process that `Ranks` starts, not meant to be called by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import sys
from dataclasses import dataclass

from .failure import Failure
from .parsing import Command, Commands, Parser
from .processes import from_parent
from .ranks import Message

START_S = 30.0
RANK = "rank"
"""The command."""

KINDS = {
    "control": "control_rank",
    "elastic": "elastic_rank",
    "ep": "ep_rank",
    "ep-cuda": "ep_cuda_rank",
    "ep-peer": "ep_peer_rank",
    "mesh": "mesh_rank",
}
"""What a rank can be, with the module whose ``serve(parent, job)`` it runs."""


class Parent:
    """The process that started this one: what it says, and a way to answer it. Made once."""

    def __init__(self) -> None:
        # stdout is for messages alone: whatever else prints goes to stderr.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, event: str, **more: object) -> None:
        """Sends a message."""
        self._out.write(json.dumps({"event": event, **more}) + "\n")
        self._out.flush()

    def hear(self, timeout: float | None = None) -> Message:
        """The next message. Raises Failure when none comes in time."""
        try:
            message: Message = json.loads(from_parent.get(timeout=timeout))
        except queue.Empty:
            raise Failure(f"the command that started this rank said nothing for {timeout:g} s") from None
        return message


@dataclass(frozen=True)
class RankOptions:
    """`crossrail rank KIND`, which a command starts."""

    kind: str
    parent: int

    def run(self) -> None:
        """Does the job that comes first on stdin."""
        parent = Parent()
        module = importlib.import_module(f".{KINDS[self.kind]}", __package__)
        try:
            module.serve(parent, parent.hear(START_S))
        except MemoryError as error:
            raise Failure(f"not enough memory: {error}") from None


def add_rank(commands: Commands) -> None:
    """Adds the parser."""
    rank = commands.add_parser(RANK, allow_abbrev=False)
    rank.add_argument("kind", choices=KINDS)
    rank.add_argument("--parent", type=int, required=True)
    rank.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return RankOptions(kind=parsed.kind, parent=parsed.parent)
