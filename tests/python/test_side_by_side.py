"""`make test` runs two chains of steps side by side: outputs stay apart, and either one's failure is the run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "side_by_side.py"


def run(first: str, second: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), first, second]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_both_run_at_once_and_the_second_one_ends_the_output(tmp_path: Path) -> None:
    """Each waits for what the other has made."""
    one, two = tmp_path / "one", tmp_path / "two"
    meet = "echo {name} begins; mkfifo {mine}; until [ -p {other} ]; do sleep 0.01; done; echo {name} ends"
    done = run(
        meet.format(name="one", mine=one, other=two), meet.format(name="two", mine=two, other=one) + "; echo 3 >&2"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["one begins", "one ends", "two begins", "two ends", "3", ""]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((3, 0), 3), ((0, 4), 4), ((3, 4), 3)])
def test_a_failure_of_either_is_the_exit_code(codes: tuple[int, int], expected: int) -> None:
    done = run(f"exit {codes[0]}", f"echo told; exit {codes[1]}")
    assert done.returncode == expected
    assert done.stdout == "told\n"
    assert ("exit code 3" in done.stderr) == (codes[0] == 3)


def test_it_takes_two_commands() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "side by side" in done.stderr


def test_ctrl_c_ends_both_without_a_traceback() -> None:
    forever = f"exec {sys.executable} -c 'print(1, flush=True); import signal; signal.pause()'"
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), forever, forever],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever started the tests in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as both:
        assert both.stdout is not None
        assert both.stdout.readline() == "1\n"
        os.killpg(both.pid, signal.SIGINT)
        _, told = both.communicate(timeout=60)
    assert both.returncode == 130
    assert "side_by_side.py" not in told
