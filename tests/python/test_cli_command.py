"""The command as a user meets it: what it prints where, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import COMMAND, QUICK, children, clean_environment, gone, listening, long_run, one_error, run
from free_ports import free_port
from leftovers import no_files_left

import crossrail
from crossrail.records import NumaNode
from crossrail_tools.cli.command_line import BENCHES, COMMANDS
from crossrail_tools.cli.info import print_info
from crossrail_tools.cli.point_to_point.channel import CONTROL_TAG
from crossrail_tools.cli.point_to_point.driver import _other_ends
from crossrail_tools.report.schema import Report
from crossrail_tools.report.tables import console


def test_version_and_help_are_data() -> None:
    version = run("--version")
    assert version.returncode == 0
    assert re.fullmatch(r"crossrail [0-9]+\.[0-9]+.*\n", version.stdout)
    for arguments in (("--help",), ("bench", "--help"), ("bench", "p2p", "--help")):
        assert run(*arguments).stdout.startswith("usage: crossrail")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("COMMAND",)),
        (("fly",), (f"'fly' (choose from {', '.join(map(repr, COMMANDS))})", "see `crossrail --help`")),
        (("bench",), ("WHAT",)),
        (("bench", "latency", "--sise=8"), ("--sise", "see `crossrail bench latency --help`")),
        (("bench", "latency", "--size=64KB"), ("64KB", "powers of ten or of two")),
        (("bench", "latency", "--size=-1"), ("-1", "64K, 2M, 1G")),
        (("bench", "latency", "--sizes=8:4"), ("8:4", "descending")),
        (("bench", "latency", "--iters=0"), ("--iters", "'0'")),
        (("bench", "latency", "--iters=many"), ("--iters", "'many'")),
        (("bench", "bandwidth", "--window=0"), ("--window",)),
        (("bench", "latency", "--window=4"), ("--window",)),
        (("bench", "p2p", "--sizes=1:4"), ("one size", "see `crossrail bench p2p --help`")),
        (("bench", "p2p", "--transport=cuda_ipc"), ("between GPUs", "--device")),
        (("bench", "p2p", "--transport=shm", "--rails=lo"), ("--rails is for tcp", "shm leaves out")),
        (("bench", "latency", "--transport=shm", "--channels=2"), ("--channels is for tcp",)),
        (("bench", "p2p", "--size=0"), ("at least one byte",)),
        (("bench", "latency", "--memory=tape"), ("tape", "shared", "ordinary")),
        (("bench", "p2p", "--device=tpu"), ("tpu", "cpu, cuda, cuda:N")),
        (("bench", "p2p", "--device=cuda:0,cuda:1,cuda:2"), ("--device", "both ends")),
        (("bench", "p2p", "--device=cuda:0", "--memory=shared"), ("--memory", "--device")),
        (("bench", "p2p", "--unpack=magic"), ("magic", "kernel", "d2d", "host")),
        (("bench", "p2p", "--unpack=host"), ("--unpack", "--device")),
        (("bench", "p2p", "--unpack=host", "--device=cpu"), ("--unpack", "--device")),
        (("bench", "p2p", "--listen", "--device=cuda:0,cuda:1"), ("--device", "alone")),
        (("bench", "latency", "--op=read"), ("read", "send", "write")),
        (("bench", "bandwidth", "--op=write"), ("--op",)),
        (("bench", "latency", "--compare=ftp"), ("ftp", "ucx, ucx-e, iperf3")),
        (("bench", "latency", "--listen", "--connect=127.0.0.1"), ("exclude",)),
        (("bench", "latency", "--connect=127.0.0.1:http"), ("http", "port")),
        (("bench", "latency", "--pin=4096"), ("--pin 4096", "may use")),
        (("bench", "latency", "--transport=rdma", *QUICK), ("rdma", "self, shm, cuda_ipc, fabric, ucx, tcp")),
        (("bench", "latency", "--transport=tcp", "--rails=nic9", *QUICK), ("nic9",)),
        (("bench", "p2p", "--chunk=lots"), ("lots",)),
        (("bench", "p2p", "--timeout=soon"), ("soon",)),
        (("bench", "latency", "--json=/nonexistent/folder/file"), ("/nonexistent/folder", "--json")),
        (("bench", "latency", "--json=/"), ("is a folder",)),
        (("info", "--json=/nonexistent/folder/file"), ("/nonexistent/folder",)),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run(*arguments), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ((), list(COMMANDS)),
        (("bench",), list(BENCHES)),
    ],
)
def test_a_command_without_a_name_lists_what_there_is(arguments: tuple[str, ...], known: list[str]) -> None:
    done = run(*arguments)
    one_error(done, 2, "one of those below")
    lines = done.stderr.splitlines()[1:]
    assert [line.split()[0] for line in lines] == known
    assert all(len(line.split()) > 2 for line in lines), "each says what it is"


@pytest.mark.parametrize("what", ["latency", "bandwidth", "p2p", "mesh", "unpack", "ep", "control"])
def test_every_bench_has_help(what: str) -> None:
    done = run("bench", what, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: crossrail bench {what} [-h]")
    for option in ("--json FILE", "--timeout TIME", "exit codes"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CROSSRAIL_CHUNKS", "2M", ("CROSSRAIL_CHUNKS", "did you mean CROSSRAIL_CHUNK")),
        ("CROSSRAIL_TLS", "rdma", ("CROSSRAIL_TLS", "rdma", "known: self, shm, cuda_ipc, fabric, ucx, tcp")),
        ("CROSSRAIL_WINDOW", "0", ("CROSSRAIL_WINDOW", "1 to 1024")),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2(name: str, value: str, words: tuple[str, ...]) -> None:
    one_error(run("bench", "latency", *QUICK, settings={name: value}), 2, *words)


def test_info_has_bad_settings_as_rows(tmp_path: Path) -> None:
    bad = {
        "CROSSRAIL_CHUNKS": "2M",
        "CROSSRAIL_TLS": "rdma",
        "CROSSRAIL_NET_DEVICES": "nic9",
        "CROSSRAIL_CONTROL_DEVICE": "nic8",
        "CROSSRAIL_SECRET_FILE": "/nonexistent/secret",
    }
    done = run("info", f"--json={tmp_path}/info.json", settings={**bad, "CROSSRAIL_WINDOW": "7"})
    assert done.returncode == 2
    assert "transports" in done.stdout and "network devices" in done.stdout and "GPUs" in done.stdout
    for value in bad.values():
        assert value in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("crossrail: error: CROSSRAIL_") and line.endswith(f"(and {len(bad) - 1} more settings)")
    rows = {row["name"]: row for row in json.loads((tmp_path / "info.json").read_text())["info"]["settings"]}
    assert {name: row["value"] for name, row in rows.items() if "error" in row} == bad
    assert "did you mean CROSSRAIL_CHUNK" in rows["CROSSRAIL_CHUNKS"]["error"]
    assert "known: self, shm" in rows["CROSSRAIL_TLS"]["error"]
    assert "nic9 is not a network interface" in rows["CROSSRAIL_NET_DEVICES"]["error"]
    assert "nic8 is not a network interface" in rows["CROSSRAIL_CONTROL_DEVICE"]["error"]
    assert rows["CROSSRAIL_WINDOW"]["value"] == "7", "what is right stays set"


@pytest.mark.parametrize("bench", ["control", "ep", "mesh"])
def test_a_node_that_does_not_resolve(bench: str) -> None:
    where = ("--world-size=2", "--rank=1", "--num-processes=1", "--master-addr=nosuch.invalid")
    one_error(run("bench", bench, *where, settings={"CROSSRAIL_SECRET": "a secret"}), 1, "nosuch.invalid", "resolve")


@pytest.mark.parametrize("arguments", [("info",), ("bench", "latency", *QUICK, "--json=-")])
def test_a_closed_stdout_is_no_failure(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_terminal_while_ranks_start() -> None:
    # A terminal sends SIGINT to all processes; those that have just started must not report it.
    for ranks in (1, 2, 4):
        command = [*COMMAND, "bench", "control", "--num-processes=4", "--rounds=1000"]
        process = subprocess.Popen(
            command, env=clean_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        deadline = time.monotonic() + 20
        while len(children(process.pid)) < ranks and time.monotonic() < deadline:
            time.sleep(0.002)  # of another process: there is no event
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
        assert "crossrail: error: interrupted" in said.splitlines()


def test_reasons_of_the_other_end_are_told_from_this_one() -> None:
    """The other end's peer is this end, and its devices are not ours."""
    assert _other_ends(
        {
            "tcp/eth2": "the peer offers eth1 only, which our other devices reach",
            "tcp/eth3": "the peer has the address 10.0.0.1 of this device itself",
            "shm(cma)": "ptrace_scope is 2",
        }
    ) == {
        "tcp/eth2 at the listening end": "this end offers eth1 only, which its other devices reach",
        "tcp/eth3 at the listening end": "this end has the address 10.0.0.1 of that device itself",
        "shm(cma)": "ptrace_scope is 2",
    }


