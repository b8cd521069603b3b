"""What is read from files: our own results, other programs' output, and files that are neither."""

from __future__ import annotations

import cProfile
import csv
import io
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import foreign_logs as logs
import pytest
from report_samples import latency_report, p2p_report, parse_source, read_source

from crossrail_tools.report.export import comma_separated, markdown, renderables
from crossrail_tools.report.page.document import document
from crossrail_tools.report.page.write import html
from crossrail_tools.report.schema import Report
from crossrail_tools.report.sources import SourceError, parse_sources
from crossrail_tools.report.tables import console
from crossrail_tools.report.writing import read_bounded, write_text

RESULTS = Path(__file__).parents[2] / "benches" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.name)
def test_every_committed_result_is_read(path: Path) -> None:
    source = read_source(path)
    assert source.rows or source.outcomes
    assert source.size == path.stat().st_size and len(source.sha256) == 64


def figures(text: str) -> list[tuple[str, int, float | None, float | None, float | None]]:
    rows = parse_source(text, "log").rows
    return [(row.what, row.size, row.p50_us, row.avg_us, row.gb_per_s) for row in rows]


def test_iperf3() -> None:
    source = parse_source(logs.IPERF3, "iperf.json")
    (row,) = source.rows
    assert (source.program, source.machine) == ("iperf 3.12", "Linux node7")
    assert (row.what, row.transport, row.gb_per_s, row.rounds) == ("stream", "tcp", 2.0, [3.0, 2.0])
    assert [(lane.share, lane.gb_per_s, lane.retransmits) for lane in row.lanes] == [(0.75, 1.5, 7), (0.25, 0.5, 0)]


def test_nccl_tests_as_json_and_as_text() -> None:
    assert figures(logs.NCCL_JSON) == [
        ("all_reduce", 1024, 12.5, 12.5, 0.08),
        ("all_reduce", 1048576, 50.0, 50.0, 20.97),
    ]
    assert figures(logs.NCCL_TEXT) == [
        ("all_gather", 1024, 11.25, 11.25, 0.09),
        ("all_gather", 1048576, 45.12, 45.12, 23.24),
    ]
    assert [row.gb_per_s_logical for row in parse_source(logs.NCCL_TEXT, "").rows] == [0.05, 11.62]


def test_ucx_perftest_in_both_forms() -> None:
    assert figures(logs.UCX_TABLE) == [("latency", 8, 6.554, 98.623, None)]
    # 6400 MiB/s by 102400 messages a second are 64 KiB each.
    ((what, size, _, average, _),) = figures(logs.UCX_CSV)
    assert (what, size, average) == ("latency", 65536, 297.936)
    named = "+ ucx_perftest node7 -t tag_bw -s 65536 -f -v\n" + logs.UCX_CSV
    assert figures(named) == [("bandwidth", 65536, None, None, pytest.approx(6.7108864))]


def test_osu() -> None:
    assert figures(logs.OSU_LATENCY) == [("latency", 1, None, 0.95, None), ("latency", 8, None, 0.97, None)]
    assert figures(logs.OSU_BANDWIDTH)[0] == ("bandwidth", 65536, None, None, pytest.approx(9.50025))
    source = parse_source(logs.OSU_COLLECTIVE, "")
    assert [(row.what, row.size, row.avg_us, row.min_us, row.max_us) for row in source.rows] == [
        ("allreduce", 4, 2.1, 1.9, 2.4),
        ("allreduce", 1048576, 456.0, 440.0, 470.0),
    ]


def test_nixlbench() -> None:
    rows = parse_source(logs.NIXLBENCH, "").rows
    assert [(row.size, row.window, row.gb_per_s, row.avg_us, row.p99_us) for row in rows] == [
        (4096, 1, 0.512, 8.0, 9.5),
        (65536, 4, 12.5, 21.0, 25.5),
    ]


def test_deepep_and_nixl_ep() -> None:
    assert [(row.what, row.p50_us, row.ranks) for row in parse_source(logs.DEEPEP_LOW_LATENCY, "").rows] == [
        ("e2e", 805.0, 2),
        ("dispatch", 661.5, 2),
        ("combine", pytest.approx(415.3), 2),
    ]
    assert [(row.what, row.p50_us, row.gb_per_s) for row in parse_source(logs.DEEPEP_TUNING, "").rows] == [
        ("dispatch", 505.12, 240.46),
        ("combine", 920.5, 195.77),
    ]
    assert [(row.what, row.p50_us, row.ranks) for row in parse_source(logs.DEEPEP_ELASTIC, "").rows] == [
        ("dispatch", 20.0, 2),
        ("combine", 30.5, 1),
    ]


