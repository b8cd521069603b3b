"""The ranks that this command starts: processes of their own, told what to do and heard from in JSON lines.

A rank gets its job as the first line on stdin and whatever it is told after that as further ones; what it prints on
stdout are its messages, what it says on stderr is passed on. No rank outlives this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO

from .failure import ERROR, EXIT_USAGE, Failure, UsageFailure, print_notice
from .processes import Message, Process

LAST_WORDS_S = 0.5
"""How long the others may still say why they failed, once one has."""

BLAMED_S = 5.0
"""The same for those whom the others name as their reason."""

ENDED = "ended"
"""The event in a rank's name when its process has ended well, or was killed on purpose."""


class Ranks:
    """Ranks by number. A context manager: leaving it ends those that still run. One thread uses it."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet`: what ranks say on stderr is not passed on; its end is part of the reason when one fails."""
        self._quiet = quiet
        self._ranks: dict[int, _Rank] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *unused: object) -> None:
        for rank in self._ranks.values():
            rank.end()

    def start(self, rank: int, kind: str, job: Message, environment: Mapping[str, str] | None = None) -> None:
        """Starts rank ``rank`` of ``kind`` (see `rank_process`) with ``job``; what ended before may start again.

        Raises Failure.
        """
        if rank in self._ranks:
            self._ranks[rank].end()
        self._ranks[rank] = _Rank(rank, kind, job, environment or {}, self._inbox, self._quiet)

    def send(self, rank: int, message: Message) -> None:
        """Tells one rank; nothing when it has ended."""
        self._ranks[rank].send(message)

    def send_all(self, message: Message) -> None:
        """Tells every rank that runs."""
        for rank in self._ranks.values():
            rank.send(message)

    def kill(self, rank: int) -> None:
        """Kills a rank, which is no failure then."""
        self._ranks[rank].kill()

    def next(self, timeout: float) -> tuple[int, Message]:
        """The next message of any rank; ``{"event": "ended"}`` when its process has ended as it should.

        Raises Failure when none comes in time, or when a rank failed: with its number and reason.
        """
        try:
            rank, message = self._inbox.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            running = ", ".join(str(number) for number, rank in self._ranks.items() if rank.runs())
            raise Failure(f"nothing was heard of ranks {running or 'any more'} for {timeout:g} s") from None
        if message.get("event") == ENDED and self._ranks[rank].failed():
            raise self._failure(rank)
        return rank, message

    def wait_for(self, event: str, ranks: Iterable[int], timeout: float) -> dict[int, Message]:
        """The ``event`` of each of ``ranks``; other messages are passed over. Raises as `next`."""
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
                raise Failure(f"rank {rank} ended too early")
        return found

    def collect(
        self, event: str, ranks: Iterable[int], patience: float, tick: Callable[[int, int], object] | None = None
    ) -> dict[int, Message]:
        """As `wait_for`, but bounding each wait for a message instead of all of them; ``tick`` is told of progress."""
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
        """Why the run failed: what rank ``first`` said; what others that fail as well have to say is passed on."""
        began, failed = time.monotonic(), [first]
        while True:
            left = began + self._patience(failed) - time.monotonic()
            try:
                rank, message = self._inbox.get(timeout=max(left, 0.0))
            except queue.Empty:
                if left <= 0:
                    break
                continue
            if message.get("event") == ENDED and self._ranks[rank].failed():
                failed.append(rank)
        # One that was killed, or found a mistake of its own, is the cause of what the others say about it: they may end
        # before it does, as soon as they hear that it goes.
        cause, *others = sorted(
            failed, key=lambda rank: (not self._blamed(rank).isdisjoint(failed), self._ranks[rank].ended_at)
        )
        for rank in others:
            print_notice(f"rank {rank}: {self._ranks[rank].reason()}")
        text = f"rank {cause}: {self._ranks[cause].reason()}"
        return UsageFailure(text) if self._ranks[cause].usage() else Failure(text)

    def _patience(self, failed: list[int]) -> float:
        """How long others are listened to once these have failed."""
        blamed = set[int]().union(*map(self._blamed, failed))
        return BLAMED_S if any(self._ranks[rank].talks() for rank in blamed) else LAST_WORDS_S

    def _blamed(self, rank: int) -> set[int]:
        """The other ranks that a rank's reason names."""
        named = {int(number) for number in re.findall(r"\brank (\d+)", self._ranks[rank].reason())}
        return (named & self._ranks.keys()) - {rank}


class _Rank:
    """One process."""

    def __init__(
        self,
        rank: int,
        kind: str,
        job: Message,
        environment: Mapping[str, str],
        inbox: queue.SimpleQueue[tuple[int, Message]],
        quiet: bool,
    ) -> None:
        self.rank = rank
        self.ended_at = float("inf")
        self._inbox = inbox
        self._error = ""
        self._quiet = quiet
        self._last = ""
        self._killed = False
        command = [sys.executable, "-m", "crossrail", "rank", kind, f"--parent={os.getpid()}"]
        try:
            self._process = Process(command, environment={"PYTHONSAFEPATH": "1", **environment}, stdin=subprocess.PIPE)
        except OSError as error:
            raise Failure(f"rank {rank} cannot be started: {error.strerror}") from None
        self._talk = threading.Thread(target=self._pass_on, name=f"crossrail-talk-{rank}", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"crossrail-rank-{rank}", daemon=True)
        self._talk.start()
        self._listener.start()
        self.send(job)

    def send(self, message: Message) -> None:
        stdin = self._process.popen.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended: its end says why
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.popen.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills it if it still runs, and gives back everything of it."""
        self.kill()
        self._listener.join()  # its pipes end with it
        self._process.stop()

    def runs(self) -> bool:
        return self._process.popen.poll() is None

    def talks(self) -> bool:
        """Whether something of it may still come, its end at least."""
        return self._listener.is_alive()

    def failed(self) -> bool:
        return not self._killed and self._process.popen.poll() not in (None, 0)

    def usage(self) -> bool:
        return self._process.popen.poll() == EXIT_USAGE

    def reason(self) -> str:
        code = self._process.popen.poll()
        if self._error:
            return self._error
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code} and said {self._last or 'nothing'}"

    def _listen(self) -> None:
        """Passes every line of stdout on as a message, then the end; runs until that."""
        for line in _lines(self._process.popen.stdout):
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                self._inbox.put((self.rank, message))
        self._process.popen.wait()
        self.ended_at = time.monotonic()
        self._talk.join()
        self._inbox.put((self.rank, {"event": ENDED}))

    def _pass_on(self) -> None:
        """Shows what the rank says, but its error: that is its reason."""
        for raw in _lines(self._process.popen.stderr):
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(ERROR):
                self._error = line.removeprefix(ERROR)
            elif line and self._quiet:
                self._last = line.strip()
            elif line:
                print_notice(f"rank {self.rank}: {line.removeprefix('crossrail: ')}")


def _lines(stream: IO[bytes] | None) -> Iterable[bytes]:
    """The lines of a pipe until its end."""
    return () if stream is None else iter(stream.readline, b"")