def test_what_the_other_end_warns_of_is_passed_on(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o644)
    done = run("bench", "latency", f"--secret-file={secret}", *QUICK)
    assert done.returncode == 0, done.stderr
    mine, other = done.stderr.split("the other end said:")
    assert all("every user of this machine can read the secret" in end for end in (mine, other))
    secret.chmod(0o600)
    assert run("bench", "latency", f"--secret-file={secret}", *QUICK).stderr == ""


def test_a_missing_peer_names_its_package() -> None:
    one_error(
        run("bench", "latency", "--compare=ucx", *QUICK, settings={"PATH": "/none"}), 2, "apt-get install ucx-utils"
    )


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_error(run("bench", "latency", f"--listen=127.0.0.1:{port}"), 2, str(port), "in use", "another port")


def test_nobody_there() -> None:
    port = free_port()
    start = time.monotonic()
    one_error(run("bench", "latency", f"--connect=127.0.0.1:{port}", "--timeout=2s"), 1, str(port))
    assert time.monotonic() - start < 30


def test_a_name_that_does_not_resolve() -> None:
    one_error(run("bench", "latency", "--connect=no-such-host.invalid"), 1, "no-such-host.invalid", "resolve")


def test_a_peer_that_says_nothing_ends_in_time_and_is_no_crossrail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        done = run("bench", "latency", f"--connect=127.0.0.1:{mute.getsockname()[1]}", "--timeout=2s")
        one_error(done, 1, "nothing received", "not Crossrail", "check address and port")
        assert time.monotonic() - start < 30


