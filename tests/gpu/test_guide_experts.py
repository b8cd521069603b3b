"""docs/guides/experts-gpu.md: its program does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import GPUS
from guide import ROOT

pytest.importorskip("torch")

WAYS = ("eagerly", "in two halves", "rank layout", "gradients", "graph", "deep_ep")


def test_the_example() -> None:
    ranks = max(n for n in (1, 2, 4, 8) if n <= max(GPUS, 1))
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMIX_", "CROSSRAIL_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    program = ROOT / "examples" / "python" / "experts_gpu.py"
    environment = {**clean, "CROSSRAIL_TIMEOUT": "15"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.findall(r"rank (\d), (.+): matches the dense layer", done.stdout)
    assert sorted(found) == sorted((str(rank), way) for rank in range(ranks) for way in WAYS)
