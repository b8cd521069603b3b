"""Reports made up for the tests of tables and JSON."""

from pathlib import Path

from crossrail_tools.report.build import Round, p2p_row, with_peers, with_samples
from crossrail_tools.report.schema import Environment, Iteration, Lane, PeerResult, Report, Row, Stages
from crossrail_tools.report.sources import Source, parse_sources, read_sources


def environment() -> Environment:
    """A machine."""
    return Environment(
        time="2026-01-02T03:04:05+00:00",
        host="node7",
        kernel="Linux 6.1",
        machine="x86_64",
        cpu="A processor",
        cores=4,
        cores_allowed=[0, 1],
        governor="performance",
        memory_gib=31.2,
        load_average=[0.1, 0.2, 0.3],
        python="CPython 3.12.1",
        crossrail="0.1.0",
        commit="0123abc",
        settings={"CROSSRAIL_TLS": "tcp"},
        peers={"iperf3": "3.12"},
    )


def iteration(us: float, lane_bytes: dict[str, int], notes: list[str] | None = None) -> Iteration:
    """One transfer that took ``us`` at the sender and a little longer at the receiver."""
    total = sum(lane_bytes.values())
    return Iteration(
        us_sender=us,
        us_receiver=us * 1.01,
        gb_per_s_sender=total / us / 1e3,
        gb_per_s_receiver=total / us / 1.01 / 1e3,
        protocol="chunks",
        lanes=[Lane(name, moved, moved / total, chunks=4, resent=0) for name, moved in lane_bytes.items()],
        stages=Stages(match_us=1.0, window_us=us * 0.05, wire_us=us * 0.9, copy_us=us * 0.02),
        notes=notes or [],
    )


def p2p_report() -> Report:
    """Two rounds of two transfers over two rails, against iperf3."""
    size = 1_000_000
    rounds = [
        [iteration(1000.0, {"tcp/eth1": 500_000, "tcp/eth2": 500_000}), iteration(1100.0, {"tcp/eth1": 1_000_000})],
        [iteration(900.0, {"tcp/eth1": 600_000, "tcp/eth2": 400_000}), iteration(1000.0, {"tcp/eth2": 1_000_000})],
    ]
    row = Row(
        what="p2p", transport="tcp", size=size, window=16, chunk=2 << 20, channels=1, memory="ordinary", verified=True
    )
    known = {"tcp/eth1": Lane("tcp/eth1", 0, 0.0, retransmits=3, transport="tcp", device="eth1")}
    row = p2p_row(row, rounds, known)
    row = with_peers(row, {"iperf3": PeerResult("iperf3, 2 at once", gb_per_s=0.8, rounds=[0.8, 0.8])})
    return Report(environment=environment(), command=["crossrail", "bench", "p2p"], rows=[row])


def latency_report() -> Report:
    """Two sizes of latency, one with a peer that failed."""
    rows = []
    for size, samples in ((8, [0.2, 0.22, 0.24]), (65536, [9.0, 10.0, 11.0])):
        row = Row(
            what="latency", transport="shm", size=size, protocol="eager", memory="ordinary", iterations_per_sample=64
        )
        rows.append(with_samples(row, [Round(samples)]))
    good = PeerResult("ucx_perftest", avg_us=0.33, p50_us=0.33, rounds=[0.32, 0.33, 0.35])
    rows[0] = with_peers(rows[0], {"ucx": good})
    rows[1] = with_peers(rows[1], {"ucx": PeerResult("ucx_perftest", error="it did not finish in time")})
    return Report(environment=environment(), command=["crossrail", "bench", "latency"], rows=rows)


def bandwidth_report() -> Report:
    """One size of bandwidth."""
    row = Row(what="bandwidth", transport="tcp", size=1 << 20, protocol="chunks", memory="shared", window=64)
    row = with_samples(row, [Round([10_000.0, 12_000.0], 64 << 20)])
    return Report(environment=environment(), command=["crossrail", "bench", "bandwidth"], rows=[row])


def parse_source(text: str, name: str) -> Source:
    """The only run that a text holds."""
    (source,) = parse_sources(text, name)
    return source


def read_source(path: Path) -> Source:
    """The only run that a file holds."""
    (source,) = read_sources(path)
    return source
