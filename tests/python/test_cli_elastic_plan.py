"""Plan files: what they print_notice, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrail_tools.cli.ep.plan import Phase, load_plan, parse_plan
from crossrail_tools.cli.failure import UsageFailure

PLANS = Path(__file__).parents[1] / "data" / "plans"


def test_a_plan_that_grows_and_shrinks() -> None:
    plan = load_plan(str(PLANS / "grow_and_shrink.json"))
    assert plan.ranks == 8
    assert [len(phase.active) for phase in plan.phases] == [4, 8, 6]
    assert [plan.joining(index) for index in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), ()]
    assert [plan.leaving(index) for index in range(3)] == [(), (), (6, 7)]
    assert all(plan.takes_lowest_ranks(index) for index in range(3))


def test_a_negative_entry_takes_part_and_dies() -> None:
    plan = load_plan(str(PLANS / "killed_and_replaced.json"))
    assert plan.phases[1] == Phase(active=(0, 1, 2, 3), killed=(2,))
    assert plan.phases[1].survivors == (0, 1, 3)
    assert plan.joining(1) == plan.leaving(1) == ()
    assert plan.joining(2) == plan.leaving(2) == ()
    assert plan.joining(3) == (2,)
    assert plan.takes_lowest_ranks(3)


def test_one_leaves_while_another_dies() -> None:
    plan = load_plan(str(PLANS / "killed_while_shrinking.json"))
    assert plan.leaving(2) == (1,)
    assert plan.phases[2].killed == (2,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[[0, 2]]", False), ("[[0, 1, 2], [0, 1, 3]]", False), ("[[0, 1, -2], [0, 1, 2]]", True), ("[[0], [0]]", True)],
)
def test_numbers_that_no_rank_server_would_give_are_known(text: str, expected: bool) -> None:
    plan = parse_plan(text)
    assert plan.takes_lowest_ranks(len(plan.phases) - 1) is expected


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_every_plan_here_is_one_and_is_written_as_it_was_read(path: Path) -> None:
    plan = load_plan(str(path))
    assert parse_plan(plan.dumps()) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("line 1, column 1", "JSON list of phases")),
        ("[[0, 1], [0, 1", ("line 1, column 15",)),
        ("[[0, 1],\n [0, one]]", ("line 2, column 6",)),
        ("{}", ("an object is not a plan",)),
        ("[]", ("an empty list",)),
        ("3", ("the number 3 is not a plan",)),
        ("[0, 1]", ("phase 1 is the number 0, not a list",)),
        ("[[0], null]", ("phase 2 is null",)),
        ("[[0], []]", ("phase 2 has no ranks",)),
        ("[[0], [0, [1]]]", ("phase 2, entry 2 is a list",)),
        ('[[0, "1"]]', ("phase 1, entry 2 is the text '1'",)),
        ("[[0, true]]", ("entry 2 is true",)),
        ("[[0, 1.5]]", ("entry 2 is 1.5, not a whole number",)),
        ("[[0, NaN]]", ("entry 2 is NaN",)),
        ("[[0, 1e3]]", ("entry 2 is 1e3",)),
        ("[[0, 1], [-0, 1]]", ("phase 2, entry 1 is -0", "rank 0 cannot")),
        ("[[0, 1, -1]]", ("phase 1 names rank 1 twice",)),
        ("[[1, 2]]", ("phase 1 is without rank 0",)),
        ("[[0, 1024]]", ("1024, beyond rank 1023",)),
        ("[[0, -99999999999999999999999]]", ("beyond rank 1023",)),
        ("[" * 100_000, ("a plan is a JSON list",)),
    ],
)
def test_what_is_no_plan_is_said_with_its_place(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageFailure) as raised:
        load_plan(str(path))
    for word in (f"--plan {path}", *words):
        assert word in str(raised.value), raised.value


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageFailure, match=word):
            load_plan(str(path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageFailure, match="not text"):
        load_plan(str(tmp_path / "binary"))
    (tmp_path / "long").write_bytes(b" " * (1 << 21))
    with pytest.raises(UsageFailure, match="longer than 1 MiB"):
        load_plan(str(tmp_path / "long"))
