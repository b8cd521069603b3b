"""`crossrail bench ep --plan`: ranks come, leave and are killed, and all that stay go on correct."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import COMMAND, children, clean_environment, gone, one_error, run

from crossrail_tools.cli.ep import elastic
from crossrail_tools.cli.ep.plan import parse_plan
from crossrail_tools.cli.placement import Placement
from crossrail_tools.cli.processes import Message
from crossrail_tools.report.schema import PhaseFacts, Report, Row

PLANS = Path(__file__).parents[1] / "data" / "plans"
SMALL = ("--tokens=16", "--hidden=256", "--experts-per-rank=2", "--iters=5", "--warmup=1")


NIXL = {
    "double_expansion": "[[0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]]",
    "expansion_contraction": (
        "[[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, -6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]"
    ),
    "expansion_fault_contraction": "[[0, 1], [0, 1, 2, 3], [0, 1, -2, 3], [0, 3]]",
    "no_expansion": "[[0, 1, 2, 3]]",
    "single_expansion": "[[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]",
    "single_expansion_16_ranks": ("[[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]"),
    "single_rank": "[[0]]",
    "killed and back at once": "[[0, 1, 2], [0, -1], [0, 1]]",
}
"""The plans of NIXL's elastic test by name, and the smallest in which a killed number returns in the next phase."""


def phases(plan: Path, path: Path, *options: str) -> list[Row]:
    """Runs a plan; its rows, whose phases are numbered, verified and measured."""
    done = run("bench", "ep", f"--plan={plan}", *SMALL, *options, f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(path.read_text()).rows
    for number, row in enumerate(rows, 1):
        assert row.phase is not None
        assert row.phase.number == number
        assert row.verified
        assert row.ranks_passed == row.ranks == len(row.phase.active)
        assert len(row.samples_us) == 5 * row.ranks
        assert row.bytes_logical
        assert row.phase.connect_us is not None and row.phase.connect_us > 0
        assert re.search(rf"^{number} +[0-9]", done.stdout, re.MULTILINE), done.stdout
    return rows


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_growing_and_shrinking(layout: str, tmp_path: Path) -> None:
    rows = phases(PLANS / "grow_and_shrink.json", tmp_path / "out.json", f"--layout={layout}")
    facts = [row.phase for row in rows if row.phase is not None]
    assert [one.joined for one in facts] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    assert [one.left for one in facts] == [[], [], [6, 7]]
    assert all(row.experts == 16 and row.layout == layout for row in rows)


@pytest.mark.parametrize("options", [(), ("--layout=rank", "--dtype=bf16", "--nodes=2")], ids=["heap", "network"])
def test_a_killed_rank_is_named_masked_and_replaced(options: tuple[str, ...], tmp_path: Path) -> None:
    facts = [row.phase for row in phases(PLANS / "killed_and_replaced.json", tmp_path / "out.json", *options)]
    killed = facts[1]
    assert killed is not None
    assert killed.killed == [2]
    assert killed.recovery_us is not None and 0 < killed.recovery_us < 1.2e6
    for survivor in (0, 1, 3):
        said = (
            f"at rank {survivor}: rank 2 is lost: .+, while (dispatch|combine) [0-9]+ waited for .+; it is masked, 3 "
        )
        assert [bool(re.match(said, fault)) for fault in killed.faults].count(True) == 1, killed.faults
    assert facts[2] is not None and facts[2].active == [0, 1, 3]
    assert facts[3] is not None and facts[3].joined == [2]


@pytest.mark.parametrize("name", ["killed_while_shrinking", "two_killed"])
def test_kills_among_other_changes(name: str, tmp_path: Path) -> None:
    last = phases(PLANS / f"{name}.json", tmp_path / "out.json")[-1].phase
    assert last is not None
    survivors = len(last.active) - len(last.killed)
    assert len(last.faults) == survivors * len(last.killed)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [(name, nodes) for name in NIXL for nodes in (1, 2) if (name, nodes) != ("single_rank", 2)],
)
def test_nixls_plans_run_as_they_are(name: str, nodes: int, tmp_path: Path) -> None:
    plan = tmp_path / f"{name}.json"
    plan.write_text(NIXL[name])
    expected = json.loads(NIXL[name])
    rows = phases(plan, tmp_path / "out.json", f"--nodes={nodes}")
    assert [(row.phase.active, row.phase.killed) for row in rows if row.phase is not None] == [
        (sorted(map(abs, phase)), sorted(-rank for rank in phase if rank < 0)) for phase in expected
    ]


