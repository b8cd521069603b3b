"""Two runs compared: the test against values counted by hand, how often it errs, and what is said of rows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from report_samples import latency_report

from crossrail_tools.report.comparing import ALPHA, compare, holm, mann_whitney
from crossrail_tools.report.schema import Row


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        # Of the C(10, 5) = 252 ways to divide ten ranks, two are as far apart as 1..5 and 6..10.
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([6, 7, 8, 9, 10], [1, 2, 3, 4, 5], 2 / 252),
        ([1, 2], [3, 4], 2 / 6),
        ([1, 4], [2, 3], 1.0),
        ([1], [2], 1.0),
        ([5, 5, 5], [5, 5, 5], 1.0),
        # 1, 2.5 | 2.5, 4: rank sums 3.5, 3.5, 5, 5, 6.5, 6.5 are equally probable; 3.5 is as far out as four of six.
        ([1, 2], [2, 3], 4 / 6),
    ],
)
def test_every_division_of_few_samples_is_counted(first: list[float], second: list[float], p: float) -> None:
    assert mann_whitney(first, second) == pytest.approx(p)


def test_many_samples_are_approximated() -> None:
    # 1..20 and 11..30: U = 50, mean 200, deviation sqrt(20 * 20 * 41 / 12) = 36.97, almost without ties' correction.
    first, second = list(range(1, 21)), list(range(11, 31))
    assert mann_whitney(first, second) == pytest.approx(5.2e-5, rel=0.05)
    assert mann_whitney([1.0] * 40, [1.0] * 40) == 1.0


@pytest.mark.parametrize("count", [6, 30])
def test_samples_that_are_alike_are_seldom_called_different(count: int) -> None:
    generator = random.Random(5)
    found = [
        mann_whitney([generator.expovariate(1) for _ in range(count)], [generator.expovariate(1) for _ in range(count)])
        for _ in range(300)
    ]
    assert 0.02 < sum(p < 0.05 for p in found) / len(found) < 0.075


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def row(middle: float, spread: float, seed: int, size: int = 8, count: int = 200) -> Row:
    generator = random.Random(seed)
    return Row("latency", "shm", size, samples_us=[generator.gauss(middle, spread) for _ in range(count)])


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (row(8.0, 0.5, 2), "better"),
        (row(12.0, 0.5, 2), "worse"),
        (row(10.05, 0.05, 2), "same"),
        (row(10, 2.5, 2), "unclear"),
    ],
)
def test_verdicts(now: Row, verdict: str) -> None:
    (found,) = compare([row(10.0, 0.5, 1)], [now]).rows
    assert found.verdict == verdict
    assert found.low <= found.ratio <= found.high and found.samples == (200, 200)
    assert (found.p < ALPHA) == (verdict in ("better", "worse"))


def test_few_samples_are_not_called_different() -> None:
    (found,) = compare([row(10.0, 0.1, 1, count=3)], [row(5.0, 0.1, 2, count=3)]).rows
    assert found.verdict == "unclear" and found.p == pytest.approx(0.1)


def test_rows_find_their_counterparts() -> None:
    old = [row(10, 0.5, 1), row(20, 0.5, 2, 64), row(20, 0.5, 3, 64), Row("latency", "tcp", 8, samples_us=[1.0])]
    new = [row(20, 0.5, 4, 64), row(20, 0.5, 5, 64), row(10, 0.5, 6), Row("latency", "shm", 4096, p50_us=1.0)]
    found = compare(old, new)
    assert [one.label for one in found.rows] == ["latency, 64, shm", "latency, 64, shm, run 2", "latency, 8, shm"]
    assert found.unmatched == ["latency, 4K, shm", "latency, 8, tcp"]


def test_rows_that_something_else_carried_are_paired() -> None:
    old = [row(10, 0.5, 1), replace(row(30, 0.5, 2, 64), transport="tcp")]
    new = [row(10, 0.5, 3), row(20, 0.5, 4, 64), row(20, 0.5, 5, 4096)]
    found = compare(old, new)
    assert [(one.label, one.verdict) for one in found.rows] == [
        ("latency, 8, shm", "same"),
        ("latency, 64, tcp now shm", "better"),
    ]
    assert found.unmatched == ["latency, 4K, shm"]


def test_the_command_compares_with_a_baseline(tmp_path: Path) -> None:
    for name, middle in (("before", 10.0), ("after", 8.0)):
        report = replace(latency_report(), rows=[row(middle, 0.5, 1), row(20.0, 0.05, 2, 64)])
        (tmp_path / f"{name}.json").write_text(report.dumps())
    after, before = tmp_path / "after.json", tmp_path / "before.json"
    page = tmp_path / "page.html"
    done = run("report", str(after), f"--baseline={before}", f"--html={page}", "--markdown=-")
    assert done.returncode == 0, done.stderr
    assert "2 rows: 1 better, 0 worse, 1 the same within 2%, 0 not distinguishable." in done.stdout
    text = page.read_text()
    assert 'id="comparison"' in text and "1.25x better" in text and "Mann and Whitney" in text
