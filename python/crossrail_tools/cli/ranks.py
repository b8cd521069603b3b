"""The ranks that this command starts: child processes that exchange messages with it as lines of JSON.

A rank receives its job as the first line on stdin and further messages as the following ones. Lines that it prints on
stdout are its messages; lines on stderr are forwarded. No rank outlives this process.
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
"""After one rank has failed, how long to wait for the others' errors."""

BLAMED_S = 5.0
"""The same for ranks that others name as the reason of their failure."""

ENDED = "ended"
"""The event of a rank whose process has ended successfully, or was killed on purpose."""


class Ranks:
    """Ranks by number. As a context manager, it kills those that still run at the end. For use by one thread."""

    def __init__(self, *, quiet: bool = False) -> None:
        """If ``quiet``, the ranks' stderr is not forwarded; its last line becomes part of the reason of a failure."""
        self._quiet = quiet
        self._ranks: dict[int, _Rank] = {}
        self._inbox: queue.SimpleQueue[tuple[_Rank, Message]] = queue.SimpleQueue()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *unused: object) -> None:
        for rank in self._ranks.values():
            rank.end()

    def start(self, rank: int, kind: str, job: Message, environment: Mapping[str, str] | None = None) -> None:
        """Starts rank ``rank`` of ``kind`` (see `rank_process`) with ``job``, again if it has ended. Raises Failure."""
        if rank in self._ranks:
            self._ranks[rank].end()
        self._ranks[rank] = _Rank(rank, kind, job, environment or {}, self._inbox, self._quiet)

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
        text = f"rank {cause}: {self._ranks[cause].reason()}"
        return UsageFailure(text) if self._ranks[cause].usage() else Failure(text)

    def _patience(self, failed: list[int]) -> float:
        """How long to wait for further failures after these."""
        blamed = set[int]().union(*map(self._blamed, failed))
        return BLAMED_S if any(self._ranks[rank].talks() for rank in blamed) else LAST_WORDS_S

    def _blamed(self, rank: int) -> set[int]:
        """The other ranks that are named in the reason of a rank's failure."""
        named = {int(number) for number in re.findall(r"\brank (\d+)", self._ranks[rank].reason())}
        return (named & self._ranks.keys()) - {rank}


class _Rank:
    """The process of one rank."""

    def __init__(
        self,
        rank: int,
        kind: str,
        job: Message,
        environment: Mapping[str, str],
        inbox: queue.SimpleQueue[tuple[_Rank, Message]],
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
            with contextlib.suppress(OSError, ValueError):  # it has ended; its exit reports why
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.popen.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills the process if it still runs, and releases its resources."""
        self.kill()
        self._listener.join()  # it ends with the pipes of the process
        self._process.stop()

    def runs(self) -> bool:
        return self._process.popen.poll() is None

    def talks(self) -> bool:
        """Whether further messages may follow, its end at least."""
        return self._listener.is_alive()

    def failed(self) -> bool:
        return not self._killed and self._process.popen.poll() not in (None, 0)

    def usage(self) -> bool:
        return self._process.popen.poll() == EXIT_USAGE

    def reason(self) -> str:
        code = self._process.popen.poll()
        if self._error:
            return self._error
        if (killed := self._process.how_it_was_killed()) is not None:
            return killed
        return f"its process ended with exit code {code}, last line on stderr: {self._last or '(none)'}"

    def _listen(self) -> None:
        """Puts every line of stdout into the inbox as a message, and finally the end of the process."""
        for line in _lines(self._process.popen.stdout):
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                self._inbox.put((self, message))
        self._process.popen.wait()
        self.ended_at = time.monotonic()
        self._talk.join()
        self._inbox.put((self, {"event": ENDED}))

    def _pass_on(self) -> None:
        """Forwards stderr, except for the line with the error, which becomes the reason of the failure."""
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
