"""The driver without a GPU, and the compiler of its kernels, as the libraries that programs load."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
LAYOUT = HERE.parents[1] / "crates/kernels/csrc"


def make(compiler: str, folder: Path) -> dict[str, str]:
    """Compiles both into a folder, and returns the variables of programs that load them from there."""
    for library, *sources in (("libcuda.so.1", "cuda.c", "offsets.cpp"), ("libnvrtc.so.13", "nvrtc.c")):
        options = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-I", LAYOUT, "-o", folder / library]
        subprocess.run([compiler, *options, *(HERE / "driver" / source for source in sources)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "CROSSRAIL_CACHE_DIR": str(folder / "cache")}
