"""Limits of control groups: what a plan says, what is refused in time, and what a death is called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from commands import COMMAND, clean_environment
from control_groups import memory_group, run_in

import crossrail
from crossrail import _native
from crossrail_tools.cli.processes import Process

MIB = 1 << 20
LIMIT = 1024 * MIB


def in_group(code: str, limit: int = LIMIT) -> subprocess.CompletedProcess[str]:
    with memory_group(limit) as group:
        return run_in(group, sys.executable, "-c", code, environment=clean_environment())


def test_a_plan_counts_what_the_group_leaves_for_all_ranks_of_the_machine() -> None:
    code = """
import crossrail, json
plan = lambda **more: crossrail.ExpertBuffer.plan(128, 1024, 32, 4, dispatch_dtype="bf16", **more)
one, eight, far = plan(ranks=1), plan(ranks=8), plan(ranks=8, network_ranks=7)
machine = crossrail.Context().info()["machine"]
print(json.dumps([one.free, one.largest_tokens, eight.local_ranks, eight.largest_tokens, far.local_ranks, str(eight),
    machine["memory_available"], machine["memory_limit"]]))
"""
    done = in_group(code)
    assert done.returncode == 0, done.stderr
    free, largest, here, largest_of_eight, far, text, available, limit = json.loads(done.stdout)
    assert 512 * MIB < free <= LIMIT
    assert 512 * MIB < available <= LIMIT
    assert limit == LIMIT
    assert (here, far) == (8, 1)
    assert 0 < largest_of_eight < largest / 8
    assert "free in this control group" in text
    assert "for 8 ranks of this machine" in text


def test_memory_beyond_the_limit_is_refused_instead_of_killing() -> None:
    code = """
import crossrail
try:
    crossrail.Context().alloc(2 << 30)
except crossrail.ExhaustedError as error:
    print(error)
"""
    done = in_group(code)
    assert done.returncode == 0, done.stderr
    assert "2147483648 bytes" in done.stdout
    assert f"which may use {LIMIT}" in done.stdout


def test_a_bench_whose_ranks_do_not_fit_together_is_one_line() -> None:
    sizes = ("--tokens=2048", "--hidden=4096", "--experts-per-rank=8", "--num-processes=4", "--dtype=bf16")
    with memory_group(LIMIT) as group:
        done = run_in(group, *COMMAND, "bench", "ep", *sizes, environment=clean_environment())
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert "those of 4 ranks" in error
    assert "tokens per rank fit" in error


@pytest.mark.parametrize("size", ["800M", "4G"])
def test_two_ends_that_do_not_fit_together_are_one_line(size: str) -> None:
    with memory_group(LIMIT) as group:
        done = run_in(group, *COMMAND, "bench", "p2p", f"--size={size}", environment=clean_environment())
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert "both ends take" in error
    assert "in this control group" in error


def test_a_mesh_whose_ranks_do_not_fit_together_is_one_line() -> None:
    with memory_group(LIMIT) as group:
        done = run_in(group, *COMMAND, "bench", "mesh", "--ranks=4", "--size=64M", environment=clean_environment())
    assert done.returncode == 1, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("crossrail: error: ")]
    assert "the buffers of the ranks here take 1.61 GB" in error


def test_a_death_for_want_of_memory_is_called_that() -> None:
    code = """
import sys
from crossrail_tools.cli.processes import Process
greedy = "b = bytearray(); [b.extend(bytes(1 << 24)) for _ in range(64)]"
with Process([sys.executable, "-c", greedy]) as process:
    process.popen.wait(60)
    print(process.how_it_was_killed())
"""
    done = in_group(code, 192 * MIB)
    assert done.returncode == 0, done.stderr
    assert "out-of-memory killer (SIGKILL)" in done.stdout
    assert f"the limit of {192 * MIB} bytes" in done.stdout


def test_another_death_is_not_called_that() -> None:
    with Process(["sleep", "100"]) as process:
        assert process.how_it_was_killed() is None
        process.popen.kill()
        process.popen.wait(30)
        assert process.how_it_was_killed() == "its process was killed by SIGKILL"


def test_without_a_gpu_the_plan_says_that_it_cannot_know() -> None:
    if crossrail.Context().info()["cuda"]["devices"]:
        pytest.skip("a GPU is here, whose free memory is known")
    plan = crossrail.ExpertBuffer.plan(128, 7168, 288, 8, ranks=4, device="cuda")
    assert plan.total > 0
    assert plan.free is None
    assert plan.largest_tokens is None
    assert "largest tokens per rank that fit" in str(plan)
    assert "unknown: " in str(plan)


def test_host_memory_is_known() -> None:
    memory = _native.host_memory()
    assert memory is not None
    assert 0 < memory["available"] <= memory["capacity"]
