"""The check of one rank's part agrees with the reference of all ranks, and sees what differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from crossrail import ref
from crossrail_tools.verify.checking import Difference, Work

SHAPE = ref.Shape(ranks=4, max_tokens=12, hidden=128, num_experts=12, topk=3)
ACTIVE = (0, 1, 3)


class Correct:
    """A buffer as the reference has it: works out what all ranks do when one of them asks."""

    def __init__(self, work: Work, rank: int, active: tuple[int, ...]) -> None:
        self.work, self.rank, self.active = work, rank, active

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, *, layout: ref.Layout) -> Any:
        fed = [self.work.inputs(rank, self.active) if rank in self.active else None for rank in range(SHAPE.ranks)]
        mine = fed[self.rank]
        assert mine is not None
        np.testing.assert_array_equal(x, mine.x)
        self.came = ref.dispatch(
            SHAPE,
            [None if one is None else one.x for one in fed],
            [None if one is None else one.topk_idx for one in fed],
            [None if one is None else one.topk_weights for one in fed],
            layout,
            scale=self.work.scale,
            active=self.active,
        )
        return self.came[self.rank]

    def combine(self, y: Any, handle: ref.Handle) -> Any:
        ys = [None if one is None else self.work.outputs(one, rank) for rank, one in enumerate(self.came)]
        mine = ys[self.rank]
        assert mine is not None
        ys[self.rank] = y
        return ref.combine(ys, handle, prereduce=self.work.prereduce, active=self.active)[self.rank]


WORKS = [
    Work(SHAPE, 12, layout, scale, prereduce=prereduce)
    for layout in ("expert", "rank")
    for scale in (None, "f32", "ue8m0")
    for prereduce in (True, False)
]


@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"{work.layout}-{work.scale}-{work.prereduce}")
@pytest.mark.parametrize("rank", ACTIVE)
def test_what_the_reference_does_is_right(work: Work, rank: int) -> None:
    work.check(Correct(work, rank, ACTIVE), rank, ACTIVE)


def test_inputs_follow_from_the_seed_and_select_active_ranks_only() -> None:
    work = WORKS[0]
    one, again = work.inputs(1, ACTIVE), work.inputs(1, ACTIVE)
    np.testing.assert_array_equal(one.x, again.x)
    assert set(np.unique(SHAPE.homes(one.topk_idx))) <= {-1, *ACTIVE}
    assert (work.inputs(0, ACTIVE).x != one.x).any()
    assert (replace(work, seed=1).inputs(1, ACTIVE).x != one.x).any()


@pytest.mark.parametrize("work", WORKS[:1] + WORKS[-2:-1], ids=lambda work: work.layout)
def test_a_wrong_bit_in_a_row_is_seen(work: Work) -> None:
    class Wrong(Correct):
        def dispatch(self, *arguments: Any, **options: Any) -> Any:
            came = super().dispatch(*arguments, **options)
            came.x.reshape(-1, SHAPE.hidden)[0, 77] ^= 1
            return came

    with pytest.raises(Difference, match=r"rank 0: dispatch: x.*1 of .* differ.*77"):
        work.check(Wrong(work, 0, ACTIVE), 0, ACTIVE)


@pytest.mark.parametrize("work", WORKS[:1] + WORKS[-2:-1], ids=lambda work: work.layout)
def test_a_row_that_is_not_summed_is_seen(work: Work) -> None:
    class Wrong(Correct):
        def combine(self, y: Any, handle: ref.Handle) -> Any:
            sums = super().combine(y, handle)
            sums[5] = 0
            return sums

    with pytest.raises(Difference, match=r"rank 3: combine: .*first token 5"):
        work.check(Wrong(work, 3, ACTIVE), 3, ACTIVE)
