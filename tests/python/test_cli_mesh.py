"""`crossrail bench mesh` as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from commands import COMMAND, clean_environment, one_error
from commands import rows_of as bench_rows
from commands import run as command
from free_ports import free_port
from leftovers import no_files_left

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.failure import UsageFailure
from crossrail_tools.cli.placement import cpus_of, describe_pins
from crossrail_tools.report.schema import Report

SMALL = ("--size=64K", "--iters=3", "--warmup=1")

run = partial(command, "bench", "mesh")
rows_of = partial(bench_rows, "mesh", *SMALL)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_ordered_pair_is_measured_over_the_transport_asked_for(transport: str) -> None:
    rows = rows_of("--ranks=3", f"--transport={transport}", "--window=2")
    pairs = [row for row in rows if row.part == "pair"]
    everybody = [(source, target) for source in range(3) for target in range(3) if source != target]
    assert [(row.source, row.target) for row in pairs] == everybody
    for row in pairs:
        assert (row.what, row.size, row.transport, row.window, row.ranks) == ("mesh", 65536, transport, 2, 3)
        assert len(row.samples_us) == 3
        assert row.bytes_logical == 3 * 2 * 65536
        assert sum(lane.share for lane in row.lanes) == pytest.approx(1.0)
    late = [row for row in rows if row.part == "latency"]
    assert [(row.source, row.target) for row in late] == everybody
    assert all(row.size == 8 and row.p50_us is not None and row.p50_us > 0 for row in late)
    together = [row for row in rows if row.part == "all"]
    assert [row.source for row in together] == [0, 1, 2]
    assert all(row.bytes_logical == 3 * 2 * 2 * 65536 for row in together)
    assert all(row.verified for row in rows)


def test_the_table_is_a_view_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(*SMALL, "--ranks=2", f"--json={path}")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(path.read_text()).rows
    for row in rows:
        shown = row.p50_us if row.part == "latency" else row.gb_per_s
        assert shown is not None
        assert (f"{shown:.2f}" if shown >= 0.1 else f"{shown:.4f}") in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices=tpu:0",), ("tpu:0", "cpu, cuda, cuda:N")),
        (("--devices=cuda:x",), ("cuda:x", "cuda:N")),
        (("--devices=cuda:0,cpu",), ("GPUs",)),
        (("--devices=cuda:0", "--ranks=3"), ("--devices", "--ranks", "exclude")),
        (("--devices=cuda:0", "--memory=shared"), ("--memory",)),
        (("--ranks=0",), ("--ranks", "'0'")),
        (("--ranks=1",), ("two or more", "1 rank")),
        (("--unpack=host",), ("--unpack", "--devices")),
        (("--devices=cuda:0", "--unpack=magic"), ("magic", "kernel", "d2d", "host")),
        (("--size=1M,2M",), ("one size",)),
        (("--transport=cuda_ipc",), ("between GPUs", "--devices")),
        (("--transport=shm", "--rails=lo"), ("--rails is for tcp", "shm leaves out")),
        (("--transport=rdma",), ("rdma", "known: self, shm, cuda_ipc, fabric, ucx, tcp")),
        (("--window=0",), ("--window",)),
        (("--memory=tape",), ("tape", "shared", "ordinary")),
        (("--world-size=2",), ("--master-addr",)),
        (("--json=/nonexistent/folder/file",), ("/nonexistent/folder",)),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error(run(*arguments), 2, *words)


def test_one_gpu_is_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossrail_tools.cli.mesh.known_gpus", lambda *_: ["cuda:0"])
    with pytest.raises(UsageFailure, match="two or more ranks, and only cuda:0 is here"):
        parse_arguments(["bench", "mesh", "--devices=all"]).run()


def test_two_nodes_by_two_commands() -> None:
    port = free_port()
    nodes = ["--world-size=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--ranks=1", "--transport=tcp"]
    with subprocess.Popen(
        [*COMMAND, "bench", "mesh", *SMALL, *nodes, "--rank=1"],
        env=clean_environment({"CROSSRAIL_SECRET": "sixteen bytes or more"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as second:
        try:
            done = subprocess.run(
                [*COMMAND, "bench", "mesh", *SMALL, *nodes, "--rank=0", "--json=-"],
                env=clean_environment({"CROSSRAIL_SECRET": "sixteen bytes or more"}),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            out, said = second.communicate(timeout=60)
        finally:
            second.kill()
    assert done.returncode == 0, done.stderr + said
    assert second.returncode == 0, said
    assert out == ""
    rows = Report.loads(done.stdout).rows
    assert [(row.part, row.source, row.target) for row in rows] == [
        ("pair", 0, 1),
        ("pair", 1, 0),
        ("latency", 0, 1),
        ("latency", 1, 0),
        ("all", 0, None),
        ("all", 1, None),
    ]
    assert all(row.nodes == 2 and row.transport == "tcp" for row in rows)


def test_nothing_is_left_of_a_run() -> None:
    with no_files_left():
        assert run(*SMALL, "--memory=shared").returncode == 0


def test_help_is_data() -> None:
    done = subprocess.run([sys.executable, "-m", "crossrail", "bench", "--help"], capture_output=True, text=True)
    assert "mesh" in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_ranks_are_pinned_one_each_and_the_header_says_so(tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    path = tmp_path / "mesh.json"
    done = run(*SMALL, "--size=64K", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"processors: ranks pinned to {first}, {second}")
    report = Report.loads(path.read_text())
    assert report.environment.pinning is not None
    assert report.environment.pinning.startswith(f"ranks pinned to {first}, {second}")
    done = run(*SMALL, "--size=64K", "--pin=none")
    assert done.stdout.startswith("processors: ranks not pinned, ")


def test_more_ranks_than_processors_are_not_pinned() -> None:
    count = len(os.sched_getaffinity(0))
    assert cpus_of("auto", count + 1) == [None] * (count + 1)
    assert describe_pins(cpus_of("auto", count + 1), "ranks").startswith(f"ranks not pinned, {count} processor")
