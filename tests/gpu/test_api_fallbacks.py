"""Where a GPU lacks something: what is said of it, and that the rest goes on.

Without a direct copy, a warning that says which memory and why, and every byte through host memory; without kernels an
error with the compiler's log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GPUS, WAYS, compiled
from far import Far, pattern

import crossrail

SIZE = (9 << 20) + 7
INSTEAD = "; through host memory instead"


def fallbacks(lines: list[str]) -> list[str]:
    return [line for line in lines if "no direct copy of GPU memory" in line]


def test_memory_of_a_pool_is_staged_with_one_warning() -> None:
    torch = pytest.importorskip("torch")
    context = crossrail.Context(tls=WAYS["cuda_ipc"], timeout=30, log="error")
    device = f"cuda:{min(1, GPUS - 1)}"
    pools = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "backend:cudaMallocAsync")
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    with crossrail.Worker(context, name="near") as worker:
        far = Far(worker, device, WAYS["cuda_ipc"], "warn", **pools)
        try:
            for seed in (1, 2):
                far.do("make", name="source", nbytes=SIZE, seed=seed)
                far.ask("send", name="source")
                received = worker.recv(target, source=far.endpoint).wait()
                far.answer()
                assert received.protocol == "chunks"
                assert torch.equal(target, pattern(SIZE, seed, "cuda:0"))
            (warning,) = fallbacks(far.said())
            why = f"memory of a pool (cudaMallocAsync) on {device} cannot be exported to other processes"
            assert warning.endswith(f"near: no direct copy of GPU memory ({why}){INSTEAD}")
        finally:
            far.close()


def test_who_requires_direct_copies_gets_them_or_no_connection() -> None:
    torch = pytest.importorskip("torch")
    context, without = (crossrail.Context(tls=tls, timeout=20, log="error") for tls in (WAYS["cuda_ipc"], "shm"))
    with crossrail.Worker(context) as a, crossrail.Worker(context) as b, crossrail.Worker(without) as c:
        for one, other, whose in ((c, a, "CROSSRAIL_TLS=shm"), (a, c, "the peer's CROSSRAIL_TLS")):
            with pytest.raises(crossrail.UnsupportedError, match=f"require=cuda_ipc: {whose} leaves it out"):
                one.connect(other.address(), require="cuda_ipc")
        to_b = a.connect(b.address(), require="cuda_ipc")
        source, target = pattern(SIZE, 3, "cuda:0"), torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
        inbound = b.recv(target)
        assert to_b.send(source).wait().protocol == "direct(cuda_ipc)"
        inbound.wait()
        assert torch.equal(source, target)
        inbound = b.recv(told := bytearray(3))
        to_b.send(b"abc").wait()
        inbound.wait()
        assert told == b"abc"


def run(program: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, to its end."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.gpus(2)
def test_gpus_that_do_not_reach_each_other_are_staged_with_a_warning(
    crossrail_command: Callable[..., Any], apart: dict[str, str]
) -> None:
    text = crossrail_command("info", **apart).stdout
    assert "cuda:0 to cuda:1" in text and "those transfers are staged" in text
    bench = ("bench", "p2p", "--device=cuda:0,cuda:1", f"--size={SIZE}", "--iters=3")
    done = crossrail_command(*bench, "--json=-", **apart)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verified"] is True and row["protocol"] == "chunks" and row["transport"] != "cuda_ipc"
    warnings = fallbacks(done.stderr.splitlines())
    assert warnings and all("no peer access: cuda:" in warning and INSTEAD in warning for warning in warnings)
    refused = crossrail_command(*bench, "--transport=cuda_ipc", code=1, **apart)
    assert "not over cuda_ipc" in refused.stderr


@pytest.mark.gpus(2)
def test_a_process_goes_on_where_its_gpus_do_not_reach_each_other(apart: dict[str, str]) -> None:
    """Both ends in one process: what is refused is told, and the workers carry everything all the same."""
    program = f"""
import crossrail
context = crossrail.Context(tls="shm,cuda_ipc", timeout=20, log="warn")
source, target = context.alloc({SIZE}, "cuda:0"), context.alloc({SIZE}, "cuda:1")
data = bytes(at % 251 for at in range({SIZE}))
source.fill_from(data)
with crossrail.Worker(context) as a, crossrail.Worker(context) as b:
    to_b = a.connect(b.address())
    for _ in range(2):
        inbound = b.recv(target)
        to_b.send(source).wait()
        print(inbound.wait().protocol)
    target.copy_to(seen := bytearray({SIZE}))
    assert seen == data
"""
    done = run(program, **apart)
    assert done.stdout.split() == ["chunks", "chunks"]
    # Each worker tells of its peer once.
    assert 1 <= len(fallbacks(done.stderr.splitlines())) <= 2, done.stderr


NVRTC = r"""
static const char LOG[] = "unpack.cu(7): error: not today";
int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 0; return 0; }
int nvrtcCreateProgram(void **program) { *program = (void *)LOG; return 0; }
int nvrtcDestroyProgram(void **program) { return 0; }
int nvrtcCompileProgram(void *program) { return 6; }
int nvrtcGetProgramLogSize(void *program, unsigned long *size) { *size = sizeof LOG; return 0; }
int nvrtcGetProgramLog(void *program, char *log) { __builtin_memcpy(log, LOG, sizeof LOG); return 0; }
int nvrtcGetCUBINSize(void *program, unsigned long *size) { *size = 0; return 0; }
int nvrtcGetCUBIN(void *program, char *image) { return 0; }
const char *nvrtcGetErrorString(int code) { return "NVRTC_ERROR_COMPILATION"; }
"""
"""A compiler that compiles nothing."""


def test_a_kernel_that_does_not_compile_is_told_with_the_log_and_not_kept(tmp_path: Path) -> None:
    compiled(tmp_path / "libnvrtc.so.13", NVRTC)
    program = f"""
import crossrail
context = crossrail.Context(tls="tcp", timeout=20, log="error", cache_dir={str(tmp_path / "cache")!r}, **SETTINGS)
with crossrail.Worker(context) as a, crossrail.Worker(context) as b:
    to_b = a.connect(b.address())
    memory = context.alloc(1 << 20, "cuda:0")
    for _ in range(2):
        try:
            b.recv(memory, tag=1).cancel()
            print("taken")
        except crossrail.UnsupportedError as error:
            print("refused:", " ".join(str(error).split()))
    inbound = b.recv(target := bytearray(100_000))
    to_b.send(b"x" * 100_000).wait()
    inbound.wait()
    assert target == b"x" * 100_000
"""
    preloaded = {"LD_PRELOAD": str(tmp_path / "libnvrtc.so.13")}
    done = run(program.replace("SETTINGS", "{}"), **preloaded)
    first, second = done.stdout.splitlines()
    assert first == second and first.startswith("refused: compile "), done.stdout
    assert "NVRTC_ERROR_COMPILATION (6)" in first and "unpack.cu(7): error: not today" in first
    assert "CROSSRAIL_UNPACK=d2d needs no compiler" in first
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]
    done = run(program.replace("SETTINGS", "{'unpack': 'd2d'}"), **preloaded)
    assert done.stdout.splitlines() == ["taken", "taken"]