def test_a_listening_end_that_is_busy_says_so_at_once() -> None:
    with listening("latency") as (_, address), crossrail.Worker(crossrail.Context(), name="the first") as first:
        endpoint = first.connect(address)
        endpoint.send(b'{"bench": "latency"}', CONTROL_TAG).wait()  # received, so it serves this end
        start = time.monotonic()
        second = run("bench", "latency", *QUICK, f"--connect={address}", "--timeout=60s")
        one_error(second, 1, "busy with the first", "serves one run", "another port")
        assert time.monotonic() - start < 30


def test_a_wrong_secret_is_refused_and_the_listener_goes_on() -> None:
    with listening("latency", settings={"CROSSRAIL_SECRET": "the right secret"}) as (process, address):
        wrong = run("bench", "latency", f"--connect={address}", settings={"CROSSRAIL_SECRET": "quite another secret"})
        one_error(wrong, 1, "secret")
        assert process.poll() is None
        right = run(
            "bench", "latency", f"--connect={address}", *QUICK, settings={"CROSSRAIL_SECRET": "the right secret"}
        )
        assert right.returncode == 0, right.stderr
        assert process.wait(30) == 0


def test_the_secret_can_come_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more\n")
    done = run("bench", "latency", f"--secret-file={secret}", *QUICK)
    assert done.returncode == 0, done.stderr
    one_error(run("bench", "latency", f"--secret-file={tmp_path}/none", *QUICK), 2, f"{tmp_path}/none")


