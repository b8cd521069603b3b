"""`crossrail bench control`: its steps, its stores, its mistakes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from commands import COMMAND, children, clean_environment, gone, one_error, run
from free_ports import free_port
from leftovers import no_files_left

import crossrail
from crossrail_tools.cli import rank_process
from crossrail_tools.cli.placement import Placement, shared_gpus
from crossrail_tools.report.control import averaged
from crossrail_tools.report.schema import Report

SMALL = ("bench", "control", "--num-processes=3", "--tokens=8", "--hidden=256")
STEPS = ["init", "connect", "disconnect", "reconnect", "destroy"]


def test_a_cycle_has_every_step_of_every_rank_and_round(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(*SMALL, "--experts-per-rank=8,32", "--rounds=4", f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(path.read_text()).rows
    assert [(row.experts_per_rank, row.what) for row in rows] == [(n, step) for n in (8, 32) for step in STEPS]
    for row in rows:
        assert (row.store, row.verified, row.ranks) == ("tcp", True, 3)
        assert [one.rank for one in row.rank_times] == [0, 1, 2]
        assert len(row.samples_us) == 3 * 4
        assert all(sample > 0 for sample in row.samples_us)
        mean, least, most = averaged(row)
        assert least <= mean <= most
    assert "control: 3 ranks x 32 experts, 4 rounds, store tcp" in done.stdout
    assert done.stdout.count("total") == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_the_header_says_how_ranks_are_pinned(tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    path = tmp_path / "out.json"
    alone = ("--experts-per-rank=2", "--rounds=1", "--op=init")
    done = run(*SMALL, "--num-processes=2", *alone, f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"processors: ranks pinned to {first}, {second}")
    pinning = Report.loads(path.read_text()).environment.pinning
    assert pinning is not None
    assert pinning.startswith(f"ranks pinned to {first}, {second}")
    done = run(*SMALL, "--num-processes=2", *alone, "--pin=none")
    assert done.stdout.startswith("processors: ranks not pinned, ")


@pytest.mark.parametrize("op", STEPS)
def test_one_step_alone(op: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(*SMALL, "--experts-per-rank=2", "--rounds=1", f"--op={op}", f"--json={path}")
    assert done.returncode == 0, done.stderr
    (row,) = Report.loads(path.read_text()).rows
    assert (row.what, len(row.samples_us)) == (op, 3)


class TwoGpus:
    """Of a context, what it says of GPUs."""

    def info(self) -> dict[str, Any]:
        return {"cuda": {"devices": [{"ordinal": 0}, {"ordinal": 1}]}}


@pytest.mark.parametrize(
    ("asked", "every", "expected"),
    [(8, True, ("cuda:0", "cuda:1")), (1, False, ("cuda:0",)), (3, False, ("cuda:0", "cuda:1", "cuda:0"))],
)
def test_ranks_are_shared_out_over_gpus(asked: int, every: bool, expected: tuple[str, ...]) -> None:
    context = cast("crossrail.Context", TwoGpus())
    where, gpus = shared_gpus(Placement(asked), context, every)
    assert (where.num_processes, gpus) == (len(expected), expected)


def test_many_rounds_are_gathered_whole(tmp_path: Path) -> None:
    """What one value of the store can't hold comes in pieces; then a run of the command with fewer rounds."""
    chance = random.Random(0)
    samples = [[chance.random() for _ in range(20_000)] for _ in range(2)]
    assert len(zlib.compress(json.dumps(samples[0]).encode(), 1)) > 2 * rank_process.PIECE
    store = f"tcp://127.0.0.1:{free_port()}"
    context = crossrail.Context(timeout=60)

    def gathered(rank: int) -> list[Any] | None:
        with crossrail.Group(name="many", rank=rank, size=2, store=store, context=context) as group:
            return rank_process.gather(group, "samples", samples[rank])

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(gathered, range(2))) == [samples, None]

    path = tmp_path / "out.json"
    options = ("--num-processes=2", "--tokens=1", "--hidden=128", "--experts-per-rank=1", "--rounds=300", "--op=init")
    done = run("bench", "control", *options, f"--json={path}")
    assert done.returncode == 0, done.stderr
    (row,) = Report.loads(path.read_text()).rows
    assert len(row.samples_us) == 2 * 300


