"""docs/guides/experts-gpu.md shows the code of its example; tests/gpu runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "python" / "experts_gpu.py"
GUIDE = ROOT / "docs" / "guides" / "experts-gpu.md"
SHOWN = {"Experts", "Layer", "Prefill", "Dispatch", "Combine", "Training", "captured", "in_two_halves", "with_deep_ep"}


def test_the_guide_shows_the_example() -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    compile(code, str(EXAMPLE), "exec")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    for block in blocks:
        compile(block, str(GUIDE), "exec")
        assert block.strip().removeprefix("buffer = ") in code, block
    assert {name for block in blocks for name in re.findall(r"^(?:def|class) (\w+)", block, re.M)} == SHOWN


def test_the_guide_names_what_there_is() -> None:
    from crossrail import ExpertBuffer, deep_ep

    text = GUIDE.read_text(encoding="utf-8")
    for name in re.findall(r"`buffer\.(\w+)\(", text):
        assert hasattr(ExpertBuffer, name), name
    for name in ("get_comm_stream", "clean_low_latency_buffer", "get_local_buffer_tensor"):
        assert name in text
        assert hasattr(deep_ep.Buffer, name)


def test_the_guide_says_what_a_buffer_takes() -> None:
    from crossrail import ExpertBuffer

    row = re.compile(
        r"^\| \w+: (\d+) tokens, (\d+), top-(\d+), (\d+) experts \| (\w+) \| ([\d.]+) MB \| ([\d.]+) MB \|$", re.M
    )
    rows = row.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(rows) == 2
    for tokens, hidden, topk, experts, layout, *said in rows:
        for dtype, megabytes in zip(("fp8", "bf16"), said, strict=True):
            numbers = map(int, (tokens, hidden, experts, topk))
            plan = ExpertBuffer.plan(*numbers, 4, dtype, layouts=[layout], device="cuda:0")
            assert plan.total / 1e6 == pytest.approx(float(megabytes), rel=0.02), (layout, dtype)
