"""Rows and tables of unpacking: compared with a contiguous copy by the same clock."""

from __future__ import annotations

import io

import pytest
from report_samples import environment

from crossrail_tools.report.build import unpack_rates
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.unpack import unpack_rows
from crossrail_tools.report.viewing import print_report

SIZE = 1_000_000
FOUND = {
    "pieces": 245,
    "contiguous": {"samples_us": [10.0, 10.0, 16.0], "gpu_us": [4.0, 5.0, 6.0]},
    "modes": {
        "kernel": {"samples_us": [20.0, 20.0, 20.0], "gpu_us": [6.0, 6.25, 7.0]},
        "host": {"samples_us": [100.0, 200.0, 300.0], "gpu_us": []},
    },
}
LIKE = Row("unpack", "", SIZE, device="cuda:1", fragment=4096, origin="device", verified=True)


def test_the_gpus_clock_judges_where_both_have_it_else_the_whole_time() -> None:
    contiguous, kernel, host = unpack_rows(FOUND, LIKE)
    assert (contiguous.unpack, kernel.unpack, host.unpack) == ("contiguous", "kernel", "host")
    assert contiguous.ratio == {}
    assert kernel.ratio == {"contiguous": pytest.approx(5.0 / 6.25)}
    assert host.ratio == {"contiguous": pytest.approx(10.0 / 200.0)}
    assert kernel.gpu_gb_per_s == pytest.approx(160.0)
    assert kernel.gb_per_s == pytest.approx(50.0)
    assert (kernel.p50_us, kernel.pieces, kernel.gpu_us) == (20.0, 245, [6.0, 6.25, 7.0])
    assert host.gpu_gb_per_s is None


def test_rates_are_of_the_median() -> None:
    assert unpack_rates(FOUND, SIZE) == {"kernel": 50.0, "host": 5.0}


def test_the_table_shows_every_way_beside_the_copy() -> None:
    report = Report(environment(), [], unpack_rows(FOUND, LIKE))
    assert Report.loads(report.dumps()).dumps() == report.dumps()
    out = io.StringIO()
    print_report(report, console(out))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["4K", "contiguous", "-", "10.0", "15.9", "83.3", "5.0", "200.0", "-"] in lines
    assert ["4K", "kernel", "245", "20.0", "20.0", "50.0", "6.2", "160.0", "0.80"] in lines
    assert ["4K", "host", "245", "200.0", "298.0", "5.0", "-", "-", "0.05"] in lines
    assert "from the GPU's own memory into cuda:1" in out.getvalue()
    assert "every way verified" in out.getvalue()
