"""Rows and tables of dispatch and combine."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from report_samples import environment

from crossrail_tools.report.build import with_peers
from crossrail_tools.report.ep import EpRank, EpTurn, ep_row, kernels_us, slowest
from crossrail_tools.report.ep_view import averages_by_rank
from crossrail_tools.report.schema import PeerResult, Report, Row
from crossrail_tools.report.tables import console
from crossrail_tools.report.viewing import print_report

LIKE = Row(
    what="e2e",
    transport="",
    size=512,
    ranks=2,
    nodes=2,
    tokens=16,
    hidden=256,
    topk=2,
    experts=8,
    layout="expert",
    dtype="fp8",
    routing="uniform",
    prereduce=True,
    cached=False,
    backend="auto",
    ranks_passed=2,
    verified=True,
)


def rank(*total_us: float, wire: int = 3000, links: tuple[str, ...] = ("self", "network")) -> EpRank:
    """One rank's turn, of which a tenth was casting and half was waiting."""
    spent = sum(total_us)
    stages = {"cast": spent / 10, "copy": 0.0, "sum": 0.0, "wait": spent / 2}
    moved = {"logical": 2 * wire, "wire": wire, "network": wire}
    return EpRank(list(total_us), stages, moved, list(links), {"tcp/eth1": 2000, "tcp/eth2": 1000})


def printed(*rows: Row) -> str:
    out = io.StringIO()
    print_report(Report.loads(Report(environment(), ["crossrail"], list(rows)).dumps()), console(out))
    return out.getvalue()


def test_the_slowest_rank_of_each_iteration_counts() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])


def test_samples_are_pooled_and_bytes_averaged() -> None:
    row = ep_row(
        LIKE, [EpTurn([rank(10, 20, 30), rank(40, 10, 20, wire=6000)]), EpTurn([rank(5, 5, 5), rank(1, 1, 7)])]
    )
    assert row.samples_us == [10, 20, 30, 40, 10, 20, 5, 5, 5, 1, 1, 7]
    assert row.slowest_us == [40, 20, 30, 5, 5, 7]
    assert row.rounds == [30, 5]
    assert (row.min_us, row.max_us) == (1, 40)
    # Twelve iterations in all, of which three moved twice as much as the others.
    assert row.bytes_wire == row.bytes_network == (3 * 3000 + 6000) // 12
    assert row.bytes_logical == 2 * (3 * 3000 + 6000) // 12
    assert row.avg_us is not None
    assert row.gb_per_s == pytest.approx(1250 / row.avg_us / 1e3)
    assert row.gb_per_s_logical == pytest.approx(2500 / row.avg_us / 1e3)
    assert row.stages_us["cast"] == pytest.approx(row.avg_us / 10)
    assert sum(row.stages_us.values()) == pytest.approx(row.avg_us)


def test_links_and_rails_are_counted() -> None:
    row = ep_row(LIKE, [EpTurn([rank(1.0), rank(1.0, links=("network", "self"))])])
    assert row.links == {"self": 2, "network": 2}
    assert [(lane.name, lane.bytes, lane.transport, lane.device) for lane in row.lanes] == [
        ("tcp/eth1", 2000, "tcp", "eth1"),
        ("tcp/eth2", 1000, "tcp", "eth2"),
    ]
    assert row.lanes[0].share == pytest.approx(2 / 3)
    assert row.transport == "tcp"
    alone = replace(rank(1.0, links=("self",)), rails={})
    assert ep_row(LIKE, [EpTurn([alone])]).transport == "self"
    mapped = replace(rank(1.0, links=("self", "heap")), rails={})
    assert ep_row(LIKE, [EpTurn([mapped])]).transport == "heap"


def test_the_ratio_compares_times_of_the_slowest_rank() -> None:
    row = ep_row(LIKE, [EpTurn([rank(10, 10), rank(20, 20)]), EpTurn([rank(10, 10), rank(30, 30)])])
    row = with_peers(row, {"mpi": PeerResult("MPI", rounds=[50.0, 75.0]), "other": PeerResult("x", error="not here")})
    assert row.ratio == {"mpi": pytest.approx(62.5 / 25)}
    text = printed(row)
    assert "other: no figure: not here" in text
    line = next(line.split() for line in text.splitlines() if line.startswith("e2e"))
    assert line[6:] == ["25.0", "62.5", "2.50", "-", "-"]


