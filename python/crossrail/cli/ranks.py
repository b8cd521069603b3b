"""The processes of a group's ranks: started here, listened to, ended together.

A rank's process is this command again, with a hidden option that says what it is to do. It tells what it finds as JSON
lines on stdout; its stderr is kept, and shown when it fails. It never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .failure import ERROR, EXIT_USAGE, Failure, UsageFailure, say
from .processes import Process

Message = dict[str, Any]

LAST_WORDS_S = 0.5
"""How long others that fail too get to do so, so that the first cause can be told from what follows from it."""


def tell(message: Message) -> None:
    """Says one message to the process that started this one."""
    print(json.dumps(message), flush=True)


class Rank:
    """One rank's process."""

    def __init__(self, title: str, arguments: Sequence[str]) -> None:
        """Starts it. `title` names it until its rank is known. Raises OSError."""
        self.title = title
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        command = [sys.executable, "-m", "crossrail", *arguments, f"--parent={os.getpid()}"]
        environment = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        try:
            self.process = Process(command, environment=environment, stdin=subprocess.PIPE, stderr=self._talk)
        except OSError:
            self._talk.close()
            raise
        self.ended = False
        self.expendable = False
        """Whether it may end by a signal: it is to be killed."""
        self._partial = b""

    def fileno(self) -> int:
        """Its stdout, to be waited for."""
        assert self.process.popen.stdout is not None
        return self.process.popen.stdout.fileno()

    def read(self) -> list[Message]:
        """The messages that are there, once there is something; at its end, `ended` is set. Raises Failure."""
        data = os.read(self.fileno(), 1 << 16)
        self.ended = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise Failure(f"{self.title} said something that is not understood: {line[:80]!r}")
            messages.append(message)
        return messages

    def kill(self) -> None:
        """SIGKILL, at once."""
        self.expendable = True
        with contextlib.suppress(ProcessLookupError):
            self.process.popen.kill()

    def failure(self) -> Failure | None:
        """Why it failed, once it has ended: its own last error. None: it did not fail."""
        code = self.process.popen.wait(LAST_WORDS_S)
        if code == 0 or (self.expendable and code < 0):
            return None
        errors = [line for line in self.talk().splitlines() if line.startswith(ERROR)]
        if not errors:
            self.show()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return Failure(f"{self.title} {how}")
        text = errors[-1].removeprefix(ERROR)
        return UsageFailure(text) if code == EXIT_USAGE else Failure(f"{self.title}: {text}")

    def talk(self) -> str:
        """What it said on stderr so far."""
        self._talk.seek(0)
        return self._talk.read().decode(errors="replace").strip()

    def show(self) -> None:
        """Passes on what it said on stderr."""
        text = self.talk()
        if text:
            say(f"{self.title} said:\n{text}")

    def stop(self, grace: float = 0.0) -> None:
        """Ends it and gives everything of it back."""
        self.process.stop(grace)
        self._talk.close()


class Ranks:
    """All rank processes of a run. A context manager: leaving it ends them all."""

    def __init__(self) -> None:
        self.running: list[Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        verbose = os.environ.get("CROSSRAIL_LOG") in ("info", "debug")
        for rank in self.running:
            if kind is None and verbose:
                rank.show()
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                rank.process.popen.kill()
        for rank in self.running:
            rank.stop()
        self.running.clear()

    def start(self, title: str, arguments: Sequence[str]) -> Rank:
        """Starts one more. Raises Failure."""
        try:
            rank = Rank(title, arguments)
        except OSError as error:
            raise Failure(f"{title} cannot be started: {error.strerror}") from None
        self.running.append(rank)
        return rank

    def messages(self, timeout: float) -> Iterator[tuple[Rank, Message]]:
        """What the ranks say, as it comes, until all of them have ended.

        Raises Failure when one of them fails, of its own accord or first among several; when none says anything for
        `timeout` seconds.
        """
        while self.running:
            for rank in self.wait(timeout):
                for message in rank.read():
                    yield rank, message
                if rank.ended:
                    self.reap(rank)

    def wait(self, timeout: float) -> list[Rank]:
        """Those that have something to read. Raises Failure when none has within `timeout` seconds."""
        ready: list[Rank] = select.select(self.running, [], [], timeout)[0]
        if not ready:
            names = ", ".join(rank.title for rank in self.running)
            raise Failure(f"nothing was heard of {names} for {timeout:g} s")
        return ready

    def reap(self, rank: Rank) -> None:
        """Of one whose stdout has ended: gives it back. Raises Failure when it failed."""
        try:
            failure = rank.failure()
        except subprocess.TimeoutExpired:
            failure = Failure(f"{rank.title} closed its stdout and runs on")
        if failure is not None:
            raise self._cause(failure)
        self.running.remove(rank)
        rank.stop()

    def _cause(self, first: Failure) -> Failure:
        """The failure to tell of: one that is a rank's own rather than what it saw of another."""
        deadline = time.monotonic() + LAST_WORDS_S
        failures = [first]
        for rank in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.popen.wait(max(deadline - time.monotonic(), 0))
                failure = rank.failure()
                if failure is not None:
                    failures.append(failure)
        return next((one for one in failures if isinstance(one, UsageFailure)), first)
