"""Processes that take orders: lines of JSON on their stdin, answered by lines of JSON on their stdout."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, TypeAlias

from .failure import ERROR, EXIT_USAGE, Failure, UsageFailure
from .processes import Message, Process

ENDED = "ended"
"""The event of a process that has ended."""

ANSWER_S = 300.0
LAST_WORDS_S = 0.5
"""Seconds to wait for the error of a process before a failure here kills it."""

MOST_KEPT = 1000
"""Lines of stderr that are kept."""


class End:
    """A process that takes orders, and never outlives this one. For use by one thread.

    Every line of its stderr goes to ``hear``, except its error (`ERROR`), which becomes the reason of its
    failure; without ``hear`` all are kept in ``said``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        hear: Callable[[str], object] | None = None,
        inbox: Inbox | None = None,
        rank: int = 0,
    ) -> None:
        """Starts it. ``inbox``: where its messages go, if several ends share one. Raises Failure."""
        self.name, self.rank = name, rank
        self.error = ""
        self.ended_at = float("inf")
        self.said: deque[str] = deque(maxlen=MOST_KEPT)
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._hear = hear
        self._killed = False
        try:
            self.process = Process(command, environment=environment, stdin=subprocess.PIPE)
        except OSError as error:
            raise Failure(f"{name} cannot be started: {error.strerror}") from None
        self._talk = threading.Thread(target=self._pass_on, name=f"crossrail-talk {name}", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"crossrail {name}", daemon=True)
        self._talk.start()
        self._listener.start()

    def send(self, message: Message) -> None:
        """Sends a message; no effect if it has ended, whose reason `answer` has."""
        stdin = self.process.popen.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()

    def order(self, what: str, **arguments: Any) -> None:
        """Sends a request without waiting; `answer` waits for its result."""
        self.send({"do": what, **arguments})

    def answer(self, timeout: float = ANSWER_S) -> Message:
        """The next message. Raises Failure if it reports an error, or there is none: in time, or because it ended."""
        try:
            _, message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise Failure(f"{self.name}: no answer within {timeout:g} s") from None
        if message.get("event") == ENDED:
            raise self.failure(f"{self.name}: {self.reason()}")
        if "error" in message:
            raise Failure(f"{self.name}: {message['error']}")
        return message

    def wait_for(self, event: str, timeout: float) -> Message:
        """Waits up to ``timeout`` seconds for its message with ``event``, skipping others. Raises as `answer`."""
        deadline = time.monotonic() + timeout
        while (message := self.answer(max(deadline - time.monotonic(), 0.0))).get("event") != event:
            pass
        return message

    def do(self, what: str, **arguments: Any) -> Message:
        """Sends a request and returns its answer. Raises as `answer`."""
        self.order(what, **arguments)
        return self.answer()

    def pause(self, paused: bool) -> None:
        """Stops or continues it: idle threads would take processors from a measurement."""
        self.process.popen.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def kill(self) -> None:
        """Kills it, which then does not count as a failure."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self.process.popen.send_signal(signal.SIGKILL)

    def end(self, grace: float = 0.0) -> None:
        """Kills it if it still runs after ``grace`` seconds, and releases its resources."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.popen.wait(grace)
        self.kill()
        self._listener.join()  # it ends with the pipes of the process
        self.process.stop()

    def runs(self) -> bool:
        return self.process.popen.poll() is None

    def talks(self) -> bool:
        """True while further messages may follow, its end at least."""
        return self._listener.is_alive()

    def failed(self) -> bool:
        return not self._killed and self.process.popen.poll() not in (None, 0)

    def failure(self, text: str) -> Failure:
        """``text`` as a failure of the kind that ended it."""
        return UsageFailure(text) if self.process.popen.poll() == EXIT_USAGE else Failure(text)

    def reason(self) -> str:
        """Why it ended."""
        if self.error:
            return self.error
        if (killed := self.process.how_it_was_killed()) is not None:
            return killed
        code, last = self.process.popen.poll(), self.said[-1].strip() if self.said else "(none)"
        return f"its process ended with exit code {code}, last line on stderr: {last}"

    def _listen(self) -> None:
        """Puts every line of stdout into the inbox as a message, and finally the end of the process."""
        for line in _lines(self.process.popen.stdout):
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                self._inbox.put((self, message))
        self.process.popen.wait()
        self.ended_at = time.monotonic()
        self._talk.join()
        self._inbox.put((self, {"event": ENDED}))

    def _pass_on(self) -> None:
        for raw in _lines(self.process.popen.stderr):
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(ERROR):
                self.error = line.removeprefix(ERROR)
            elif line and self._hear is not None:
                self._hear(line)
            if line and self._hear is None:
                self.said.append(line)


Inbox: TypeAlias = "queue.SimpleQueue[tuple[End, Message]]"


def _lines(stream: IO[bytes] | None) -> Iterable[bytes]:
    """The lines of a pipe until its end."""
    return () if stream is None else iter(stream.readline, b"")
