"""crossrail.deep_ep.ElasticBuffer on GPUs, against the reference."""

from __future__ import annotations

import pytest
from deep_ep_ranks import Ranks

pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["bf16", "f32", "packed", "opaque"])
def test_exchange(ranks: Ranks, kind: str) -> None:
    for seed in range(3):
        ranks.do("elastic", "exchange", 10 + seed, kind, alignment=1 + 7 * (seed % 2), biases=seed)


@pytest.mark.parametrize("alignment", [1, 128])
def test_without_waiting_for_counts(ranks: Ranks, alignment: int) -> None:
    ranks.do("elastic", "exchange", 20, "f32", alignment=alignment, sync=False)


@pytest.mark.parametrize("biases", [0, 2])
def test_outputs_that_are_summed_once(ranks: Ranks, biases: int) -> None:
    ranks.do("elastic", "exchange", 30, biases=biases, options={"allow_multiple_reduction": False})


@pytest.mark.parametrize("previous", [False, True])
def test_beside_the_current_stream(ranks: Ranks, previous: bool) -> None:
    for seed in range(3):
        ranks.do("elastic", "exchange", 40 + seed, "bf16", previous=previous, asynchronous=True)


def test_barriers(ranks: Ranks) -> None:
    ranks.do("elastic", "barriers")
