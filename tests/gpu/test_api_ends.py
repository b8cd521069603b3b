"""Processes that die in mid-transfer, and what is given back."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GPUS, WAYS
from far import Far, pattern

import crossrail

torch = pytest.importorskip("torch")

FLOOD = 256 << 20
SLACK = 64 << 20
"""What the driver keeps here and there."""


@pytest.mark.parametrize("way", ["cuda_ipc", "tcp"])
def test_a_process_killed_in_mid_transfer(way: str) -> None:
    context = crossrail.Context(tls=WAYS[way], timeout=30, log="error")
    target = torch.zeros(FLOOD, dtype=torch.uint8, device="cuda:0")
    with crossrail.Worker(context, name="near") as worker:
        far = Far(worker, f"cuda:{min(1, GPUS - 1)}", WAYS[way])
        try:
            far.do("flood", nbytes=FLOOD)
            worker.recv(target, tag=9, source=far.endpoint).wait()
            under_way = [worker.recv(target, tag=9, source=far.endpoint) for _ in range(400)]
            unmatched = far.endpoint.send(target, tag=10)
            time.sleep(0.01)
        finally:
            far.kill()
        started = time.monotonic()
        failed = 0
        for request in (*under_way, unmatched):
            try:
                request.wait(20)
            except crossrail.PeerDeadError:
                failed += 1
        assert failed >= 2 and time.monotonic() - started < 15
        target.fill_(7)
        assert not far.endpoint.is_alive
        far = Far(worker, f"cuda:{min(1, GPUS - 1)}", WAYS[way])
        far.do("make", name="source", nbytes=1 << 20, seed=3)
        far.ask("send", name="source")
        worker.recv(target[: 1 << 20], source=far.endpoint).wait()
        far.answer()
        assert torch.equal(target[: 1 << 20], pattern(1 << 20, 3, "cuda:0")), "the worker goes on"
        rest = target[1 << 20 :]
        assert int(rest.min()) == int(rest.max()) == 7, "the dead process wrote on"
        far.close()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def free() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(0)[0])


@pytest.mark.alone
@pytest.mark.parametrize("tls", ["shm,cuda_ipc", "tcp"])
def test_descriptors_and_gpu_memory_are_given_back(tls: str) -> None:
    tensor = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:0")

    def turn() -> None:
        context = crossrail.Context(tls=tls, timeout=30, log="error")
        with crossrail.Worker(context) as a, crossrail.Worker(context) as b:
            to_b = a.connect(b.address())
            memory = context.alloc(96 << 20, "cuda:0")
            inbound = b.recv(memory)
            to_b.send(tensor).wait()
            inbound.wait()
            to_b.close()
        del memory, inbound, to_b, a, b, context
        gc.collect()

    for _ in range(2):
        turn()
    before = free(), descriptors()
    for _ in range(6):
        turn()
    deadline = time.monotonic() + 10
    while (descriptors() > before[1] or before[0] - free() > SLACK) and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    assert descriptors() <= before[1] and before[0] - free() <= SLACK


@pytest.mark.alone
def test_what_a_killed_process_had_mapped_is_given_back() -> None:
    context = crossrail.Context(tls=WAYS["cuda_ipc"], timeout=30, log="error")
    with crossrail.Worker(context, name="near") as worker:
        before = None
        for _ in range(2):
            tensor = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda:0")
            far = Far(worker, "cuda:0", WAYS["cuda_ipc"])
            far.do("make", name="target", nbytes=128 << 20)
            far.ask("recv", name="target")
            far.endpoint.send(tensor).wait()
            far.answer()
            far.kill()
            del tensor
            gc.collect()
            torch.cuda.empty_cache()
            deadline = time.monotonic() + 15
            while before is not None and before - free() > SLACK and time.monotonic() < deadline:
                time.sleep(0.05)
            assert before is None or before - free() <= SLACK
            before = free() if before is None else before


def test_without_gpu_memory_the_driver_is_not_touched() -> None:
    """In a process of its own: transfers of host memory load no CUDA."""
    program = """
import crossrail
context = crossrail.Context(timeout=20, log="error")
with crossrail.Worker(context) as a, crossrail.Worker(context) as b:
    inbound = b.recv(target := bytearray(1 << 20))
    a.connect(b.address()).send(b"x" * (1 << 20)).wait()
    inbound.wait()
    context.alloc(100)
import sys
loaded = [line for line in open("/proc/self/maps") if "libcuda" in line or "nvrtc" in line]
assert not loaded and "torch" not in sys.modules, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
