"""Benches under mpirun, srun and torchrun: one job, not several copies of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

import pytest
from commands import COMMAND, clean_environment, one_error
from free_ports import free_port

from crossrail_tools.cli.launcher import find_launch
from crossrail_tools.cli.parsing import Parser
from crossrail_tools.report.schema import Report

P2P = ("p2p", "--size=1M", "--iters=3")
EP = ("ep", "--mode=dispatch", "--tokens=16", "--hidden=256", "--experts-per-rank=4", "--iters=3", "--warmup=1")
MESH = ("mesh", "--size=64K", "--iters=3", "--warmup=1")
CONTROL = ("control", "--rounds=1", "--experts-per-rank=2", "--tokens=16", "--hidden=256")


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    named = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in named.items()}}


def slurm(rank: int, size: int, job: int) -> dict[str, str]:
    named = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": rank, "SLURM_JOB_ID": job, "SLURM_STEP_ID": 0}
    named |= {"SLURM_NNODES": 1, "SLURM_STEP_NUM_NODES": 1, "SLURM_NODEID": 0}
    nodes = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return {**nodes, **{name: str(value) for name, value in named.items()}}


def together(variables: Sequence[Mapping[str, str]], bench: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Runs `crossrail bench` once with each of ``variables``, all at the same time."""
    started = [
        subprocess.Popen(
            [*COMMAND, "bench", *bench],
            env=clean_environment(each),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in variables
    ]
    ended = []
    try:
        for process in started:
            out, said = process.communicate(timeout=90)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, said))
    finally:
        for process in started:
            process.kill()
    return ended


def jobs(launcher: str, size: int) -> list[dict[str, str]]:
    port, job = free_port(), int(uuid.uuid4().int % 10**6)
    return [torchrun(rank, size, port) if launcher == "torchrun" else slurm(rank, size, job) for rank in range(size)]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("bench", [P2P, ("latency", "--size=8", "--iters=50"), EP, MESH, CONTROL], ids=lambda b: b[0])
def test_two_processes_are_one_job(launcher: str, bench: tuple[str, ...]) -> None:
    ends = together(jobs(launcher, 2), (*bench, "--json=-"))
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    reports = [Report.loads(end.stdout) for end in ends if end.stdout.strip()]
    assert len(reports) == 1, "one of them reports"
    row = reports[0].rows[0]
    if row.ranks is not None:
        assert (row.ranks, row.nodes) == (2, 1)
    if bench is EP:
        assert row.links == {"self": 2, "heap": 2}, "ranks of one machine share memory"
    measuring = ends[1] if row.ranks is None else ends[0]
    assert measuring.stdout.strip()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) >= 2 and bench is not CONTROL:
        pinned = reports[0].environment.pinning
        assert pinned is not None
        assert f"pinned to {cpus[0]}, {cpus[1]}" in pinned or bench is P2P


@pytest.mark.parametrize("bench", [P2P, EP], ids=lambda b: b[0])
def test_mpirun_starts_one_job(bench: tuple[str, ...]) -> None:
    if shutil.which("mpirun") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("mpirun is missing")
        pytest.skip("mpirun is not installed")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "2", *COMMAND, "bench", *bench, "--json=-"],
        env={**clean_environment(root), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "crossrail-bench/1", "one report, not two"
    row = Report.loads(done.stdout).rows[0]
    assert row.ranks in (None, 2)


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (P2P, ("between 2 processes", "torchrun started 3", "--listen")),
        ((*EP, "--compare=mpi"), ("--compare", "launcher")),
        (("unpack", "--device=cuda"), ("one command", "torchrun started 3")),
    ],
    ids=str,
)
def test_what_cannot_be_one_job_is_one_line(bench: tuple[str, ...], words: tuple[str, ...]) -> None:
    (end,) = together(jobs("torchrun", 3)[1:2], bench)
    one_error(end, 2, *words)


def test_ends_that_are_placed_by_options_ignore_the_launcher() -> None:
    """As does a job of one process."""
    (end,) = together([{**torchrun(0, 1, free_port())}], P2P)
    assert end.returncode == 0, end.stderr
    assert "verified" in end.stdout


def test_contradicting_variables_are_one_line() -> None:
    (end,) = together([{**torchrun(0, 2, free_port()), "RANK": "5"}], P2P)
    one_error(end, 2, "process 5 of 2", "contradict")
    (end,) = together([{**torchrun(0, 2, free_port()), "LOCAL_RANK": "x"}], P2P)
    one_error(end, 2, 'LOCAL_RANK: "x"')


def test_places_are_read_from_each_launchers_variables() -> None:
    def found(**variables: str) -> tuple[str, int, int, int, int] | None:
        launch = find_launch(Parser(), variables)
        return None if launch is None else (launch.name, launch.rank, launch.size, launch.local_rank, launch.local_size)

    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_NNODES": "3"}
    assert found(**step, SLURM_STEP_ID="0", SLURM_STEP_TASKS_PER_NODE="3,2,1") == ("Slurm", 5, 6, 0, 1)
    assert found(**step, SLURM_STEP_ID="0", SLURM_STEP_TASKS_PER_NODE="2(x3)") == ("Slurm", 5, 6, 0, 2)
    assert found(**step, SLURM_STEP_ID="0") == ("Slurm", 5, 6, 0, 2)
    assert found(**step, ENVIRONMENT="BATCH") is None, "the script of a job runs once"
    assert found(**step, SLURM_STEP_NUM_TASKS="6", WORLD_SIZE="9", MASTER_ADDR="h", MASTER_PORT="1") == (
        ("Slurm", 5, 6, 0, 2)
    ), "variables exported for torchrun do not make a rank"
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert found(**step, **mpi) == ("Open MPI", 1, 4, 1, 4), "mpirun inside a job of Slurm"
    assert found(**mpi, OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2") == ("Open MPI", 1, 4, 1, 2)
    assert found(RANK="1", WORLD_SIZE="2") is None, "nodes, by hand"
    assert found(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1") == ("torchrun", 1, 2, 1, 2)
    assert found() is None
