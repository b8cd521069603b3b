"""Two ends of the command in the two namespaces of a bed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bed import Bed, Side

from crossrail_tools.report.schema import Report, Row

PORT = 18177
SECRET = "a secret for the test bed"
START_S = 20.0
END_S = 60.0


@dataclass(frozen=True)
class Ended:
    """One end after it ended: its exit code and what it said on stderr."""

    code: int
    said: str


@dataclass(frozen=True)
class Outcome:
    """Both ends after they ended, and the report where one was written."""

    listening: Ended
    driving: Ended
    report: Report | None

    @property
    def row(self) -> Row:
        """The only row of the report of a run that went well at both ends."""
        talk = f"listening end ({self.listening.code}):\n{self.listening.said}\n"
        talk += f"driving end ({self.driving.code}):\n{self.driving.said}"
        assert self.listening.code == 0, talk
        assert self.driving.code == 0, talk
        assert self.report is not None, talk
        (row,) = self.report.rows
        return row


class End:
    """A running end. What it says can be waited for while it runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **environment},
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._lines.append("")
            self._changed.notify_all()

    @property
    def said(self) -> str:
        """All output so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_to_say(self, *words: str, timeout: float = START_S) -> str:
        """Waits for a line with all of ``words``; fails when the process ends or ``timeout`` seconds pass before."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self._lines:
                    if all(word in line for word in words):
                        return line
                left = deadline - time.monotonic()
                if left <= 0 or (self._lines and self._lines[-1] == ""):
                    raise AssertionError(f"never said {words}; it said:\n{''.join(self._lines)}")
                self._changed.wait(left)

    def end(self, timeout: float = END_S) -> Ended:
        """Waits for the process to end by itself."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; it said:\n{self.said}") from None
        self._reader.join(5)
        return Ended(code, self.said)

    def kill(self) -> None:
        """Ends the process if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join(5)


@dataclass(frozen=True)
class Pair:
    """How the two ends of one bench are started in a bed."""

    bed: Bed
    what: str = "p2p"
    rails: Sequence[str] | None = None
    version: int = 4
    settings: Mapping[str, str] | None = None

    def environment(self) -> dict[str, str]:
        """The settings of both ends."""
        return {
            "CROSSRAIL_TLS": "tcp",
            "CROSSRAIL_NET_DEVICES": ",".join(self.rails if self.rails is not None else self.bed.rails),
            "CROSSRAIL_CONTROL_DEVICE": "eth0",
            "CROSSRAIL_SECRET": SECRET,
            "CROSSRAIL_LOG": "info",
            **(self.settings or {}),
        }

    def clean(self) -> dict[str, str]:
        """The whole environment of an end."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
        return {**others, **self.environment()}

    def address(self) -> str:
        """Where the listening end listens: its control link."""
        host = self.bed.address("left", "eth0", 6 if self.version == 6 else 4)
        return f"[{host}]:{PORT}" if self.version == 6 else f"{host}:{PORT}"

    def start(
        self, side: Side, *options: str, settings: Mapping[str, str] | None = None, without: str | None = None
    ) -> End:
        """One end, with the settings of both and ``settings`` besides, less ``without``."""
        command = self.bed.inside(side, sys.executable, "-m", "crossrail", "bench", self.what, *options)
        environment = {**self.environment(), **(settings or {})}
        return End(command, {name: value for name, value in environment.items() if name != without})

    @contextlib.contextmanager
    def listening(self, *options: str, settings: Mapping[str, str] | None = None) -> Iterator[End]:
        """The listening end, once it listens."""
        end = self.start("left", f"--listen={self.address()}", *options, settings=settings)
        try:
            end.wait_to_say("listening on")
            yield end
        finally:
            end.kill()

    def run(self, *options: str, during: Callable[[End], None] | None = None, timeout: float = END_S) -> Outcome:
        """Runs both ends to their end; ``during`` is called with the driving end once that was started."""
        with tempfile.TemporaryDirectory() as folder, self.listening() as listening:
            path = Path(folder, "report.json")
            driving = self.start("right", f"--connect={self.address()}", f"--json={path}", *options)
            try:
                if during is not None:
                    during(driving)
                ended = driving.end(timeout)
            finally:
                driving.kill()
            report = Report.loads(path.read_text()) if path.exists() else None
            if ended.code != 0:
                listening.kill()  # it may go on waiting for an end that does better
            return Outcome(listening.end(10.0), ended, report)

    def undisturbed(self, check: Callable[[Row], None], *options: str, tries: int = 4) -> Row:
        """The row of the first run whose rates pass ``check``, or the AssertionError of the last of ``tries``.

        Other work on the machine takes from a run's rates and shifts its shares; it never adds to them. What must hold
        however slow a run was is asserted of every one: that it ended well and every byte was verified.
        """
        for left in reversed(range(tries)):
            row = self.run(*options).row
            assert row.verified
            try:
                check(row)
            except AssertionError:
                if not left:
                    raise
            else:
                return row
        raise AssertionError("no run")


def wait_for_traffic(bed: Bed, nic: str, num_bytes: int, end: End, timeout: float = START_S) -> None:
    """Waits until so many more bytes have left ``nic`` at the driving ``end``: then a transfer is under way on it."""
    start, deadline = bed.sent_bytes("right", nic), time.monotonic() + timeout
    while bed.sent_bytes("right", nic) < start + num_bytes:
        if end.process.poll() is not None:
            raise AssertionError(f"it ended before {nic} carried {num_bytes} bytes; it said:\n{end.said}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{nic} did not carry {num_bytes} bytes within {timeout} s")
        time.sleep(0.005)  # a counter in the kernel: there is no event to wait for


def outlives_a_rail(pair: Pair, how: str, lane: str) -> None:
    """A transfer over eth1 and eth2 finishes although eth2 is lost meanwhile, and an end reports that of ``lane``."""

    def fail(driving: End) -> None:
        wait_for_traffic(pair.bed, "eth2", 20 << 20, driving)
        if how == "down":
            pair.bed.set_down("right", "eth2")
        else:
            pair.bed.swallow("eth2")

    outcome = pair.run("--size=192M", "--iters=1", "--warmup=0", during=fail)
    assert outcome.row.verified
    assert lane in outcome.driving.said + outcome.listening.said


def uses_a_rail_again(pair: Pair, lane: str) -> None:
    """Transfers over eth1 and eth2 finish although eth2 is lost meanwhile, and it is used again once it is back."""

    def blink(driving: End) -> None:
        wait_for_traffic(pair.bed, "eth2", 20 << 20, driving)
        pair.bed.set_down("right", "eth2")
        driving.wait_to_say(lane)
        pair.bed.set_up("right", "eth2")
        driving.wait_to_say("rail eth2 is back")

    assert pair.run("--size=128M", "--iters=4", "--warmup=0", during=blink).row.verified