def test_a_real_etcd(tmp_path: Path) -> None:
    if shutil.which("etcd") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("etcd-server is not installed")
        pytest.skip("etcd-server is not installed")
    path = tmp_path / "out.json"
    with no_files_left():
        done = run(*SMALL, "--experts-per-rank=8", "--rounds=2", "--store=etcd", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert {row.store for row in Report.loads(path.read_text()).rows} == {"etcd"}
    assert "an etcd was started" in done.stderr


@pytest.mark.skipif(shutil.which("etcd") is None and os.environ.get("CI") != "true", reason="no etcd here")
def test_ctrl_c_while_an_etcd_serves_is_one_line() -> None:
    # A terminal sends SIGINT to all processes, etcd among them, whose end is then no failure of the store.
    command = [*COMMAND, *SMALL, "--rounds=100000", "--store=etcd"]
    with no_files_left():
        process = subprocess.Popen(
            command, env=clean_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stderr is not None
        assert "an etcd was started" in process.stderr.readline()
        assert "3 ranks, store etcd" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said and "etcd did not" not in said, said
    assert [line for line in said.splitlines() if "error:" in line] == ["crossrail: error: interrupted"], said


def test_without_etcd_it_names_the_package() -> None:
    one_error(run(*SMALL, "--store=etcd", settings={"PATH": "/none"}), 2, "apt-get install etcd-server")


def test_two_nodes_meet_at_the_first(tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "out.json"
    common = (
        "bench",
        "control",
        "--num-processes=2",
        "--experts-per-rank=2",
        "--rounds=2",
        "--tokens=8",
        "--hidden=256",
    )
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outcomes: list[subprocess.CompletedProcess[str]] = []
    second = threading.Thread(target=lambda: outcomes.append(run(*common, settings={**where, "RANK": "1"})))
    second.start()
    first = run(*common, f"--json={path}", settings={**where, "RANK": "0"})
    second.join()
    assert first.returncode == 0, first.stderr
    assert outcomes[0].returncode == 0, outcomes[0].stderr
    rows = Report.loads(path.read_text()).rows
    assert [row.what for row in rows] == STEPS
    assert all(len(row.rank_times) == 4 for row in rows)
    assert f"127.0.0.1:{port + 1}" in first.stderr
    assert outcomes[0].stdout == ""
    assert "node 0" in outcomes[0].stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--op=fly",), ("fly", "cycle")),
        (("--rounds=0",), ("--rounds", "'0'")),
        (("--experts-per-rank=8,x",), ("--experts-per-rank", "'x'")),
        (("--store=zookeeper",), ("zookeeper", "tcp", "etcd")),
        (("--world-size=2",), ("--master-addr",)),
        (("--world-size=2", "--rank=2", "--master-addr=127.0.0.1"), ("--rank",)),
        (("--world-size=2", "--master-addr=127.0.0.1", "--store=etcd"), ("CROSSRAIL_STORE",)),
        (("--hidden=100",), ("hidden 100", "128")),
        (("--timeout=soon",), ("soon",)),
        (("--json=/nonexistent/folder/file",), ("/nonexistent/folder", "--json")),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run(*SMALL, "--experts-per-rank=1", "--rounds=1", *options), 2, *words)


def test_a_store_that_is_not_there_is_one_line() -> None:
    port = free_port()
    settings = {"CROSSRAIL_STORE": f"etcd://127.0.0.1:{port}"}
    one_error(run(*SMALL, "--rounds=1", "--timeout=1s", settings=settings), 1, f"127.0.0.1:{port}")


def test_a_rank_that_is_killed_ends_the_run_and_the_others() -> None:
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--rounds=100000"], env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            while len(ranks := children(process.pid)) < 3:
                assert process.poll() is None
            os.kill(ranks[1], signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=30)
            assert process.returncode == 1
            assert stdout == b""
            (error,) = [line for line in stderr.decode().splitlines() if line.startswith("crossrail: error: ")]
            assert "rank 1" in error and "SIGKILL" in error
            assert all(gone(rank) for rank in ranks)
        finally:
            process.kill()
