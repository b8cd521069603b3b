"""Two ranks on one GPU, for what the CPUs and the network limit: kernels of both run at once, by CUDA's MPS.

Without MPS the two processes would take turns of milliseconds on the GPU, and every wait of one for the other would
cost such a turn. With it a GPU's copies and short kernels are those of two GPUs, except that they share one memory.
Nothing that goes over NVLink can be measured so. NCCL refuses two ranks on one GPU of one host; peers/nccl_rates.py
tells it that they are on two (NCCL_HOSTID).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from steps import gpu_count

CONTROL = "nvidia-cuda-mps-control"
FOLDERS = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin")
"""Where the daemon may lie, besides PATH."""
VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LIMIT_S = 20.0
WITHOUT = {VARIABLE: "/nonexistent"}
"""Ranks take turns: for programs with a profiler, which MPS and kernels that wait for other ranks would stop."""
HALF = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
"""For ranks whose launches are small and wait for each other's: none takes more than half of the GPU."""
SHARE = "48"
"""Multiprocessors of each rank whose kernels fill theirs and wait for another rank's: all blocks run at once. HALF does
not ensure that, as the multiprocessors that MPS leaves to two processes may be the same."""


def shared() -> bool:
    """Whether this process runs within `mps`."""
    return VARIABLE in os.environ


def share() -> tuple[str, ...]:
    """The option of a command whose ranks share a GPU and wait for each other in kernels."""
    return (f"--num-sms={SHARE}",) if shared() else ()


def as_own_host(rank: int) -> None:
    """Before a communicator is made: NCCL refuses two ranks of one host that share a GPU."""
    if shared():
        os.environ["NCCL_HOSTID"] = f"rank {rank}"


def two_ranks() -> bool:
    """Whether two ranks can run at once: on two GPUs, or on a shared one."""
    return gpu_count()[0] > 1 or shared()


def rank_devices() -> str:
    """The GPUs of two ranks, as --device takes them."""
    return "cuda:0,cuda:1" if gpu_count()[0] > 1 else "cuda:0"


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Has an MPS daemon of our own; programs started meanwhile use it. RuntimeError: there is none, or it fails."""
    program = shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
    if program is None:
        raise RuntimeError(f"{CONTROL} was not found in PATH, {', '.join(FOLDERS)}: two ranks cannot share a GPU")
    with tempfile.TemporaryDirectory(prefix="crossrail-mps-") as folder:
        # The daemon starts its server by name.
        path = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")])
        own = {VARIABLE: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **own, "PATH": path}
        _control([program, "-d"], environment)
        os.environ.update(own)
        try:
            yield
        finally:
            for name in own:
                del os.environ[name]
            _control([program], environment, "quit\n")


def _control(command: list[str], environment: dict[str, str], said: str = "") -> None:
    try:
        done = subprocess.run(
            command, env=environment, input=said, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{CONTROL}: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{CONTROL}: {done.stderr.strip() or f'exit code {done.returncode}'}")
