"""A forked rank is as one that was started: what it begins with, how it ends, and that a leftover is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest
from fork_server import Forked, forks
from leftovers import held, more

BEGINS = """
import os, signal, sys
names = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
print(os.getcwd(), sys.argv, dict(os.environ), __name__)
print([str(signal.getsignal(name)) for name in names], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(os.getpgrp(), os.getsid(0), os.isatty(1), sys.flags.optimize, sys.stdin.read())
"""


def started(start: str, environment: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", start]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)


def outcome(process: Forked | subprocess.Popen[bytes], fed: bytes = b"") -> tuple[bytes, int]:
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(fed)
        process.stdin.close()
        return process.stdout.read(), process.wait(30)


def test_it_begins_with_what_a_started_one_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"CROSSRAIL_TIMEOUT": "3", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as stderr:
        forked, expected = (outcome(way(BEGINS, environment, stderr), b"fed\n") for way in (Forked, started))
        assert os.pread(stderr.fileno(), 1 << 16, 0) == b""
    assert forked == expected
    assert forked[0].endswith(b"fed\n\n")


@pytest.mark.parametrize(
    "end",
    [
        "print(1)",
        "import sys; sys.exit(7)",
        "import os; os._exit(200)",
        "raise ValueError('of this test')",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 'last')",
    ],
)
def test_it_ends_as_a_started_one(end: str) -> None:
    found = []
    for way in (Forked, started):
        with tempfile.TemporaryFile() as stderr:
            out = outcome(way(end, dict(os.environ), stderr))
            told = os.pread(stderr.fileno(), 1 << 16, 0).splitlines()
            found.append((out, told[-1:]))
    assert found[0] == found[1]


def test_it_is_stopped_and_killed_by_its_number() -> None:
    with tempfile.TemporaryFile() as stderr:
        process = Forked("import signal; print(1, flush=True); signal.pause()", dict(os.environ), stderr)
        with process.stdin, process.stdout:
            assert process.stdout.readline() == b"1\n"
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            process.send_signal(signal.SIGKILL)
            assert process.wait(30) == -signal.SIGKILL == process.poll()
        process.send_signal(signal.SIGKILL)  # its number may be another's by now: nothing happens


def test_one_that_is_left_behind_is_found() -> None:
    before = held()
    with tempfile.TemporaryFile() as stderr:
        process = Forked("import sys; sys.stdin.read()", dict(os.environ), stderr)
        assert "child processes" in more(before, held())
        assert outcome(process) == (b"", 0)


@pytest.mark.parametrize(("name", "expected"), [("CROSSRAIL_TLS", True), ("LD_PRELOAD", False), ("PATH", False)])
def test_what_an_interpreter_reads_needs_one(name: str, expected: bool) -> None:
    assert forks({name: "anything"}) == expected
