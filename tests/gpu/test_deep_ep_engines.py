"""The calls of serving engines on GPUs: eager and in graphs, with two micro-batches in flight."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import GPUS
from deep_ep_ranks import Ranks

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import deep_ep_engines as engines

SIZE = 1 << (min(GPUS, 8) or 1).bit_length() - 1
"""Ranks, a GPU each."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(SIZE)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("program", engines.PROGRAMS)
def test_eager(ranks: Ranks, program: str, kind: str) -> None:
    ranks.do("engine", program, kind)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("program", engines.GRAPHS)
def test_in_a_graph(ranks: Ranks, program: str, kind: str) -> None:
    ranks.do("engine", program, kind, graph=True)
