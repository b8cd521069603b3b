"""crossrail.deep_ep's low-latency mode on GPUs, against the reference, and both modes together."""

from __future__ import annotations

import pytest
from conftest import RANKS
from deep_ep_ranks import Ranks
from deep_ep_work import PAYLOADS

pytest.importorskip("torch")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_dispatch_and_combine(ranks: Ranks, payload: str) -> None:
    for seed in range(2):
        ranks.do("low_latency", 100 + seed, payload)
        ranks.do("low_latency", 110 + seed, payload, hook=True)
        ranks.do("low_latency", 120 + seed, payload, asynchronous=True)
    for seed in range(4):
        ranks.do("low_latency", 125 + seed, payload, hook=seed == 2, counted=False)


def test_inputs_that_are_let_go(ranks: Ranks) -> None:
    ranks.do("inputs_let_go", "low_latency")


def test_two_halves(ranks: Ranks) -> None:
    for seed in range(3):
        ranks.do("low_latency_overlapped", 130 + 2 * seed)


def test_a_graph(ranks: Ranks) -> None:
    ranks.do("low_latency_graph", 6)
    ranks.do("low_latency", 140)


def test_what_a_constructor_prepares(ranks: Ranks) -> None:
    ranks.do("prepared", 400)
    ranks.do("low_latency", 145)


@pytest.mark.alone
def test_a_quarter_of_the_memory(ranks: Ranks) -> None:
    ranks.do("decode_memory", 2.1e9 / 4)


@pytest.mark.gpus(2)
def test_masks(ranks: Ranks) -> None:
    ranks.do("low_latency", 160)
    ranks.do("masks")
    ranks.do("low_latency", 161)


def test_modes_in_turns(ranks: Ranks) -> None:
    ranks.do("modes_in_turns", 6)


def test_two_buffers(ranks: Ranks) -> None:
    ranks.do("over_a_crossrail_group", 170)


@pytest.mark.gpus(2)
def test_without_nvlink(ranks: Ranks) -> None:
    ranks.do("over_the_network", 175)


@pytest.mark.gpus(2)
def test_beside_nccl(ranks: Ranks) -> None:
    ranks.do("over_nccl", 180)


@pytest.mark.gpus(2)
def test_a_rank_that_is_killed() -> None:
    ranks = Ranks(RANKS)
    try:
        ranks.do("low_latency", 190, "bf16")
        ranks.kill(RANKS - 1)
        ranks.do("low_latency_without", 191, RANKS - 1)
    finally:
        ranks.end()


@pytest.mark.gpus(2)
def test_a_rank_that_is_killed_before_the_first_dispatch() -> None:
    ranks = Ranks(RANKS)
    try:
        ranks.do("prepare")
        ranks.kill(RANKS - 1)
        ranks.do("prepared_without", 195, RANKS - 1)
    finally:
        ranks.end()
