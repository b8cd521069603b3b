"""The other end as a child process, for benches that run both ends on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from ..failure import ERROR, EXIT_USAGE, Failure, UsageFailure, print_notice
from ..processes import Message, Process, read_line
from .options import BenchOptions

START_S = 30.0
LAST_WORDS_S = 0.5
"""How long to wait for the error of a failing child before this end's own failure kills it."""


class Child:
    """The second process of a bench. It never outlives this one."""

    def __init__(self, process: Process, talk: IO[bytes]) -> None:
        self.process = process
        self._talk = talk
        self._failed = False
        self.announced = self._announcement()

    @property
    def address(self) -> bytes:
        """The address of the child's worker."""
        return bytes.fromhex(str(self.announced.get("address", "")))

    def report_failure(self) -> None:
        """Prints the child's stderr if it failed by itself. To be called when this end fails, before it closes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._failed = self.process.popen.wait(LAST_WORDS_S) != 0
        if (killed := self.process.how_it_was_killed()) is not None:
            print_notice(f"the other end: {killed}")
        if self._failed:
            self.show_output()

    def show_output(self) -> None:
        """Forwards the child's stderr."""
        self._talk.seek(0)
        text = self._talk.read().decode(errors="replace").strip()
        if text:
            print_notice(f"the other end said:\n{text}")

    def _early_end(self) -> Failure:
        """The failure of a child that ended before it listened, with its own error if it printed one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.popen.wait(LAST_WORDS_S)
        self._talk.seek(0)
        errors = [line for line in self._talk.read().decode(errors="replace").splitlines() if line.startswith(ERROR)]
        if not errors:
            self.show_output()
            return Failure("the other end ended before it listened")
        text = errors[-1].removeprefix(ERROR)
        return UsageFailure(text) if self.process.popen.returncode == EXIT_USAGE else Failure(text)

    def _announcement(self) -> Message:
        stdout = self.process.popen.stdout
        line = read_line(stdout, START_S) if stdout is not None else b""
        if line is None:
            raise Failure(f"the other end did not start within {START_S:g} s")
        try:
            announced = json.loads(line)
        except ValueError:
            raise self._early_end() from None
        if not isinstance(announced, dict):
            raise Failure("the other end did not announce its address as a JSON object")
        return announced


@contextlib.contextmanager
def other_end(options: BenchOptions) -> Iterator[Child]:
    """Starts the other end on this machine, and ends it when the context ends. Raises Failure."""
    command = [sys.executable, "-m", "crossrail", "bench", options.what, "--listen=:0"]
    command += [f"--parent={os.getpid()}", f"--pin={_pin_text(options)}", *options.for_child()]
    with tempfile.TemporaryFile() as talk:
        environment = {"PYTHONSAFEPATH": "1"}
        if options.trace_parts is not None:
            environment["CROSSRAIL_TRACE"] = options.trace_parts
        process = Process(command, environment=environment, stdin=subprocess.PIPE, stderr=talk)
        try:
            child = Child(process, talk)
            yield child
            process.stop(grace=2.0)
            child.show_output()
        finally:
            process.stop()


def _pin_text(options: BenchOptions) -> str:
    if options.pin == "auto" and options.cpu(driver=False) is None:
        return "none"
    return ",".join(map(str, options.pin)) if isinstance(options.pin, list) else options.pin
