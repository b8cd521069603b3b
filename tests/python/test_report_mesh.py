"""The rows and tables of a mesh: what is an outlier by the written rule, and what is not."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from report_samples import environment

from crossrail_tools.report.mesh import mesh_rows
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report

SIZE = 1_000_000
LIKE = Row("mesh", "", SIZE, memory="ordinary", ranks=4, nodes=1, verified=True)


def measured(ranks: int, rates: Mapping, latencies: Mapping, together: Mapping) -> dict:
    """What the ranks told: GB/s and us by pair, GB/s by rank; 1.0, 2.0 and 3.0 where nothing is said."""

    def pair(source: int, target: int) -> dict:
        us = 4 * SIZE / rates.get((source, target), 1.0) / 1e3
        return {
            "target": target,
            "rate": {"samples_us": [us, us], "batch": 4, "bytes_per_sample": 4 * SIZE},
            "latency": {"samples_us": [latencies.get((source, target), 2.0)] * 3, "batch": 8, "size": 8},
            "lanes": [{"name": "shm", "bytes": SIZE, "share": 1.0, "transport": "shm"}],
            "protocol": "chunks",
            "notes": [],
        }

    moved = 4 * SIZE * (ranks - 1)
    return {
        rank: {
            "pairs": [pair(rank, other) for other in range(ranks) if other != rank],
            "all_us": [moved / together.get(rank, 3.0) / 1e3] * 2,
            "all_bytes": moved,
            "slowest": [
                {"target": 1, "posted_us": 1.0, "matched_us": 9.0, "copied_us": 309.0, "finished_us": 311.0},
                {"target": 2, "posted_us": 2.0, "matched_us": 12.0, "copied_us": 612.0, "finished_us": 620.0},
                {"target": 2, "posted_us": 3.0, "matched_us": 15.0, "copied_us": 905.0, "finished_us": 910.0},
            ],
            "copied": {"by_engine": 2},
        }
        for rank in range(ranks)
    }


def rows(rates: Mapping | None = None, latencies: Mapping | None = None, together: Mapping | None = None) -> list[Row]:
    return mesh_rows(measured(4, rates or {}, latencies or {}, together or {}), LIKE)


def test_there_is_a_row_for_each_pair_twice_and_for_each_rank() -> None:
    found = rows()
    assert [row.part for row in found] == ["pair"] * 12 + ["latency"] * 12 + ["all"] * 4
    first = found[0]
    assert (first.source, first.target, first.transport, first.protocol, first.window) == (0, 1, "shm", "chunks", 4)
    assert first.gb_per_s == pytest.approx(1.0)
    assert first.bytes_logical == 2 * 4 * SIZE
    latency = found[12]
    assert (latency.size, latency.p50_us, latency.iterations_per_sample, latency.gb_per_s) == (8, 2.0, 8, None)
    everybody = found[24]
    assert (everybody.source, everybody.target, everybody.size) == (0, None, SIZE)
    assert everybody.gb_per_s == pytest.approx(3.0)
    assert not any(row.outlier for row in found)


def test_what_copied_is_in_the_row_and_said() -> None:
    found = rows()
    assert found[24].copies == {"by_engine": 2}
    assert (found[24].messages[1].target, found[24].messages[1].copied_us) == (2, 612.0)
    text = printed(found)
    assert "8 by copy engines" in text
    assert "to 1: matched 9 to 9, copied 309 to 309" in text
    assert "to 2: matched 12 to 15, copied 612 to 905" in text


@pytest.mark.parametrize(("rate", "outlier"), [(0.79, True), (0.81, False)])
def test_a_rate_below_four_fifths_of_the_median_is_an_outlier(rate: float, outlier: bool) -> None:
    found = rows(rates={(2, 3): rate})
    assert [(row.source, row.target) for row in found if row.outlier] == ([(2, 3)] if outlier else [])


@pytest.mark.parametrize(("latency", "outlier"), [(3.05, True), (2.95, False)])
def test_a_latency_beyond_one_and_a_half_medians_is_an_outlier(latency: float, outlier: bool) -> None:
    found = rows(latencies={(1, 0): latency})
    assert [(row.part, row.source, row.target) for row in found if row.outlier] == (
        [("latency", 1, 0)] if outlier else []
    )


@pytest.mark.parametrize(("rate", "outlier"), [(2.35, True), (2.45, False)])
def test_a_rank_that_falls_behind_when_all_send_is_an_outlier(rate: float, outlier: bool) -> None:
    found = rows(together={3: rate})
    assert [(row.part, row.source) for row in found if row.outlier] == ([("all", 3)] if outlier else [])


def printed(found: list[Row]) -> str:
    out = io.StringIO()
    print_report(Report(environment(), [], found), console(out))
    return out.getvalue()


def test_the_matrices_show_every_pair_and_mark_outliers_with_their_figures() -> None:
    text = printed(rows(rates={(2, 3): 0.5}, latencies={(0, 3): 9.0}))
    lines = text.splitlines()
    assert lines[0] == "mesh: 4 ranks, ordinary memory, over shm"
    (row,) = [line for line in lines if line.split()[:1] == ["2"] and "* 0.50" in line]
    assert row.split() == ["2", "1.00", "1.00", "-", "*", "0.50"]
    assert "* 2 -> 3: rate 0.50 GB/s, 0.50 of the median 1.00" in lines
    assert "* 0 -> 3: latency 9.00 us, 4.50 of the median 2.00" in lines
    assert "slowest, sum" in text
    assert "3.00, 12.00" in text
    assert "\x1b" not in text and "…" not in text


def test_gpus_are_named() -> None:
    devices = ["cuda:0", "cuda:1"]
    found = mesh_rows(measured(2, {}, {}, {}), Row("mesh", "", SIZE, ranks=2, verified=True), devices)
    assert [row.device for row in found if row.part == "pair"] == ["cuda:0,cuda:1", "cuda:1,cuda:0"]
    assert [row.device for row in found if row.part == "all"] == devices
    text = printed(found)
    assert "GPU memory" in text
    assert "1 cuda:1" in text


def test_one_rank_alone_is_no_crash() -> None:
    assert mesh_rows(measured(1, {}, {}, {}) | {0: {"pairs": [], "all_us": [], "all_bytes": 0}}, LIKE) == []


def test_it_reads_back() -> None:
    report = Report(environment(), [], rows(rates={(0, 1): 0.1}))
    assert Report.loads(report.dumps()) == report