def runs_of(text: str) -> list[tuple[str, list[tuple[str, int, float | None, float | None]]]]:
    """The runs of a file: their names, and their rows."""
    return [
        (source.name, [(row.what, row.size, row.avg_us, row.gb_per_s) for row in source.rows])
        for source in parse_sources(text, "log")
    ]


def test_two_tests_in_one_output_keep_their_figures() -> None:
    ((name, rows),) = runs_of(logs.OSU_TWO_TESTS)
    assert (name, rows[:4]) == (
        "log",
        [
            ("latency", 1, 1.1, None),
            ("latency", 8, 1.12, None),
            ("latency", 1024, 2.05, None),
            ("bandwidth", 1, None, pytest.approx(0.00153)),
        ],
    )
    ((_, rows),) = runs_of(logs.NCCL_TWO_TESTS)
    assert rows == [("all_reduce", 1 << 20, 50.0, 20.97), ("alltoall", 1 << 20, 200.0, 5.24)]


@pytest.mark.parametrize(
    ("text", "figures_of_runs"),
    [
        (logs.OSU_TWICE, [[0.00135, 19.09527], [0.00149, 9.0125]]),
        (logs.NIXLBENCH_TWICE, [[0.5], [0.027182]]),
        (logs.UCX_TABLE + logs.UCX_TABLE.replace("98.623", "55.5"), [[98.623], [55.5]]),
        (logs.UCX_CSV + logs.UCX_CSV.replace("297.936,297.936", "55.5,55.5"), [[297.936], [55.5]]),
        (logs.NCCL_TEXT + logs.NCCL_TEXT.replace("23.24", "11.5"), [[0.09, 23.24], [0.09, 11.5]]),
        (logs.DEEPEP_LOW_LATENCY + logs.DEEPEP_LOW_LATENCY.replace("805.34", "605.34"), [[805.0], [705.0]]),
        (logs.NCCL_JSON + logs.NCCL_JSON.replace("20.97", "10.5"), [[0.08, 20.97], [0.08, 10.5]]),
        (logs.IPERF3 + logs.IPERF3, [[2.0], [2.0]]),
        (logs.RCCL_LINES, [[0.053], [0.053]]),
    ],
)
def test_the_same_test_twice_in_one_output_is_two_runs(text: str, figures_of_runs: list[list[float]]) -> None:
    sources = parse_sources(text, "log")
    assert [source.name for source in sources] == ["log, run 1", "log, run 2"]
    for source, expected in zip(sources, figures_of_runs, strict=True):
        timed = source.rows[0].what in ("latency", "e2e")
        found = [(row.avg_us or row.p50_us) if timed else row.gb_per_s for row in source.rows]
        assert found[: len(expected)] == pytest.approx(expected)


def test_both_directions_of_iperf3_are_rows_of_their_own() -> None:
    (source,) = parse_sources(logs.IPERF3_BOTH_WAYS, "log")
    assert [(row.protocol, row.gb_per_s, row.rounds, len(row.lanes)) for row in source.rows] == [
        ("forward", 5.0, [5.0], 1),
        ("reverse", 2.0, [2.0], 1),
    ]
    assert "both directions together: 7 GB/s" in source.rows[0].notes


def test_a_receiver_of_iperf3_that_reported_nothing() -> None:
    data = json.loads(logs.IPERF3)
    data["end"]["sum_received"] = {"bytes": 0, "bits_per_second": 0.0, "seconds": 2.0}
    (row,) = parse_source(json.dumps(data), "log").rows
    assert row.gb_per_s == 2.0 and "the receiver reported nothing: the rate is the sender's" in row.notes


def test_events_of_iperf3_a_line_each() -> None:
    (row,) = parse_source(logs.IPERF3_EVENTS, "log").rows
    assert (row.gb_per_s, row.rounds) == (4.875, [5.0])


