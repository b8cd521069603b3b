"""Rows and tables of the control plane and of elastic plans."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from report_samples import environment

from crossrail_tools.report.control import averaged, control_rows
from crossrail_tools.report.schema import PhaseFacts, RankTimes, Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report

ENVIRONMENT = environment()
LIKE = Row(what="", transport="", size=0, experts_per_rank=8, store="tcp")
SAMPLES = {
    1: {"init": [4000.0, 6000.0], "connect": [10_000.0, 20_000.0]},
    0: {"init": [1000.0, 3000.0], "connect": [30_000.0, 40_000.0]},
}


def printed(report: Report) -> str:
    out = io.StringIO()
    print_report(Report.loads(report.dumps()), console(out))
    return out.getvalue()


def test_each_rank_has_its_times_and_they_are_averaged() -> None:
    init, connect = control_rows(SAMPLES, LIKE)
    assert (init.what, connect.what) == ("init", "connect")
    assert init.samples_us == [1000.0, 3000.0, 4000.0, 6000.0]
    assert init.rank_times == [RankTimes(0, 2000.0, 1000.0, 3000.0), RankTimes(1, 5000.0, 4000.0, 6000.0)]
    assert averaged(init) == (3500.0, 2500.0, 4500.0)
    assert init.p50_us == 3500.0
    assert connect.max_us == 40_000.0


def test_parts_of_a_step_are_averaged_and_are_no_steps() -> None:
    parts = {0: {"connect/map": [10.0, 30.0]}, 1: {"connect/map": [20.0, 20.0], "connect/hello": [5.0, 7.0]}}
    init, connect = control_rows({rank: {**SAMPLES[rank], **parts[rank]} for rank in SAMPLES}, LIKE)
    assert connect.stages_us == {"map": 20.0, "hello": 6.0}
    assert init.stages_us == {}
    assert connect.samples_us == [30_000.0, 40_000.0, 10_000.0, 20_000.0]


def test_the_table_has_a_line_per_step_and_their_sum() -> None:
    rows = control_rows(SAMPLES, LIKE) + control_rows(SAMPLES, replace(LIKE, experts_per_rank=32))
    text = printed(Report(ENVIRONMENT, ["crossrail"], rows))
    assert "control: 2 ranks x 8 experts, 2 rounds, store tcp" in text
    assert "control: 2 ranks x 32 experts" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines.count(["init", "3.50", "2.50", "4.50"]) == 2
    assert lines.count(["connect", "25.00", "20.00", "30.00"]) == 2
    assert lines.count(["total", "28.50", "22.50", "34.50"]) == 2


def test_one_step_has_no_sum() -> None:
    only = {rank: {"init": times["init"]} for rank, times in SAMPLES.items()}
    assert "total" not in printed(Report(ENVIRONMENT, ["crossrail"], control_rows(only, LIKE)))


def test_phases_say_who_was_there_and_what_happened() -> None:
    facts = PhaseFacts(
        2,
        active=[0, 1, 2, 4],
        joined=[4],
        left=[3],
        killed=[2],
        connect_us=12_345.0,
        recovery_us=800_000.0,
        faults=["rank 0: rank 2 is lost"],
    )
    row = Row("e2e", "", 0, samples_us=[100.0], p50_us=100.0, gb_per_s_logical=2.0, ranks_passed=3, phase=facts)
    text = printed(Report(ENVIRONMENT, ["crossrail"], [row]))
    (line,) = [line.split() for line in text.splitlines() if line.startswith("2 ")]
    assert line == ["2", "0-2,4", "4", "3", "2", "3", "12.35", "100.0", "2.00", "GB/s", "-", "800.00"]
    assert "phase 2: rank 0: rank 2 is lost" in text


@pytest.mark.parametrize(("ranks", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7], "0,2-3,7")])
def test_ranks_are_written_short(ranks: list[int], text: str) -> None:
    row = Row("e2e", "", 0, phase=PhaseFacts(1, active=ranks))
    (line,) = [line.split() for line in printed(Report(ENVIRONMENT, ["c"], [row])).splitlines() if line[:2] == "1 "]
    assert line[1] == text
