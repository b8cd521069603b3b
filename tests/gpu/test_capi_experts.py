"""Expert buffers of the C library on GPUs: the sums are those of the dense computation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_programs import SOURCES, build
from conftest import GPUS


@pytest.mark.timeout(900)  # the first builds the library
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
def test_sums_in_both_layouts(tmp_path: Path, ranks: int) -> None:
    program = build(SOURCES / "gpu_sums.c", tmp_path / "sums", "gcc", "-ldl")
    gpus = min(ranks, GPUS)
    done = subprocess.run([program, str(ranks), str(gpus)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
