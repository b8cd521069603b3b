"""`crossrail bench ep --device cuda` without a GPU: all but the native half, which is played by host memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from commands import COMMAND, clean_environment, one_error
from commands import rows_of as bench_rows
from commands import run as command

from crossrail_tools.report.schema import Report, Row

FAKE = Path(__file__).parent / "fake_gpus"
SMALL = ("--device=cuda", "--tokens=16", "--hidden=512", "--experts-per-rank=4", "--iters=5", "--warmup=1")


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where there seem to be two GPUs."""
    return command("bench", "ep", *SMALL, *arguments, settings={"PYTHONPATH": seen(), **settings})


def seen() -> str:
    return os.pathsep.join([str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])])


def rows_of(*arguments: str) -> list[Row]:
    """The rows of a run that went well."""
    return bench_rows("ep", *SMALL, *arguments, settings={"PYTHONPATH": seen()})


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_each_mode_is_told_by_both_clocks(layout: str) -> None:
    done = run(f"--layout={layout}", "--num-sms=16", "--json=-")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(done.stdout).rows
    assert [row.what for row in rows] == ["dispatch", "combine", "e2e"]
    for row in rows:
        assert row.verified
        assert (row.device, row.ranks, row.num_sms, row.heap_bytes) == ("cuda", 2, 16, 1 << 20)
        assert row.given == ("fp8" if layout == "rank" else "bf16")
        assert len(row.samples_us) == len(row.host_us) == 2 * 5
        assert len(row.slowest_us) == 5
        assert row.host_p50_us is not None
        assert row.host_p50_us > 1000.0
        assert (row.bytes_logical, row.bytes_wire, row.transport) == (3000, 2000, "heap")
    assert "three ways to count" in done.stderr
    assert "in GPU memory" in done.stderr


def test_a_sweep_changes_one_number_after_the_other() -> None:
    rows = rows_of("--mode=dispatch", "--sweep=tokens=1,16", "--sweep=topk=1,4", "--sweep=dtype=bf16")
    found = [(row.tokens, row.topk, row.dtype) for row in rows]
    assert found == [(1, 2, "fp8"), (16, 2, "fp8"), (16, 1, "fp8"), (16, 4, "fp8"), (16, 2, "bf16")]


def test_rows_cross_the_network_as_often_as_send_asks() -> None:
    found = rows_of("--mode=dispatch", "--sweep=send=rank,node,auto")
    assert [row.send for row in found] == ["rank", "node", "rank"], "what the buffer has chosen"
    alone = rows_of("--mode=dispatch", "--send=node", "--backend=none")
    assert [row.send for row in alone] == ["rank"], "no rank forwards where ranks share no memory"
    done = run("--mode=dispatch", "--send=node")
    assert done.returncode == 0, done.stderr
    assert "once per node" in done.stdout + done.stderr, done
    one_error(run("--sweep=send=once"), 2, "a way to send; known: rank, node, auto")
    one_error(command("bench", "ep", "--send=node"), 2, "--send and --sweep need --device cuda")


def test_a_wrong_bit_of_one_rank_is_found_before_anything_is_timed() -> None:
    one_error(run("--json=-", FAKE_FLAW="1"), 1, "rank 1", "did not verify before anything was measured", "element 0")


def test_a_peer_that_cannot_run_takes_nothing_from_ours() -> None:
    (row,) = rows_of("--mode=e2e", "--compare=deepep", "--rounds=2")
    assert len(row.rounds) == 2
    error = row.peers["deepep"].error
    assert error is not None
    assert "deepep" not in row.ratio


def test_nvlink_and_network_beside_the_network_alone() -> None:
    done = run("--compare=network", "--rounds=2", "--json=-")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(done.stdout).rows
    assert [(row.what, row.backend) for row in rows] == [
        (mode, backend) for backend in ("auto", "none") for mode in ("dispatch", "combine", "e2e")
    ]
    ours, alone = rows[:3], rows[3:]
    for one, other in zip(ours, alone, strict=True):
        assert one.links == {"self": 2, "heap": 2} and other.links == {"self": 2, "network": 2}
        assert (one.bytes_network, other.bytes_network) == (0, 2000)
        assert one.peers["network"].rounds == other.rounds and len(one.rounds) == 2
        assert one.ratio["network"] > 1
        assert [(lane.name, lane.bytes) for lane in other.lanes] == [("tcp/127.0.0.1", 1500), ("tcp/127.0.0.2", 500)]
        assert one.lanes == []
    said = done.stderr
    for mode in ("dispatch", "combine", "e2e"):
        assert re.search(rf"^{mode}: [0-9.]+ us, over the network alone 2\d{{5}}\.\d us: saves [89]\d%$", said, re.M)
    assert "Data Plane (e2e): 2/2 ranks passed, 1 node, NVLink\n" in said
    assert "Data Plane (e2e): 2/2 ranks passed, 1 node, network lanes only\n" in said
    assert re.search(r"^Network: 2.00 kB per rank, 0.00 GB/s on each of 2 rails$", said, re.M)


def test_emulated_nodes_share_no_memory_and_neither_does_backend_none() -> None:
    (row,) = rows_of("--mode=e2e", "--nodes=2")
    assert (row.nodes, row.transport, row.bytes_network) == (2, "network", 2000)
    (row,) = rows_of("--mode=e2e", "--nvlink-backend=none")
    assert (row.nodes, row.transport, row.backend) == (1, "network", "none")
    one_error(run("--nvlink-backend=none", "--compare=network"), 2, "--compare network", "--backend none")


def test_more_ranks_than_gpus_share_them(tmp_path: Path) -> None:
    out = tmp_path / "three.json"
    done = run("--num-processes=3", f"--json={out}")
    assert done.returncode == 0, done.stderr
    assert [(row.ranks, row.ranks_passed) for row in Report.loads(out.read_text()).rows] == [(3, 3)] * 3


@pytest.mark.parametrize("arguments", [("ep", "--device=cuda"), ("control", "--device=cuda")])
def test_without_a_gpu_the_reason_is_said(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*COMMAND, "bench", *arguments],
        env={**clean_environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    one_error(done, 1, "no GPU can be used")


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_rank_that_gets_no_rows_verifies(layout: str) -> None:
    rows = rows_of(f"--layout={layout}", "--mode=e2e", "--sweep=routing=one,skewed:1", "--sweep=tokens=1")
    assert [(row.routing, row.tokens) for row in rows] == [("one", 16), ("skewed:1", 16), ("uniform", 1)]
    assert all(row.ranks_passed == 2 for row in rows)
