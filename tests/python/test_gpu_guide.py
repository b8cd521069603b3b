"""docs/guides/gpu.md on a machine without a GPU: its commands exist, and say what is missing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from guide import COMMANDS, ENDS, NODES

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "gpu"))

from steps import gpu_count


def test_the_page_has_its_commands() -> None:
    assert len(COMMANDS) == 5
    assert (len(ENDS), len(NODES)) == (2, 2)


@pytest.mark.parametrize("command", [*COMMANDS, *ENDS.values(), *NODES.values()])
def test_a_command_is_understood_and_says_that_there_is_no_gpu(command: str) -> None:
    if gpu_count()[0]:
        pytest.skip("this machine has a GPU; tests/gpu runs the commands")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    here = command.replace("10.77.0.1", "127.0.0.1").replace("eth1,eth2,eth3,eth4", "127.0.0.1,127.0.0.2")
    words = [sys.executable, "-m", *shlex.split(here)]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if command == "crossrail info" else 1), done.stderr
    assert "Traceback" not in done.stderr
    if "--device" in command:
        assert "CUDA" in done.stderr