def test_tables_in_other_forms() -> None:
    assert figures(logs.NCCL_WITHOUT_ROOT) == [("collective", 1024, 19.18, 19.18, 0.05)]
    assert [(row.size, row.verified) for row in parse_source(logs.OSU_CHECKED, "").rows] == [(1, True), (8, False)]
    for prefix in ("[1,0]<stdout>:", "0: "):
        labelled = "".join(f"{prefix}{line}\n" for line in logs.OSU_LATENCY.splitlines())
        assert figures(labelled) == figures(logs.OSU_LATENCY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("all:\n\tcc main.c\n", "unknown kind of file"),
        (latency_report().dumps()[:700], "not whole JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": "crossrail-bench/9", "rows": []}', "unknown to this release"),
        ('{"schema": "vega/5"}', "not one of Crossrail's"),
        ('{"schema": "crossrail-bench/1", "rows": [{"what": 7}]}', "rows[0].what"),
        ('{"outcomes": [{"ours": "1 us"}]}', "outcomes[0]"),
        ('{"start": {}, "end": {}}', "iperf3"),
        ('{"start": {}, "end": {}, "error": "unable to connect"}', "unable to connect"),
        (logs.IPERF3.replace("16000000000.0", "NaN"), "without its figures"),
        ('{"nccl_version": 22703, "results": []}', "without results"),
        (logs.OSU_LATENCY[:60], "without a line of figures"),
        ("Final: 20000 6.554 98.623\n", "3 figures"),
        (logs.NIXLBENCH.splitlines()[0], "without a line of figures"),
    ],
)
def test_a_file_that_is_no_result_is_named_with_the_reason(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text(text)
    with pytest.raises(SourceError) as failure:
        read_source(path)
    assert words in str(failure.value)
    assert str(failure.value).startswith(str(path)) and "\n" not in str(failure.value)


HOSTILE = "\x1b]0;mine\x07 \x9b31m \u202e \ud800"


@pytest.mark.parametrize("name", ["=1+1\r.json", "\x1b[31m.json", os.fsdecode(b"\xff.json")])
def test_no_text_of_a_file_reaches_a_terminal_as_a_command(name: str, tmp_path: Path) -> None:
    """Neither a field, nor the file's own name; and a spreadsheet computes nothing."""
    report = p2p_report()
    lane = replace(report.rows[0].lanes[0], device=HOSTILE, name=HOSTILE)
    row = replace(report.rows[0], lanes=[lane], unused={HOSTILE: HOSTILE}, notes=[f"=2+2\r{HOSTILE}"])
    environment = replace(report.environment, time=HOSTILE, host=HOSTILE, peers={HOSTILE: HOSTILE})
    path = tmp_path / name
    write_text(Report(environment, [HOSTILE], [row]).dumps(), str(path))
    found = [read_source(path)]
    made = document(found, "Hostile")
    out = io.StringIO()
    console(out).print(*renderables(made))
    rows = comma_separated(found)
    for text in (out.getvalue(), markdown(made), html(found, "Hostile"), rows):
        assert text.encode()  # UTF-8 has all of it
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert not any(cell.startswith("=") for line in csv.reader(io.StringIO(rows)) for cell in line)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": "crossrail-bench/1", "rows": [{"what": "latency", "size": -8}]}',
        '{"schema": "crossrail-bench/1", "rows": [{"what": "latency", "samples_us": [1.0, -1e-3]}]}',
        '{"schema": "crossrail-bench/1", "rows": [{"what": "p2p", "lanes": [{"name": "a", "bytes": -1, "share": 1}]}]}',
        logs.IPERF3.replace("16000000000.0", "-1.0"),
        logs.NCCL_JSON.replace("1024", "-1024"),
    ],
)
def test_no_size_time_or_rate_is_negative(text: str) -> None:
    with pytest.raises(SourceError, match="out of range"):
        parse_source(text, "file")


def test_rows_cost_the_same_however_many_there_are() -> None:
    """Counted in calls: what a row takes is to look at its fields, not to resolve their types again."""
    row = latency_report().rows[0]

    def calls(count: int) -> int:
        text = Report(latency_report().environment, [], [replace(row, size=size) for size in range(count)]).dumps()
        parse_source(text, "many")
        profile = cProfile.Profile()
        profile.runcall(parse_source, text, "many")
        return sum(entry.callcount for entry in profile.getstats())

    assert (calls(400) - calls(200)) / 200 < 2000


def test_a_pipe_is_read_and_its_writer_not_awaited_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(TimeoutError, match=r"whoever writes into this pipe did not finish in 0\.1 s"):
        read_bounded(path, 100, patience=0.1)
    writer = threading.Thread(target=lambda: path.write_bytes(b"x" * 200_000))
    writer.start()
    assert read_bounded(path, 200_000) == b"x" * 200_000
    writer.join()
    with pytest.raises(OSError, match="neither a file nor a pipe"):
        read_bounded("/dev/zero", 1 << 20)
    (tmp_path / "long").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(OSError, match="longer than 1 MiB"):
        read_bounded(tmp_path / "long", 1 << 20)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(SourceError, match="not text"):
        read_source(tmp_path / "picture.png")


def test_what_peers_measured_beside_is_kept_apart() -> None:
    source = read_source(RESULTS / "gpu" / "latency-2.json")
    assert set(source.others) == {"puts", "nccl", "nixl"}
    data = json.loads((RESULTS / "gpu" / "latency-2.json").read_text())
    assert len(source.rows) == len(data["rows"])
