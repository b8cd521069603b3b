"""No figure of any table is ever cut, however narrow the terminal is."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_samples import bandwidth_report, latency_report, p2p_report
from terminal import plain, run_in_terminal

from crossrail_tools.report.schema import Report
from crossrail_tools.report.tables import HeadedTable, console, table
from crossrail_tools.report.viewing import print_report, views

RESULTS = Path(__file__).parents[2] / "benches" / "results"
KINDS = {
    "latency, compared": "tcp-latency.json",
    "latency of writes": "gpu/latency-2.json",
    "bandwidth, compared": "shm-bandwidth.json",
    "p2p over four rails": "rails-uneven.json",
    "p2p of GPUs": "gpu/tcp-2.json",
    "mesh": "gpu/mesh-4.json",
    "unpack": "gpu/unpack-2.json",
    "control": "control.json",
    "elastic": "ep-killed.json",
    "dispatch and combine": "ep-wire.json",
    "prefill, compared": "ep-prefill.json",
    "decode on GPUs": "gpu/ep_decode-2.json",
}
SEPARATOR = "--- the next report"
PRINT = f"""
import sys
from pathlib import Path
from crossrail_tools.report.schema import Report
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report
for path in sys.argv[1:]:
    print_report(Report.loads(Path(path).read_text()), console())
    print({SEPARATOR!r}, flush=True)
"""


@pytest.fixture(scope="module", params=[60, 80, 200])
def width(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def samples(folder: Path) -> Iterator[tuple[str, Path]]:
    """Reports with every kind of table: those committed, and those made up."""
    yield from ((kind, RESULTS / name) for kind, name in KINDS.items())
    for made in (latency_report(), bandwidth_report(), p2p_report()):
        path = folder / f"{made.rows[0].what}.json"
        path.write_text(made.dumps())
        yield f"made up: {made.rows[0].what}", path


def tables_of(report: Report) -> list[HeadedTable]:
    return [one for one in views(report.rows) if isinstance(one, HeadedTable)]


def test_in_a_terminal_every_figure_is_whole(width: int, tmp_path: Path) -> None:
    kinds = dict(samples(tmp_path))
    status, all_raw = run_in_terminal([sys.executable, "-c", PRINT, *map(str, kinds.values())], width)
    assert status == 0, all_raw
    printed = all_raw.split(SEPARATOR)
    for (kind, path), raw in zip(kinds.items(), printed[:-1], strict=True):
        lines = plain(raw)
        assert "\N{HORIZONTAL ELLIPSIS}" not in raw, kind
        assert max(map(len, lines)) <= width, (kind, max(lines, key=len))
        whole = "\n".join(lines)
        for one in tables_of(Report.loads(path.read_text())):
            missing = one.left_out(width)
            assert not missing or f"left out at {width} columns" in whole
            for row in one.rows:
                for column, cell in zip(one.columns, row, strict=True):
                    shown = re.search(rf"(^|\s){re.escape(cell.plain)}(\s|$)", whole)
                    assert shown or column.name in missing, (kind, column.name, cell.plain, whole)


def test_what_matters_most_is_never_left_out() -> None:
    kept = {
        "latency, compared": {"size", "p50 us", "p99 us", "avg us", "ucx avg us", "x ucx"},
        "bandwidth, compared": {"size", "GB/s", "p99 us", "x ucx"},
        "elastic": {"phase", "ranks", "killed", "logical", "wire", "recovery ms"},
        "prefill, compared": {"p50", "p99", "slowest p50"},
    }
    for kind, names in kept.items():
        shown = set()
        for one in tables_of(Report.loads((RESULTS / KINDS[kind]).read_text())):
            shown |= {column.name for column in one.columns} - set(one.left_out(60))
        assert names <= shown, (kind, names - shown)


def test_a_pipe_gets_every_column_on_one_line() -> None:
    out = io.StringIO()
    report = Report.loads((RESULTS / "ep-killed.json").read_text())
    print_report(report, console(out))
    assert "left out" not in out.getvalue()
    (header,) = [line for line in out.getvalue().splitlines() if "recovery ms" in line]
    assert header.split()[:4] == ["phase", "ranks", "joined", "left"]


def test_long_cells_do_not_cost_the_last_columns() -> None:
    out = io.StringIO()
    made = table("every goal", ["work", "ours", "met"], left=3, keys=1, prose=["work", "ours"])
    made.add_row("w" * 150, "o" * 150, "yes")
    console(out).print(made)
    assert out.getvalue().splitlines()[3].split() == ["w" * 150, "o" * 150, "yes"]


def test_columns_that_do_not_fit_are_stacked_under_their_key() -> None:
    made = table("matrix", ["rank", *(f"to {number}" for number in range(30))])
    made.add_row("0", *(f"{number}.125" for number in range(30)))
    out = io.StringIO()
    narrow = console(out)
    narrow.width = 40
    narrow.print(made)
    lines = [line.split() for line in out.getvalue().splitlines()]
    figures = [line for line in lines if line[:1] == ["0"] and len(line) > 1]
    assert [figure for line in figures for figure in line[1:]] == [f"{number}.125" for number in range(30)]
    assert len(figures) > 3
