"""The program of docs/guides/kv.md does what the page says, and the page has room for no more words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import crossrail

PAGE = Path(__file__).parents[2].joinpath("docs", "guides", "kv.md").read_text(encoding="utf-8")


def test_its_program() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # the page's own code
    context = crossrail.Context(log="error", timeout=20)
    size = names["BLOCKS"] * names["PAGE"]
    theirs, ours = np.random.default_rng(0).integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
    expected = ours.copy().reshape(-1, names["PAGE"])
    worker, _region, described = names["producer"](context, theirs)
    blocks, their_blocks = np.array([1, 5, 6], np.int32), np.array([9, 10, 0], np.int32)
    receipt = names["consumer"](context, ours, described, names["rows"](theirs), blocks, their_blocks)
    expected[blocks] = theirs.reshape(-1, names["PAGE"])[their_blocks]
    assert receipt.bytes == 3 * names["PAGE"] and np.array_equal(ours, expected.ravel())
    worker.close()


def test_its_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "python" / "kv_cache.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "49152 bytes of blocks 5, 3 and 8: [5.0, 3.0, 8.0]" in done.stdout and "b'request 1'" in done.stdout


def test_its_length() -> None:
    assert len(PAGE.split()) <= 950
