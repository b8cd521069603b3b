"""Peers: what they print is read right, they are really run, and what fails is said."""

import json
import os
import shutil
import socket
import time

import pytest

from crossrail_tools.cli import peers
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.peers import PeerFailure, PeerJob

UCX_CSV = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
200000,0.096,0.095,0.094,80.61,80.61,10565530,10565530
"""


def need(program: str) -> None:
    if shutil.which(program) is None:
        message = f"{program} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


def work(peer: str, what: str, transport: str, size: int = 65536, iterations: int = 200) -> PeerJob:
    return PeerJob(peer, what, size, transport, iterations, seconds=1, hosts=["127.0.0.1"], timeout=30.0)


def test_ucx_latency_is_its_overall_average() -> None:
    figure = peers.parse_ucx(UCX_CSV, "latency")
    assert (figure.p50_us, figure.avg_us, figure.gb_per_s) == (0.096, 0.094, None)


def test_ucx_megabytes_are_mebibytes() -> None:
    assert peers.parse_ucx(UCX_CSV, "bandwidth").gb_per_s == pytest.approx(80.61 * 1048576 / 1e9)


@pytest.mark.parametrize("output", ["", "nonsense", UCX_CSV.splitlines()[0], UCX_CSV.replace("80.61", "fast")])
def test_ucx_output_that_is_no_result_is_an_error(output: str) -> None:
    with pytest.raises(PeerFailure, match="ucx_perftest printed"):
        peers.parse_ucx(output, "bandwidth")


def test_iperf3_counts_what_arrived_in_gigabytes() -> None:
    result = {"end": {"sum_sent": {"bits_per_second": 9e9}, "sum_received": {"bits_per_second": 8e9}}}
    assert peers.parse_iperf3(json.dumps(result)) == 1.0


@pytest.mark.parametrize(
    ("output", "said"),
    [("", "no JSON"), ("{}", "no result"), ('{"end": {}, "error": "unable to connect"}', "unable to connect")],
)
def test_iperf3_output_that_is_no_result_is_an_error(output: str, said: str) -> None:
    with pytest.raises(PeerFailure, match=said):
        peers.parse_iperf3(output)


def test_a_missing_peer_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "apt-get install ucx-utils" in str(peers.missing("ucx"))
    assert "apt-get install ucx-utils" in str(peers.missing("ucx-e"))
    assert "apt-get install iperf3" in str(peers.missing("iperf3"))


@pytest.mark.parametrize(
    ("peer", "what", "transport", "suited"),
    [
        ("ucx", "latency", "shm", True),
        ("ucx", "p2p", "tcp", True),
        ("ucx", "bandwidth", "shm+tcp", False),
        ("ucx-e", "bandwidth", "tcp", True),
        ("ucx-e", "latency", "ucx", True),
        ("ucx-e", "latency", "shm", False),
        ("iperf3", "bandwidth", "tcp", True),
        ("iperf3", "latency", "tcp", False),
        ("iperf3", "p2p", "shm", False),
    ],
)
def test_a_peer_is_not_asked_for_what_it_does_not_do(peer: str, what: str, transport: str, suited: bool) -> None:
    assert (peers.unsuited(peer, what, transport) is None) == suited


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"peer": "rm", "what": "p2p", "size": 1, "transport": "tcp", "iterations": 1},
        {**vars(work("ucx", "p2p", "tcp")), "devices": ["eth1; reboot"]},
        {**vars(work("ucx", "p2p", "tcp")), "devices": [7]},
        {**vars(work("iperf3", "p2p", "tcp")), "hosts": ["--help"]},
        {**vars(work("ucx", "p2p", "tcp")), "hosts": []},
        {**vars(work("ucx", "p2p", "tcp")), "hosts": 7},
        {**vars(work("ucx", "p2p", "tcp")), "size": "big"},
        {**vars(work("ucx", "p2p", "tcp")), "iterations": 0},
        {**vars(work("ucx", "p2p", "tcp")), "surprise": 1},
    ],
)
def test_work_from_the_other_end_is_checked(message: dict[str, object]) -> None:
    with pytest.raises(Failure):
        PeerJob.from_message(message)


def test_work_travels_as_json() -> None:
    sent = work("ucx", "bandwidth", "shm")
    assert PeerJob.from_message(json.loads(json.dumps(vars(sent)))) == sent


@pytest.mark.parametrize(
    ("peer", "what", "transport"),
    [
        ("ucx", "latency", "shm"),
        ("ucx", "bandwidth", "shm"),
        ("ucx", "bandwidth", "tcp"),
        ("ucx-e", "bandwidth", "tcp"),
    ],
)
def test_ucx_is_really_run(peer: str, what: str, transport: str) -> None:
    need("ucx_perftest")
    job = work(peer, what, transport)
    assert (" -e " in peers.describe(job)) == (peer == "ucx-e")
    with peers.servers(job) as ports:
        figure = peers.run_client(job, ports)
    if what == "latency":
        assert figure.avg_us is not None and 0 < figure.avg_us < 1e5
    else:
        assert figure.gb_per_s is not None and 0.001 < figure.gb_per_s < 1000
    assert peers.version("ucx")[0].isdigit()


@pytest.mark.parametrize("zerocopy", [False, True])
def test_several_iperf3_are_run_at_once_and_summed(zerocopy: bool) -> None:
    need("iperf3")
    hosts = ["127.0.0.1", "127.0.0.2"]
    job = PeerJob("iperf3", "p2p", 1 << 20, "tcp", 1, seconds=1, hosts=hosts, zerocopy=zerocopy)
    start = time.monotonic()
    with peers.servers(job) as ports:
        assert len(set(ports)) == 2
        figure = peers.run_client(job, ports)
    assert figure.gb_per_s is not None and 0.001 < figure.gb_per_s < 1000
    assert time.monotonic() - start < 20, "one after the other"
    assert peers.version("iperf3")[0].isdigit()


def test_a_peer_that_hangs_is_ended_in_time() -> None:
    need("ucx_perftest")
    job = PeerJob("ucx", "latency", 8, "tcp", 1 << 40, hosts=["127.0.0.1"], timeout=1.0)
    start = time.monotonic()
    with peers.servers(job) as ports, pytest.raises(PeerFailure, match="did not finish in time"):
        peers.run_client(job, ports)
    assert time.monotonic() - start < 20
    from crossrail_tools.cli import processes

    assert not processes._running, "every process was reaped"


def test_a_server_that_cannot_start_says_why() -> None:
    need("iperf3")
    job = PeerJob("iperf3", "p2p", 1, "tcp", 1, hosts=["192.0.2.1"])
    with pytest.raises(PeerFailure, match=r"no free port on 192\.0\.2\.1"), peers.servers(job):
        pytest.fail("there is no such address here")


@pytest.mark.parametrize("peer", ["ucx", "iperf3"])
def test_a_server_whose_port_was_taken_meanwhile_gets_another(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(peers._PROGRAMS[peer])
    free_port = peers._free_port
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        found = iter([port])
        monkeypatch.setattr(peers, "_free_port", lambda host: next(found, None) or free_port(host))
        with peers.servers(work(peer, "bandwidth", "tcp")) as ports:
            assert ports != [port]
        monkeypatch.setattr(peers, "_free_port", lambda host: port)
        with pytest.raises(PeerFailure, match=r"did not start listening on port \d+.*already in use"):
            peers.servers(work(peer, "bandwidth", "tcp")).__enter__()
