"""crossrail.deep_ep's normal mode on GPUs, against the reference."""

from __future__ import annotations

import pytest
from deep_ep_ranks import Ranks

pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["bf16", "f32", "packed"])
def test_dispatch_and_combine(ranks: Ranks, kind: str) -> None:
    for seed in range(3):
        ranks.do("normal", 10 + seed, kind, alignment=1 + 7 * (seed % 2))


def test_without_waiting_for_counts(ranks: Ranks) -> None:
    for seed in range(2):
        ranks.do("normal", 20 + seed, "bf16", worst=True, asynchronous=seed == 1)


def test_beside_the_current_stream(ranks: Ranks) -> None:
    for seed in range(4):
        ranks.do("normal", 30 + seed, "bf16", asynchronous=True)


def test_inputs_that_are_let_go(ranks: Ranks) -> None:
    ranks.do("inputs_let_go", "normal")


def test_with_a_handle(ranks: Ranks) -> None:
    ranks.do("normal_again", 40)


def test_without_ids(ranks: Ranks) -> None:
    ranks.do("normal_without_ids", 50)


def test_results_that_are_kept(ranks: Ranks) -> None:
    ranks.do("normal_kept", 5)


def test_results_that_are_let_go(ranks: Ranks) -> None:
    ranks.do("normal_in_place", 3)


def test_outputs_that_are_held(ranks: Ranks) -> None:
    ranks.do("normal_outputs", 24)


def test_rows_of_another_kind_where_none_came(ranks: Ranks) -> None:
    ranks.do("normal_of_nothing")


def test_more_tokens_than_before(ranks: Ranks) -> None:
    ranks.do("normal_grows")


def test_many_that_are_kept(ranks: Ranks) -> None:
    ranks.do("normal_many", 100)


@pytest.mark.gpus(2)
def test_what_is_wrong_on_one_rank(ranks: Ranks) -> None:
    ranks.do("normal_refused")


@pytest.mark.gpus(2)
def test_ranks_that_disagree(ranks: Ranks) -> None:
    ranks.do("normal_mismatched")


def test_a_graph(ranks: Ranks) -> None:
    ranks.do("normal_graph", 4)
    ranks.do("normal", 60)
