"""docs/guides/gpu.md: its commands do what it says, as they stand there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from guide import COMMANDS, ENDS, ROOT

LIMIT_S = 50.0


def environment() -> dict[str, str]:
    """This one's, with no settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}


def words(command: str) -> list[str]:
    """A command of the guide, by this Python."""
    return [sys.executable, "-m", *shlex.split(command, comments=True)]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    done = subprocess.run(
        words(command), env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_two_nodes_on_one_machine() -> None:
    with subprocess.Popen(words(ENDS["left"]), env=environment(), stderr=subprocess.PIPE, text=True) as left:
        try:
            assert left.stderr is not None
            assert any("listening on " in line for line in left.stderr)
            right = words(ENDS["right"])
            done = subprocess.run(
                right, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            assert done.returncode == 0, done.stderr
            assert left.wait(30) == 0, left.stderr.read()
        finally:
            left.kill()
    assert "cuda:0" in done.stdout


def test_the_example() -> None:
    pytest.importorskip("torch")
    example = ROOT / "examples" / "python" / "two_gpus.py"
    done = subprocess.run(
        [sys.executable, example], env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
