"""The ranks that this command starts: child processes that exchange messages with it as lines of JSON.

A rank receives its job as the first line on stdin and further messages as the following ones. Lines that it prints on
stdout are its messages; lines on stderr are forwarded. No rank outlives this process.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from .ends import ENDED, LAST_WORDS_S, End, Inbox
from .failure import Failure, print_notice
from .processes import Message

BLAMED_S = 5.0
"""The same for ranks that others name as the reason of their failure."""


class Ranks:
    """Ranks by number. As a context manager, it kills those that still run at the end. For use by one thread."""

    def __init__(self, *, quiet: bool = False) -> None:
        """If ``quiet``, the ranks' stderr is not forwarded; its last line becomes part of the reason of a failure."""
        self._quiet = quiet
        self._ranks: dict[int, End] = {}
        self._inbox: Inbox = queue.SimpleQueue()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *unused: object) -> None:
        for rank in self._ranks.values():
            rank.end()

    def start(self, rank: int, kind: str, job: Message, environment: Mapping[str, str] | None = None) -> None:
        """Starts rank ``rank`` of ``kind`` (see `rank_process`) with ``job``, again if it has ended. Raises Failure."""
        if rank in self._ranks:
            self._ranks[rank].end()
        hear = None if self._quiet else partial(_forward, rank)
        end = rank_process(f"rank {rank}", kind, environment, hear=hear, inbox=self._inbox, rank=rank)
        self._ranks[rank] = end
        end.send(job)

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to one rank; no effect if it has ended."""
        self._ranks[rank].send(message)

    def send_all(self, message: Message) -> None:
        """Sends a message to every rank that still runs."""
        for rank in self._ranks.values():
            rank.send(message)

    def kill(self, rank: int) -> None:
        """Kills a rank, whose end then does not count as a failure."""
        self._ranks[rank].kill()

    def next(self, timeout: float) -> tuple[int, Message]:
        """The next message of any rank; ``{"event": "ended"}`` when its process has ended successfully.

        Raises Failure if there is none in time, or if a rank failed, with its number and the reason.
        """
        try:
            rank, message = self._take(time.monotonic() + timeout)
        except queue.Empty:
            running = ", ".join(str(number) for number, rank in self._ranks.items() if rank.runs())
            ranks = f"ranks {running}" if running else "any rank"
            raise Failure(f"no message from {ranks} within {timeout:g} s") from None
        if message.get("event") == ENDED and self._ranks[rank].failed():
            raise self._failure(rank)
        return rank, message

    def _take(self, deadline: float) -> tuple[int, Message]:
        """The next message of a rank that was not started again since. Raises queue.Empty if there is none in time."""
        while True:
            sender, message = self._inbox.get(timeout=max(deadline - time.monotonic(), 0.0))
            if self._ranks[sender.rank] is sender:
                return sender.rank, message

    def wait_for(self, event: str, ranks: Iterable[int], timeout: float) -> dict[int, Message]:
        """Waits up to ``timeout`` seconds for ``event`` of each of ``ranks``, skipping others. Raises as `next`."""
        missing, found = set(ranks), dict[int, Message]()
        deadline = time.monotonic() + timeout
        while missing:
            rank, message = self.next(deadline - time.monotonic())
            if rank not in missing:
                continue
            if message.get("event") == event:
                missing.discard(rank)
                found[rank] = message
            elif message.get("event") == ENDED:
                raise Failure(f"rank {rank} ended before the event {event!r}")
        return found

    def collect(
        self, event: str, ranks: Iterable[int], patience: float, tick: Callable[[int, int], object] | None = None
    ) -> dict[int, Message]:
        """As `wait_for`, with a timeout of ``patience`` seconds for each message; ``tick`` is called with progress."""
        missing, found = set(ranks), dict[int, Message]()
        while missing:
            rank, message = self.next(patience)
            if message.get("event") == "progress" and tick is not None:
                tick(message["done"], message["total"])
            if message.get("event") == event:
                missing.discard(rank)
                found[rank] = message
        return found

    def _failure(self, first: int) -> Failure:
        """The failure of the run after rank ``first`` failed. Reasons of other ranks that fail too are printed."""
        began, failed = time.monotonic(), [first]
        while True:
            try:
                rank, message = self._take(began + self._patience(failed))
            except queue.Empty:
                if time.monotonic() >= began + self._patience(failed):
                    break
                continue
            if message.get("event") == ENDED and self._ranks[rank].failed():
                failed.append(rank)
        # A rank that was killed, or failed by itself, is the cause of the errors that name it. The ranks that name it
        # may end first, because they notice its failure before its process is gone.
        cause, *others = sorted(
            failed, key=lambda rank: (not self._blamed(rank).isdisjoint(failed), self._ranks[rank].ended_at)
        )
        for rank in others:
            print_notice(f"rank {rank}: {self._ranks[rank].reason()}")
        return self._ranks[cause].failure(f"rank {cause}: {self._ranks[cause].reason()}")

    def _patience(self, failed: list[int]) -> float:
        """How long to wait for further failures after these."""
        blamed = set[int]().union(*map(self._blamed, failed))
        return BLAMED_S if any(self._ranks[rank].talks() for rank in blamed) else LAST_WORDS_S

    def _blamed(self, rank: int) -> set[int]:
        """The other ranks that are named in the reason of a rank's failure."""
        named = {int(number) for number in re.findall(r"\brank (\d+)", self._ranks[rank].reason())}
        return (named & self._ranks.keys()) - {rank}


def _forward(rank: int, line: str) -> None:
    print_notice(f"rank {rank}: {line.removeprefix('crossrail: ')}")


def rank_process(name: str, kind: str, environment: Mapping[str, str] | None = None, **how: Any) -> End:
    """Starts a process of ``kind`` (see `rank_process.py`); ``how``: arguments of `End`. Raises Failure."""
    command = [sys.executable, "-m", "crossrail", "rank", kind, f"--parent={os.getpid()}"]
    return End(name, command, environment={"PYTHONSAFEPATH": "1", **(environment or {})}, **how)
