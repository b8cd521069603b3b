"""Other programs' output in the forms of their versions, options and launchers: read as printed, or refused by name."""

# ruff: noqa: E501

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_logs as logs
import pytest
from report_samples import parse_source, read_source

from crossrail_tools.cli import main
from crossrail_tools.report.export import renderables
from crossrail_tools.report.page.document import document
from crossrail_tools.report.sources import SourceError, parse_sources
from crossrail_tools.report.tables import console

Figures = list[tuple[str, int, str | None, float | None, float | None]]


def rows_of(text: str) -> list[Figures]:
    """The runs of a text: what was measured, its size, its variant, its time and its rate."""
    return [
        [(row.what, row.size, row.protocol, row.p50_us or row.avg_us or row.p99_us, row.gb_per_s) for row in one.rows]
        for one in parse_sources(text, "log")
    ]


def shown(text: str) -> str:
    """Output of `crossrail report` for a text."""
    out = console()
    with out.capture() as captured:
        out.print(*renderables(document(parse_sources(text, "log"), "Title")))
    return captured.get()


def labelled(text: str, label: str) -> str:
    return "".join(f"{label}{line}\n" for line in text.splitlines())


NCCL = """# nThread 1 nGpus 2 (all_reduce_perf)
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
"""


def nccl(*lines: str) -> str:
    return NCCL + "".join(f"{line}    11.30    0.09    0.05      0\n" for line in lines)


def test_lines_of_one_table_of_nccl_tests_stay_apart() -> None:
    types = nccl(
        "1024  256  float  sum  -1  11.25  0.09  0.05  0",
        "1024  512   half  sum  -1  12.25  0.08  0.05  3",
        "1024  256  float prod  -1  13.25  0.07  0.05  0",
    )
    assert rows_of(types) == [
        [
            ("all_reduce", 1024, "float sum", 11.25, 0.09),
            ("all_reduce", 1024, "half sum", 12.25, 0.08),
            ("all_reduce", 1024, "float prod", 13.25, 0.07),
        ]
    ]
    assert [row.verified for row in parse_source(types, "log").rows] == [True, False, True]
    text = shown(types)
    assert "half sum" in text and "12.2" in text and "data was wrong in 1 row: all_reduce 1K half sum" in text
    cycles = nccl("1024  256  float sum -1  11.25  0.09  0.05  0", "1024  256  float sum -1  13.25  0.07  0.05  0")
    assert rows_of(cycles) == [
        [("all_reduce", 1024, "float sum", 11.25, 0.09)],
        [("all_reduce", 1024, "float sum", 13.25, 0.07)],
    ]
    roots = nccl("1024  256  float none 0  11.25  0.09  0.05  0", "1024  256  float none 1  13.25  0.07  0.05  0")
    assert [row[2] for row in rows_of(roots)[0]] == ["float root 0", "float root 1"]


def test_columns_of_nccl_tests_by_name() -> None:
    assert rows_of(logs.NCCL_TEXT.replace("time ", "cputime ")) == rows_of(logs.NCCL_TEXT)
    in_place = NCCL + "1024  256  float  sum  -1                                 13.30    0.08    0.05      0\n"
    assert rows_of(in_place) == [[("all_reduce", 1024, "float sum", 13.3, 0.08)]]


def test_every_collective_is_shown() -> None:
    text = shown(logs.NCCL_TWO_TESTS)
    assert "All-reduce: time" in text and "Alltoall: time" in text and "5.24 GB/s" in text


def test_batch_sizes_of_nixlbench_are_never_averaged() -> None:
    line = "4096                2              1.500000       8.0            20.0           7.0            9.5\n"
    text = shown(logs.NIXLBENCH + line)
    assert "nixlbench, batch 1" in text and "0.512 GB/s" in text
    assert "nixlbench, batch 2" in text and "1.5 GB/s" in text


@pytest.mark.parametrize(
    "label",
    [
        " 0: ",
        "00: ",
        "[0] ",
        "[1,0]<stdout>: ",
        "[prterun-node1-1234@1,0]<stdout>: ",
        "Wed Nov 29 16:34:01 2026[1,0]<stdout>:",
        "[default0]:",
        "[pod/launcher-abc/main] ",
        "2026-11-29T16:34:01.123456789Z ",
        "[2026-11-29 16:34:01] ",
        "node7: ",
        "osu-1  | ",
    ],
)
@pytest.mark.parametrize("text", [logs.OSU_LATENCY, logs.NCCL_TEXT, logs.UCX_TABLE, logs.NIXLBENCH, logs.IPERF3])
def test_labels_and_times_before_lines(label: str, text: str) -> None:
    assert rows_of(labelled(text, label)) == rows_of(text)


