"""NCCL's device API over a proxy on the CPU: kernels of two ranks write to each other's memory.

    python benches/gpu/peers/gin.py --limit 55

Compiles gin.cu with nvcc and the headers at NCCL_HOME. An all-to-all is checked first; then latency of a
put with a signal (half a round trip), and the rate of windows of puts with one signal after each. Each rank is a host
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ranks as processes

SOURCE = Path(__file__).with_name("gin.cu")


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    processes.add_common(parser)
    return processes.run(parser.parse_args(), work)


def work(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Runs one rank."""
    program = build(folder) if rank == 0 else folder / "gin"
    processes.exchange(folder, rank, "built", b"1")
    gpu = gpus()[rank % len(gpus())]
    own = {"RANK": str(rank), "STORE": str(folder), "CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": f"rank {rank}"}
    done = subprocess.run([program], env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gin.py: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if rank == 0:
        processes.keep([row for row in rows if "us" in row or "gb_per_s" in row], {"nccl": home().name})


def home() -> Path:
    """NCCL's headers and library."""
    return Path(os.environ["NCCL_HOME"])


def gpus() -> list[str]:
    """The GPUs that may be used, by number or as the environment names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def build(folder: Path) -> Path:
    """Compiles the program."""
    compiler = Path(shutil.which("nvcc") or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    program, library = folder / "gin", home() / "lib"
    # CUDA's C++ library is in a folder of its own from CUDA 13 on.
    root = compiler.resolve().parents[1]
    own = (root / "include" / "cccl", root / "targets" / "x86_64-linux" / "include" / "cccl")
    includes = [f"-I{path}" for path in (home() / "include", *own) if path.is_dir()]
    command = [compiler, "-std=c++17", "-arch=native", *includes, SOURCE, "-o", program]
    command += [f"-L{library}", "-lnccl", "-Xlinker", f"-rpath={library}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gin.py: nvcc: {done.stderr[-2000:]}")
    return program


if __name__ == "__main__":
    sys.exit(main())
