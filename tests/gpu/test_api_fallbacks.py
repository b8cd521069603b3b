"""Where no direct copy is possible: a warning that says which memory and why, and every byte through host memory."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GPUS, WAYS
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
            why = f"memory of a pool (cudaMallocAsync) on {device} can't be passed to other processes"
            assert warning == f"crossrail: near: no direct copy of GPU memory ({why}){INSTEAD}"
        finally:
            far.close()


@pytest.fixture
def apart(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose GPUs do not reach each other: its driver, with another answer to that."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    ctypes.CDLL("libcuda.so.1")
    files = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line)
    (tmp_path / "libcuda-real.so").symlink_to(next(files))
    (tmp_path / "named").mkdir()
    (tmp_path / "answer.c").write_text("int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }\n")
    (tmp_path / "nothing.c").write_text("")
    shared = [compiler, "-shared", "-fPIC", "-o"]
    # The real one is found under another name than its own, which is this one's.
    name = ["-Wl,-soname,libcuda-real.so"]
    subprocess.run([*shared, tmp_path / "named" / "libcuda-real.so", tmp_path / "nothing.c", *name], check=True)
    behind = [f"-L{tmp_path}/named", "-Wl,--no-as-needed", "-lcuda-real", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*shared, tmp_path / "libcuda.so.1", tmp_path / "answer.c", *behind], check=True)
    return {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


@pytest.mark.gpus(2)
def test_gpus_that_do_not_reach_each_other_are_staged_with_a_warning(
    crossrail_command: Callable[..., Any], apart: dict[str, str]
) -> None:
    text = crossrail_command("info", **apart).stdout
    assert "cuda:0 to cuda:1" in text and "those transfers are staged" in text
    bench = ("bench", "p2p", "--device=cuda:0,cuda:1", f"--size={SIZE}", "--iters=3")
    done = crossrail_command(*bench, "--json=-", **apart)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verified"] is True and row["protocol"] == "chunks" and row["transport"] == "shm"
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
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **apart},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["chunks", "chunks"]
    # Each worker tells of its peer once.
    assert 1 <= len(fallbacks(done.stderr.splitlines())) <= 2, done.stderr
