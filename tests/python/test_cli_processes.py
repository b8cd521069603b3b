"""A process that was started never outlives the one that started it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossrail_tools.cli import parsing, processes
from crossrail_tools.cli.failure import Failure, UsageFailure


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} outlived its parent"
        time.sleep(0.01)


PARENT = """
import sys, time
from crossrail_tools.cli.processes import Process
child = Process(["sleep", "60"])
print(child.popen.pid, flush=True)
time.sleep(60)
"""

LEASHED = """
import os, sys, time
from crossrail_tools.cli.processes import live_with_parent
live_with_parent(int(sys.argv[1]) or os.getppid())
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_dies_with_its_starter(signal_number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal_number)
        parent.wait(30)
    wait_until_gone(pid)


def test_the_other_end_dies_when_its_stdin_closes() -> None:
    command = [sys.executable, "-c", LEASHED, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.poll() is None, "Ctrl-C is left to the parent"
        child.stdin.close()
        assert child.wait(30) == 1


def test_the_other_end_does_not_start_for_another_parent() -> None:
    command = [sys.executable, "-c", LEASHED, "1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    assert done.returncode == 1
    assert b"ready" not in done.stdout


def test_stopping_reaps_and_closes() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    process = processes.Process(["sleep", "60"], stdin=subprocess.PIPE)
    pid = process.popen.pid
    process.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_everything_that_runs_can_be_ended_at_once() -> None:
    several = [processes.Process(["sleep", "60"]) for _ in range(3)]
    processes.kill_all()
    assert [process.popen.poll() for process in several] == [-signal.SIGKILL] * 3
    for process in several:
        process.stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("127.0.0.1", parsing.DEFAULT_PORT)),
        ("node7", ("node7", parsing.DEFAULT_PORT)),
        ("10.0.0.1:99", ("10.0.0.1", 99)),
        (":0", ("127.0.0.1", 0)),
        ("[fd77::1]:99", ("fd77::1", 99)),
        ("[fd77::1]", ("fd77::1", parsing.DEFAULT_PORT)),
        ("fd77::1", ("fd77::1", parsing.DEFAULT_PORT)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parsing.parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["host:port", "host:65536", "host:-1", "[fd77::1", "[]:1", "[::1]x", "h:\u0661", "7471", "1:2"]
)
def test_what_is_no_address_says_the_form(text: str) -> None:
    with pytest.raises(UsageFailure, match="HOST:PORT"):
        parsing.parse_address(text)


def test_a_name_to_listen_at_that_only_this_machine_can_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look_up(host: str, port: int, **unused: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ({"node": "127.0.1.1", "far": "10.0.0.1"}.get(host, host), port))]

    monkeypatch.setattr(parsing.socket, "getaddrinfo", look_up)
    assert parsing.place_to_listen("node:5") == "127.0.1.1:5"
    said = capsys.readouterr().err
    assert "node resolves to 127.0.1.1" in said and said.count("\n") == 1
    for quiet in ("far:5", "127.0.0.1:5", ":5", "[::1]:5"):
        parsing.place_to_listen(quiet)
    assert capsys.readouterr().err == ""


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(Failure, match=r"no-such-host\.invalid does not resolve"):
        parsing.resolve("no-such-host.invalid:1")
    assert parsing.resolve("[::1]:5") == "[::1]:5"
    assert parsing.resolve("127.0.0.1") == f"127.0.0.1:{parsing.DEFAULT_PORT}"
