"""`crossrail bench ep` as a user meets it: what it verifies, measures and prints, and how it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from commands import COMMAND, children, clean_environment, is_busy, one_error
from commands import rows_of as bench_rows
from commands import run as command
from free_ports import free_port
from leftovers import no_files_left
from test_fabric_lanes import fabric_or_skip

from crossrail_tools.report.schema import Report

run = partial(command, "bench", "ep")
SMALL = ("--tokens=16", "--hidden=256", "--experts-per-rank=4", "--iters=5", "--warmup=1", "--pin=none")
rows_of = partial(bench_rows, "ep", *SMALL)


def test_all_modes_are_verified_and_measured() -> None:
    done = run(*SMALL, "--json=-")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(done.stdout).rows
    assert [row.what for row in rows] == ["dispatch", "combine", "e2e"]
    for row in rows:
        assert row.verified
        assert row.ranks == row.ranks_passed == 2
        assert (row.tokens, row.hidden, row.experts, row.topk, row.layout) == (16, 256, 8, 2, "expert")
        assert len(row.samples_us) == 2 * 5
        assert len(row.slowest_us) == 5
        assert min(row.samples_us) > 0
        assert row.links == {"self": 2, "heap": 2}
        assert set(row.stages_us) == {"cast", "copy", "sum", "wait", "other"}
        assert row.avg_us is not None
        assert sum(row.stages_us.values()) == pytest.approx(row.avg_us, rel=0.2)
    assert "2 of 2 ranks passed" in done.stderr
    assert "logical" in done.stderr


def test_bytes_are_counted_three_ways() -> None:
    """One expert for all: what each rank sends is known exactly, also of a run that is reported in parts."""
    same = ("--routing=one", "--topk=1", "--dtype=bf16", "--nodes=2")
    dispatch, combine = rows_of("--mode=dispatch,combine", "--iters=25", *same)
    row = 16 * 2 * 256
    assert len(dispatch.samples_us) == len(combine.samples_us) == 2 * 25
    # Every token goes to rank 0: the half of them that are its own do not leave it.
    assert dispatch.bytes_logical == row
    assert dispatch.bytes_wire == dispatch.bytes_network == row // 2
    assert combine.bytes_wire == combine.bytes_network == row // 2
    assert dispatch.links == {"self": 2, "network": 2}
    assert dispatch.nodes == 2
    assert dispatch.transport == "tcp"
    assert sum(lane.bytes for lane in dispatch.lanes) >= row // 2


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_experts_over_libfabric_verify_and_count_their_bytes(provider: str) -> None:
    tls = fabric_or_skip(provider)
    same = ("--routing=one", "--topk=1", "--dtype=bf16", "--backend=none")
    for row in rows_of("--mode=dispatch,combine", f"--transport={tls}", *same):
        assert (row.transport, row.verified, row.links) == ("fabric", True, {"self": 2, "network": 2})
        # Every token goes to rank 0, so that one rank's rows are the network's bytes.
        assert row.bytes_network == 16 * 2 * 256 // 2
        (rail,) = row.lanes
        assert rail.name.startswith("fabric/lo(") and provider in rail.name
        assert rail.bytes >= row.bytes_network


def test_bytes_per_rail_are_those_of_the_timed_iterations() -> None:
    """However long the warm-up is: bytes of one iteration, with the heads of its frames."""
    sent = []
    for warmup in (0, 40):
        (row,) = rows_of("--mode=dispatch", "--dtype=bf16", "--nodes=2", "--tokens=64", f"--warmup={warmup}")
        assert row.bytes_network is not None
        sent.append(sum(lane.bytes for lane in row.lanes))
        assert row.bytes_network <= sent[-1] < 1.15 * row.bytes_network
    assert sent[0] == pytest.approx(sent[1], rel=0.05)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout=rank", "--topk=3", "--scale=ue8m0"),
        ("--dtype=bf16", "--no-prereduce", "--routing=skewed:1.5", "--num-processes=3"),
        ("--backend=none", "--cached", "--scale=power2"),
        ("--tokens=0",),
        ("--num-processes=1", "--layout=rank"),
    ],
)
def test_other_shapes_verify(arguments: tuple[str, ...]) -> None:
    assert all(row.verified for row in rows_of("--mode=e2e", *arguments))


def test_two_emulated_nodes_use_both_kinds_of_links() -> None:
    (row,) = rows_of("--mode=e2e", "--num-processes=4", "--nodes=2")
    assert row.links == {"self": 4, "heap": 4, "network": 8}
    assert row.bytes_wire is not None
    assert row.bytes_network is not None
    assert 0 < row.bytes_network < row.bytes_wire


def test_presets_give_way_to_options() -> None:
    (row,) = rows_of("--preset=decode", "--mode=dispatch")
    assert (row.tokens, row.hidden, row.topk, row.experts, row.dtype) == (16, 256, 8, 8, "fp8")
    assert row.size == 256 + 4 * 256 // 128


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--experts=7",), ("7 experts", "2 ranks")),
        (("--hidden=100",), ("hidden 100", "128")),
        (("--topk=33", "--experts=64"), ("topk 33", "32")),
        (("--topk=9", "--experts-per-rank=1"), ("9", "2 experts")),
        (("--routing=zipf",), ("zipf", "skewed:S")),
        (("--mode=send",), ("send", "dispatch")),
        (("--nodes=3",), ("--nodes 3", "2 ranks")),
        (("--compare=ucx",), ("ucx", "mpi")),
        (("--compare=nccl",), ("nccl", "--device cuda")),
        (("--compare=mpi", "--device=cuda"), ("mpi", "--device cpu")),
        (("--num-sms=16",), ("--num-sms", "--device cuda")),
        (("--sweep=tokens=1,2",), ("--sweep", "--device cuda")),
        (("--sweep=colour=1", "--device=cuda"), ("colour", "tokens")),
        (("--sweep=tokens=1,x", "--device=cuda"), ("--sweep", "x")),
        (("--plan=x.json", "--device=cuda"), ("--plan", "--device cpu")),
        (("--compare=network", "--device=cuda", "--backend=none"), ("--compare network", "--backend none")),
        (("--world-size=2",), ("--master-addr",)),
        (("--world-size=2", "--rank=2", "--master-addr=127.0.0.1"), ("node 2", "2")),
        (("--timeout=soon",), ("soon",)),
        (("--num-processes=2000",), ("1024",)),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run(*arguments), 2, *words)


def test_a_launchers_bad_variable_is_named() -> None:
    done = run(*SMALL, settings={"WORLD_SIZE": "two"})
    one_error(done, 2, "WORLD_SIZE='two'")


def test_more_than_fits_is_said_before_anything_starts() -> None:
    started = time.monotonic()
    done = run("--tokens=16000000", "--hidden=8192")
    one_error(done, 1, "free", "tokens per rank fit")
    assert time.monotonic() - started < 30


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on until it is ended, once its ranks are measuring."""
    work = ["--tokens=16", "--hidden=256", "--iters=2000000", "--mode=e2e", "--pin=none"]
    with subprocess.Popen(
        [*COMMAND, "bench", "ep", *work, *arguments],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while not all(is_busy(pid) for pid in children(process.pid)) or len(children(process.pid)) < 2:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)  # another process: nothing tells when it has come so far
            yield process
        finally:
            process.kill()