def test_the_table_says_what_was_verified_and_how_bytes_count() -> None:
    row = ep_row(LIKE, [EpTurn([rank(10, 20), rank(40, 10)])])
    text = printed(replace(row, what="dispatch"), row, replace(row, layout="rank", prereduce=False, backend="none"))
    assert "2 ranks on 2 nodes, 16 tokens x 256 each, top-2 of 8 experts, expert layout, dispatch fp8" in text
    assert "rank layout, dispatch fp8, routing uniform, no pre-reduction, no shared memory" in text
    assert text.count("2 of 2 ranks passed") == 2
    assert "links: 2 over the network lanes, 2 to the rank itself" in text
    assert "rails: tcp/eth1 1.00 kB, tcp/eth2 500 B of each rank's e2e" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("dispatch ")]
    # Twice 1500 bytes in 10 to 40 us, 20 on average.
    assert ["dispatch", "logical", "3.00", "kB", "0.20", "0.08", "0.15", "0.07", "0.30"] in lines
    assert ["dispatch", "wire", "1.50", "kB", "0.10", "0.04", "0.07", "0.04", "0.15"] in lines
    assert "50%" in text


def test_exchanges_on_gpus_are_told_as_nixl_tells_them() -> None:
    like = replace(LIKE, size=7392, hidden=7168, tokens=512, topk=2, device="cuda", given="bf16", num_sms=132)

    def turn(*averages: float) -> EpTurn:
        moved = {"logical": 22_000_000, "wire": 11_000_000, "network": 8_000_000}
        rails = {"tcp/eth1": 900, "tcp/eth2": 100}
        spread = [[average - 9.0, average + 9.0] for average in averages]
        return EpTurn([EpRank(two, {}, moved, ["self", "heap", "network"], rails, host_us=two) for two in spread])

    row = ep_row(like, [turn(500.0, 550.0), turn(538.6, 600.0)])
    assert averages_by_rank(row) == pytest.approx([519.3, 575.0])
    assert [(lane.name, lane.bytes) for lane in row.lanes] == [("tcp/eth1", 7_200_000), ("tcp/eth2", 800_000)]
    text = printed(row)
    assert "Data Plane (e2e): 2/2 ranks passed, 2 nodes, NVLink + network lanes\n" in text
    # 1024 selections of (7408 + 14336) bytes in 519.3 and 575.0 us, as NIXL prints it.
    assert "Bandwidth (GB/s): avg=40.80, min=38.72, max=42.88; logical 40.21, wire 20.10, network 14.62\n" in text
    assert "Latency (us): avg=547.1, min=519.3, max=575.0; p50 544.3, slowest rank 575.0\n" in text
    assert "Network: 8.00 MB per rank, 7.31 GB/s on each of 2 rails\n" in text
    alone = replace(row, peers={"network": PeerResult("alone", rounds=[1150.0, 1150.0])})
    assert "e2e: 575.0 us, over the network alone 1150.0 us: saves 50%\n" in printed(alone)
    slower = replace(row, peers={"network": PeerResult("alone", rounds=[500.0])})
    assert "takes 15% more\n" in printed(slower)
    dispatch = replace(row, what="dispatch", links={"self": 2, "network": 2})
    assert "Data Plane (dispatch): 2/2 ranks passed, 2 nodes, network lanes only\n" in printed(dispatch)
    assert averages_by_rank(replace(row, samples_us=row.samples_us[1:])) == []


def test_ranks_that_moved_nothing_make_a_row() -> None:
    nothing = EpRank(
        [1.0],
        {"cast": 0.0, "copy": 0.0, "sum": 0.0, "wait": 0.5},
        dict.fromkeys(("logical", "wire", "network"), 0),
        ["self"],
    )
    row = ep_row(replace(LIKE, tokens=0), [EpTurn([nothing])])
    assert row.gb_per_s == 0.0
    assert "0 B" in printed(row)


def test_kernels_of_the_median_iteration_are_added_up() -> None:
    spans: list[tuple[float, float, str]] = []
    for number, took in enumerate((900.0, 20.0, 30.0, 25.0)):
        begin = number * 1e4
        spans += [(begin - 200, 75.0, "fill"), (begin - 100, 75.0, "fill"), (begin, 9.0, "ncclDevKernel_AllReduce")]
        spans += [(begin + 10, took, "dispatch"), (begin + 11, 2.0, "fill")]
    assert kernels_us(spans[::-1], "nccl", fills=2, warmup=1) == 27.0, "what it fills itself counts, the first does not"
    with pytest.raises(ValueError, match="no samples"):
        kernels_us(spans, "nccl", fills=2, warmup=4)
    lost = [span for span in spans if span[:1] != (1e4 + 10,) and span[:1] != (1e4 + 11,) and span[:1] != (2e4 - 200,)]
    assert kernels_us(lost, "nccl", fills=2, warmup=1) == 29.5, "what the profiler did not see whole is left out"