def test_a_rank_is_killed_in_an_exchange_and_not_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine: the kill answers the word of the rank that it has begun the exchange."""
    events: list[str] = []

    class Slow:
        def send(self, rank: int, request: Message) -> None:
            assert request["do"] == "exchange"
            assert (request["due"] is not None) == (rank in (1, 2))

        def next(self, timeout: float) -> tuple[int, Message]:
            rank = [0, 2, 1][len(events) // 2]
            events.append(f"word of {rank}")
            if rank == 0:
                events.append("not due")
                return rank, {"event": "progress"}
            return rank, {"event": "due"}

        def kill(self, rank: int) -> None:
            events.append(f"kill {rank}")

        def wait_for(self, event: str, ranks: tuple[int, ...], timeout: float) -> dict[int, Message]:
            now = time.monotonic_ns()
            return {rank: {"without": {"1": now, "2": now}, "faults": []} for rank in ranks}

    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a pause"))
    plan = parse_plan("[[0, -1, -2]]")
    where = Placement(3)
    alone = elastic.Nodes(None, 1.0)
    made = elastic._Run(SimpleNamespace(seed=0, placement=where), plan, Slow(), alone, 1.0)  # type: ignore[arg-type]
    made.kill(plan.phases[0], PhaseFacts(number=1, active=[0, 1, 2]))
    assert events == ["word of 0", "not due", "word of 2", "kill 2", "word of 1", "kill 1"]


def test_numbers_that_the_rank_server_would_not_give_are_asked_for(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("[[0, 2], [0, 1, 2], [0, 1, 4]]")
    facts = [row.phase for row in phases(plan, tmp_path / "out.json")]
    assert [one.joined for one in facts if one is not None] == [[0, 2], [1], [4]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0, 1], [0, -0]]", ("phase 2, entry 2", "rank 0 cannot")),
        ("{}", ("an object is not a plan",)),
        ("[[0, 1", ("line 1, column 7",)),
        ("", ("line 1, column 1",)),
    ],
)
def test_what_is_no_plan_is_one_line_and_exit_2(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    one_error(run("bench", "ep", f"--plan={plan}", *SMALL), 2, str(plan), *words)


def test_a_plan_that_is_not_there_is_one_line_and_exit_2(tmp_path: Path) -> None:
    one_error(run("bench", "ep", f"--plan={tmp_path}/none"), 2, f"{tmp_path}/none", "No such file")


def test_experts_that_cannot_be_spread_are_one_line_and_exit_2() -> None:
    plan = PLANS / "killed_and_replaced.json"
    one_error(run("bench", "ep", f"--plan={plan}", "--experts=6"), 2, "6 experts", "4 ranks")


def test_a_death_that_the_plan_does_not_have_fails_the_run() -> None:
    command = [*COMMAND, "bench", "ep", f"--plan={PLANS / 'grow_and_shrink.json'}", *SMALL, "--iters=1000000"]
    with subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while len(ranks := children(process.pid)) < 4:
                assert process.poll() is None
            os.kill(ranks[2], signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=40)
            assert process.returncode == 1
            assert stdout == ""
            (error,) = [line for line in stderr.splitlines() if line.startswith("crossrail: error: ")]
            assert "rank 2" in error and "SIGKILL" in error
            assert "Traceback" not in stderr
            assert all(gone(rank) for rank in ranks)
        finally:
            process.kill()
