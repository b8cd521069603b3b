"""The sampling judge: it accepts what the whole reference gives, and finds what is not that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossrail import ref
from crossrail_tools.verify import sampling
from crossrail_tools.verify.checking import Difference, Work

SHAPE = ref.Shape(ranks=2, max_tokens=12, hidden=1024, num_experts=8, topk=3)


def work(layout: Any, scale: Any) -> Work:
    return Work(SHAPE, 10, layout, scale, "uniform", True, 7)


def parts_of(came: Any, layout: str) -> dict[str, bytes]:
    """What a GPU would give, from what the reference gives."""
    parts = {"counts": came.counts.tobytes()}
    if layout == "rank":
        for name in ("offsets", "x", "topk_idx", "topk_weights", "scales"):
            if getattr(came, name) is not None:
                parts[name] = getattr(came, name).tobytes()
        return parts
    parts["ranges"], parts["source"] = came.ranges.tobytes(), came.source.tobytes()
    rows = [came.x[local, :count] for local, count in enumerate(came.counts)]
    parts["x"] = np.concatenate(rows).tobytes()
    if came.scales is not None and came.scales.dtype == np.uint8:
        local, most, blocks = came.scales.shape
        parts["scales"] = came.scales.reshape(local, most, blocks // 4, 4).transpose(0, 2, 1, 3).tobytes()
    elif came.scales is not None:
        parts["scales"] = np.ascontiguousarray(came.scales.transpose(0, 2, 1)).tobytes()
    return parts


def everything(of: Work) -> tuple[list[dict[str, bytes]], list[bytes]]:
    """By rank: what the dispatch delivers, and the sums."""
    inputs = [of.inputs(rank, range(SHAPE.ranks)) for rank in range(SHAPE.ranks)]
    came = ref.dispatch(
        SHAPE,
        [one.x for one in inputs],
        [one.topk_idx for one in inputs],
        [one.topk_weights for one in inputs],
        of.layout,
        scale=of.scale,
    )
    ys = []
    for rank, one in enumerate(came):
        assert one is not None
        lead = one.x.shape[:-1]
        numbers = np.arange(int(np.prod(lead))) % sampling.PERIOD
        ys.append(sampling.outputs(of, rank)[numbers].reshape(*lead, SHAPE.hidden))
    assert came[0] is not None
    sums = ref.combine(ys, came[0].handle)
    return [parts_of(one, of.layout) for one in came], [one.tobytes() for one in sums if one is not None]


CASES = [("expert", None), ("expert", "f32"), ("expert", "ue8m0"), ("rank", None), ("rank", "f32"), ("rank", "ue8m0")]


@pytest.mark.parametrize(("layout", "scale"), CASES)
def test_what_the_reference_gives_is_right(layout: str, scale: str | None) -> None:
    of = work(layout, scale)
    parts, sums = everything(of)
    for rank in range(SHAPE.ranks):
        judge = sampling.Judge(of, rank, turn=rank)
        judge.judge_dispatch(parts[rank])
        judge.judge_combine(sums[rank])


@pytest.mark.parametrize(("layout", "scale"), CASES)
def test_a_wrong_byte_of_any_part_is_found(layout: str, scale: str | None) -> None:
    of = work(layout, scale)
    parts, sums = everything(of)
    for name, right in parts[1].items():
        wrong = bytearray(right)
        # The first column is always looked at, as is all that is no row.
        wrong[0] ^= 1
        with pytest.raises(Difference, match="rank 1: dispatch"):
            sampling.Judge(of, 1).judge_dispatch({**parts[1], name: bytes(wrong)})
    values = np.frombuffer(bytearray(sums[1]), np.uint16).copy()
    values[0] ^= 0x0100
    with pytest.raises(Difference, match="combine: 1 of"):
        sampling.Judge(of, 1).judge_combine(values.tobytes())


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_rows_that_went_to_each_others_places_are_found(layout: str) -> None:
    of = work(layout, "f32")
    parts, sums = everything(of)
    rows = np.frombuffer(parts[0]["x"], np.uint8).reshape(-1, SHAPE.hidden).copy()
    rows[[0, 1]] = rows[[1, 0]]
    with pytest.raises(Difference, match="x"):
        sampling.Judge(of, 0).judge_dispatch({**parts[0], "x": rows.tobytes()})
    tokens = np.frombuffer(sums[0], np.uint16).reshape(-1, SHAPE.hidden).copy()
    tokens[[0, 1]] = tokens[[1, 0]]
    with pytest.raises(Difference, match="combine"):
        sampling.Judge(of, 0).judge_combine(tokens.tobytes())