def gone(pids: list[int]) -> bool:
    """Whether all of them have ended, within a moment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)  # they are not ours to wait for
    return False


def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    with running() as process:
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
        assert re.search(r"error: rank \d: its process was killed by SIGKILL", said), said
        assert "Traceback" not in said
        assert gone(ranks)


@pytest.mark.parametrize(
    ("by", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "the terminal was closed"),
    ],
)
def test_a_signal_ends_every_rank_at_once(by: signal.Signals, code: int, word: str) -> None:
    with running() as process:
        ranks = children(process.pid)
        process.send_signal(by)
        _, said = process.communicate(timeout=30)
        assert process.returncode == code
        first, *others = said.splitlines()
        assert first == f"crossrail: error: {word}"
        assert re.fullmatch("crossrail: (nothing was measured yet|what follows was measured until then; .*)", *others)
        assert gone(ranks)


@pytest.mark.parametrize(
    "pair", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM), (signal.SIGHUP, signal.SIGHUP)]
)
def test_two_signals_at_once_are_one(pair: tuple[signal.Signals, signal.Signals]) -> None:
    code = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    with no_files_left(), running() as process:
        ranks = children(process.pid)
        for by in pair:
            process.send_signal(by)
            time.sleep(0.0005)  # two that are pending at a time are one to the kernel
        _, said = process.communicate(timeout=30)
        assert process.returncode in {code[by] for by in pair}
        first, *others = said.splitlines()
        assert re.fullmatch("crossrail: error: (interrupted|terminated|the terminal was closed)", first), said
        partial = "crossrail: (nothing was measured yet|what follows was measured until then; .*)"
        assert len(others) == 1 and re.fullmatch(partial, others[0]), said
        assert gone(ranks)


def test_no_rank_outlives_a_command_that_is_killed() -> None:
    with running() as process:
        ranks = children(process.pid)
        process.kill()
        process.wait(30)
        assert gone(ranks)


@pytest.mark.parametrize("arguments", [(), ("--compare=mpi", "--rounds=1")])
def test_nothing_is_left_of_a_run(arguments: tuple[str, ...]) -> None:
    if arguments and not _has_mpi():
        pytest.skip("mpirun and mpi4py are not installed")
    with no_files_left():
        assert run(*SMALL, *arguments).returncode == 0


def test_one_command_per_node(tmp_path: Path) -> None:
    """Two commands, each with the ranks of one node; the second by the launcher's variables."""
    port = free_port()
    first = [*SMALL, "--mode=e2e", "--json=-", "--world-size=2", "--rank=0", "--master-addr=127.0.0.1"]
    variables = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    with subprocess.Popen(
        [*COMMAND, "bench", "ep", *SMALL, "--mode=e2e", f"--json={tmp_path / 'second.json'}"],
        env=clean_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as second:
        try:
            done = run(*first, f"--master-port={port}")
            out, said = second.communicate(timeout=60)
        finally:
            second.kill()
    assert done.returncode == 0, done.stderr + said
    assert second.returncode == 0, said
    (row,) = Report.loads(done.stdout).rows
    assert (row.ranks, row.nodes, row.ranks_passed) == (4, 2, 4)
    assert row.links == {"self": 4, "heap": 4, "network": 8}
    assert len(row.samples_us) == 4 * 5
    assert "node 1 of 2" in said and "node 0 of 2 has the report; --json" in said and "has no effect here" in said
    assert out == "" and not list(tmp_path.iterdir())


def test_a_store_that_runs_already_is_used_by_several_runs_at_once() -> None:
    with subprocess.Popen(
        [*COMMAND, "store", "--listen=127.0.0.1:0"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as store:
        try:
            assert store.stdout is not None
            settings = clean_environment({"CROSSRAIL_STORE": store.stdout.readline().decode().strip()})
            command = [*COMMAND, "bench", "ep", *SMALL, "--mode=dispatch"]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            runs = [subprocess.Popen(command, env=settings, **pipes) for _ in range(2)]  # type: ignore[call-overload]
            for one in runs:
                with one:
                    out, said = one.communicate(timeout=60)
                    assert one.returncode == 0, said
                    assert "2 of 2 ranks passed" in out
        finally:
            store.terminate()
    assert store.returncode == 0


def test_a_node_that_never_comes_is_missed_by_name() -> None:
    done = run(
        *SMALL,
        "--world-size=2",
        "--rank=0",
        "--master-addr=127.0.0.1",
        "--master-port",
        str(free_port()),
        "--timeout=2s",
    )
    one_error(done, 1, "rank 2 (never joined)", "rank 3 (never joined)")


def test_mpi_takes_turns_with_ours() -> None:
    if not _has_mpi():
        if os.environ.get("CI"):
            pytest.fail("mpirun and mpi4py are missing")
        pytest.skip("mpirun and mpi4py are not installed")
    for arguments in (("--layout=rank", "--dtype=bf16"), ("--scale=power2",)):
        (row,) = rows_of("--mode=e2e", "--compare=mpi", "--rounds=2", *arguments)
        assert len(row.rounds) == 2
        for name in ("mpi", "mpi-dedup"):
            result = row.peers[name]
            assert result.error is None, result.error
            assert len(result.rounds) == 2
            assert (name in row.ratio) == (result.void is None), "a disturbed comparison has no ratio"
            assert row.ratio.get(name, 1) > 0


def test_a_signal_while_mpi_runs_leaves_nothing() -> None:
    if not _has_mpi():
        pytest.skip("mpirun and mpi4py are not installed")
    work = ["--tokens=16", "--hidden=256", "--warmup=0", "--iters=500", "--mode=e2e", "--compare=mpi", "--rounds=1"]
    with subprocess.Popen([*COMMAND, "bench", "ep", *work], env=clean_environment(), stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 60
            while not (folders := [_mpi_folder(pid) for pid in children(process.pid)]) or not any(folders):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.02)  # another program's start: nothing tells of it
            pids = children(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert gone(pids)
    assert not any(Path(folder).exists() for folder in folders if folder)


def _mpi_folder(pid: int) -> str | None:
    """Where mpirun keeps its files, if that is what a process is."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    return arguments[arguments.index("orte_tmpdir_base") + 1] if "orte_tmpdir_base" in arguments else None


def _has_mpi() -> bool:
    import importlib.util
    import shutil

    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def test_without_mpi_the_comparison_says_what_to_install(tmp_path: Path) -> None:
    done = run(*SMALL, "--compare=mpi", settings={"PATH": str(tmp_path)})
    one_error(done, 2, "openmpi-bin")


def test_ranks_are_no_command_of_the_users() -> None:
    done = subprocess.run([sys.executable, "-m", "crossrail", "--help"], capture_output=True, text=True, check=False)
    assert not re.search(r"^ +rank\b", done.stdout, re.MULTILINE)
