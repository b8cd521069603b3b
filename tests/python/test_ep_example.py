"""The example of the guide, and that the guide shows its code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "python" / "experts.py"
GUIDE = ROOT / "docs" / "guides" / "experts.md"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMIX_", "CROSSRAIL_")


def test_the_example() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    ended = subprocess.run([sys.executable, EXAMPLE], env=clean, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d): 64 tokens", ended.stdout)) == ["0", "1", "2", "3"]


def test_the_guide_shows_the_example() -> None:
    code = EXAMPLE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    from_example = [block for block in blocks if block.strip() in code]
    names = set(re.findall(r"^def (\w+)", code, re.M))
    shown = {name for block in from_example for name in re.findall(r"^def (\w+)", block, re.M)}
    assert shown >= names - {"all_ranks", "parameters"}
    for block in blocks:
        compile(block, str(GUIDE), "exec")
