"""What is read from files: our own results, other programs' output, and files that are neither."""

from __future__ import annotations

import json
from pathlib import Path

import foreign_logs as logs
import pytest
from report_samples import latency_report

from crossrail_tools.report.sources import SourceError, parse_source, read_source

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


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(SourceError, match="not text"):
        read_source(tmp_path / "picture.png")


def test_what_peers_measured_beside_is_kept_apart() -> None:
    source = read_source(RESULTS / "gpu" / "latency-2.json")
    assert set(source.others) == {"puts", "nccl", "nixl"}
    data = json.loads((RESULTS / "gpu" / "latency-2.json").read_text())
    assert len(source.rows) == len(data["rows"])