def test_garbage_on_the_port_does_not_end_the_listener() -> None:
    with listening("latency") as (process, address):
        host, _, port = address.rpartition(":")
        for junk in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, bytes(4096), b"\x01"):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(junk)
        assert run("bench", "latency", f"--connect={address}", *QUICK).returncode == 0
        assert process.wait(30) == 0


def test_ends_that_run_different_benches_say_so_at_both() -> None:
    with listening("p2p") as (process, address):
        one_error(run("bench", "latency", f"--connect={address}", *QUICK), 1, "bench p2p", "bench latency")
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "bench latency" in process.stderr.read()


def test_parameters_given_at_the_listening_end_must_agree() -> None:
    with listening("latency", "--size=16") as (process, address):
        one_error(run("bench", "latency", f"--connect={address}", *QUICK), 1, "--size", "16", "8")
        assert process.wait(30) == 1


def test_a_chunk_that_differs_is_a_mismatch() -> None:
    with listening("p2p", "--chunk=1M") as (_, address):
        one_error(run("bench", "p2p", f"--connect={address}", "--chunk=2M", "--size=4M"), 1, "chunk")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_latency_says_what_carried_it(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("bench", "latency", f"--transport={transport}", "--sizes=0,1,8,64K", "--iters=50", f"--json={path}")
    assert done.returncode == 0, done.stderr
    report = Report.loads(path.read_text())
    assert [row.size for row in report.rows] == [0, 1, 8, 65536]
    for row in report.rows:
        assert row.transport == transport
        assert row.protocol
        assert row.p50_us is not None and row.p50_us > 0
        assert f"{row.p50_us:.3f}" in done.stdout or f"{row.p50_us:.1f}" in done.stdout, (
            "the table is a view of the JSON"
        )
    assert report.environment.settings["CROSSRAIL_TLS"] == transport
    assert report.command[1:3] == ["bench", "latency"]


@pytest.mark.parametrize("memory", ["shared", "ordinary"])
def test_bandwidth(memory: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--sizes=1,64K,1M", "--iters=3", f"--memory={memory}", "--transport=shm", f"--json={path}")
    done = run("bench", "bandwidth", *options)
    assert done.returncode == 0, done.stderr
    for row in Report.loads(path.read_text()).rows:
        assert (row.transport, row.memory, row.window) == ("shm", memory, 64)
        assert row.bytes_logical == 3 * 64 * row.size
        assert row.gb_per_s == pytest.approx(row.bytes_logical / sum(row.samples_us) / 1e3)


def test_writes_stand_beside_messages(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("bench", "latency", "--op=both", "--sizes=8,64K", "--iters=50", f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(path.read_text()).rows
    assert [(row.what, row.size) for row in rows] == [
        ("latency", 8),
        ("latency", 65536),
        ("write", 8),
        ("write", 65536),
    ]
    assert all(row.samples_us and row.p50_us and row.gb_per_s is None for row in rows)
    assert "one-sided, until the other host has seen it" in done.stdout
    (only,) = json.loads(run("bench", "latency", "--op=write", "--json=-", *QUICK).stdout)["rows"]
    assert only["what"] == "write"


def test_p2p_over_shared_memory_has_no_raw_sockets_beside_it() -> None:
    done = run("bench", "p2p", "--transport=shm", "--size=1M", "--iters=2", "--json=-")
    (row,) = Report.loads(done.stdout).rows
    assert (row.raw_tcp_us, row.raw_tcp_gb_per_s, row.device) == ([], None, None)


def test_p2p_over_four_rails_of_loopback(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    rails = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4"
    options = ("--transport=tcp", f"--rails={rails}", "--size=16M", "--iters=3", f"--json={path}")
    done = run("bench", "p2p", *options)
    assert done.returncode == 0, done.stderr
    (row,) = Report.loads(path.read_text()).rows
    assert row.verified
    assert len(row.iterations) == 3
    assert {lane.device for lane in row.lanes} == set(rails.split(","))
    assert sum(lane.share for lane in row.lanes) == pytest.approx(1.0)
    assert len(row.raw_tcp_us) == 5
    assert row.raw_tcp_gb_per_s == pytest.approx(row.size / sorted(row.raw_tcp_us)[2] / 1e3)
    assert row.verdict is not None
    assert f"plain TCP sockets over the same rails: {row.raw_tcp_gb_per_s:.2f} GB/s" in done.stdout
    for part in (
        "sender GB/s",
        "receiver GB/s",
        "average",
        "127.0.0.3",
        "retransmits",
        "window",
        f"verdict: {row.verdict.text}",
    ):
        assert part in done.stdout, done.stdout


def test_json_on_stdout_is_alone_there() -> None:
    done = run("bench", "latency", "--json=-", *QUICK)
    assert json.loads(done.stdout)["schema"] == "crossrail-bench/1"
    assert "half of a round trip" in done.stderr


def test_a_full_disk_is_one_line_after_the_table() -> None:
    done = run("bench", "latency", "--json=/dev/full", *QUICK)
    assert done.returncode == 1
    assert "half of a round trip" in done.stdout
    assert done.stderr.count("error:") == 1
    assert "No space left on device" in done.stderr


def test_a_full_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "info"], env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_left_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m crossrail bench latency --size 8 --iters 200 | true",
        shell=True,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_info_lists_transports_devices_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    done = run("info", f"--json={path}", settings={"CROSSRAIL_SECRET": "do not tell", "CROSSRAIL_TLS": "shm"})
    assert done.returncode == 0, done.stderr
    for word in ("shm", "tcp", "127.0.0.1", "CROSSRAIL_CHUNK", "2M", "GPUs"):
        assert word in done.stdout, done.stdout
    assert "do not tell" not in done.stdout + path.read_text()
    data = json.loads(path.read_text())
    assert {transport["name"] for transport in data["info"]["transports"]} >= {"shm", "tcp"}
    out = next(one for one in data["info"]["transports"] if one["name"] == "tcp")
    assert out["usable"] or out["reason"]
    placement = data["info"]["placement"]
    assert placement["near_devices"] is (placement.get("why_not") is None)
    assert (placement.get("why_not") or "NUMA node") in " ".join(done.stdout.split())
    for way in data["info"]["tcp_ways"]:
        assert way["reason"] and way["possible"] is (way["fix"] is None), way
        assert way["name"] in done.stdout
    assert {"io_uring", "MSG_ZEROCOPY", "SO_BUSY_POLL"} < {way["name"] for way in data["info"]["tcp_ways"]}


def test_info_says_where_threads_run() -> None:
    info = crossrail.Context(environment=False).info()
    nodes: list[NumaNode] = [{"node": 0, "cpus": [0, 1]}, {"node": 1, "cpus": [2]}]
    info["placement"] = {"near_devices": True, "why_not": None, "nodes": nodes}
    out = io.StringIO()
    print_info(info, console(out))
    assert "(2 of node 0, 1 of node 1); CROSSRAIL_AFFINITY=off" in " ".join(out.getvalue().split())


def test_compare_prints_ratios(tmp_path: Path) -> None:
    if run("bench", "latency", "--compare=ucx,iperf3", *QUICK, "--rounds=1").returncode == 2:
        if os.environ.get("CI") == "true":
            pytest.fail("ucx-utils and iperf3 are not installed")
        pytest.skip("ucx-utils and iperf3 are not installed")
    path = tmp_path / "out.json"
    options = ("--transport=tcp", "--size=1M", "--iters=4", "--compare=ucx,iperf3", "--rounds=2", f"--json={path}")
    done = run("bench", "bandwidth", *options)
    assert done.returncode == 0, done.stderr
    report = Report.loads(path.read_text())
    (row,) = report.rows
    assert len(row.rounds) == 2
    # A busy machine disturbs either: then the row says so in place of the ratio.
    assert row.ratio.keys() ^ {name for name, result in row.peers.items() if result.void} == {"ucx", "iperf3"}
    for name, result in row.peers.items():
        assert len(result.rounds) == 2
        assert report.environment.peers[name]
    assert "x ucx" in done.stdout
    assert "x iperf3" in done.stdout


def test_ctrl_c_ends_both_processes_at_once() -> None:
    with long_run() as (process, other):
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130
        assert time.monotonic() - start < 20
        assert gone(other)
        assert "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_second_process_never_outlives_the_first(number: int) -> None:
    with long_run() as (process, other):
        process.send_signal(number)
        process.wait(30)
        assert gone(other)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_the_second_process_said_of_a_signal_to_both_is_not_shown(number: int, code: int) -> None:
    # As of `timeout` or a batch system, which signal all processes of a job.
    with long_run() as (process, _):
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == code
        assert stderr.count("crossrail: error:") == 1 and "the other end" not in stderr, stderr


def test_the_death_of_the_second_process_is_one_line() -> None:
    with long_run() as (process, other):
        os.kill(other, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 1
        assert stdout == ""
        assert stderr.count("error:") == 1, stderr
        assert "Traceback" not in stderr


def test_what_the_second_process_said_is_shown_when_it_fails() -> None:
    done = run("bench", "latency", "--transport=tcp", "--rails=nic9", *QUICK)
    assert done.returncode != 0
    assert "nic9" in done.stderr


def test_nothing_is_left_of_a_run() -> None:
    with no_files_left():
        assert run("bench", "p2p", "--size=1M", "--iters=2", "--memory=shared").returncode == 0


def test_what_a_lane_carries_is_set_on_the_command_line() -> None:
    """What the verdict advises has to work: a window, chunks and channels for both ends."""
    done = run(
        *("bench", "p2p", "--transport=tcp", "--size=4M", "--iters=2", "--warmup=1", "--json=-"),
        *("--window=8", "--chunk=256K", "--channels=2"),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["window"], row["chunk"], row["channels"]) == (8, 256 << 10, 2)


def test_a_run_that_pins_both_ends_says_so(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two processors")
    path = tmp_path / "out.json"
    done = run("bench", "latency", *QUICK, f"--json={path}")
    assert f"processors: ends pinned to {allowed[0]}, {allowed[1]}" in done.stdout
    assert Report.loads(path.read_text()).environment.cores_allowed == allowed


def test_a_full_stderr_costs_no_result() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "doctor", "--only=descriptors"],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0 and "descriptors" in done.stdout


@pytest.mark.parametrize("option", ["--preset", "--nodes", "--tokens"])
def test_two_hyphens_are_no_value(option: str) -> None:
    one_error(run("bench", "ep", f"{option}=--"), 2, option, "expected one argument")


@pytest.mark.parametrize("arguments", [("info",), ("doctor", "--only=descriptors"), ("bench", "latency", *QUICK)])
def test_json_is_written_though_stdout_is_full_or_closed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    for place, command in enumerate(('"$@" >/dev/full', '"$@" | true')):
        path = tmp_path / f"{place}.json"
        subprocess.run(
            ["sh", "-c", command, "sh", *COMMAND, *arguments, f"--json={path}"],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        assert json.loads(path.read_text())["environment"]