@pytest.mark.parametrize("label", ["{}: ", "[1,{}]<stdout>:", "[{}] "])
def test_tables_that_two_ranks_print_at_once_are_two_runs(label: str) -> None:
    pairs = zip(logs.OSU_LATENCY.splitlines(), logs.OSU_LATENCY.replace("0.95", "5.55").splitlines(), strict=True)
    text = "+ srun osu_latency\n"
    text += "".join(f"{label.format(0)}{one}\n{label.format(1)}{two}\n" for one, two in pairs)
    assert [[row[3] for row in run] for run in rows_of(text + "srun: done\n")] == [[0.95, 0.97], [5.55, 0.97]]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: ("\x1b[32m" + text.replace("\n", "\x1b[0m\r\n\x1b[1m")).encode(),
        lambda text: b"\0" * 40 + text.encode(),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.encode("utf-16"),
        lambda text: gzip.compress(text.encode()),
        lambda text: b"# at 30 \xb0C\n" + text.encode(),
    ],
)
def test_encodings_of_logs(change: Callable[[str], bytes], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(change(logs.OSU_LATENCY))
    assert [(row.size, row.avg_us) for row in read_source(path).rows] == [(1, 0.95), (8, 0.97)]


def test_a_broken_or_huge_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    for data, words in (
        (gzip.compress(b"x" * 1000)[:-12], "not a whole gzip file"),
        (gzip.compress(bytes(65 << 20)), "longer than 64 MiB once expanded"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=words):
            read_source(path)


BARRIER = "# OSU MPI Barrier Latency Test v7.3\n# Avg Latency(us)\n             1.41\n"
PUT = """# OSU MPI_Put Latency Test v5.8
# Window creation: MPI_Win_allocate
# Size          Latency (us)
1                      39.13
"""
OVERLAP = """# OSU MPI-CUDA Non-blocking Allreduce Latency Test v7.5
# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait

# Size           Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)
4                      11.09              6.10              5.18              3.46
"""
TAILS = """# OSU MPI Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)  P50 Tail Lat(us)  P99 Tail Lat(us)
1                       1.24              1.20              3.30
"""


def test_forms_of_osu() -> None:
    both = BARRIER + OVERLAP
    assert rows_of(both) == [[("barrier", 0, None, 1.41, None), ("non-blocking allreduce", 4, "CUDA", 5.18, None)]]
    assert rows_of(PUT + PUT.replace("Put Latency", "Get latency").replace("39.13", "49.13")) == [
        [("mpi_put", 1, None, 39.13, None), ("mpi_get", 1, None, 49.13, None)]
    ]
    assert "One-way latency" not in shown(PUT)
    (row,) = parse_source(TAILS, "log").rows
    assert (row.p50_us, row.p99_us, row.avg_us) == (1.2, 3.3, 1.24)
    nccl = parse_source(logs.OSU_COLLECTIVE.replace("MPI", "NCCL"), "log").rows[0]
    assert (nccl.what, nccl.transport) == ("allreduce", "nccl")
    assert "data was wrong in 1 row: latency 8 B" in shown(logs.OSU_CHECKED)


def test_host_and_gpu_memory_in_one_output_of_osu_are_two_curves() -> None:
    text = shown(logs.OSU_LATENCY + logs.OSU_LATENCY.replace("MPI", "MPI-CUDA").replace("0.95", "5.55"))
    assert "0.95" in text and "5.55" in text


def test_a_test_of_osu_without_a_table_is_named() -> None:
    init = "# OSU MPI Init Test v5.8\nnprocs: 2, min: 12 ms, max: 13 ms, avg: 12 ms\n"
    with pytest.raises(SourceError, match="MPI Init has no table by size"):
        parse_sources(init, "log")
    assert "without a table of figures in the same output: MPI Init" in shown(init + logs.OSU_LATENCY)


UCX_OLD = """|              |       latency (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
| # iterations | typical | average | overall |  average |  overall |   average |   overall |
+--------------+---------+---------+---------+----------+----------+-----------+-----------+
      586527     0.845     0.852     0.852       4.47       4.47      586527      586527
     1000000     0.844     0.848     0.851       4.50       4.48      589339      587686
"""
UCX_BATCH = """|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+tag_lat_8-----+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                 10000      1.353     2.916     2.916        4.37       4.37      550000      550000
+tag_bw_64K----+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                 10000      0.353     2.916     2.916     4500.00    4500.00       72000       72000
"""
UCX_CSV_BATCH = """tests.txt,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
tag_lat,2000,4.915,297.936,297.936,6400.00,6400.00,102400,102400
tag_bw,2000,4.9,1.9,1.9,6400.00,6400.00,102400,102400
"""
UCX_BANDWIDTH = """|              |              |       overhead (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
Final:                    10      0.353     2.916     2.916     4500.00    4500.00      576000      576000
"""


def test_forms_of_ucx_perftest() -> None:
    assert rows_of(UCX_OLD) == [[("latency", 8, None, 0.844, None)]]
    assert rows_of(UCX_BATCH) == [
        [("latency", 8, "tag_lat_8", 1.353, None), ("bandwidth", 65536, "tag_bw_64K", None, pytest.approx(4.718592))]
    ]
    assert rows_of(UCX_CSV_BATCH) == [
        [("latency", 65536, "tag_lat", 4.915, None), ("bandwidth", 65536, "tag_bw", None, pytest.approx(6.7108864))]
    ]
    assert rows_of(UCX_BANDWIDTH) == [[("bandwidth", 8192, None, None, pytest.approx(4.718592))]]
    (row,) = parse_source(logs.UCX_TABLE.replace("50.0%ile", "99.0%ile"), "log").rows
    assert (row.p50_us, row.p99_us) == (None, 6.554)
    (row,) = parse_source(logs.UCX_CSV.replace("50.0_", "99.9_"), "log").rows
    assert (row.p50_us, row.avg_us) == (None, 297.936)
    assert rows_of(logs.UCX_CSV.replace("50.0_percentile", "typical")) == rows_of(logs.UCX_CSV)
    separated = logs.UCX_TABLE.replace("20000 ", "20,000 ").replace("19784", "19,784")
    assert rows_of(separated) == rows_of(logs.UCX_TABLE)


def test_forms_of_deepep() -> None:
    best = (
        "[tuning] Best dispatch (FP8): SMs 24, NVL chunk 28, RDMA chunk 12, transmit: 1234.00 us, notify: 56.00 us, "
        "BW: 48.10 GB/s (RDMA), 157.00 GB/s (NVL)\n"
        "[tuning] Best combine: SMs 24, NVL chunk 24: 35.55 GB/s (NVL send), 33.00 GB/s (NVL recv)\n"
    )
    assert [row[3:] for row in rows_of(best)[0]] == [(1290.0, 157.0), (None, 33.0)]
    each = "".join(
        f"[rank {rank}] num_tokens={tokens}, hidden=7168, num_experts=288, num_topk=8, return_recv_hook=False Dispatch "
        f"bandwidth: {tokens}.00 GB/s, avg_t={tokens}.00 us | Combine bandwidth: 3.00 GB/s, avg_t=5.00 us\n"
        for rank in (0, 1)
        for tokens in (64, 128)
    )
    ((first, _, second, _),) = rows_of(each)
    assert "num_tokens=64," in str(first[2]) and first[3:] == (64.0, 64.0)
    assert "num_tokens=128," in str(second[2]) and second[3:] == (128.0, 128.0)
    apart = "[rank 0] Dispatch send/recv time: 20.00 + 10.00 us | Combine send/recv time: 11.00 + 12.00 us\n"
    assert [row[3] for row in rows_of(apart)[0]] == [30.0, 23.0]


def iperf3(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(logs.IPERF3)
    return {**data, **changes}


def test_json_between_lines_of_a_shell() -> None:
    text = f"+ iperf3 -c a -J\n{logs.IPERF3}+ iperf3 -c b -J\n{logs.IPERF3}"
    assert rows_of(text) == rows_of(logs.IPERF3) * 2
    assert rows_of(text[text.index("{") :]) == rows_of(text)
    with pytest.raises(SourceError, match="not whole JSON"):
        parse_sources(text[:-400], "log")


def test_intervals_and_datagrams_of_iperf3_that_do_not_count() -> None:
    data = iperf3()
    data["intervals"].insert(0, {"sum": {"bits_per_second": 1e9, "omitted": True}})
    assert parse_source(json.dumps(data), "log").rows[0].rounds == [3.0, 2.0]
    sent = {"bytes": 10**9, "seconds": 1, "bits_per_second": 1e10, "lost_packets": 60, "packets": 100, "sender": True}
    (row,) = parse_source(json.dumps(iperf3(end={"streams": [{"udp": sent}], "sum": sent})), "log").rows
    assert row.gb_per_s == pytest.approx(0.5) and "60.00% of the datagrams were lost" in row.notes
    with pytest.raises(SourceError, match="cut short"):
        parse_sources("\n".join(logs.IPERF3_EVENTS.splitlines()[:2]), "log")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[ ID] Interval           Transfer     Bitrate\n", "iperf3, of which only the JSON is read"),
        (" #bytes     #iterations    BW peak[MB/sec]\n", "perftest"),
        ("bytes   #sent   #ack     total       time     MB/sec\n", "libfabric's tests"),
    ],
)
def test_forms_that_are_not_read_are_named(text: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        parse_sources(text, "log")


@pytest.mark.parametrize(
    "text",
    [
        " " * 4_000_000 + "x",
        "1 " * 2_000_000,
        "# OSU " + " " * 1_000_000 + "\n# Size x\n1 2\n",
        "ucx_perftest -s" * 100_000 + "\n" + logs.UCX_CSV,
        '{"a\n' * 100_000,
        "+" + "-" * 1_000_000 + "\n" + logs.UCX_TABLE,
        logs.UCX_TABLE + "1 " * 1_000_000 + "x\n",
        "size count " * 100_000,
        "," * 200_000,
    ],
    ids=range(9),
)
def test_no_text_costs_more_than_in_proportion(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(SourceError):
        parse_sources(text, "log")
    assert time.process_time() - began < 20


def run_report(*words: str) -> int:
    """The exit code of `crossrail report` in this process."""
    try:
        return main(["report", *words])
    except SystemExit as end:
        return int(str(end.code))


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(logs.OSU_LATENCY)
    assert run_report(str(tmp_path / "a.log"), f"{tmp_path}/./a.log") == 0
    out, notices = capsys.readouterr()
    assert out.count("a.log ") == 1 and "named more than once" in notices


def test_no_output_replaces_an_input_or_another_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, page = tmp_path / "a.log", tmp_path / "page"
    log.write_text(logs.OSU_LATENCY)
    assert run_report(str(log), "--csv", f"{tmp_path}/./a.log") == 2
    assert log.read_text() == logs.OSU_LATENCY and "would overwrite" in capsys.readouterr().err
    assert run_report(str(log), "--html", str(page), "--csv", str(page)) == 2
    assert not page.exists() and "name the same file" in capsys.readouterr().err
    assert run_report("") == 2 and "name of a file is empty" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_a_page_on_stdout_is_utf_8_whatever_the_terminal_is(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(logs.OSU_LATENCY)
    done = subprocess.run(
        [sys.executable, "-m", "crossrail", "report", str(tmp_path / "a.log"), "--html=-"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\N{MICRO SIGN}s" in done.stdout.decode()


def test_runs_of_another_program_are_compared_without_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    first, second = (
        "1024  256  float  sum  -1  10.00  0.10  0.05  0",
        "1024  512   half  sum  -1  40.00  0.08  0.05  0",
    )
    old.write_text(nccl(first, second))
    new.write_text(nccl(second.replace("0.08", "0.16"), first.replace("0.10", "0.04")))
    assert run_report(str(new), "--baseline", str(old)) == 0
    out = capsys.readouterr().out
    assert re.search(r"float sum +0.1 GB/s +0.04 GB/s +takes 2.5 times as long", out), out
    assert re.search(r"half sum +0.08 GB/s +0.16 GB/s +saves 50%", out), out
    assert "0 rows" not in out
    old.write_text(nccl(first.replace("float", "bfloat16")))
    new.write_text(nccl(first))
    assert run_report(str(new), "--baseline", str(old)) == 0
    assert "no row of the same work" in capsys.readouterr().out
    old.write_text(logs.OSU_LATENCY)
    assert run_report(str(new), "--baseline", str(old)) == 0
    assert "no row of the same work" in capsys.readouterr().out
