"""The calls of serving engines on GPUs: eager and in graphs, with two micro-batches in flight."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deep_ep_ranks import Ranks

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import deep_ep_engines as engines


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("program", engines.PROGRAMS)
def test_eager(ranks: Ranks, program: str, kind: str) -> None:
    ranks.do("engine", program, kind)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("program", engines.GRAPHS)
def test_in_a_graph(ranks: Ranks, program: str, kind: str) -> None:
    ranks.do("engine", program, kind, graph=True)
