"""The command as tests run it: to its end, listening, or without end, and what became of it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from crossrail_tools.report.schema import Report, Row

COMMAND = [sys.executable, "-m", "crossrail"]
LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
QUICK = ("--size=8", "--iters=200", "--warmup=10")

RUN_S = 150.0
"""Bound of a run, within that of a test: sixteen ranks take more than a minute where a machine has much else to do."""


def clean_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its settings and a launcher's, and with these."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CROSSRAIL_", *LAUNCHERS))}
    return {**clean, **(settings or {})}


def run(*arguments: str, settings: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end. Whatever it does, it never prints a traceback."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=clean_environment(settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def rows_of(*arguments: str, settings: Mapping[str, str] | None = None) -> list[Row]:
    """The rows of a bench that went well."""
    done = run("bench", *arguments, "--json=-", settings=settings)
    assert done.returncode == 0, done.stderr
    return Report.loads(done.stdout).rows


def one_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It failed with ``code``, nothing on stdout, and one line on stderr that has ``words``."""
    assert done.returncode == code, done
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in errors[0], errors[0]


@contextmanager
def listening(
    what: str, *options: str, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The listening end of a bench, and the address it said."""
    with listening_command("bench", what, *options, settings=settings) as told:
        yield told


@contextmanager
def listening_command(
    *arguments: str, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that listens, and the address it said."""
    command = [*COMMAND, *arguments, "--listen=127.0.0.1:0"]
    with subprocess.Popen(command, env=clean_environment(settings), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"listening on ([0-9.:]+)", line)
            assert found, line
            yield process, found.group(1)
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether ``pid`` ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


@contextmanager
def long_run() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A bench with both ends here, for ever as good as; and the pid of its second process, once both talk."""
    command = [*COMMAND, "bench", "latency", "--size=8", "--iters=2000000000"]
    with subprocess.Popen(
        command,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + 90
            while not (found := children(process.pid)) or not is_busy(found[0]):
                assert time.monotonic() < deadline and process.poll() is None, "it did not start"
                time.sleep(0.02)
            yield process, found[0]
        finally:
            process.kill()


def is_busy(pid: int) -> bool:
    """Whether ``pid`` has used a second of processor time: it is past its start, and measures."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.0
