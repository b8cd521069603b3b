"""Tables are views of the JSON: the figures printed are those in it, with their units."""

import io
from dataclasses import replace
from typing import Any

import pytest
from report_samples import bandwidth_report, environment, latency_report, p2p_report

from crossrail_tools.report.build import Round, with_peers, with_samples
from crossrail_tools.report.schema import PeerResult, Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report


def printed(report: Report) -> str:
    out = io.StringIO()
    print_report(report, console(out))
    return out.getvalue()


def line_with(text: str, *words: str) -> str:
    found = [line for line in text.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, f"{words}: {found}\n{text}"
    return found[0]


def test_latency_shows_what_carried_it_and_the_ratio() -> None:
    text = printed(latency_report())
    assert "one way, half of a round trip" in text
    assert line_with(text, "size", "p50 us").split()[:3] == ["size", "transport", "protocol"]
    cells = line_with(text, "eager", "0.220", "0.330").split()
    assert cells[:3] == ["8", "shm", "eager"]
    assert cells[-1] == "1.50"
    assert "ucx: no figure: it did not finish in time" in text
    assert line_with(text, "64K").split()[-2:] == ["-", "-"]


def test_bandwidth_counts_gigabytes_of_1e9_bytes() -> None:
    text = printed(bandwidth_report())
    cells = line_with(text, "1M", "tcp").split()
    assert cells[:5] == ["1M", "tcp", "chunks", "shared", "6.10"]
    assert "64 sends, wait for all" in text


def test_p2p_shows_both_ends_lanes_stages_and_a_verdict() -> None:
    text = printed(p2p_report())
    assert line_with(text, "chunks", "0.900").split() == ["3", "chunks", "0.900", "0.909", "1.11", "1.10"]
    average = line_with(text, "average")
    assert average.split() == ["average", "1.000", "1.010", "1.00", "0.99"]
    rail = line_with(text, "tcp/eth1", "MB").split()
    assert rail == ["tcp/eth1", "2.10", "MB", "52.5%", "0.53", "-", "12", "0", "B", "3"]
    assert line_with(text, "wire ", "%").split() == ["wire", "0.900", "90%"]
    assert "data: verified before and after the timing" in text
    assert "verdict: network:" in text
    assert "iperf3: 0.80 GB/s (iperf3, 2 at once), Crossrail: 1.00, medians of 2 rounds; ratio 1.25" in text


def test_the_ratio_is_the_quotient_of_the_figures_beside_it() -> None:
    """Several rounds of both, of which one of ours was slow: the same statistic of both."""
    row = Row(what="latency", transport="shm", size=8)
    row = with_samples(row, [Round([1.0, 1.2]), Round([1.3, 1.5]), Round([1.0, 1.0])])
    row = with_peers(row, {"ucx": PeerResult("ucx_perftest", avg_us=2.0, p50_us=1.9, rounds=[1.8, 2.0, 2.4])})
    text = printed(Report(environment(), [], [row]))
    heads, cells = line_with(text, "avg us").split("  "), line_with(text, "shm").split()
    assert "ucx avg us" in [head.strip() for head in heads]
    ours, theirs, ratio = (float(cells[place]) for place in (5, -2, -1))
    assert ratio == round(theirs / ours, 2) == 1.82

    row = Row(what="bandwidth", transport="shm", size=1000, window=10)
    row = with_samples(row, [Round([10.0, 10.0, 20.0], 10_000), Round([10.0], 10_000), Round([8.0], 10_000)])
    row = with_peers(row, {"ucx": PeerResult("ucx_perftest", gb_per_s=0.8, rounds=[0.8, 0.8, 0.7])})
    cells = line_with(printed(Report(environment(), [], [row])), "1000").split()
    assert (cells[4], cells[-2:]) == ("1.00", ["0.80", "1.25"])
    assert cells[5] == "1,000,000"  # of 1000 bytes each: 1 GB/s


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ([0.3, 0.3], {"avg_us": 8.0, "rounds": [0.3, 16.0]}, "rounds of ucx are from 0.3 to 16 us"),
        ([0.3, 4.0], {"avg_us": 0.3, "rounds": [0.3, 0.3]}, "rounds of Crossrail are from 0.3 to 4 us"),
        ([1.8, 1.9], {"avg_us": 98.6, "p50_us": 6.5, "rounds": [98.0, 99.2]}, "98.6 us on average, and 6.5 us at p50"),
    ],
)
def test_a_comparison_that_was_disturbed_is_void(ours: list[float], theirs: dict[str, Any], why: str) -> None:
    row = with_samples(Row(what="latency", transport="shm", size=8), [Round([time]) for time in ours])
    row = with_peers(row, {"ucx": PeerResult("ucx_perftest", **theirs)})
    assert row.ratio == {}
    text = printed(Report.loads(Report(environment(), [], [row]).dumps()))
    assert line_with(text, "shm").split()[-1] == "void"
    assert why in line_with(text, "x ucx is void for latency of 8: ")


def test_p2p_of_gpus_shows_their_stages_and_what_the_parts_do_alone() -> None:
    report = p2p_report()
    (row,) = report.rows
    assert row.stages is not None
    row = replace(
        row,
        device="cuda:0,cuda:1",
        unpack="kernel",
        unpack_gb_per_s={"kernel": 30.0, "host": 5.0},
        raw_tcp_gb_per_s=2.0,
        stages=replace(row.stages, pack_us=300.0, unpack_us=200.0, slot_us=100.0),
    )
    text = printed(replace(report, rows=[row]))
    assert "over tcp from cuda:0 to cuda:1" in text
    assert line_with(text, "unpack ", "20%").split() == ["unpack", "0.200", "20%"]
    assert line_with(text, "slot ", "10%").split() == ["slot", "0.100", "10%"]
    assert "plain TCP sockets over the same rails: 2.00 GB/s; this is 50% of it" in text
    assert "unpacking alone on the receiver's GPU: kernel 30.00, host 5.00 GB/s; this used kernel" in text
    assert "unpack" not in printed(report)
    shares = {"network": 0.7, "unpack": 0.25, "bounce": 0.05}
    text = printed(replace(report, rows=[replace(row, stages=replace(row.stages, slowest=shares))]))
    assert line_with(text, "wire ", "70%").split() == ["wire", "0.900", "90%", "70%"]
    assert line_with(text, "slot ", "5%").split()[-1] == "5%"
    assert line_with(text, "pack ", "30%").split()[-1] == "-"


def test_an_unknown_row_is_said_not_dropped() -> None:
    report = Report(environment(), [], [Row(what="teleport", transport="shm", size=1)])
    assert "teleport" in printed(report)


@pytest.mark.parametrize("report", [latency_report(), bandwidth_report(), p2p_report()])
def test_a_pipe_gets_plain_text_with_no_cut_or_folded_line(report: Report) -> None:
    text = printed(report)
    assert "\x1b" not in text
    assert "…" not in text


def test_no_color_is_honoured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    console(coloured).print("word", style="red")
    assert "\x1b[31m" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    console(plain).print("word", style="red")
    assert "\x1b[31m" not in plain.getvalue()
